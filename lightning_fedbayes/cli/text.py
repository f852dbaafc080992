"""Docstrings as plain text for a terminal."""

from __future__ import annotations

import re

SYMBOLS = {
    r"\\sum_k": "Σ", r"\\exp": "exp", r"\\log": "log", r"\\alpha": "α", r"\\omega": "ω", r"\\sigma": "σ", r"\\mu": "μ",
    r"\\\|": "‖", r"\^2": "²", r"_k": "ₖ", r"_\\alpha|_α": "_α", r"_2": "₂", r"\\ ": " ",
}


def plain(text: str) -> str:
    r"""``text`` without markup: roles become names, the TeX of the package's docstrings Unicode.

    >>> plain(r"Minimiser of :math:`\sum_k \omega_k KL(q\|q_k)`, see :class:`~lightning_fedbayes.AutoFusion`.")
    'Minimiser of Σ ωₖ KL(q‖qₖ), see AutoFusion.'
    """
    text = re.sub(r":math:`([^`]*)`", lambda found: _formula(found[1]), text)
    text = re.sub(r":\w+:`~?(?:[\w.]*\.)?(\w+)`", r"\1", text)
    return " ".join(text.replace("``", "").split())


def _formula(tex: str) -> str:
    for pattern, symbol in SYMBOLS.items():
        tex = re.sub(pattern, lambda _, symbol=symbol: symbol, tex)
    return tex
