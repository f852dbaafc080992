"""The code in README and docs runs as it stands, and the pages make a site."""

import ast
import doctest
import glob
import importlib.util
import itertools
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

import lightning_fedbayes as fb
from lightning_fedbayes.cli.main import COMMANDS, main
from lightning_fedbayes.fusion import available_fusions, unregister_fusion
from lightning_fedbayes.methods import available_methods, unregister_method
from tests.benchmarks.test_readers import grey
from tests.test_examples import load

ROOT = Path(__file__).parents[1]
PAGES = (
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    *sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")),
)
BENCHMARKS = tuple(sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "benchmarks").glob("*/README.md")))
BLOCKS = [
    pytest.param(block, id=f"{page}-{number}")
    for page in PAGES
    for number, block in enumerate(re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL))
]
ROOMS = [
    *("callbacks", "callbacks.calibration", "clients", "clients.privacy", "core.exchange", "data", "data.partition"),
    *("fusion", "layers", "methods", "metrics", "metrics.functional", "modules", "transport.flower"),
    *(["transport.nvflare"] if importlib.util.find_spec("nvflare") else []),
]
FIRST_HOUR = [
    Path("docs", f"{name}.md")
    for name in ("first_federation", "own_network", "which_method", "calibration", "machines", "running")
]
"""Guides that end with charts, in the order in which they are read."""
LINES_OF_AN_EXAMPLE = 40
LEFT = re.compile('"digits","method":"FedAvg"|"rules".*"fedavg"|"liars"|"fednova"')
"""The cell of a study that is run again."""
KEY = re.compile(r"(?<![\w\]`])\[([A-Z][\w-]*)\](?![(\[:])")
"""A reference to a source in a text without code."""


@pytest.mark.slow
@pytest.mark.parametrize("block", BLOCKS)
def test_code_runs(block, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    before, methods = set(available_fusions()), set(available_methods())
    try:
        exec(compile(block, "block", "exec", dont_inherit=True), {"__name__": "__main__"})
    finally:
        for name in set(available_fusions()) - before:
            unregister_fusion(name)
        for name in set(available_methods()) - methods:
            unregister_method(name)
    assert capsys.readouterr().out


def test_the_page_of_rules_names_every_rule_and_alias():
    table = (ROOT / "docs" / "rules.md").read_text()
    missing = [name for name in available_fusions(aliases=True) if f"`{name}`" not in table]
    assert not missing


def charts(text):
    """The charts that a page names in the first column of its last table."""
    column = re.findall(r"^\| (`.*?) \|", text[text.index("## What to look at in W&B") :], re.MULTILINE)
    return {name for cell in column for name in re.findall(r"`([^`]+)`", cell)}


def logged(folder):
    """Names of all figures, tables and curves of the runs in a folder, and of pictures with "_" for "/"."""
    names = {path.stem for path in folder.rglob("*.png")}
    for path in folder.rglob("federation.jsonl"):
        for entry in map(json.loads, path.read_text().splitlines()):
            names |= {*entry.get("figures", ()), entry.get("table"), entry.get("curve")}
    return names


@pytest.mark.slow
def test_the_first_hour_runs_and_logs_the_charts_that_it_names(tmp_path, monkeypatch, capsys):
    seen = set()
    for page in FIRST_HOUR:
        text = (ROOT / page).read_text()
        example, *others = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
        assert all(len(each.splitlines()) <= LINES_OF_AN_EXAMPLE for each in (example, *others))
        folder = tmp_path / page.stem
        folder.mkdir()
        monkeypatch.chdir(folder)
        exec(compile(example, page.name, "exec", dont_inherit=True), {"__name__": "__main__"})
        assert capsys.readouterr().out
        own = logged(folder)
        seen |= own
        for chart in charts(text):
            place, _, last = chart.rpartition("/")
            assert any(
                name in (chart, chart.replace("/", "_")) or (last == "NAME" and str(name).startswith(f"{place}/"))
                for name in own or seen
            ), f"{page}: {chart}"


def commands(start):
    """Every line of code in README, docs and benchmarks that begins with a command, with the lines it goes on in."""
    texts = [(ROOT / page).read_text().replace("\\\n", " ") for page in (*PAGES, *BENCHMARKS)]
    blocks = [block for text in texts for block in re.findall(r"```console\n(.*?)```", text, re.DOTALL)]
    return [
        line.partition(" #")[0].split() for block in blocks for line in block.splitlines() if line.startswith(start)
    ]


SMALL = {"--seeds": ["1", "--trainer.max_epochs=1", "--federation.fraction=0.2"], "--trainer.max_epochs": ["1"]}
"""Option of a line of the docs → its value here, and further options."""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_every_command_of_the_docs_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    known = commands("fedbayes ")
    assert {line[1] for line in known} == {*COMMANDS} - {"test", "predict"}
    for line in sorted(known, key=lambda line: COMMANDS.index(line[1])):
        if "wandb" in line[-1]:  # of the demo
            shutil.copytree("outputs/fedbayes/version_0", "outputs/digits/wandb/offline-run-1-sites")
        values = [SMALL.get(before, [word]) for before, word in itertools.pairwise(line)]
        words = [each for value in values for word in value for each in (glob.glob(word) if "*" in word else [word])]
        assert main(words) == 0, (line, capsys.readouterr().err)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_every_program_of_the_docs_starts_and_has_its_options(monkeypatch, capsys):
    found = {}
    for page in (*PAGES, *BENCHMARKS):
        for line in re.findall(r"python -m (benchmarks[^`\n|]+)", (ROOT / page).read_text().replace("\\\n", "")):
            found.setdefault(line.split()[0].rstrip(".,;)"), set()).update(re.findall(r"--[\w-]+", line))
    assert len(found) > 40
    for module, options in found.items():
        monkeypatch.setattr(sys, "argv", [module, "--help"])
        with pytest.raises(SystemExit) as end:
            runpy.run_module(module, run_name="__main__")
        shown = capsys.readouterr().out
        assert (end.value.code, {each for each in options if each not in shown}) == (0, set()), module


SMALLER = {
    "benchmarks.speed.run": "--only regression-10 --repeats 1 --rounds 1 --peers none",
    "benchmarks.speed.validation": "--examples 200 --repeats 1",
    "benchmarks.federations.run": "--only digits",
    "benchmarks.posterior.rounds": "--only rules",
    "benchmarks.layers.width": "--epochs 1",
    "benchmarks.engine.kills": "--kills 1",
    "tests.flower.hardening": "restart",
}
"""Program of README and docs → words that make it small; of a study one cell is left to do, and its page."""


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "line", sorted({line for page in PAGES for line in re.findall(r"`(python -m [^`]+)`", (ROOT / page).read_text())})
)
def test_every_program_of_the_docs_runs_at_a_small_size(line, tmp_path):
    if "nvflare" in line:
        pytest.importorskip("nvflare")
    copy, data = tmp_path / "copy", tmp_path / "data"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "outputs", "__pycache__"))
    for file in copy.glob("benchmarks/*/results/*.jsonl"):
        lines = file.read_text().splitlines(keepends=True)
        left = next(filter(LEFT.search, lines), "")
        file.write_text("".join(each for each in lines if each != left))
    grey(data / "FashionMNIST" / "raw", packed=True)
    (data / "uci_regression" / "kin8nm").mkdir(parents=True)
    np.savetxt(data / "uci_regression" / "kin8nm" / "data.txt", np.random.default_rng(0).normal(size=(2100, 9)))
    words = line.replace("DIR", str(data)).split()[1:]
    done = subprocess.run([sys.executable, *words, *SMALLER.get(words[1], "").split()], cwd=copy, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    for file in (ROOT / words[1].replace(".", "/")).parent.glob("results/*.jsonl"):
        again = (copy / file.relative_to(ROOT)).read_text().splitlines()
        assert len(again) == len(file.read_text().splitlines()), file.name


def test_links_and_pictures_exist():
    for page in PAGES:
        for target in re.findall(r"\]\((?!https?:)([^)#:\s]+)", (ROOT / page).read_text()):
            assert (ROOT / page).parent.joinpath(target).exists(), f"{page}: {target}"


@pytest.mark.parametrize("name", ["links", "references", "roles", "rules", "tex"])
def test_examples_in_the_hooks(name):
    assert doctest.testmod(load(f"../docs/hooks/{name}")).failed == 0


def docstrings():
    """Every docstring of package, benchmarks and examples, as (file, text)."""
    for room in ("lightning_fedbayes", "benchmarks", "examples"):
        for path in sorted((ROOT / room).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                    yield path.relative_to(ROOT).as_posix(), str(node.value.value)


CODE = re.compile(r"^ *```[\s\S]*?^ *```$|`+[^`]+`+|^ *>>> .*$", re.MULTILINE)


def test_every_key_that_is_used_is_in_the_bibliography():
    keys = set(load("../docs/hooks/references").KEYS)
    assert keys == {"FedAG", "Untrusted", "BA-BFL", "FBDL"}
    pages = [(page, (ROOT / page).read_text()) for page in (*PAGES, *BENCHMARKS)]
    used = {(key, where) for where, text in (*docstrings(), *pages) for key in KEY.findall(CODE.sub("", text))}
    assert {key for key, _ in used} == keys, used


class Page(HTMLParser):
    """Links, anchors and loaded files of a built page."""

    def __init__(self, path):
        super().__init__()
        self.anchors, self.links, self.loaded = set(), set(), []
        self.feed(path.read_text())

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self.anchors.add(attributes.get("id"))
        if tag == "a":
            self.links.add(attributes.get("href"))
        if tag in ("script", "img", "iframe") or (tag == "link" and attributes.get("rel") == "stylesheet"):
            self.loaded.append(attributes.get("src") or attributes.get("href") or "")


def below(prefix, anchors):
    """The last parts of those ``anchors`` that lie within a module."""
    return {anchor.rpartition(".")[2] for anchor in anchors if anchor and anchor.startswith(f"{prefix}.")}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Built page → its content. Warnings, such as a link that leads nowhere, fail the build."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    options = {"env": os.environ | {"NO_MKDOCS_2_WARNING": "1"}, "capture_output": True, "text": True}
    done = subprocess.run(command, cwd=ROOT, check=False, **options)
    assert done.returncode == 0, done.stderr
    return {path.relative_to(folder).as_posix(): Page(path) for path in folder.rglob("*.html")}


@pytest.mark.slow
def test_the_site_loads_nothing_from_elsewhere(site):
    for name, page in site.items():
        assert not [source for source in page.loaded if re.match(r"(https?:)?//", source)], name


def test_the_reference_has_every_public_name(site):
    anchors = set.union(*(page.anchors for name, page in site.items() if name.startswith("api/")))
    for room in ROOMS:
        module = import_module(f"lightning_fedbayes.{room}")
        called = {n for n in getattr(module, "__all__", vars(module)) if n[0] != "_" and callable(getattr(module, n))}
        assert called <= below(module.__name__, anchors), room
    assert set(fb.__all__) <= below(fb.__name__, anchors)


def test_names_in_the_reference_lead_to_what_they_name(site):
    for page, name in (("data", "ClientDatasets"), ("methods", "available_methods")):
        assert f"{page}.html#lightning_fedbayes.{page}.{name}" in site["api/index.html"].links
