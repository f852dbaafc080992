"""Help and error messages of the commands: one page of help, one line for every mistake."""

import argparse
import importlib
import inspect
import re
import textwrap
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from pydoc import locate
from typing import NoReturn

from lightning_fedbayes.core.errors import FedBayesError, nearest


class Options(argparse.ArgumentParser):
    """Argument parser of the small commands. Raises FedBayesError instead of printing the usage and exiting."""

    def __init__(self, command: str, description: str) -> None:
        super().__init__(f"fedbayes {command}", description=description, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        """Raise FedBayesError with the message that argparse would print."""
        raise FedBayesError(f"{message}; see {self.prog} --help")

    def parse(self, arguments: list[str]) -> argparse.Namespace:
        """Return the values of ``arguments``. Raise FedBayesError for an unknown option."""
        values, unknown = self.parse_known_args(arguments)
        if unknown:
            self.refuse(unknown[0])
        return values

    def refuse(self, argument: str) -> NoReturn:
        """Raise FedBayesError for an unknown ``argument``, with the nearest known one."""
        known = [name for action in self._actions for name in action.option_strings if name.startswith("--")]
        raise FedBayesError(f"{self.prog}: unknown argument '{argument}': {nearest(argument, known)}")


def check_file(config: Path) -> None:
    """Raise FedBayesError if there is no such YAML file."""
    if not config.is_file():
        raise FedBayesError(f"config: File does not exist: {config}")


PLUMBING = ("Given value", "Subtypes:", "Errors:", "Does not validate", "- Expected a <class 'NoneType'>")
"""Beginnings of lines of jsonargparse that do not help a user."""
OTHER_TYPES = ("- Expected a ", "- Import path")
"""Beginnings of lines about other possible types of the value. Dropped if another line names the mistake."""
CONTAINERS = ("builtins", "collections.abc", "typing")
"""Modules of generic types, which are no candidates for a class name."""


def explain(message: str, keys: Collection[str]) -> str:
    """Return one line, with the nearest known name, for an error ``message`` of jsonargparse. ``keys`` have no dashes.

    >>> explain("Subcommand 'fit' does not accept option 'federation.fuson'", ["federation.fusion", "model"])
    "unknown option 'federation.fuson': did you mean 'federation.fusion'? Known: federation.fusion"
    """
    where = ".".join(re.findall(r'Parser key "([^"]+)"', message))
    for pattern, what, known_by in MISTAKES:
        found = re.search(pattern, message)
        if found is not None:
            *_, name = found.groups()
            sentence = f"unknown {what} '{name}': {nearest(name, set(known_by(found, keys)))}"
            return f"{where}: {sentence}" if where else sentence
    missing = re.search(r"arguments are required: (.*)", message)
    if missing is None:
        return one_line(message)
    names = " and ".join(name.strip().rpartition(".")[2] for name in missing[1].split(","))
    remedy = "give --config FILE with a class_path for each, as in examples/configs"
    return f"{where}: {names} missing" if where else f"{names} missing: {remedy}"


def one_line(message: str) -> str:
    """Return the lines of a message that name the mistake, as one line."""
    lines = [line.strip() for line in message.splitlines()]
    kept = [line for line in lines if line and not line.startswith(PLUMBING)]
    meant = [line for line in kept if not line.startswith(OTHER_TYPES)]
    said = meant if any(not line.startswith("Parser key") for line in meant) else kept
    return re.sub(r'Parser key "([^"]+)":', r"\1:", " ".join(line.removeprefix("- ") for line in said))


def subclass_names(base: type) -> list[str]:
    """Return the names of the imported concrete public classes that derive from ``base``, itself included."""
    kinds = [base]
    for kind in kinds:  # which grows
        kinds += kind.__subclasses__()
    return sorted({each.__name__ for each in kinds if not inspect.isabstract(each) and each.__name__[0] != "_"})


def _options(found: re.Match[str], keys: Collection[str]) -> Iterable[str]:
    """Return the known keys in the group of an unknown one, or all."""
    group = found[1].rpartition(".")[0]
    return [key for key in keys if key.rpartition(".")[0] == group] or keys


def _parameters(found: re.Match[str], keys: Collection[str]) -> Iterable[str]:
    return [name for name in inspect.signature(locate(found[1])).parameters if name != "self"]  # type: ignore[arg-type]


def _public_names(found: re.Match[str], keys: Collection[str]) -> Iterable[str]:
    known = vars(importlib.import_module(found[1]))
    return known.get("__all__", [n for n, each in known.items() if n[0] != "_" and not inspect.ismodule(each)])


def _classes(found: re.Match[str], keys: Collection[str]) -> Iterable[str]:
    types = re.search(r"Subtypes: \[(.*)\]", found.string)
    named = re.findall(r"[A-Za-z_]\w*(?:\.\w+)+", "" if types is None else types[1])
    bases = [kind for kind in map(locate, named) if isinstance(kind, type) and kind.__module__ not in CONTAINERS]
    return [name for base in bases for name in subclass_names(base)]


def _choices(found: re.Match[str], keys: Collection[str]) -> Iterable[str]:
    return [choice.strip().strip("'\"") for choice in found[1].split(",")]


MISTAKES: tuple[tuple[str, str, Callable[[re.Match[str], Collection[str]], Iterable[str]]], ...] = (
    (r"(?i)unrecognized arguments: --([\w.]+)", "option", _options),
    (r"class_path '([\w.]+)':\s+Option '(\w+)' is not accepted", "argument", _parameters),
    (r"(?:does not accept option|Option) '([\w.]+)'", "option", _options),
    (r"module '([\w.]+)' has no attribute '(\w+)'", "name", _public_names),
    (r"Expected a dot import path string: (\w+)", "class", _classes),
    (r"Expected a typing\.Literal\[(.*?)\]\. Got value: (\S+)", "choice", _choices),
    (r"(?s)Expected a typing\.Literal\[([^]]*)\]\s+- Expected a <class 'int'>.*Given value: (\S+)", "choice", _choices),
)
"""Pattern of a message that ends with an unknown name, its kind, and a function that returns the known ones."""


WIDTH, COLUMN = 110, 34


def short_help(command: str, description: str, actions: Iterable[argparse.Action], classes: dict[str, type]) -> str:
    """Return a help of one page: one line per option, in groups. ``classes``: key → base class, if it takes one."""
    options = {action.dest: action for action in actions if _is_option(action)}
    heads = {name.partition(".")[0] for name in options if "." in name}
    general = {name: each for name, each in options.items() if "." not in name and name not in {*heads, *classes}}
    usage = f"usage: fedbayes {command} --config FILE [--KEY VALUE ...]"
    sections = [usage, description, _lines("options", general)]
    for head in sorted(heads - {"trainer"}):
        sections.append(_lines(head, {n: each for n, each in options.items() if n.startswith(f"{head}.")}))
    for key, base in classes.items():
        names = ", ".join(name for name in subclass_names(base) if name != base.__name__)
        head = f"--{key} CLASS, --{key}.ARGUMENT VALUE (arguments: fedbayes {command} --{key}.help CLASS)"
        sections.append(f"{head}\n{_wrapped(names or f'any {base.__name__}')}")
    trainer = ", ".join(name.partition(".")[2] for name in options if name.startswith("trainer."))
    sections.append(f"--trainer.ARGUMENT VALUE, of lightning.Trainer\n{_wrapped(trainer)}")
    return "\n\n".join(sections) + "\n"


def class_help(name: str, actions: Iterable[argparse.Action]) -> str:
    """Return one line per argument of the class ``name``. ``actions`` are of a parser for this class."""
    return _lines(f"arguments of {name}", {each.dest: each for each in actions if _is_option(each)}) + "\n"


def option_names(actions: Iterable[argparse.Action]) -> list[str]:
    """Return the names of the options that a user can give, without dashes."""
    return [action.dest for action in actions if _is_option(action)]


def _is_option(action: argparse.Action) -> bool:
    """Return True if a user can give an action: it is neither a help nor the target of a link."""
    names = action.option_strings
    return bool(names) and names[-1].startswith("--") and not names[0].endswith((".help", "--help", "-h"))


def _lines(title: str, options: Mapping[str, argparse.Action]) -> str:
    """Return a title and each option with its help and default, in two columns."""
    parts = [f"{title}:"]
    for name, option in options.items():
        text = plain(option.help or "")
        if isinstance(option.default, str | int | float) and option.default is not argparse.SUPPRESS:
            text += f" (default: {option.default})"
        head = f"  --{name} ".ljust(COLUMN)
        lines = textwrap.wrap(text, WIDTH - COLUMN, max_lines=3, placeholder=" …")
        if len(head) > COLUMN:  # the text begins below it
            lines.insert(0, "")
        parts.append(head + f"\n{' ' * COLUMN}".join(lines))
    return "\n".join(parts)


def _wrapped(text: str) -> str:
    return textwrap.fill(text, WIDTH, initial_indent="  ", subsequent_indent="  ")


SYMBOLS = r"""
\\sum_k=Σ \\exp=exp \\log=log \\alpha=α \\omega=ω \\sigma=σ \\mu=μ \\\|=‖ \^2=² _k=ₖ _\\alpha|_α=_α _2=₂
"""
"""Patterns of TeX = their replacements."""


def plain(text: str) -> str:
    r"""Return ``text`` without markup: roles become names, the TeX of the package's docstrings becomes Unicode.

    >>> plain(r"Minimiser of :math:`\sum_k \omega_k KL(q\|q_k)`, see :class:`~lightning_fedbayes.fusion.AutoFusion`.")
    'Minimiser of Σ ωₖ KL(q‖qₖ), see AutoFusion.'
    """
    text = re.sub(r":math:`([^`]*)`", lambda found: _formula(found[1]), text)
    text = re.sub(r":\w+:`~?(?:[\w.]*\.)?(\w+)`", r"\1", text)
    return " ".join(text.replace("``", "").split())


def _formula(tex: str) -> str:
    for pair in SYMBOLS.split():
        pattern, symbol = pair.split("=")
        tex = re.sub(pattern, symbol, tex)
    return tex.replace(r"\ ", " ")
