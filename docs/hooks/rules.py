"""The table of all fusion rules, from the registry and the rules' own docstrings."""

from __future__ import annotations

import inspect
import re
from typing import TYPE_CHECKING

from mkdocs.structure.pages import Page

if TYPE_CHECKING:
    from lightning_fedbayes.fusion import FusionRule

MARK = "<!-- table of all rules -->"
WHEN = re.compile(r"^When to use it: (.*?)(?:\n\n|\Z)", re.MULTILINE | re.DOTALL)


def on_page_markdown(markdown: str, page: Page, **kwargs: object) -> str:
    """Put the table where :data:`MARK` is."""
    return markdown.replace(MARK, table()) if MARK in markdown else markdown


def table() -> str:
    """Return every rule in its family: name and aliases, description, when to use it, needs."""
    from lightning_fedbayes.cli.rules import FAMILIES, OTHER, family
    from lightning_fedbayes.fusion import available_fusions, get_rule

    families: dict[str, list[str]] = {title: [] for title in (*reversed(FAMILIES), OTHER)}
    for name in available_fusions():
        families[family(get_rule(name))].append(row(name, get_rule(name)))
    head = "| rule | what it is | when to use it | needs |\n|---|---|---|---|\n"
    return "\n\n".join(
        f"### {title.capitalize()}\n\n{head}" + "\n".join(rows) for title, rows in families.items() if rows
    )


def row(name: str, rule: FusionRule) -> str:
    """Return one line of the table."""
    from lightning_fedbayes.cli.rules import aliases_of

    document = inspect.getdoc(type(rule)) or ""
    when = WHEN.search(document)
    needs = ["weights"] * rule.uses_weights + ["previous posterior"] * rule.needs_previous
    others = ", ".join(f"`{each}`" for each in aliases_of(name))
    cells = [
        f"[`{name}`][{type(rule).__module__}.{type(rule).__qualname__}]" + (f" ({others})" if others else ""),
        in_a_cell(document.splitlines()[0]),
        in_a_cell(when[1]) if when else "",
        ", ".join(needs) or "–",
    ]
    return f"| {' | '.join(cells)} |"


def in_a_cell(text: str) -> str:
    """Turn text of a docstring into a cell of a table: one line, equations and names as Markdown.

    >>> in_a_cell(":math:`a` or\\n    :class:`~fb.Krum`, a | b")
    '$a$ or `fb.Krum`, a \\\\| b'
    """
    text = re.sub(r":math:`([^`]+)`", r"$\1$", " ".join(text.split()))
    text = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", text)
    return re.sub(r"(?<!\\)\|", r"\\|", text)  # an escaped one is TeX's ‖, which does not end a cell either
