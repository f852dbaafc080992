"""Docstrings open with an imperative or a noun; words mean one thing."""

import ast
import inspect
import re
from importlib import import_module
from pathlib import Path

import lightning_fedbayes

PACKAGE = Path(lightning_fedbayes.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))
FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef

QUESTIONS = ("What", "Whether", "How", "Who", "Whose", "Whom", "Which", "Where", "Why", "When")
"""Words that no docstring opens with."""

RETIRED = {
    r"\b[Jj]udg(?:e|es|ed|ing|ement)\b": "a rule infers the reliability of clients",
    r"\breliability (?:diagram|of predictions?)\b": "calibration; reliability is of a client",
    r"\b[Mm]eetings?\b|\b[Tt]alks?\b": "collective call",
}
"""Words that have given way to others."""


def docstrings(source):
    """(line, text) of every docstring, those of constants too."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value.strip()


def test_docstrings_open_with_an_imperative_or_a_noun_and_retired_words_are_gone():
    for path in MODULES:
        text = path.read_text()
        wrong = [(line, doc.split("\n")[0]) for line, doc in docstrings(text) if doc.split()[0] in QUESTIONS]
        assert not wrong, path
        found = {match for pattern in RETIRED for match in re.findall(pattern, text)}
        assert not {match for match in found if "diagram" not in match or "also called" not in text}, path


def test_public_methods_have_a_docstring_or_inherit_one():
    for path in MODULES:
        for kind in ast.parse(path.read_text()).body:
            if not isinstance(kind, ast.ClassDef) or kind.name.startswith("_"):
                continue
            bare = [each.name for each in kind.body if isinstance(each, FUNCTIONS) and not ast.get_docstring(each)]
            room = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
            for name in (name for name in bare if not name.startswith("_")):
                found = getattr(getattr(import_module(room), kind.name), name)
                assert inspect.getdoc(found), (path, kind.name, name)


MARKS = {
    r"\b(that|those) of\b": (5.0, 0.3),
    r"\bown\b": (8.0, 4.5),
    r"\b(is|are) (no|none)\b": (11.0, 2.1),
    r"\bnothing\b": (4.0, 1.8),
    r"\bwhose\b": (4.5, 4.2),
    r"\b(beside|anew|alone|nobody)\b": (4.2, 0.3),
    ";": (48.0, 15.0),
}
"""Words of a stiff manner → how many stand in 10,000, and how many are to be left, three times other projects'."""


def test_words_of_a_stiff_manner_only_become_fewer():
    """A ratchet: lower the first numbers when a page has been read again."""
    texts = [
        node.value
        for path in MODULES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value
    ]
    words = sum(len(re.findall(r"[A-Za-z']+", text)) for text in texts)
    found = {mark: 1e4 * sum(len(re.findall(mark, text)) for text in texts) / words for mark in MARKS}
    assert not {mark: number for mark, number in found.items() if number > MARKS[mark][0]}
