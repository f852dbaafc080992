"""Every closed-form rule against the table of formulas, written out in NumPy."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate
from torch.distributions import Normal, kl_divergence

from lightning_fedbayes import GaussianPosterior, fuse
from lightning_fedbayes.fusion import AlphaBarycenter, available_fusions, get_rule, rule_name

from .strategies import ATOMS, CLOSED_FORMS, KINDS, RULES, assert_same, cohorts, posterior

ALIASES = {
    "weighted_average": ["nwa", "eaa", "fedavg", "centered_linear_pool"],
    "weighted_sum": ["ws", "gaa"],
    "linear_pool": ["lp", "kl_barycenter"],
    "conflation": ["inverse_variance"],
    "weighted_conflation": ["wc"],
    "reverse_kl_barycenter": ["rklb", "log_linear_pool", "llp"],
    "wasserstein_barycenter": ["wb"],
    "log_variance_average": ["aalv"],
    "distributed_weight_consolidation": ["dwc"],
    "gaussian_fit": ["fedag"],
}


def expected(rule, m, v, w, mo, vo):
    """Mean and variance of one parameter from arrays over clients: means m, variances v, weights w summing to 1."""
    count = len(m)
    average = np.sum(w * m)
    if rule == "weighted_average":
        return average, np.sum(w * v)
    if rule == "weighted_sum":
        return average, np.sum(w**2 * v)
    if rule == "linear_pool":
        return average, np.sum(w * (v + (m - average) ** 2))
    if rule == "wasserstein_barycenter":
        return average, np.sum(w * np.sqrt(v)) ** 2
    if rule == "log_variance_average":
        return average, 0.0 if (v == 0).any() else np.exp(np.sum(w * np.log(v)))
    if rule == "gaussian_fit":
        return np.mean(m), np.var(m)
    if (v == 0).any():
        unweighted = rule in ("conflation", "distributed_weight_consolidation")
        return np.average(m[v == 0], weights=None if unweighted else w[v == 0]), 0.0
    if rule == "conflation":
        return np.sum(m / v) / np.sum(1 / v), 1 / np.sum(1 / v)
    if rule == "weighted_conflation":
        return np.sum(w * m / v) / np.sum(w / v), np.max(w) / np.sum(w / v)
    if rule == "reverse_kl_barycenter":
        return np.sum(w * m / v) / np.sum(w / v), 1 / np.sum(w / v)
    assert rule == "distributed_weight_consolidation"
    precision = np.sum(1 / v) - (count - 1) / vo
    return (np.sum(m / v) - (count - 1) * mo / vo) / precision, 1 / precision


def expected_posterior(rule, cohort):
    """The fused posterior, parameter by parameter and entry by entry in float64."""
    weights = np.array(cohort.weights) / np.sum(cohort.weights)
    means, variances = {}, {}
    for name, like in cohort.previous.mean.items():
        columns = [
            np.stack([np.asarray(tensors[name], dtype=np.float64).reshape(-1) for tensors in each])
            for each in (
                [c.mean for c in cohort.clients],
                [c.variance for c in cohort.clients],
                [cohort.previous.mean],
                [cohort.previous.variance],
            )
        ]
        pairs = [expected(rule, m, v, weights, mo[0], vo[0]) for m, v, mo, vo in zip(*(c.T for c in columns))]
        fused = np.array(pairs, dtype=np.float64).reshape(-1, 2)
        means[name] = torch.tensor(fused[:, 0]).reshape(like.shape)
        variances[name] = torch.tensor(fused[:, 1]).reshape(like.shape)
    return GaussianPosterior(means, variances)


@pytest.mark.parametrize("atoms", ATOMS)
@pytest.mark.parametrize("rule", CLOSED_FORMS)
@given(data=st.data())
@settings(deadline=None, max_examples=25)
def test_agrees_with_the_table(rule, atoms, data):
    cohort = data.draw(cohorts(dtype=torch.float32, atoms=(atoms,)))
    fused = cohort.fuse(rule)
    assert all(tensor.dtype == torch.float32 for each in (fused.mean, fused.variance) for tensor in each.values())
    parts = ({n: t.double() for n, t in each.items()} for each in (fused.mean, fused.variance))
    in_double = GaussianPosterior(*parts)
    assert_same(in_double, expected_posterior(rule, cohort), rtol=1e-6, atol=1e-30)


def test_table_is_complete_and_aliases_are_the_same_rules():
    assert set(ALIASES) == set(CLOSED_FORMS)
    named = {name for name in available_fusions(aliases=True) if rule_name(name) in CLOSED_FORMS}
    assert named == {name for rule, aliases in ALIASES.items() for name in (rule, *aliases)}
    for rule, aliases in ALIASES.items():
        assert {type(get_rule(alias)) for alias in aliases} == {type(get_rule(rule))}


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
@pytest.mark.parametrize("rule", KINDS)
def test_dtype_and_shape_are_kept_and_no_parameters_are_none(rule, dtype):
    shapes = {"scalar": (), "vector": (3,), "empty": (0,), "flat": (2, 0), "image": (1, 2, 2)}
    full = {value: {n: torch.full(s, value, dtype=dtype) for n, s in shapes.items()} for value in (0.5, 1.0, 2.0)}
    clients = [GaussianPosterior(full[mean], full[0.5]) for mean in (1.0, 2.0)]
    previous = GaussianPosterior(full[1.0], full[1.0])
    fused = fuse(rule, clients, previous=previous)
    for name, shape in shapes.items():
        for tensor in (fused.mean[name], fused.variance[name]):
            assert tensor.dtype == dtype
            assert tensor.shape == shape
            assert bool(torch.isfinite(tensor).all())
    assert fused.names == clients[0].names
    nothing = GaussianPosterior({}, {})
    assert fuse(rule, [nothing, nothing], previous=nothing).names == ()


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
def test_half_precision_is_summed_in_double(rule):
    """A thousand clients whose sum of means would leave float16 far behind."""
    client = GaussianPosterior(*({"w": torch.tensor([each], dtype=torch.float16)} for each in (100.0, 0.5)))
    fused = fuse(rule, [client] * 1000, previous=client)
    assert fused.mean["w"].item() == 100


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
@given(cohort=cohorts(clients=st.integers(2, 3), dtype=torch.float32))
@settings(deadline=None, max_examples=10)
def test_inputs_and_outputs_share_no_memory(rule, cohort):
    before = [client.clone() for client in (*cohort.clients, cohort.previous)]
    fused = cohort.fuse(rule)
    for tensor in fused.mean.values():
        tensor.add_(1)
    for client, copy in zip((*cohort.clients, cohort.previous), before, strict=True):
        assert_same(client, copy, rtol=0)


@pytest.mark.parametrize("rule", RULES)
def test_parameters_are_matched_by_name_not_by_order(rule):
    def client(mean, variance, names):
        means, variances = {"a": mean, "b": 10 * mean}, {"a": variance, "b": 3 * variance}
        return GaussianPosterior(*({n: torch.tensor([each[n]]) for n in names} for each in (means, variances)))

    first, previous = client(1.0, 0.1, "ab"), client(0.0, 9.0, "ab")
    expected = fuse(rule, [first, client(2.0, 0.5, "ab")], previous=previous)
    assert_same(fuse(rule, [first, client(2.0, 0.5, "ba")], previous=previous), expected, rtol=0)
    assert_same(fuse(rule, [first, client(2.0, 0.5, "ab")], previous=client(0.0, 9.0, "ba")), expected, rtol=0)


ALPHAS = (-1.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.5)


def by_integration(means, variances, weights, alpha):
    """Moments of the normalised power mean, by adaptive quadrature."""
    means, deviations = np.asarray(means), np.sqrt(variances)

    def log_power_mean(x):
        logs = -0.5 * ((x - means) / deviations) ** 2 - np.log(deviations) - 0.5 * math.log(2 * math.pi)
        return np.logaddexp.reduce(np.log(weights) + alpha * logs) / alpha

    ends = (means - 12 * deviations).min(), (means + 12 * deviations).max()
    top = max(log_power_mean(x) for x in np.linspace(*ends, 20_001))
    moments = [
        integrate.quad(
            lambda x, n=n: x**n * np.exp(log_power_mean(x) - top),
            *ends,
            limit=2000,
            epsabs=1e-12,
            points=np.unique([*means, *(means - deviations), *(means + deviations)]),
        )[0]
        for n in range(3)
    ]
    mean = moments[1] / moments[0]
    return mean, moments[2] / moments[0] - mean**2


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("seed", range(6))
def test_moments_are_those_of_the_normalised_power_mean(alpha, seed):
    random = np.random.default_rng(seed)
    clients = int(random.integers(2, 5))
    means, variances = random.normal(0, 1.5, clients), np.exp(random.uniform(-1, 1, clients))
    weights = random.dirichlet(np.ones(clients))
    fused = fuse(AlphaBarycenter(alpha), [posterior([m], [v]) for m, v in zip(means, variances, strict=True)], weights)
    mean, variance = by_integration(means, variances, weights, alpha)
    loose = 1 if 0 <= alpha <= 1 else 25
    assert float(fused.mean["w"]) == pytest.approx(mean, abs=loose * 5e-4)
    assert float(fused.variance["w"]) == pytest.approx(variance, rel=loose * 1e-3)


@pytest.mark.parametrize(("alpha", "rule"), [(1e-4, "reverse_kl_barycenter"), (1 - 1e-5, "linear_pool")])
def test_family_is_continuous_at_its_ends(alpha, rule):
    clients = [posterior([0.0, 1.0, -2.0], [1.0, 0.5, 2.0]), posterior([1.0, 1.2, 2.0], [0.3, 0.5, 1.0])]
    assert_same(fuse(AlphaBarycenter(alpha), clients, [0.3, 0.7]), fuse(rule, clients, [0.3, 0.7]), rtol=2e-3)


def test_a_larger_alpha_is_wider():
    clients = [posterior([0.0, 0.5], [1.0, 0.1]), posterior([1.0, -0.5], [2.0, 0.1])]
    widths = [fuse(AlphaBarycenter(alpha), clients).variance["w"] for alpha in (0.0, 0.25, 0.5, 0.75, 1.0)]
    assert all(bool((wider > narrower).all()) for narrower, wider in pairwise(widths))


OBJECTIVES = {
    "reverse_kl_barycenter": kl_divergence,
    "wasserstein_barycenter": lambda q, client: (q.mean - client.mean) ** 2 + (q.stddev - client.stddev) ** 2,
    "linear_pool": lambda q, client: kl_divergence(client, q),
}
"""KL(q‖q_k), W₂²(q, q_k) and KL(q_k‖q) of each parameter."""


def objective(rule, cohort, mean, log_std):
    """The rule's Σ_k ω_k D(q, q_k)."""
    weights = np.array(cohort.weights) / sum(cohort.weights)
    q = Normal(mean, log_std.exp())
    flat = [client.flatten() for client in cohort.clients]
    return sum(w * OBJECTIVES[rule](q, Normal(m, v.sqrt())).sum() for w, (m, v) in zip(weights, flat, strict=True))


PROBABILISTIC = cohorts(clients=st.integers(1, 5), orders=(-2, 2)).filter(lambda c: c.previous.num_parameters > 0)


@pytest.mark.parametrize("rule", OBJECTIVES)
@given(cohort=PROBABILISTIC)
@settings(deadline=None, max_examples=40)
def test_gradient_of_its_objective_is_zero(rule, cohort):
    mean, variance = cohort.fuse(rule).flatten()
    leaves = mean.requires_grad_(), (variance.log() / 2).requires_grad_()
    gradients = torch.autograd.grad(objective(rule, cohort, *leaves), leaves)
    moved = mean.detach() + variance.sqrt(), variance.log() / 2 + 1
    scale = objective(rule, cohort, *moved).detach()
    for gradient in gradients:
        torch.testing.assert_close(gradient, torch.zeros_like(gradient), rtol=0, atol=1e-8 * float(1 + scale))


@given(
    shards=st.lists(st.integers(0, 6), min_size=1, max_size=4),
    parameters=st.integers(1, 4),
    seed=st.integers(0, 2**32 - 1),
)
@settings(deadline=None, max_examples=60)
def test_dwc_of_conjugate_posteriors_is_the_posterior_of_the_pooled_data(shards, parameters, seed):
    """Linear regression y = Xθ + ε with orthogonal columns, prior q_o, known noise precision."""
    random = np.random.default_rng(seed)
    prior_mean, prior_variance = random.normal(0, 2, parameters), 10 ** random.uniform(-2, 2, parameters)
    noise_precision = 10 ** random.uniform(-1, 1)

    def regression(x, y):
        precision = np.diag(1 / prior_variance) + noise_precision * x.T @ x
        assert np.allclose(precision, np.diag(np.diag(precision)))
        mean = np.linalg.solve(precision, prior_mean / prior_variance + noise_precision * x.T @ y)
        return posterior(mean, 1 / np.diag(precision))

    data = []
    for examples in shards:
        x = np.zeros((examples, parameters))
        x[np.arange(examples), random.integers(0, parameters, examples)] = random.normal(0, 2, examples)
        data.append((x, random.normal(0, 3, examples)))
    pooled = regression(np.concatenate([x for x, _ in data]), np.concatenate([y for _, y in data]))
    clients = [regression(x, y) for x, y in data]
    assert_same(fuse("dwc", clients, previous=posterior(prior_mean, prior_variance)), pooled)
