"""Published figures: each stands once in benchmarks/published.yaml, and code and pages quote what stands there.

A page quotes figures behind the word "published" ("published 5.8 and 9.4", "published as 0.785"), in parentheses that
begin with it, in columns of tables whose head is "published" or "FLamby", and in parentheses of columns whose head ends
in "(published)".
"""

import re
from pathlib import Path

import pytest

from benchmarks.federations.published import STUDIES, UNPASSED
from benchmarks.published import OTHER, rows, sources
from benchmarks.uci.scores import published
from benchmarks.untrusted.report import PUBLISHED
from lightning_fedbayes.core.errors import FederationError

ROOT = Path(__file__).parents[2]
PAGES = {
    "benchmarks/uci/README.md": ["fedag"],
    "benchmarks/uci/results/tables.md": ["fedag"],
    "benchmarks/uci/results/rates.md": ["fedag"],
    "benchmarks/images/README.md": ["ba-bfl", "fbdl"],
    "benchmarks/untrusted/README.md": ["untrusted"],
    "benchmarks/federations/README.md": ["flamby"],
    "docs/benchmarks.md": ["ba-bfl"],
    **{str(page.relative_to(ROOT)): ["ba-bfl", "fbdl"] for page in ROOT.glob("benchmarks/images/results/*/report.md")},
    **{str(page.relative_to(ROOT)): ["untrusted"] for page in ROOT.glob("benchmarks/untrusted/results/**/*.md")},
}
NUMBER = r"(?<![\w.,-])(?<!\w[-−])[-−+]?\d+(?:,\d{3})*(?:\.\d+)?(?!\w)"
QUOTES = (rf"published (?:as )?({NUMBER}(?:(?:,| and| to| ±) {NUMBER})*)", r"\(published([^()]*)\)")
NAMES = {"FedAvg": "weighted_average", "uniform average": "weighted_average", "DWC": "distributed_weight_consolidation"}
"""Name in a page → rule. Others are rules, data sets or methods as they stand, or with "_" for "-" and spaces."""


def figures(sources_, names=None, score=None):
    """Every figure of the published rows that are about one of the names, spreads included."""
    found = set()
    for table in (f"{source} {name}" for source in sources_ for name in sources()[source] if name not in OTHER):
        for row in rows(table):
            about = [str(row[key]).split("(")[0] for key in ("rule", "fusion", "dataset", "method") if key in row]
            if names is None or any(name.startswith(each) for each in about for name in names):
                found |= {
                    float(part)
                    for key, text in row.items()
                    if is_score(text) and score in (None, key)
                    for part in text.split(" ± ")
                }
    return found


def is_score(text):
    return isinstance(text, str) and re.fullmatch(r"-?\d+\.?\d*( ± \d+\.?\d*)?", text) is not None


def other_figures(sources_):
    return {number(text) for source in sources_ for name in OTHER for text in sources()[source].get(name, ())}


def number(text):
    return float(text.replace(",", "").replace("−", "-").lstrip("+"))


def is_known(text, known):
    """Whether a figure is one that is known, rounded to as many digits."""
    digits = len(text.partition(".")[2])
    return any(abs(each - number(text)) <= 0.5 * 10.0**-digits * (1 + 1e-9) for each in known)


def wrong_quotes(text, sources_):
    """What a page quotes and published.yaml does not have."""
    known = figures(sources_) | other_figures(sources_)
    lines = text.splitlines()
    prose = " ".join(line for line in lines if not line.startswith("|"))
    quoted = {found for pattern in QUOTES for each in re.findall(pattern, prose) for found in re.findall(NUMBER, each)}
    wrong = [f"published {found}" for found in sorted(quoted) if not is_known(found, known)]
    for heads, *table in tables(lines):
        for cells in table:
            for place, (head, cell) in enumerate(zip(heads, cells)):
                column = heads[place - 1] if head == "published" else head
                known = figures(sources_, names_of(cells), score_of(f"{cells[0]} {column}", sources_))
                wrong += [f"{cells[0]}, {head}: {each}" for each in shown(head, cell) if not is_known(each, known)]
    return wrong


def tables(lines):
    """Every table of a page: its heads, then the cells of each row."""
    found = []
    for before, line in zip(["", *lines], lines):
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if line.startswith("|") and not before.startswith("|"):
            found.append([])
        if line.startswith("|") and not line.startswith("|---"):
            found[-1].append(cells)
    return found


def shown(head, cell):
    """The published figures of a cell, by the head of its column."""
    if head.startswith("published") or head == "FLamby":
        return re.findall(NUMBER, cell)
    return re.findall(NUMBER, "".join(re.findall(r"\(([^()]*)\)", cell))) if "(published)" in head else []


def names_of(cells):
    """What a row of a page is about: rules, data sets, methods."""
    names = {re.split("[,:]", cell)[0] for cell in cells} | set(re.findall(r"`([^`(]+)", cells[0]))
    return names | {NAMES.get(name, re.sub("[- ]", "_", name.lower())) for name in names}


def score_of(heads, sources_):
    """The key of the scores of a column; None if its heads do not tell."""
    shown = {"accuracy": "accuracy", "ECE": "ece100", "NLL": "nll"} if "fbdl" in sources_ else {}
    return next((key for text, key in shown.items() if text in heads), None)


@pytest.mark.parametrize("page", PAGES)
def test_pages_quote_what_is_published(page):
    assert wrong_quotes((ROOT / page).read_text(), PAGES[page]) == []


def test_every_row_stands_once():
    for source in sources():
        for name in sources()[source]:
            keys = (
                []
                if name in OTHER
                else [tuple((k, v) for k, v in row.items() if not is_score(v)) for row in rows(f"{source} {name}")]
            )
            assert len(keys) == len(set(keys))


def test_what_pages_derive_follows():
    for source, content in sources().items():
        known = figures([source])
        for text, formula in content.get("derived", {}).items():
            first, sign, second = formula.split(" ")
            assert {float(first), float(second)} <= known
            value = float(first) - float(second) if sign == "-" else float(first) / float(second)
            assert is_known(text, [value]), (source, text, value)


def test_benchmarks_read_the_file():
    assert published("nll", "bostonHousing", "fedag") == (2.58, 0.06)
    assert published("sharpness", "yacht", "fedag") == (2.85, None)
    assert published("crps", "yacht", "fedag") is None
    assert published("nll", "diabetes", "fedag") is None
    assert PUBLISHED["shakespeare"]["ivar_mle"] == "0.50"
    assert "icov_mle" not in PUBLISHED["shakespeare"]
    heart = STUDIES["Fed-Heart, FLamby's settings"].methods
    assert heart["cyclic"] == heart[UNPASSED] == (0.7850, 0.0123)
    with pytest.raises(FederationError, match=r"no table 'fbdl table 6'; did you mean 'fbdl table"):
        rows("fbdl table 6")
