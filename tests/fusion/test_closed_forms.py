"""Every closed-form rule against the table of formulas, written out in NumPy."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_fedbayes import GaussianPosterior, fuse
from lightning_fedbayes.fusion import available_fusions, get_rule, rule_name

from .strategies import ATOMS, CLOSED_FORMS, KINDS, RULES, assert_same, cohorts

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
    in_double = GaussianPosterior(
        {n: t.double() for n, t in fused.mean.items()}, {n: t.double() for n, t in fused.variance.items()}
    )
    assert_same(in_double, expected_posterior(rule, cohort), rtol=1e-6, atol=1e-30)


def test_table_is_complete_and_aliases_are_the_same_rules():
    assert set(ALIASES) == set(CLOSED_FORMS)
    named = {name for name in available_fusions(aliases=True) if rule_name(name) in CLOSED_FORMS}
    assert named == {name for rule, aliases in ALIASES.items() for name in (rule, *aliases)}
    for rule, aliases in ALIASES.items():
        assert {type(get_rule(alias)) for alias in aliases} == {type(get_rule(rule))}


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
@pytest.mark.parametrize("rule", KINDS)
def test_dtype_and_shape_are_kept(rule, dtype):
    shapes = {"scalar": (), "vector": (3,), "empty": (0,), "flat": (2, 0), "image": (1, 2, 2)}
    clients = [
        GaussianPosterior(
            {n: torch.full(s, mean, dtype=dtype) for n, s in shapes.items()},
            {n: torch.full(s, 0.5, dtype=dtype) for n, s in shapes.items()},
        )
        for mean in (1.0, 2.0)
    ]
    previous = GaussianPosterior(clients[0].mean, {n: torch.ones(s, dtype=dtype) for n, s in shapes.items()})
    fused = fuse(rule, clients, previous=previous)
    for name, shape in shapes.items():
        for tensor in (fused.mean[name], fused.variance[name]):
            assert tensor.dtype == dtype
            assert tensor.shape == shape
            assert bool(torch.isfinite(tensor).all())
    assert fused.names == clients[0].names


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
def test_half_precision_is_summed_in_double(rule):
    """A thousand clients whose sum of means would leave float16 far behind."""
    client = GaussianPosterior(
        {"w": torch.tensor([100.0], dtype=torch.float16)}, {"w": torch.tensor([0.5], dtype=torch.float16)}
    )
    fused = fuse(rule, [client] * 1000, previous=client)
    assert fused.mean["w"].item() == 100


@pytest.mark.parametrize("rule", KINDS)
def test_no_parameters_at_all(rule):
    nothing = GaussianPosterior({}, {})
    assert fuse(rule, [nothing, nothing], previous=nothing).names == ()


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
        return GaussianPosterior(
            {n: torch.tensor([means[n]]) for n in names}, {n: torch.tensor([variances[n]]) for n in names}
        )

    first, previous = client(1.0, 0.1, "ab"), client(0.0, 9.0, "ab")
    expected = fuse(rule, [first, client(2.0, 0.5, "ab")], previous=previous)
    assert_same(fuse(rule, [first, client(2.0, 0.5, "ba")], previous=previous), expected, rtol=0)
    assert_same(fuse(rule, [first, client(2.0, 0.5, "ab")], previous=client(0.0, 9.0, "ba")), expected, rtol=0)
