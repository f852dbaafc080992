"""Docstrings open with an imperative or a noun; words mean one thing."""

import ast
import re
from pathlib import Path

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


def test_docstrings_open_with_an_imperative_or_a_noun_and_retired_words_are_gone():
    for path in MODULES:
        text = path.read_text()
        wrong = [(line, doc.split("\n")[0]) for line, doc in docstrings(text) if doc.split()[0] in QUESTIONS]
        assert not wrong, path
        found = {match for pattern in RETIRED for match in re.findall(pattern, text)}
        assert not {match for match in found if "diagram" not in match or "also called" not in text}, path
