"""Keys of sources, such as ``[FedAG]``, become links to the bibliography, in pages and in docstrings."""

from __future__ import annotations

import ast
import os
import re
from pathlib import Path
from typing import Any

from griffe import Extension
from mkdocs.structure.pages import Page

BIBLIOGRAPHY = Path(__file__).parents[1] / "bibliography.md"
KEYS = re.findall(r"^### \[([\w-]+)\]$", BIBLIOGRAPHY.read_text(), re.MULTILINE)
USE = re.compile(rf"(?<!### )(?<![\w\]])\[({'|'.join(KEYS)})\](?![(\[:])")
DEFINITION = re.compile(rf"^\[(?:{'|'.join(KEYS)})\]: \S+\n?", re.MULTILINE)
CODE = re.compile(r"(^ *```.*?^ *```$|`[^`\n]+`)", re.MULTILINE | re.DOTALL)


def on_page_markdown(markdown: str, page: Page, **kwargs: object) -> str:
    """Let the keys on a page lead to the bibliography, in place of the page's own link definitions."""
    return linked(DEFINITION.sub("", markdown), os.path.relpath("bibliography.md", Path(page.file.src_uri).parent))


def linked(text: str, target: str) -> str:
    """Return ``text`` with every key outside code as a link to the page ``target``.

    >>> linked("[FedAG] eq. (6), `[FedAG]`", "bibliography.md")
    '[[FedAG]](bibliography.md#fedag) eq. (6), `[FedAG]`'
    """
    parts = CODE.split(text)  # every second one is code
    parts[::2] = [USE.sub(lambda key: f"[{key[0]}]({target}#{key[1].lower()})", part) for part in parts[::2]]
    return "".join(parts)


class References(Extension):
    """Griffe extension: the same in every docstring of the package."""

    def on_module_members(self, *, node: Any, mod: Any, **kwargs: Any) -> None:
        """Names of ``from … import Name as Name`` are a room's public ones."""
        imports = [each for each in getattr(node, "body", ()) if isinstance(each, ast.ImportFrom)]
        names = [alias.name for each in imports for alias in each.names if alias.asname == alias.name]
        mod.exports = names or mod.exports

    def on_package(self, *, pkg: Any, **kwargs: Any) -> None:
        """After all modules are loaded."""
        self._convert(pkg)

    def _convert(self, scope: Any) -> None:
        if scope.docstring is not None:
            scope.docstring.value = linked(scope.docstring.value, "../bibliography.md")  # as seen from docs/api
        for member in scope.members.values():
            if not member.is_alias:
                self._convert(member)
