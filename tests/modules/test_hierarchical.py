"""Hierarchical linear regression: REML of statsmodels, the dense Gaussian conditional, limits, and what it refuses."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_fedbayes import FedBayesError, HierarchicalLinearRegression
from lightning_fedbayes.modules import LinearStatistics
from tests.refusals import refusals

NOISE_STD = 0.5
SPREAD = {(0,): [[0.8]], (0, 1): [[0.8, 0.0], [0.2, 0.4]], (1,): [[0.6]], (1, 0): [[0.4, 0.0], [0.1, 0.8]]}
"""Root of the covariance of the random coefficients, by columns."""


def federation(random=(0,), clients=12, seed=0, root=None, features=2):
    """Name → (inputs, targets); 3 to 20 examples each. The stream of RandomState is the same in every numpy."""
    stream = np.random.RandomState(seed)
    root = np.array(SPREAD[random] if root is None else root)
    data = {}
    for k in range(clients):
        x = stream.randn(3 + stream.randint(18), features)
        design = np.column_stack([np.ones(len(x)), x])
        y = design @ (1.0, 2.0, -0.5, 0.3)[: features + 1] + design[:, list(random)] @ root @ stream.randn(len(root))
        data[f"client {k}"] = torch.tensor(x), torch.tensor(y + NOISE_STD * stream.randn(len(x)))
    return data


def statistics(data):
    return {name: LinearStatistics.of(x, y) for name, (x, y) in data.items()}


def fitted(random=(0,), **options):
    data = federation(random, **options)
    return data, HierarchicalLinearRegression(random).fit(statistics(data))


def with_bias(x):
    return torch.cat([torch.ones(len(x), 1, dtype=x.dtype), x], 1)


def stacked(data, random):
    """X, y and the block-diagonal Z of the pooled data."""
    x = torch.cat([with_bias(x) for x, _ in data.values()])
    z = torch.block_diag(*(with_bias(x)[:, list(random)] for x, _ in data.values()))
    return x, torch.cat([y for _, y in data.values()]), z


def restricted_likelihood(data, random, covariance, noise):
    """Density of what does not depend on β, in an orthonormal basis of the complement of X."""
    x, y, z = stacked(data, random)
    marginal = z @ torch.block_diag(*[covariance] * len(data)) @ z.T + noise * torch.eye(len(y)).double()
    complement = torch.linalg.qr(x, mode="complete").Q[:, x.shape[1] :]
    zeros = torch.zeros(complement.shape[1]).double()
    free = torch.distributions.MultivariateNormal(zeros, complement.T @ marginal @ complement)
    return free.log_prob(complement.T @ y) - torch.linalg.slogdet(x.T @ x).logabsdet / 2


def assert_same(one, other, rtol=1e-6, atol=1e-8):
    for name in ("fixed", "fixed_covariance", "random_covariance"):
        torch.testing.assert_close(getattr(one, name), getattr(other, name), rtol=rtol, atol=atol)
    assert one.noise_variance == pytest.approx(other.noise_variance, rel=rtol)
    assert one.log_likelihood == pytest.approx(other.log_likelihood, rel=1e-9)


MIXED_LM = {
    (0,): ([1.1980653, 2.0507889, -0.4438521], [[0.4969683]], 0.3151487, -155.545878),
    (0, 1): (
        [1.1310455, 2.2314752, -0.5567263],
        [[0.3402588, 0.1426555], [0.1426555, 0.1578943]],
        0.2587325,
        -123.694380,
    ),
}
"""Fixed effects, Ψ, σ² and log-likelihood of statsmodels 0.15.0 on ``federation(random)``:
``MixedLM(y, X, groups, exog_re=X[:, random]).fit(reml=True)``."""


@pytest.mark.parametrize("random", MIXED_LM)
def test_it_is_the_mixed_model_of_statsmodels(random):
    _, fit = fitted(random)
    fixed, covariance, noise, log_likelihood = MIXED_LM[random]
    torch.testing.assert_close(fit.fixed, torch.tensor(fixed).double(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(fit.random_covariance, torch.tensor(covariance).double(), rtol=1e-4, atol=1e-5)
    assert fit.noise_variance == pytest.approx(noise, rel=1e-5)
    assert fit.log_likelihood == pytest.approx(log_likelihood, abs=1e-5)


@pytest.mark.parametrize(("random", "features"), [*((random, 2) for random in SPREAD), ((0,), 0)])
def test_the_restricted_likelihood_is_that_of_the_pooled_data_and_at_its_maximum(random, features):
    data, fit = fitted(random, features=features)
    root = torch.linalg.cholesky(fit.random_covariance)
    found = torch.cat([root[tuple(torch.tril_indices(*root.shape))], torch.tensor([fit.noise_variance]).double().log()])

    def likelihood(values):
        lower = torch.zeros_like(root).index_put(tuple(torch.tril_indices(*root.shape)), values[:-1])
        return restricted_likelihood(data, random, lower @ lower.T, values[-1].exp())

    assert float(likelihood(found)) == pytest.approx(fit.log_likelihood, rel=1e-10)
    slope = torch.func.grad(likelihood)(found)
    torch.testing.assert_close(slope, torch.zeros_like(slope), rtol=0, atol=1e-4)
    assert float(torch.linalg.eigvalsh(torch.autograd.functional.hessian(likelihood, found)).max()) < 0


@pytest.mark.parametrize("random", SPREAD)
def test_posterior_is_the_gaussian_conditional_of_the_pooled_data(random):
    """Conditions the joint distribution of all coefficients, β with a flat prior, on all targets."""
    data, fit = fitted(random, clients=5)
    x, y, z = stacked(data, random)
    variances, directions = torch.linalg.eigh(fit.random_covariance)
    root = directions * variances.clamp_min(0).sqrt()  # b = root u, with u ~ N(0, I)
    columns, size = x.shape[1], len(random)
    back = torch.block_diag(torch.eye(columns).double(), *[root] * len(data))
    joint = torch.cat([x, z], 1) @ back
    precision = joint.T @ joint / fit.noise_variance
    precision[columns:, columns:] += torch.eye(size * len(data))
    covariance = back @ torch.linalg.inv(precision) @ back.T
    mean = back @ torch.linalg.solve(precision, joint.T @ y / fit.noise_variance)
    torch.testing.assert_close(fit.fixed, mean[:columns])
    torch.testing.assert_close(fit.fixed_covariance, covariance[:columns, :columns])
    for k, name in enumerate(data):
        pick = torch.eye(columns, len(mean), dtype=torch.float64)
        pick[list(random), range(columns + k * size, columns + (k + 1) * size)] = 1
        of_client, its_covariance = fit.posterior_of(name)
        torch.testing.assert_close(of_client, pick @ mean)
        torch.testing.assert_close(its_covariance, pick @ covariance @ pick.T)


def test_without_variation_it_is_least_squares():
    """Targets on a plane, with noise that sums to 0 within every client: the variance between clients is 0."""
    data = {}
    for k in range(6):
        x = torch.randn(8, 2, dtype=torch.float64)
        noise = torch.randn(8, dtype=torch.float64)
        y = 1 + x @ torch.tensor([2.0, -0.5]).double() + noise
        data[f"client {k}"] = x, y - with_bias(x) @ torch.linalg.lstsq(with_bias(x), noise).solution
    for random in SPREAD:
        fit = HierarchicalLinearRegression(random).fit(statistics(data))
        assert float(fit.random_covariance.abs().max()) < 1e-10
        x, y, _ = stacked(data, random)
        torch.testing.assert_close(fit.fixed, torch.linalg.lstsq(x, y).solution, rtol=1e-9, atol=1e-9)
        residual = (y - x @ fit.fixed).square().sum()
        assert fit.noise_variance == pytest.approx(float(residual) / (len(y) - 3))
        torch.testing.assert_close(fit.fixed_covariance, fit.noise_variance * torch.linalg.inv(x.T @ x))
        torch.testing.assert_close(fit.posterior_of("client 0")[0], fit.fixed, rtol=1e-8, atol=1e-8)


def test_one_variance_can_be_0_beside_another_that_is_not():
    """Slopes vary less than the noise lets them: their estimated variance, or the smaller eigenvalue of Ψ, is 0."""
    seen = 0
    for seed in range(8):
        data, fit = fitted((0, 1), clients=8, seed=seed, root=[[0.8, 0.0], [0.0, 0.0]])
        smallest, largest = torch.linalg.eigvalsh(fit.random_covariance).tolist()
        assert smallest > -1e-12
        if smallest < 1e-8 * largest:
            seen += 1
            inside = fit.random_covariance + 1e-4 * torch.eye(2).double()
            assert float(restricted_likelihood(data, (0, 1), inside, fit.noise_variance)) < fit.log_likelihood
    assert seen


@settings(deadline=None, max_examples=8)
@given(order=st.permutations(range(8)), random=st.sampled_from(sorted(SPREAD)))
def test_the_order_of_clients_does_not_matter(order, random):
    data = federation(random, clients=8)
    names = list(data)
    first = HierarchicalLinearRegression(random).fit(statistics(data))
    second = HierarchicalLinearRegression(random).fit(statistics({names[k]: data[names[k]] for k in order}))
    assert_same(first, second, rtol=0, atol=0)


@pytest.mark.parametrize("random", SPREAD)
def test_units_of_the_inputs(random):
    data, fit = fitted(random)
    units = torch.tensor([1e4, 1e-3]).double()
    other = {name: (x * units, y) for name, (x, y) in data.items()}
    scaled = HierarchicalLinearRegression(random).fit(statistics(other))
    for name in data:
        for one, other in zip(scaled.predict(data[name][0] * units, name), fit.predict(data[name][0], name)):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


def test_a_client_without_data_has_the_distribution_of_the_population():
    data = federation((0, 1))
    empty = LinearStatistics.of(torch.empty(0, 2), torch.empty(0))
    fit = HierarchicalLinearRegression((0, 1)).fit({**statistics(data), "new": empty})
    assert_same(fit, HierarchicalLinearRegression((0, 1)).fit(statistics(data)), rtol=1e-9)
    select = torch.eye(3).double()[:, :2]
    expected = fit.fixed_covariance + select @ fit.random_covariance @ select.T
    for name in (None, "new"):
        mean, covariance = fit.posterior_of(name)
        torch.testing.assert_close(mean, fit.fixed)
        torch.testing.assert_close(covariance, expected)


def test_prediction_has_the_moments_of_the_posterior():
    data, fit = fitted((0, 1))
    x = data["client 3"][0][:4]
    mean, covariance = fit.posterior_of("client 3")
    predicted, std = fit.predict(x, "client 3")
    torch.testing.assert_close(predicted, with_bias(x) @ mean)
    variance = (with_bias(x) @ covariance @ with_bias(x).T).diagonal() + fit.noise_variance
    torch.testing.assert_close(std, variance.sqrt())
    assert {values.dtype for values in fit.predict(x.float())} == {torch.float32}
    assert fit.predict(torch.ones(2, 2, dtype=torch.int64))[1].dtype == torch.float32


def changed(change):
    """Statistics of six clients whose data ``change`` has changed, by position."""
    data = {name: change(k, x, y) for k, (name, (x, y)) in enumerate(federation((0, 1), clients=6).items())}
    return statistics(data)


def dependent(k, x, y):
    x[:, 1] = 2 * x[:, 0] + 1
    return x, y


def only_in_one(k, x, y):
    x[:, 0] = x[:, 0] if k == 2 else 0
    return x, y


test_wrong_clients = refusals(
    FedBayesError,
    ((0,), [1], "name → LinearStatistics"),
    ((0,), {"a": 3.0}, "client 'a'=3.0: give LinearStatistics"),
    ((3,), statistics(federation()), "columns 0 to 2"),
    ((0,), statistics(federation(clients=1)), "at least two"),
    ((0, 1), changed(only_in_one), "column 1 is not 0 in 1 client"),
    ((0,), changed(dependent), "columns 0, 1, 2 are linearly dependent"),
    ((0,), changed(lambda k, x, y: (0 * x, y)), "column 1, 2 is 0 in all clients: leave it out"),
    ((0,), changed(lambda k, x, y: (x[:1], y[:1])), "6 examples determine 6 coefficients"),
    ((0, 1), changed(lambda k, x, y: (x[:2], y[:2])), "12 examples determine 12 coefficients"),
    ((0,), changed(lambda k, x, y: (x, 3 * x[:, 0] + 1)), "one model fits the targets"),
    (
        (0,),
        {**statistics(federation()), "b": LinearStatistics.of(torch.ones(4, 1), torch.ones(4))},
        "client 'b' has 2 columns, others 3",
    ),
    ((0,), {"a": LinearStatistics.of(torch.zeros(4, 2), torch.ones(4), bias=False)}, "not a column of ones"),
    call=lambda random, clients: HierarchicalLinearRegression(random).fit(clients),
)


test_wrong_examples = refusals(
    FedBayesError,
    ({"inputs": torch.ones(5)}, "as many examples"),
    ({"inputs": torch.full((5, 2), math.nan)}, "inputs are not finite"),
    ({"inputs": torch.full((5, 2), 1e200, dtype=torch.float64)}, "gram is not finite: standardise"),
    ({"inputs": torch.ones(5, 0), "bias": False}, "at least one column"),
    call=lambda change: LinearStatistics.of(**{"inputs": torch.ones(5, 2), "targets": torch.ones(5), **change}),
)


GOOD = {"gram": torch.eye(2).double(), "moment": torch.ones(2).double(), "square": torch.ones(()).double()}
test_wrong_statistics = refusals(
    FedBayesError,
    ({"gram": torch.eye(2)}, "float64"),
    ({"gram": torch.ones(2, 3).double()}, r"\(columns, columns\)"),
    ({"gram": torch.tensor([[1.0, 2.0], [0.0, 1.0]]).double()}, "not symmetric"),
    ({"square": torch.full((), math.nan).double()}, "square is not finite"),
    call=lambda change: LinearStatistics(**{**GOOD, "num_examples": 2, **change}),
)
