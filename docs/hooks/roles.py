"""Sphinx's roles in docstrings, turned into Markdown for the site."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

ROLE = re.compile(r":(class|func|meth|attr|data|mod|obj|exc):`(~?)([^`<]+?)(?:\s*<([^`>]+)>)?`")
INLINE_MATH = re.compile(r":math:`([^`]+)`")
DISPLAY_MATH = re.compile(r"^( *)\.\. math::(?: *\n)?((?: *\S.*\n?)(?:\1 +\S.*\n?)*)", re.MULTILINE)
DOCTEST = re.compile(r"^( *)>>> .*(?:\n\1\S.*|\n\1 +\S.*)*", re.MULTILINE)
LITERAL = re.compile(r"(?:^::| ::|(?<=:):)\n\n((?:    .*\n?|\n(?=    ))+)", re.MULTILINE)
REFERENCE_ONLY = re.compile(r"See :meth:`[^`]+`\.")
ONE_LINE_SECTION = re.compile(r"^(Returns|Yields|Raises): +(?=\S)", re.MULTILINE)


def markdown(text: str, scope: Object) -> str:
    """Return a docstring with roles, equations, doctests and literal blocks in Markdown.

    Args:
        text: the docstring, without the indentation of the code.
        scope: the object that it belongs to, where names are looked up.
    """
    text = LITERAL.sub(_literal, text)
    text = DOCTEST.sub(_doctest, text)
    text = DISPLAY_MATH.sub(_display, text)
    text = INLINE_MATH.sub(lambda match: f"${_joined(match.group(1))}$", text)
    text = ONE_LINE_SECTION.sub(r"**\1**: ", text)
    return ROLE.sub(lambda match: link(match, scope), text)


def link(match: re.Match[str], scope: Object) -> str:
    """Turn a role into code that links to the object that it names, if that is on the site."""
    kind, short, name, target = match.groups()
    shown = name if target else name.removeprefix("~")
    path = target or shown
    if short:
        shown = shown.rsplit(".", 1)[-1]
    if kind in ("func", "meth"):
        shown += "()"
    return f'<autoref identifier="{resolved(path, scope)}" optional>`{shown}`</autoref>'


def resolved(path: str, scope: Object) -> str:
    """Return the full name of ``path`` as seen from ``scope``; unchanged if nothing has that name there.

    A name is one of the object's own members, of its class, of its module, or of a base class.
    """
    head, _, rest = path.partition(".")
    place: Any = scope
    while place is not None:
        members = place.all_members if place.is_class or place.is_module else {}
        if head in members:
            found = members[head]
            start = found.canonical_path if not found.is_alias or found.resolved else found.target_path
            return f"{start}.{rest}" if rest else start
        place = place.parent
    return path


def _joined(tex: str) -> str:
    """Return an equation on one line."""
    return " ".join(tex.split())


def _display(match: re.Match[str]) -> str:
    indent, body = match.groups()
    return f"{indent}$${_joined(body)}$$\n"


def _doctest(match: re.Match[str]) -> str:
    indent, body = match.group(1), match.group(0)
    return f"{indent}```pycon\n{body}\n{indent}```"


def _literal(match: re.Match[str]) -> str:
    r"""Return a literal block as code, below the text that announces it.

    >>> LITERAL.sub(_literal, "Use it::\n\n    fit()")
    'Use it:\n\n```python\nfit()\n```\n'
    >>> LITERAL.sub(_literal, "It fits. ::\n\n    fit()")
    'It fits.\n\n```python\nfit()\n```\n'
    """
    return "\n\n```python\n" + re.sub(r"^    ", "", match.group(1), flags=re.MULTILINE).rstrip() + "\n```\n"


class Roles(Extension):
    """Griffe extension: every docstring of the package goes through :func:`markdown`.

    Methods that say no more than "See" that of the base class are left out: they are on its page.
    """

    def on_package(self, *, pkg: Any, **kwargs: Any) -> None:
        """After all modules are loaded, when names can be looked up."""
        self._convert(pkg)

    def _convert(self, scope: Any) -> None:
        if scope.docstring is not None:
            scope.docstring.value = markdown(scope.docstring.value, scope)
        for name, member in list(scope.members.items()):
            if member.is_alias:
                continue
            if member.docstring is not None and REFERENCE_ONLY.fullmatch(member.docstring.value.strip()):
                del scope.members[name]
            else:
                self._convert(member)
