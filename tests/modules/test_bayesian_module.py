"""The loss is the negative ELBO per example, alone and in a federation; checkpoints keep the predictions."""

from collections import namedtuple

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import IterableDataset

import lightning_fedbayes as fb
from lightning_fedbayes import ClientDatasets, FederatedBayes, HybridBayesianClassifier
from lightning_fedbayes.core.errors import FedBayesError
from lightning_fedbayes.layers import LinearFlipout, LinearReparameterization
from lightning_fedbayes.modules import BayesianModule, mlp
from tests import federations
from tests.federations import CLASSES, FEATURES, Made, Plain, assert_equal, federate, trainer

from .helpers import labelled, loader, summed_kl

PRIOR_STD = 0.3
SIZES = (12, 25)  # examples of the two clients
Step = namedtuple("Step", "epoch n nll kl loss examples")


class Spied(HybridBayesianClassifier):
    """Writes down what every training step was made of."""

    def on_fit_start(self):
        self.steps = []

    def negative_log_likelihood(self, outputs, targets):
        self.nll = super().negative_log_likelihood(outputs, targets)
        return self.nll

    def training_step(self, batch, batch_idx):
        kl = summed_kl(self.network, PRIOR_STD)
        loss = super().training_step(batch, batch_idx)
        self.steps.append(Step(self.current_epoch, self.num_examples, self.nll.item(), kl, loss.item(), len(batch[1])))
        return loss


def spied(**options):
    return Spied(mlp(6, 3, (4,)), bayesian_last=1, prior_std=PRIOR_STD, **options)


def fit_alone(model, rounds=1):
    run = trainer(rounds)
    run.fit(model, loader(labelled(sum(SIZES)), shuffle=True))
    return run


def fit_federated(model, rounds=1):
    clients = ClientDatasets({str(n): labelled(n) for n in SIZES})
    run = trainer(rounds, [FederatedBayes(fusion="rklb")])
    run.fit(model, loader(clients, shuffle=True))
    return run


# the number of examples that each batch's KL is to be divided by
EXPECTED_N = {fit_alone: [37] * 5, fit_federated: [12] * 2 + [25] * 4}
both = pytest.mark.parametrize("fit", [fit_alone, fit_federated])


@both
@pytest.mark.parametrize("kl_weight", [1.0, 0.1, 0.0])
def test_the_loss_is_the_nll_plus_the_summed_kl_over_n(fit, kl_weight):
    model = spied(kl_weight=kl_weight)
    fit(model)
    assert [step.n for step in model.steps] == EXPECTED_N[fit]
    assert sum(step.examples for step in model.steps) == sum(SIZES)
    for step in model.steps:
        assert step.kl > 1
        assert step.loss == pytest.approx(step.nll + kl_weight * step.kl / step.n, rel=1e-5)


@both
def test_the_kl_warms_up_linearly_over_rounds(fit):
    model = spied(kl_weight=0.5, warmup_rounds=4)
    fit(model, rounds=6)
    for step in model.steps:
        warm = (0.25, 0.5, 0.75, 1.0, 1.0, 1.0)[step.epoch]
        assert step.loss == pytest.approx(step.nll + 0.5 * warm * step.kl / step.n, rel=1e-5)
    assert {step.epoch for step in model.steps} == set(range(6))


@both
def test_the_logged_figures_are_means_over_the_examples_of_the_round(fit):
    model = spied(kl_weight=0.5, warmup_rounds=4)
    run = fit(model, rounds=2)
    last = [step for step in model.steps if step.epoch == 1]

    def mean(values):
        weights = [step.examples for step in last]
        return sum(value * weight for value, weight in zip(values, weights, strict=True)) / sum(weights)

    expected = {
        "train/nll": mean([step.nll for step in last]),
        "train/kl": mean([step.kl for step in last]),
        "train/kl_factor": mean([0.5 * 0.5 / step.n for step in last]),
    }
    logged = {name: float(value) for name, value in run.callback_metrics.items() if name.startswith("train/")}
    assert logged == pytest.approx(expected, rel=1e-5)


class Endless(IterableDataset):
    """Data without a length."""

    def __iter__(self):
        yield from labelled(8)


def test_an_unknown_number_of_examples_is_an_error_with_a_remedy():
    message = r"Spied does not know the number of training examples .* set module\.num_examples"
    with pytest.raises(FedBayesError, match=message):
        spied().training_step([torch.zeros(2, 6), torch.zeros(2, dtype=torch.int64)], 0)
    with pytest.raises(FedBayesError, match=message):
        trainer(1).fit(spied(), loader(Endless()))
    model = spied()
    model.num_examples = 1000
    trainer(1).fit(model, loader(Endless()))
    (step,) = model.steps
    assert step.loss == pytest.approx(step.nll + step.kl / 1000)


class Poisson(BayesianModule):
    """A user's own likelihood, and batches that are dicts."""

    def unpack(self, batch):
        return batch["x"], batch["count"]

    def negative_log_likelihood(self, outputs, targets):
        return F.poisson_nll_loss(outputs.squeeze(-1), targets)


COUNTS = Made(lambda index: {"x": torch.full((2,), float(index)), "count": torch.tensor(float(index))}, count=11)


@pytest.mark.parametrize("callbacks", [[], [FederatedBayes()]])
def test_a_subclass_with_its_own_batches_and_likelihood_trains(callbacks):
    data = ClientDatasets({"a": COUNTS, "b": COUNTS}) if callbacks else COUNTS
    model = Poisson(LinearFlipout(2, 1))
    before = [p.clone() for p in model.parameters()]
    run = trainer(1, callbacks)
    run.fit(model, loader(data, 4))
    assert float(run.callback_metrics["train/kl_factor"]) == pytest.approx(1 / 11)
    assert not any(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("estimator", ["reparameterization", "local_reparameterization", "flipout"])
def test_predict_mean_is_the_deterministic_forward(estimator):
    network = mlp(6, 3, (4,))
    model = HybridBayesianClassifier(network, bayesian_last=2, estimator=estimator, init="pretrained")
    x = torch.randn(5, 6)
    assert torch.allclose(model.predict_mean(x), network(x))
    assert not torch.allclose(model(x), network(x))  # and afterwards it samples again


WEIGHT = 0.3


class Mean(nn.Module):
    """A Bayesian layer of weights at their means: losses without noise, with a KL divergence."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = LinearReparameterization(FEATURES, CLASSES)

    def forward(self, x):
        return nn.functional.linear(x, self.layer.mu_weight, self.layer.mu_bias)


class ByHand(Plain):
    """Adds the KL of the client's share itself."""

    def on_client_start(self, client):
        self.n = client.num_examples

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) + WEIGHT / self.n * fb.kl_divergence(self)


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_in_a_federation_it_is_what_one_would_write_by_hand(engine):
    by_hand, added = ByHand(Mean()), fb.with_kl(Plain(Mean()), WEIGHT)
    assert list(added.state_dict()) == list(Plain(Mean()).state_dict())
    for module in (by_hand, added):
        federate(module, fb.FederatedBayes(fb.SizesPartition((50, 30, 10)), engine=engine), 2, federations.loader())
    assert_equal(dict(by_hand.state_dict()), dict(added.state_dict()))
    assert not torch.equal(added.net.layer.rho_weight, Mean().layer.rho_weight)  # only the KL has a gradient there


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.parametrize(
    ("module", "lines"),
    [
        (lambda: fb.bayesianize(Plain(), last=1), 1),
        (lambda: fb.with_kl(fb.bayesianize(Plain(), last=1)), 0),
        (lambda: ByHand(Mean()), 0),
        (Plain, 0),
    ],
    ids=["bayesianize", "with_kl", "by hand", "deterministic"],
)
def test_a_loss_without_the_kl_of_its_layers_is_told_once(module, lines, engine, caplog):
    with caplog.at_level("INFO"):
        federate(module(), fb.FederatedBayes(fb.IIDPartition(3), engine=engine), 2, federations.loader())
    told = [line for line in caplog.messages if "fb.kl_divergence(self) / n" in line]
    assert len(told) == lines
    assert all("net.2.mu_weight" in line or "net.2.weight" in line for line in told)
