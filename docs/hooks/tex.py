"""Equations between dollars become MathML when the site is built, so that pages need no JavaScript to show them."""

from __future__ import annotations

import re
from typing import Any
from xml.etree.ElementTree import Element

from latex2mathml.converter import convert
from markdown import Markdown
from markdown.extensions import Extension
from markdown.inlinepatterns import InlineProcessor
from mkdocs.config.defaults import MkDocsConfig

PATTERN = r"(?<![\\$])(\$\$?)(?!\s)((?:[^$\\]|\\.)+?)(?<!\s)\1(?![\d$])"
"""``$inline$`` or ``$$display$$``; a dollar before a blank or a number is a dollar."""
UNKNOWN = (
    (r"\\[Bb]ig+l(?![a-z])", r"\\left"),
    (r"\\[Bb]ig+r(?![a-z])", r"\\right"),
    (r"\\arg\\min", r"\\mathrm{arg}\\,\\min"),
    (r"\\tfrac", r"\\frac"),
    (r"\\(log|exp|max|min)\s+(?=[A-Za-z\\])", r"\\\1\\, "),
    (r"\\mathcal *(?:L|\{L\})", "ℒ"),  # which browsers would not set in script otherwise
    (r"(?<![A-Za-z\\])KL(?![A-Za-z])", r"\\mathrm{KL}"),
)
"""Replacements for LaTeX that latex2mathml does not know, or sets too tightly."""
MENDED = (
    ("<mi>&#x0007E;</mi>", "<mo>&#x0223C;</mo>"),
    (r"<mi>(;|&#x000B1;)</mi>", r"<mo>\1</mo>"),
    ('<mo accent="true">&#x02015;</mo>', '<mo stretchy="true">&#x000AF;</mo>'),
)
"""Replacements for MathML: relations and signs need room on both sides, and a bar is as long as what is below it."""
AFTER_CODE_BEFORE_ESCAPES = 185
"""Priority: backticks (190) hide dollars, and backslashes (180) belong to TeX."""


def mathml(tex: str, display: str) -> str:
    r"""Return the MathML of an equation.

    Args:
        tex: LaTeX without delimiters, in the subset that latex2mathml knows.
        display: "inline" or "block".

    >>> mathml("x", "inline")
    '<math xmlns="http://www.w3.org/1998/Math/MathML" display="inline"><mrow><mi>x</mi></mrow></math>'
    """
    for pattern, replacement in UNKNOWN:
        tex = re.sub(pattern, replacement, tex)
    mended = convert(tex, display=display)
    for pattern, replacement in MENDED:
        mended = re.sub(pattern, replacement, mended)
    return mended


class _Equation(InlineProcessor):
    def handleMatch(self, m: re.Match[str], data: str) -> tuple[Element | str, int, int]:
        display = "block" if m.group(1) == "$$" else "inline"
        return self.md.htmlStash.store(mathml(m.group(2), display)), m.start(0), m.end(0)


class Equations(Extension):
    """Python-Markdown extension for ``$…$`` and ``$$…$$``."""

    def extendMarkdown(self, md: Markdown) -> None:
        """Register the pattern."""
        equation: Any = _Equation(PATTERN, md)
        md.inlinePatterns.register(equation, "equation", AFTER_CODE_BEFORE_ESCAPES)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Let all pages, and the docstrings in them, have equations."""
    config.markdown_extensions.append(Equations())  # pyright: ignore[reportArgumentType]
    return config
