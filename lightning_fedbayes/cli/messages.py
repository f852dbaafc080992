"""Help and error messages of the commands: one page of help, one line for every mistake."""

from __future__ import annotations

import argparse
import importlib
import inspect
import re
import textwrap
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any, NoReturn

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
    for pattern, sentence in SENTENCES:
        found = re.search(pattern, message)
        if found is not None:
            return sentence(found, keys)
    return one_line(message)


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


def _where(message: str) -> str:
    """Return the key that a message is about, such as ``model.network``."""
    return ".".join(re.findall(r'Parser key "([^"]+)"', message)) or "configuration"


def _load(path: str) -> Any:
    """Import the object at a dotted path. Return None if there is none."""
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name) if module else None
    except (ImportError, AttributeError):
        return None


def _unknown_key(found: re.Match[str], keys: Collection[str]) -> str:
    """Name the first unknown part of a dotted key, and the nearest key of the same depth."""
    parts = ".".join(found.groups()).split(".")
    for depth in range(1, len(parts) + 1):
        parent, name = ".".join(parts[: depth - 1]), ".".join(parts[:depth])
        level = {".".join(key.split(".")[:depth]) for key in keys if not parent or key.startswith(f"{parent}.")}
        if level and name not in level:
            return f"unknown option '{name}': {nearest(name, level)}"
    return f"unknown option '{'.'.join(parts)}'"


def _unknown_argument(found: re.Match[str], keys: Collection[str]) -> str:
    owner, name = _load(found[1]), found[2]
    known = [] if owner is None else [each for each in inspect.signature(owner).parameters if each != "self"]
    return f"{_where(found.string)}: {found[1]} has no argument '{name}': {nearest(name, known)}"


def _unknown_attribute(found: re.Match[str], keys: Collection[str]) -> str:
    module = importlib.import_module(found[1])
    known: Iterable[str] = getattr(module, "__all__", [name for name in dir(module) if not name.startswith("_")])
    return f"{_where(found.string)}: '{found[1]}' has no '{found[2]}': {nearest(found[2], known)}"


def _unknown_class(found: re.Match[str], keys: Collection[str]) -> str:
    types = re.search(r"Subtypes: \[(.*)\]", found.string)
    named = re.findall(r"[A-Za-z_]\w*(?:\.\w+)+", "" if types is None else types[1])
    bases = [kind for kind in map(_load, named) if isinstance(kind, type) and kind.__module__ not in CONTAINERS]
    known = [name for base in bases for name in subclass_names(base)]
    return f"{_where(found.string)}: unknown class '{found[1]}': {nearest(found[1], set(known))}"


def _wrong_choice(found: re.Match[str], keys: Collection[str]) -> str:
    choices = [choice.strip().strip("'\"") for choice in found[1].split(",")]
    return f"{_where(found.string)}: unknown choice '{found[2]}': {nearest(found[2], choices)}"


def _missing(found: re.Match[str], keys: Collection[str]) -> str:
    names = " and ".join(name.strip().rpartition(".")[2] for name in found[1].split(","))
    if 'Parser key "' in found.string:
        return f"{_where(found.string)}: {names} missing"
    return f"{names} missing: give --config FILE with a class_path for each, as in examples/configs"


SENTENCES: tuple[tuple[str, Callable[[re.Match[str], Collection[str]], str]], ...] = (
    (r"(?i)unrecognized arguments: --([\w.]+)", _unknown_key),
    (r"Group '([\w.]+)' does not accept option '([\w.]+)'", _unknown_key),
    (r"does not accept option '([\w.]+)'", _unknown_key),
    (r"class_path '([\w.]+)':\s+Option '(\w+)' is not accepted", _unknown_argument),
    (r"Option '([\w.]+)' is not accepted", _unknown_key),
    (r"module '([\w.]+)' has no attribute '(\w+)'", _unknown_attribute),
    (r"Expected a dot import path string: (\w+)", _unknown_class),
    (r"Expected a typing\.Literal\[(.*?)\]\. Got value: (\S+)", _wrong_choice),
    (r"(?s)Expected a typing\.Literal\[([^]]*)\]\s+- Expected a <class 'int'>.*Given value: (\S+)", _wrong_choice),
    (r"arguments are required: (.*)", _missing),
)
"""Pattern of a message → function that rewrites it. The first match counts."""


WIDTH, COLUMN = 110, 34
HELP = {
    "config": "YAML file; of several, and of options, the later wins",
    "print_config": "print the whole configuration, with every default, and exit",
    "optimizer": "CLASS of torch.optim, in place of the model's own; --optimizer.lr and so on",
    "lr_scheduler": "CLASS of torch.optim.lr_scheduler, one step per round",
    "ckpt_path": "FILE of a checkpoint to load, or to go on from; 'last' or 'best'",
    "weights_only": "load a checkpoint without executing any code in it",
}
"""Option → help text that is shorter than the docstring it would come from."""


def short_help(command: str, description: str, actions: Iterable[argparse.Action], classes: dict[str, type]) -> str:
    """Return a help of one page: one line per option, in groups. The Trainer's options by name only.

    ``classes`` are the base classes of the keys that take a class, such as "model".
    """
    options = {action.dest: action for action in actions if _is_option(action)}
    heads = {name.partition(".")[0] for name in options if "." in name}
    others = {*heads, *classes}
    general = [_line(name, option) for name, option in options.items() if "." not in name and name not in others]
    usage = f"usage: fedbayes {command} --config FILE [--KEY VALUE ...]"
    sections = [usage, description, "\n".join(["options:", *general])]
    for head in sorted(heads - {"trainer"}):
        lines = [_line(name, option) for name, option in options.items() if name.startswith(f"{head}.")]
        sections.append("\n".join([f"{head}:", *lines]))
    for key, base in classes.items():
        names = ", ".join(name for name in subclass_names(base) if name != base.__name__)
        head = f"--{key} CLASS, --{key}.ARGUMENT VALUE (arguments: fedbayes {command} --{key}.help CLASS)"
        sections.append(f"{head}\n{_wrapped(names or f'any {base.__name__}')}")
    trainer = ", ".join(name.partition(".")[2] for name in options if name.startswith("trainer."))
    sections.append(f"--trainer.ARGUMENT VALUE, of lightning.Trainer\n{_wrapped(trainer)}")
    return "\n\n".join(sections) + "\n"


def class_help(name: str, actions: Iterable[argparse.Action]) -> str:
    """Return one line per argument of the class ``name``. ``actions`` are of a parser for this class."""
    lines = [_line(action.dest, action) for action in actions if _is_option(action)]
    return "\n".join([f"arguments of {name}:", *lines]) + "\n"


def option_names(actions: Iterable[argparse.Action]) -> list[str]:
    """Return the names of the options that a user can give, without dashes."""
    return [action.dest for action in actions if _is_option(action)]


def _is_option(action: argparse.Action) -> bool:
    """Return True if a user can give an action: it is neither a help nor the target of a link."""
    names = action.option_strings
    return bool(names) and names[-1].startswith("--") and not names[0].endswith((".help", "--help", "-h"))


def _line(name: str, action: argparse.Action) -> str:
    default = action.default
    text = HELP.get(name) or plain(action.help or "")
    if isinstance(default, str | int | float) and default is not argparse.SUPPRESS:
        text += f" (default: {default})"
    head = f"  --{name} ".ljust(COLUMN)
    lines = textwrap.wrap(text, WIDTH - COLUMN, max_lines=3, placeholder=" …")
    if len(head) > COLUMN:  # the text begins below it
        lines.insert(0, "")
    return head + f"\n{' ' * COLUMN}".join(lines)


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
