"""Settings are a value: frozen, checked when made, the same for whoever builds them."""

import dataclasses
import os

import pytest

import lightning_fedbayes as fb
from benchmarks.untrusted.adversaries import SignFlip
from lightning_fedbayes.clients.settings import FederationSettings
from lightning_fedbayes.core.errors import FedBayesError
from lightning_fedbayes.fusion.auto import AutoFusion

WRONG = {
    "local_epochs=0": {"local_epochs": 0},
    "safeguards=2": {"safeguards": 2},
    "engine=0": {"engine": 0},
    "fraction=0": {"fraction": 0},
    "engine='fast'": {"engine": "fast"},
    "keep='kept'": {"keep": "kept"},
    "buffers='averaged'": {"buffers": "averaged"},
    "did you mean 'conflation'": {"fusion": "conflatoin"},
    "did you mean 'train_size'": {"weighting": "trainsize"},
    "is no Partition": {"partition": 3},
    "give a function of a round": {"adversaries": ["SignFlip"]},
    "is no UpdatePrivacy": {"privacy": 1.0},
}


@pytest.mark.parametrize(("says", "arguments"), WRONG.items(), ids=WRONG)
def test_every_argument_is_checked(says, arguments):
    with pytest.raises(FedBayesError, match=says):
        FederationSettings(**arguments)


def test_settings_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        FederationSettings().fraction = 0.5  # pyright: ignore[reportAttributeAccessIssue]


def test_arguments_are_brought_into_one_form():
    settings = FederationSettings(fusion="auto", local_parameters="head.*")
    assert isinstance(settings.method.rule, AutoFusion)
    assert settings.local_parameters == ("head.*",)


def test_making_settings_has_no_side_effect(monkeypatch):
    monkeypatch.delenv("WANDB_MODE", raising=False)
    before = dict(os.environ)
    FederationSettings(fusion="auto")
    assert dict(os.environ) == before


def test_the_callback_makes_the_same_value():
    arguments = {"local_epochs": 2, "fraction": 0.5, "weighting": "equal", "buffers": "local", "seed": 3}
    callback = fb.FederatedBayes(fb.IIDPartition(4), **arguments)
    made, by_hand = callback.settings, FederationSettings(fb.IIDPartition(4), **arguments)
    assert made.described() == by_hand.described()
    names = [field.name for field in dataclasses.fields(made) if field.name != "fusion"]
    assert [getattr(made, name) for name in names] == [getattr(by_hand, name) for name in names]


def test_the_callback_prints_what_was_chosen():
    assert repr(fb.FederatedBayes()) == "FederatedBayes(fusion=None)"
    chosen = repr(fb.FederatedBayes(fb.IIDPartition(4), fusion="conflation", adversaries=SignFlip([0]), seed=3))
    assert chosen == (
        "FederatedBayes(partition=IIDPartition(clients=4), fusion='conflation', "
        "adversaries='SignFlip(clients=(0,), scale=1.0)', seed=3)"
    )
