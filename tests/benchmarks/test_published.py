"""Published figures: each stands once in benchmarks/published.yaml; code and pages quote it behind "published"."""

import re
from pathlib import Path

import pytest

from benchmarks.federations.published import STUDIES, UNPASSED
from benchmarks.published import OTHER, rows, sources
from benchmarks.uci.scores import published
from benchmarks.untrusted.report import PUBLISHED

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


def figures(sources_):
    """Every figure of the published rows, spreads included."""
    tables_ = (f"{source} {name}" for source in sources_ for name in sources()[source] if name not in OTHER)
    texts = (text for table in tables_ for row in rows(table) for text in row.values() if is_score(text))
    return {float(part) for text in texts for part in text.split(" ± ")}


def is_score(text):
    return isinstance(text, str) and re.fullmatch(r"-?\d+\.?\d*( ± \d+\.?\d*)?", text) is not None


def number(text):
    return float(text.replace(",", "").replace("−", "-").lstrip("+"))


def is_known(text, known):
    """Whether a figure is one that is known, rounded to as many digits."""
    digits = len(text.partition(".")[2])
    return any(abs(each - number(text)) <= 0.5 * 10.0**-digits * (1 + 1e-9) for each in known)


def wrong_quotes(text, sources_):
    """What a page quotes and published.yaml does not have."""
    others = (sources()[source].get(name, ()) for source in sources_ for name in OTHER)
    known = figures(sources_) | {number(each) for texts in others for each in texts}
    lines = text.splitlines()
    prose = " ".join(line for line in lines if not line.startswith("|"))
    quoted = [found for pattern in QUOTES for each in re.findall(pattern, prose) for found in re.findall(NUMBER, each)]
    for heads, *table in tables(lines):
        quoted += [each for cells in table for head, cell in zip(heads, cells) for each in shown(head, cell)]
    return [each for each in quoted if not is_known(each, known)]


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
