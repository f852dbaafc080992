"""Draws of a network's output and of its parameters: their distribution, and the number of passes."""

import pytest
import torch
from torch import nn

from benchmarks.networks import lenet
from lightning_fedbayes.core.posterior import zeros_like
from lightning_fedbayes.layers import ESTIMATORS, MCDropout, Reparameterized, bayesianize, with_mc_dropout
from lightning_fedbayes.modules import is_stochastic, mlp, sample_outputs, sampling
from lightning_fedbayes.modules.sampling import convolves_noise, outputs_with
from tests.federations import around, of_bayesian_torch

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
DRAWS = 4000


def bayesian(estimator="reparameterization", **options):
    return bayesianize(mlp(6, 3, (5,)), last=2, estimator=estimator, posterior_std=0.3, **options)


class LastStep(nn.Module):
    """The output of an LSTM at its last step, for sequences of three steps with two features."""

    def __init__(self):
        super().__init__()
        self.lstm = Reparameterized(nn.LSTM(2, 4, batch_first=True), posterior_std=0.3)

    def forward(self, x):
        return self.lstm(x.view(-1, 3, 2))[0][:, -1]


STOCHASTIC = {
    **{name: lambda name=name: bayesian(name) for name in ESTIMATORS},
    "dropout": lambda: nn.Sequential(nn.Linear(6, 5), nn.ReLU(), MCDropout(0.4), nn.Linear(5, 3)),
    "lstm": LastStep,
    "bayesian_torch": lambda: of_bayesian_torch(mlp(6, 3, (5,)), "Reparameterization", -1.0),
}


def moments(draws):
    """Mean and covariance of flattened draws, with six standard errors of each."""
    flat = draws.flatten(1).double()
    spread = flat.std(0)
    covariance = flat.T.cov()
    return flat.mean(0), covariance, 6 * spread / len(flat) ** 0.5, 9 * torch.outer(spread, spread) / len(flat) ** 0.5


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("kind", [*ESTIMATORS, "dropout"])
def test_one_pass_draws_from_the_distribution_of_separate_passes(kind):
    """Means, variances and the covariances between classes and between the examples of a batch."""
    network = STOCHASTIC[kind]()
    mean, covariance, mean_error, covariance_error = moments(sample_outputs(network, X, DRAWS))
    loop_mean, loop_covariance, *_ = moments(torch.stack([network(X) for _ in range(DRAWS)]))
    assert ((mean - loop_mean).abs() <= 2**0.5 * mean_error + 1e-9).all()
    assert ((covariance - loop_covariance).abs() <= 2**0.5 * covariance_error + 1e-9).all()


@torch.no_grad()
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_moments_of_a_linear_layer_are_the_analytic_ones(estimator):
    network = bayesianize(nn.Linear(6, 2), last=1, estimator=estimator, posterior_std=0.3)
    mean, covariance, mean_error, covariance_error = moments(sample_outputs(network, X, DRAWS))
    expected = X @ network.mu_weight.T + network.mu_bias
    variance = (0.09 * (X.square().sum(1, keepdim=True) + 1)).expand(-1, 2)
    assert ((mean - expected.flatten()).abs() <= mean_error).all()
    assert ((covariance.diagonal() - variance.flatten()).abs() <= covariance_error.diagonal()).all()


@torch.no_grad()
@pytest.mark.parametrize("kind", STOCHASTIC)
def test_draws_are_different(kind):
    network = STOCHASTIC[kind]().eval()
    assert is_stochastic(network)
    draws = sample_outputs(network, X, 6)
    assert draws.shape == (6, 4, draws.shape[-1])
    for i in range(6):
        for j in range(i):
            assert not torch.equal(draws[i], draws[j])


@torch.no_grad()
def test_the_network_runs_once_and_its_deterministic_beginning_for_one_sample_only():
    network = bayesianize(mlp(6, 3, (5, 5)), last=1)
    batched = []
    for layer in network:
        layer.register_forward_hook(lambda _, x, y: batched.append(torch._C._functorch.is_batchedtensor(y)))
    sample_outputs(network, X, 7)
    assert batched == [False, False, False, False, True]


@torch.no_grad()
@pytest.mark.parametrize(("last", "passes"), [(2, 4), (1, 1)])
def test_a_large_network_without_a_deterministic_beginning_takes_several_passes(last, passes, monkeypatch):
    network = bayesianize(mlp(6, 3, (5,)), last=last, posterior_std=0.3)
    entries = X.numel() + sum(p.numel() for p in network.parameters())
    monkeypatch.setattr(sampling, "ENTRIES", 2 * entries + 1)
    calls = []
    network.register_forward_hook(lambda *_: calls.append(1))
    draws = sample_outputs(network, X, 7)
    assert len(calls) == passes
    assert draws.shape == (7, 4, 3)
    assert draws[:, 0, 0].unique().numel() == 7


@pytest.mark.parametrize("position", ["before", "after"])
def test_batch_norm_in_evaluation_normalises_with_its_running_statistics(position):
    norm = nn.BatchNorm1d(5)
    norm.running_mean.fill_(0.5)
    norm.running_var.fill_(4.0)
    first = nn.Linear(6, 5)
    plain = nn.Sequential(first, norm, nn.Linear(5, 3)) if position == "before" else nn.Sequential(first, norm)
    network = bayesianize(plain, last=1, init="pretrained", delta=1e-6).eval()
    buffers = {name: value.clone() for name, value in network.named_buffers()}
    draws = sample_outputs(network, X, 4)
    assert torch.allclose(draws, plain.eval()(X).expand_as(draws), atol=1e-3)
    assert all(torch.equal(value, buffers[name]) for name, value in network.named_buffers())


class Residual(nn.Module):
    """Adds in place to what has no samples: torch cannot vectorise that."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.bayes = bayesianize(nn.Linear(3, 3), last=1, posterior_std=0.3)

    def forward(self, x):
        h = self.first(x)
        h += self.bayes(h)
        return h


class Branching(Residual):
    def forward(self, x):
        h = self.bayes(self.first(x))
        return h if h.mean() > 100 else -h


@pytest.mark.parametrize("make", [Residual, Branching])
def test_a_failed_attempt_to_vectorise_draws_nothing(make):
    network = make().eval()
    torch.manual_seed(0)
    draws = sample_outputs(network, torch.ones(2, 3), 5)
    assert draws.shape == (5, 2, 3)
    assert draws[:, 0, 0].unique().numel() == 5
    torch.manual_seed(0)
    assert torch.equal(draws, sample_outputs(network, torch.ones(2, 3), 5)), "the failed attempt drew something"


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: bayesianize(lenet(), last=2), False),
        (lambda: bayesianize(lenet(), last=5), True),
        (lambda: with_mc_dropout(lenet()), True),
        (lambda: nn.Sequential(nn.Conv2d(1, 2, 3), MCDropout(0.2), nn.Flatten(), nn.Linear(1352, 2)), False),
    ],
)
def test_large_batches_through_noisy_convolutions_go_one_by_one(make, expected):
    network = make().eval()
    assert convolves_noise(network, torch.zeros(200, 1, 28, 28)) == expected
    assert not convolves_noise(network, torch.zeros(2, 1, 28, 28))
    calls = []
    network.register_forward_hook(lambda *_: calls.append(1))
    assert sample_outputs(network, torch.randn(90, 1, 28, 28), 3).shape[:2] == (3, 90)
    assert len(calls) == (3 if expected else 1)


class Deep(nn.Module):
    """A body that is frozen, then a head; the body may be one that vmap cannot run."""

    def __init__(self, body="plain"):
        super().__init__()
        self.kind = body
        self.body = (
            nn.LSTM(4, 6, batch_first=True)
            if body == "lstm"
            else nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(inplace=True))
        )
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        x = self.body(x.unsqueeze(1))[0][:, -1] if self.kind == "lstm" else self.body(x)
        return self.head(x if self.kind != "branch" or float(x.sum()) > 0 else -x)


def counted(*layers):
    """Calls of the forward of some layers, as they grow."""
    calls = []
    for layer in layers:
        layer.register_forward_hook(lambda *_: calls.append(1))
    return calls


@pytest.mark.parametrize("zero", [torch.zeros_like, zeros_like])
@pytest.mark.parametrize("body", ["plain", "lstm", "branch"])
def test_what_has_no_variance_runs_once_for_all_draws(body, zero):
    network, x = Deep(body).eval(), torch.randn(5, 4)
    sets = around(network, 0.3, "head", zero).sample(10)
    calls, last = counted(network.body), counted(network.head)
    found = outputs_with(network, sets, x)
    assert (len(calls), len(last)) == (1, 1)
    torch.testing.assert_close(found, outputs_with(network, sets, x, vectorized=False), rtol=1e-5, atol=1e-5)
    assert len(calls) == 11
    assert found.std(0).min() > 0


def test_layers_that_vary_run_for_all_draws_and_layers_that_do_not_for_one():
    network, seen = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))), []
    for layer in network:
        layer.register_forward_hook(lambda _, inputs, output: seen.append("BatchedTensor" in repr(output)))
    sets = around(network, 0.3, "2").sample(6)
    assert outputs_with(network, sets, torch.randn(5, 4)).shape == (6, 5, 4)
    assert seen == [False, False, True, True]
