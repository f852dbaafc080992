"""Settings are a value: frozen, checked when made, the same for whoever builds them."""

import logging
from functools import partial

import pytest
import torch

import lightning_fedbayes as fb
from lightning_fedbayes.clients.settings import FederationSettings
from lightning_fedbayes.core.errors import FedBayesError
from lightning_fedbayes.fusion.auto import AutoFusion
from lightning_fedbayes.layers import LinearReparameterization
from lightning_fedbayes.layers.priors import ScaleMixturePrior
from lightning_fedbayes.methods import Averaging, averaging
from tests.federations import Plain, assert_equal, bayesian, federate

WRONG = {
    "local_epochs=0: give at least 1": {"local_epochs": 0},
    "safeguards=2.*give fb.Safeguards": {"safeguards": 2},
    "engine=0": {"engine": 0},
    r"fraction=0.*\(0, 1\]": {"fraction": 0},
    "engine='sequental': did you mean 'sequential'": {"engine": "sequental"},
    "keep='optimiser': did you mean 'optimizer'": {"keep": ["optimiser"]},
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


def test_arguments_are_brought_into_one_form():
    settings = FederationSettings(fusion="auto", local_parameters="head.*")
    assert isinstance(settings.method.rule, AutoFusion)
    assert settings.local_parameters == ("head.*",)


def unlike_priors(**prior) -> Plain:
    torch.manual_seed(0)
    layers = LinearReparameterization(6, 4, prior_std=0.5), LinearReparameterization(4, 3, **prior)
    return Plain(torch.nn.Sequential(*layers))


AVERAGES = {
    "weighting": (bayesian, {"weighting": "max_discrepancy"}, "weighting='max_discrepancy' is given"),
    "one client": (Plain, {"partition": fb.IIDPartition(1)}, "one client is ordinary training"),
    "SWAG": (Plain, {"posterior": fb.SWAG()}, r"SWAG() has no width that follows the data"),
    "published IVON": (
        partial(Plain, optimizer=partial(fb.IVON, curvature="ivon")),
        {},
        "IVON(curvature='ivon') has no width that follows the data",
    ),
    "no prior": (partial(Plain, optimizer=partial(fb.IVON, prior_std=float("inf"))), {}, "has no normal prior"),
    "point masses": (Plain, {}, "no parameter has a posterior"),
    "another prior": (partial(unlike_priors, prior=ScaleMixturePrior(0.5, 1.0, 0.1)), {}, "has no normal prior"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("make", "options", "says"), AVERAGES.values(), ids=AVERAGES)
def test_where_sites_do_not_go_clients_are_averaged(make, options, says, caplog):
    made = fb.FederatedBayes(options.pop("partition", None) or fb.IIDPartition(3), **options)
    with caplog.at_level(logging.INFO):
        federate(make(), made, 1)
    assert sum(says in line and "'reverse_kl_barycenter'" in line for line in caplog.messages) == 1
    assert made.described()["fusion"] == "reverse_kl_barycenter"


UNLIKE = {f"net.{i}.{name}": std for i, std in enumerate((0.5, 1.0)) for name in ("weight", "bias")}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "options", "sites"),
    [
        (partial(bayesian, prior_std=0.5), {}, fb.Sites(prior_std=0.5)),
        (partial(Plain, optimizer=partial(fb.IVON, prior_std=0.5)), {}, fb.Sites(prior_std=0.5)),
        (Plain, {"posterior": fb.Laplace(prior_std=0.5)}, fb.Sites(prior_std=0.5)),
        (unlike_priors, {}, fb.Sites(prior_std=UNLIKE)),
    ],
    ids=["layers", "IVON", "Laplace", "unlike priors"],
)
def test_elsewhere_it_is_sites_with_the_priors_of_the_posterior(make, options, sites, caplog):
    modules = [make() for _ in range(2)]
    federations = [fb.FederatedBayes(fb.IIDPartition(3), **{**options, **each}) for each in ({}, {"fusion": sites})]
    with caplog.at_level(logging.INFO):
        for module, made in zip(modules, federations):
            federate(module, made, 2)
    assert sum("Fusion: sites" in line for line in caplog.messages) == 1
    assert_equal(dict(modules[0].state_dict()), dict(modules[1].state_dict()))
    assert repr(federations[0]) == repr(federations[1])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"fusion": "rklb"}, 1),
        ({"fusion": "conflation"}, 0),
        ({"fusion": "sites"}, 0),
        ({"fusion": Averaging("rklb", "global")}, 0),
        ({"fusion": "rklb", "partition": fb.IIDPartition(1)}, 0),
    ],
    ids=str,
)
def test_an_average_under_a_fixed_prior_says_once_where_it_goes(options, told, caplog, monkeypatch):
    monkeypatch.setattr(averaging, "LATE", 1)
    made = fb.FederatedBayes(**{"partition": fb.IIDPartition(3), **options})
    with caplog.at_level(logging.INFO):
        federate(bayesian(), made, 4)
    assert sum("σ goes to the prior's" in line for line in caplog.messages) == told
