"""The code in README and docs runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import lightning_fedbayes as fb
from lightning_fedbayes.fusion import available_fusions, unregister_fusion

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", "docs/guide.md")
BLOCKS = [
    pytest.param(block, id=f"{page}-{number}")
    for page in PAGES
    for number, block in enumerate(re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL))
]


@pytest.mark.parametrize("block", BLOCKS)
def test_code_runs(block, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    before = set(available_fusions())
    try:
        exec(compile(block, "block", "exec"), {"__name__": "block"})
    finally:
        for name in set(available_fusions()) - before:
            unregister_fusion(name)
    assert capsys.readouterr().out


def test_the_readme_names_every_rule_and_alias():
    table = (ROOT / "README.md").read_text()
    missing = [name for name in available_fusions(aliases=True) if f"`{name}`" not in table]
    assert not missing


def test_links_and_pictures_exist():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)\)", (ROOT / page).read_text()):
            assert (ROOT / page).parent.joinpath(target).exists(), f"{page}: {target}"


def test_everything_public_is_there():
    for name in fb.__all__:
        assert getattr(fb, name).__doc__, name
