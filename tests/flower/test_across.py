"""Each client's posterior on every client's data, over Flower: only where it is asked for by name."""

import pytest
import torch
from torch.utils.data import Subset

import lightning_fedbayes as fb
from lightning_fedbayes.core.errors import FederationError
from lightning_fedbayes.transport.flower import FusionStrategy
from lightning_fedbayes.transport.flower.wire import from_arrays
from tests.federations import Plain, loader, trainer
from tests.flower.clients import client_apps, run
from tests.flower.grid import LocalGrid
from tests.refusals import refusals
from tests.transport.federation import BlobData

pytestmark = pytest.mark.slow

ENDS = ((0, 40), (40, 70), (70, 90))
DATA = [Subset(BlobData().dataset, range(*ends)) for ends in ENDS]


def apps(**settings):
    return [client_apps(1, Plain, data=lambda own=own: BlobData(own), partition=None, **settings)[0] for own in DATA]


def sent(grid):
    """What each client has sent last."""
    return {k: from_arrays(reply.content["arrays"], "a client")[0] for k, _, reply in grid.of("train") if reply}


def told(grid):
    """The posteriors that clients were told to score."""
    return [from_arrays(message.content["arrays"], "the server")[0] for _, message, _ in grid.of("evaluate")]


def test_the_table_is_of_what_each_client_has_sent_last():
    grid, strategy = LocalGrid(apps()), FusionStrategy("weighted_average", wait_for=3, across=True)
    run(grid, strategy, rounds=2, make=Plain)
    found = strategy.cross_scores
    assert found is not None
    assert found.names == ("0", "1", "2")
    for i in range(3):
        model = Plain()
        model.load_state_dict(sent(grid)[i].mean)
        for j, part in enumerate(DATA):
            expected = trainer().validate(model, loader(part, shuffle=False), verbose=False)[0]["val/nll"]
            assert float(found.values["val/nll"][i, j]) == pytest.approx(expected, rel=1e-5)
    assert [kind for kind, _ in grid.asked][-4:] == ["train", *["evaluate"] * 3]
    assert found.table()[0] == ["val/nll: model on data of", "0", "1", "2"]


@pytest.mark.parametrize("evaluate", [True, False])
def test_clients_see_no_posterior_of_another_unless_it_is_asked_for(evaluate):
    grid, strategy = LocalGrid(apps()), FusionStrategy("weighted_average", wait_for=3, evaluate=evaluate)
    run(grid, strategy, rounds=2, make=Plain)
    assert strategy.cross_scores is None
    assert strategy._own == {}
    for each in told(grid):
        for own in sent(grid).values():
            assert not torch.equal(each.mean["net.0.weight"], own.mean["net.0.weight"])


def test_a_client_that_fails_in_the_last_round_is_scored_by_what_was_admitted_before():
    def lost(reply):
        return reply if int(reply.metadata.group_id) < 2 else None

    grid, strategy = LocalGrid(apps(), {1: lost}), FusionStrategy("weighted_average", wait_for=3, across=True)
    run(grid, strategy, rounds=2, make=Plain)
    own = told(grid)[3:6]
    assert len(told(grid)) == 9
    assert all(torch.equal(each.mean["net.0.weight"], sent(grid)[1].mean["net.0.weight"]) for each in own)
    assert strategy.cross_scores is not None
    assert strategy.cross_scores.names == ("0", "1", "2")


def test_under_privacy_nobody_scores(tmp_path, caplog):
    caplog.set_level("INFO")
    private = {"privacy": fb.UpdatePrivacy(1.0, 0.5), "state_folder": tmp_path}
    strategy = FusionStrategy("weighted_average", wait_for=3, across=True)
    run(LocalGrid(apps(**private)), strategy, rounds=1, make=Plain)
    assert strategy.cross_scores is None
    assert "fewer than two clients have trained in this run and scored all models" in caplog.text


test_what_cannot_be_is_refused = refusals(
    FederationError,
    ({"fusion": "sites"}, "its clients send no posterior of their own"),
    ({"across": "yes"}, "across="),
    call=lambda options: FusionStrategy(**{"across": True, **options}),
)
