"""``fedbayes doctor`` says what works here, and why not what does not."""

import re
from importlib.metadata import PackageNotFoundError, version

import lightning_fedbayes as fb
from lightning_fedbayes.cli import doctor, main


def test_all_that_is_installed_works(capsys):
    assert main(["doctor"]) == 0
    said = capsys.readouterr().out
    assert f"lightning-fedbayes {fb.__version__}, Python 3." in said
    assert f"torch {version('torch')}" in said
    assert re.findall(r"engine (\w+): works", said) == ["sequential", "vectorized"]
    for extra in doctor.EXTRAS:
        assert re.search(rf"^{extra}( \(.*\), .*: works|: not installed; .*\[{extra}\])$", said, re.MULTILINE)


def test_what_is_missing_or_broken_is_named(capsys, monkeypatch):
    def found(package):
        if package in ("flwr", "scipy"):
            raise PackageNotFoundError(package)
        return "1.0"

    def refuses(engine):
        raise RuntimeError(f"no {engine}\nhere")

    monkeypatch.setattr(doctor, "version", found)
    monkeypatch.setattr(doctor, "_round", refuses)
    monkeypatch.setattr(doctor, "EXTRAS", {**doctor.EXTRAS, "privacy": ("privacy", "opacus", "no_such_module")})
    assert main(["doctor"]) == 1
    said = capsys.readouterr().out
    assert "scipy missing" in said
    assert "engine vectorized: does not work: RuntimeError: no vectorized here" in said
    assert "flower: not installed; for a federation over Flower: pip install lightning-fedbayes[flower]" in said
    assert "privacy (opacus 1.0), privacy: does not work: ModuleNotFoundError" in said
