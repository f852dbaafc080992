"""Docstrings open with an imperative or a noun; words mean one thing."""

import ast
import re
from pathlib import Path

import pytest

import lightning_fedbayes

PACKAGE = Path(lightning_fedbayes.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))

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


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_docstrings_open_with_an_imperative_or_a_noun(path):
    wrong = [
        (line, text.split("\n")[0]) for line, text in docstrings(path.read_text()) if text.split()[:1][0] in QUESTIONS
    ]
    assert not wrong


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_retired_words_are_gone(path):
    text = path.read_text()
    found = {match: instead for pattern, instead in RETIRED.items() for match in re.findall(pattern, text)}
    found = {match: instead for match, instead in found.items() if "diagram" not in match or "also called" not in text}
    assert not found
