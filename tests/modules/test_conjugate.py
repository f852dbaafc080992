"""Bayesian linear regression with known noise, where the optimum of the mean-field ELBO has a closed form."""

import functools

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset

from lightning_fedbayes import HybridBayesianRegressor
from lightning_fedbayes.layers import ESTIMATORS, read_posterior

from .helpers import trainer

N, NOISE_STD, PRIOR_STD, STEPS = 50, 0.5, 0.7, 1000


class FullBatches(IterableDataset):
    """The whole data set as one batch, again and again."""

    def __init__(self, x, y):
        self.batch = [x, y]

    def __iter__(self):
        return iter([self.batch] * STEPS)


class Averaged(HybridBayesianRegressor):
    """Averages its parameters over the second half of the steps, and with them the noise of the gradients."""

    def on_train_start(self):
        self.sums = [torch.zeros_like(p) for p in self.parameters()]

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if batch_idx >= STEPS // 2:
            torch._foreach_add_(self.sums, [p.detach() for p in self.parameters()])

    @torch.no_grad()
    def on_train_end(self):
        for parameter, total in zip(self.parameters(), self.sums, strict=True):
            parameter.copy_(total / (STEPS - STEPS // 2))


def data():
    """Correlated inputs, so that the mean-field variance is not the marginal one."""
    x = torch.randn(N, 3) @ torch.tensor([[1.0, 0.8, 0.0], [0.0, 0.6, 0.5], [0.0, 0.0, 1.0]])
    return x, x @ torch.tensor([[0.8], [-0.5], [0.3]]) + 0.4 + NOISE_STD * torch.randn(N, 1)


def trained(x, y, **options):
    model = Averaged(nn.Linear(3, 1), bayesian_last=1, prior_std=PRIOR_STD, noise_std=NOISE_STD,
                     optimizer=functools.partial(torch.optim.Adam, lr=0.03), **options)
    model.num_examples = N
    trainer(max_epochs=1).fit(model, torch.utils.data.DataLoader(FullBatches(x, y), batch_size=None))
    return model


def fitted(model):
    """Posterior mean and variance of weights and bias, in one vector each."""
    posterior = read_posterior(model.network)
    names = sorted(posterior.names, key=lambda name: "bias" in name)
    return tuple(torch.cat([part[name].flatten() for name in names]) for part in (posterior.mean, posterior.variance))


@pytest.mark.parametrize(("estimator", "kl_weight"), [*((estimator, 1.0) for estimator in ESTIMATORS),
                                                       ("local_reparameterization", 0.2)])
def test_training_finds_the_optimal_mean_field_posterior(estimator, kl_weight):
    x, y = data()
    mean, variance = fitted(trained(x, y, estimator=estimator, noise="fixed", kl_weight=kl_weight))
    design = torch.cat([x, torch.ones(N, 1)], 1)
    # minus the ELBO times β: the likelihood counts 1/β times
    precision = design.T @ design / (kl_weight * NOISE_STD**2) + torch.eye(4) / PRIOR_STD**2
    exact_mean = torch.linalg.solve(precision, design.T @ y / (kl_weight * NOISE_STD**2)).flatten()
    exact_variance = 1 / precision.diagonal()
    assert ((mean - exact_mean).abs() < 0.1 * exact_variance.sqrt()).all()
    assert torch.allclose(variance, exact_variance, rtol=0.2)
    marginal = torch.linalg.inv(precision).diagonal()
    assert (marginal / exact_variance).max() > 2  # the test tells the two apart


def test_a_learnt_noise_is_the_expected_squared_residual():
    r""":math:`\sigma^2 = \frac1n E_q \|y - X\theta\|^2` is where the derivative of the ELBO vanishes."""
    x, y = data()
    model = trained(x, y, noise="learnt")
    mean, variance = fitted(model)
    design = torch.cat([x, torch.ones(N, 1)], 1)
    expected = ((y.flatten() - design @ mean).square() + design.square() @ variance).mean()
    assert model.noise_variance.item() == pytest.approx(expected.item(), rel=0.05)
