"""Forty situations and more from public threads, each by plain Lightning and as a federation.

    python -m benchmarks.situations.run [--only NAME ...] [--out tests/zoo]

One client with all data is compared with a plain fit, three clients with a loop of plain fits, by each engine. Needs
the packages of the group `models`: pip install --group models. Takes about five minutes.
"""

from __future__ import annotations

import argparse
import logging
import re
import sys
import warnings
from pathlib import Path

import torch

from benchmarks.page import include
from benchmarks.situations import again, data, graphs, huggingface, networks, steps, vision
from benchmarks.situations.situation import DIFFERENT, ERROR, REFUSED, SITUATIONS, Situation, Verdict, verdicts
from lightning_fedbayes.core.tables import markdown_table

README = Path(__file__).parents[2] / "tests" / "zoo" / "README.md"
PARTS = [part.asked.name for part in (data, steps, networks, again, huggingface, vision, graphs)]
DUNDER = re.compile(r"\b__\w+__\b")
"""Names that Markdown shows in bold letters, unless they are code."""
HEADER = ("what people do", "thread", "sequential", "vectorized", "why not")


def row(case: Situation) -> tuple[str, ...]:
    """Return a row of the table, as the situation is declared."""
    words = [case.declared(engine) for engine in ("sequential", "vectorized")]
    shown = [f"**{word}**" if word in (DIFFERENT, ERROR) else word for word in words]
    _, _, _, owner, name, _, number = case.address.split("/")
    what, why = (DUNDER.sub(r"`\g<0>`", text) for text in (f"{case.name}: {case.asks}", case.why))
    return what, f"[{owner}/{name}#{number}]({case.address})", *shown, why


def tables() -> str:
    """Return a table for each part, and how many situations there are of each verdict."""
    parts = list[str]()
    for group in PARTS:
        rows = [row(case) for case in SITUATIONS if case.group == group]
        parts.append(f"## {group}\n\n{markdown_table(HEADER, rows)}")
    found = [case.declared("sequential") for case in SITUATIONS]
    counts = ", ".join(f"{found.count(word)} {word}" for word in dict.fromkeys(found))
    return "\n\n".join([f"{len(SITUATIONS)} situations; sequential: {counts}.", *parts])


def mistakes(case: Situation, found: dict[str, Verdict]) -> list[str]:
    """Return what is otherwise than declared, a sentence each."""
    wrong = [
        f"{case.name}, {engine}: {verdict.word}, and {case.declared(engine)} is declared: {verdict.note}"
        for engine, verdict in found.items()
        if verdict.word != case.declared(engine) and not (engine == "auto" and _alike(case, verdict))
    ]
    refusals = [each.note for each in found.values() if each.word in (REFUSED, ERROR)]
    if refusals and (not case.why or case.why not in refusals[0]):
        wrong.append(f"{case.name}: '{case.why}' is not in the message: {refusals[0]}")
    return wrong


def _alike(case: Situation, verdict: Verdict) -> bool:
    """Return True if the engine that "auto" chose does as declared for it."""
    return verdict.word == case.declared("vectorized") and case.declared("sequential") not in (REFUSED, ERROR)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], help="parts of the names of situations")
    parser.add_argument("--out", type=Path, default=README.parent, help="folder of the README.md with the table")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    wrong = list[str]()
    for case in SITUATIONS:
        if not arguments.only or any(part in case.name for part in arguments.only):
            found = verdicts(case)
            print(case.name, {engine: f"{each.word} {each.note[:60]}" for engine, each in found.items()}, flush=True)
            wrong += mistakes(case, found)
    if wrong:
        sys.exit("\n".join(wrong))
    if not arguments.only:
        include(arguments.out / "README.md", tables())


if __name__ == "__main__":
    main()
