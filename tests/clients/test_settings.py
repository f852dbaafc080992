"""Settings are a value: frozen, checked when made, the same for whoever builds them."""

import dataclasses

import pytest

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
    "give a Partition": {"partition": 3},
    "give a function of a round": {"adversaries": ["SignFlip"]},
    "give UpdatePrivacy": {"privacy": 1.0},
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
