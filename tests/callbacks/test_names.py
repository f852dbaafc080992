"""Figures of predictions that the package has drawn itself have names of their own, in log, tables and report."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader

import lightning_fedbayes as fb
from tests.clients.test_evaluation import clients
from tests.federations import Plain, bayesian, federate, loader, trainer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:the temperature ends at its limit"),
    pytest.mark.filterwarnings("ignore:Your `val_dataloader`'s sampler has shuffling enabled"),
]


class Own(Plain):
    """Scores itself at the mean; its steps return "none", "probs" or "probs and logits"."""

    def __init__(self, returns="none", optimizer=fb.IVON):
        super().__init__(optimizer=optimizer)
        self.returns = returns

    def validation_step(self, batch, batch_idx):
        logits = self(batch[0])
        stage = "test" if self.trainer.testing else "val"
        self.log(f"{stage}/acc", (logits.argmax(1) == batch[1]).float().mean())
        if self.returns != "none":
            found = {"probs": logits.softmax(-1), "target": batch[1]}
            return found | ({"logits": logits} if "logits" in self.returns else {})
        return None

    test_step = validation_step


def held_out(**options):
    return DataLoader(clients(16, 40), **{"batch_size": 8, **options})


def everything():
    return [fb.UncertaintyReport(5), fb.ClientReport(), fb.FederatedTemperature(), fb.FederatedConformal(0.8)]


def figures_of(module, val=None, callbacks=None, test=False, **options):
    """Names of what the reports have logged in a fit, or in a test after it, behind "val/" or "test/"."""
    logged = everything() if callbacks is None else callbacks
    federation = fb.FederatedBayes(seed=3, **options)
    made = federate(
        module, federation, 2, loader(clients(40, 30)), held_out() if val is None else val, callbacks=logged
    )
    if test:
        made = trainer(1, [federation, *logged])
        made.test(module, held_out(), verbose=False)
    return {name.partition("/")[2] for name in made.callback_metrics if name[:4] in ("val/", "test")}


BY_BATCH = {f"retained_area_{name}" for name in ("entropy", "epistemic", "kwon_aleatoric", "kwon_epistemic")}
BY_CLIENT = {f"clients/{name}{end}" for name in ("accuracy", "nll", "ece") for end in ("", "_worst", "_spread")}
CALIBRATED = {"scaled/temperature", "lac_80/threshold"}


def drawn(names):
    return {f"draws/{name}" for name in names}


def test_figures_by_draws_stand_beside_the_module_s_own_at_the_mean():
    assert figures_of(Own()) == {"acc"} | drawn(BY_BATCH | BY_CLIENT | CALIBRATED)


@pytest.mark.parametrize(
    ("module", "own"),
    [
        (lambda: Own(optimizer=torch.optim.SGD), {"acc"}),  # a point: there is nothing to draw from
        (lambda: Own("probs and logits"), {"acc"}),
        (bayesian, None),
    ],
)
@pytest.mark.parametrize("shuffle", [False, True])
def test_figures_of_other_predictions_have_no_such_word(module, own, shuffle):
    made = module()
    found = figures_of(made, held_out(shuffle=shuffle))
    clients_ = BY_CLIENT | CALIBRATED
    if shuffle and isinstance(made, Own) and made.returns != "none":  # its clients are predicted once more, by draws
        assert found == own | BY_BATCH | drawn(clients_)
    elif own is not None:
        assert found == own | BY_BATCH | clients_
    else:
        assert BY_BATCH | clients_ <= found
        assert not any("draws" in name for name in found)


@pytest.mark.parametrize(("returns", "by"), [("none", "draws/"), ("probs and logits", "")])
def test_each_client_s_own_posterior_is_drawn(returns, by):
    """Also where the module's steps return predictions: those are of the global one, at its mean."""
    found = figures_of(Own(returns), keep=["posterior"])
    assert {f"{by}clients/nll", "draws/personal/nll"} <= found
    assert "personal/nll" not in found
    assert "personal/nll" in figures_of(bayesian(), keep=["posterior"])
