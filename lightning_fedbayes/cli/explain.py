"""What is wrong with a configuration, in one line with the nearest name, out of what jsonargparse says in fifteen."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

from lightning_fedbayes.errors import nearest

PLUMBING = ("Given value", "Subtypes:", "Errors:", "Does not validate", "- Expected a <class 'NoneType'>")
"""Beginnings of lines that say nothing to a user."""
OTHER_TYPES = ("- Expected a ", "- Import path")
"""Beginnings of lines about types that a value was not meant to have, where another line says what is wrong."""
CONTAINERS = ("builtins", "collections.abc", "typing")
"""Modules of types that hold others."""


def explain(message: str, keys: Collection[str]) -> str:
    """One line for a parser's ``message``.

    Args:
        message: of jsonargparse.
        keys: the options that the parser knows, without dashes.

    >>> explain("Subcommand 'fit' does not accept option 'federation.fuson'", ["federation.fusion", "model"])
    "unknown option 'federation.fuson': did you mean 'federation.fusion'? Known: federation.fusion"
    """
    for pattern, sentence in SENTENCES:
        found = re.search(pattern, message)
        if found is not None:
            return sentence(found, keys)
    return one_line(message)


def one_line(message: str) -> str:
    """A message without the plumbing, on one line."""
    lines = [line.strip() for line in message.splitlines()]
    kept = [line for line in lines if line and not line.startswith(PLUMBING)]
    meant = [line for line in kept if not line.startswith(OTHER_TYPES)]
    said = meant if any(not line.startswith("Parser key") for line in meant) else kept
    return re.sub(r'Parser key "([^"]+)":', r"\1:", " ".join(line.removeprefix("- ") for line in said))


def subclass_names(base: type) -> list[str]:
    """Names of the concrete public classes below ``base``, itself included, that are imported."""
    return sorted({kind.__name__ for kind in _subclasses(base)
                   if not inspect.isabstract(kind) and not kind.__name__.startswith("_")})


def _subclasses(base: type) -> Iterator[type]:
    yield base
    for kind in base.__subclasses__():
        yield from _subclasses(kind)


def _where(message: str) -> str:
    """The key that a message speaks of, such as ``model.network``."""
    return ".".join(re.findall(r'Parser key "([^"]+)"', message)) or "configuration"


def _load(path: str) -> Any:
    """What an import path names; None if there is no such thing."""
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name) if module else None
    except (ImportError, AttributeError):
        return None


def _unknown_key(found: re.Match[str], keys: Collection[str]) -> str:
    """The first part of a dotted key that is unknown, and its nearest neighbour on that level."""
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
    inside = 'Parser key "' in found.string
    return f"{_where(found.string)}: {names} missing" if inside else (
        f"{names} missing: give --config FILE with a class_path for each, as in examples/configs"
    )


SENTENCES: tuple[tuple[str, Callable[[re.Match[str], Collection[str]], str]], ...] = (
    (r"(?i)unrecognized arguments: --([\w.]+)", _unknown_key),
    (r"Group '([\w.]+)' does not accept option '([\w.]+)'", _unknown_key),
    (r"does not accept option '([\w.]+)'", _unknown_key),
    (r"class_path '([\w.]+)':\s+Option '(\w+)' is not accepted", _unknown_argument),
    (r"Option '([\w.]+)' is not accepted", _unknown_key),
    (r"module '([\w.]+)' has no attribute '(\w+)'", _unknown_attribute),
    (r"Expected a dot import path string: (\w+)", _unknown_class),
    (r"Expected a typing\.Literal\[(.*?)\]\. Got value: (\S+)", _wrong_choice),
    (r"arguments are required: (.*)", _missing),
)
"""Pattern of a message → who says it better; the first that matches."""
