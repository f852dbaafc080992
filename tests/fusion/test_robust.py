"""Robust rules bound how far a minority of clients, whatever it sends, moves the global posterior."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize

from lightning_fedbayes import GaussianPosterior, fuse, fusion
from lightning_fedbayes.core.errors import FusionError
from lightning_fedbayes.fusion.robust import start
from tests.refusals import refusals

from .strategies import assert_same, posterior

ROBUST = {
    "geometric_median": "geometric_median",
    "coordinate_median": "coordinate_median",
    "trimmed_mean": fusion.TrimmedMean(trim=0.49),
    "krum": "krum",
    "multi_krum": "multi_krum",
    "nnm, geometric_median": fusion.NearestNeighbourMixing(),
    "nnm, coordinate_median": fusion.NearestNeighbourMixing("coordinate_median"),
    "nnm, trimmed_mean": fusion.NearestNeighbourMixing(fusion.TrimmedMean(trim=0.49)),
    "norm_clipping, geometric_median": fusion.NormClipping("geometric_median"),
    "norm_clipping, coordinate_median": fusion.NormClipping("coordinate_median"),
}
robust = pytest.mark.parametrize("rule", ROBUST.values(), ids=ROBUST)
ATTACKS = ("scaled", "sign", "noise", "colluding", "zero")
COUNTS, SEEDS = st.integers(1, 12), st.integers(0, 2**32 - 1)
FEW = settings(deadline=None, max_examples=25)
PARTS = ("mean", "variance")


def points(rows):
    return [GaussianPosterior.point_mass({"w": row}) for row in torch.as_tensor(np.asarray(rows)).unbind(0)]


def apply(rule, rows, previous=None, clients=None):
    """The outcome for point masses of equal weight."""
    count = len(rows)
    origin = None if previous is None else posterior(previous, 0.0)
    weights = torch.full((count,), 1 / count, dtype=torch.float64)
    return fusion.get_rule(rule).apply(fusion.Cohort(points(rows), weights, origin, clients or tuple(range(count))), {})


def attack(kind, honest, count, random):
    """Updates of bad clients."""
    size = honest.shape[1]
    if kind == "scaled":
        return 1e30 * random.normal(size=(count, size))
    if kind == "sign":
        return np.repeat(-10 * honest.mean(0, keepdims=True), count, 0)
    if kind == "noise":
        return honest.mean(0) + 20 * random.normal(size=(count, size))
    if kind == "colluding":
        return np.repeat(honest.mean(0, keepdims=True) + 1e4, count, 0)
    return np.zeros((count, size))


@robust
@pytest.mark.parametrize("kind", ATTACKS)
@pytest.mark.parametrize(("good", "size", "offset"), [(4, 2, 0.0), (9, 40, 1e6)])
def test_just_under_half_cannot_leave_the_neighbourhood_of_the_others(rule, kind, good, size, offset):
    """2f + 2 < K for krum's sake, so f = good − 3."""
    random = np.random.default_rng(good)
    honest = random.normal(offset + 1, 1, (good, size))
    rows = np.concatenate([attack(kind, honest, good - 3, random), honest])
    fused = fuse(rule, points(rows), previous=posterior(np.full(size, float(offset)), 0.0)).mean["w"].numpy()
    spread = np.linalg.norm(honest - honest.mean(0), axis=1).max()
    assert np.linalg.norm(fused - honest.mean(0)) < (12 if kind == "sign" or kind == "zero" else 6) * spread


@pytest.mark.parametrize(
    "rule", [fusion.GeometricMedian(), fusion.Krum(), fusion.MultiKrum(), fusion.NearestNeighbourMixing()]
)
@given(count=st.integers(1, 9), seed=st.integers(0, 2**32 - 1))
@settings(deadline=None, max_examples=30)
def test_reliability_is_the_share_of_the_mean_and_the_weight_of_the_median_variance(rule, count, seed):
    random = np.random.default_rng(seed)
    means, variances = random.normal(0, 1, (count, 4)), 10 ** random.uniform(-3, 1, (count, 4))
    clients = tuple(int(number) for number in random.permutation(50)[:count])
    weights = torch.tensor(random.dirichlet(np.ones(count)))
    posteriors = [posterior(m, v) for m, v in zip(means, variances)]
    outcome = rule.apply(fusion.Cohort(posteriors, weights, None, clients), {"kept": 1})
    shares = np.array([outcome.reliability[client] for client in clients])
    assert outcome.state == {"kept": 1}
    assert shares.sum() == pytest.approx(1)
    assert (shares >= 0).all()
    assert set(outcome.excluded) <= {client for client, share in outcome.reliability.items() if share == 0}
    np.testing.assert_allclose(outcome.posterior.mean["w"], shares @ means, atol=1e-12)
    if not isinstance(rule, fusion.NearestNeighbourMixing):  # medians of medians: tests/fusion/test_preaggregation.py
        np.testing.assert_allclose(outcome.posterior.variance["w"], weighted_medians(variances, shares), rtol=1e-12)


def weighted_medians(values, shares):
    """Per column: no more than half of the weight lies below it, and no more above; the middle of all such values."""
    found = []
    for column in values.T:
        at = [value for value in column if shares[column < value].sum() <= 0.5 + 1e-12]
        at = [value for value in at if shares[column > value].sum() <= 0.5 + 1e-12]
        at = [value for value in at if shares[column == value].sum() > 0]
        found.append((min(at) + max(at)) / 2)
    return np.array(found)


# byzfl 0.0.11 on the rows of DATA, equal weights: GeometricMedian(nu=1e-9, T=10000), Krum(f=2), MultiKrum(f=1),
# MultiKrum(f=2), TrMean(f=1), TrMean(f=2), Median(), NNM(f=2) before GeometricMedian and before Average,
# Clipping(c=2.5) before Average. Its Krum sums over K − f − 1 other clients, one more than the paper does.
DATA = np.array([[1, 2, -1], [0, 3, 1], [2, 1, 0], [1, 1, 1], [-1, 2, 2], [30, -20, 10], [25, 40, -30]], dtype=float)
BYZFL = [
    (fusion.GeometricMedian(smoothing=1e-9), [1.274385747594, 1.598642372441, 0.359075018804]),
    (fusion.Krum(byzantine=1), [1, 1, 1]),
    (fusion.MultiKrum(byzantine=1), [5.5, -1.833333333333, 2.166666666667]),
    (fusion.MultiKrum(byzantine=2), [0.6, 1.8, 0.6]),
    (fusion.TrimmedMean(trim=1), [5.8, 1.8, 0.6]),
    (fusion.TrimmedMean(trim=2), [1.333333333333, 1.666666666667, 0.666666666667]),
    (fusion.get_rule("coordinate_median"), [1, 2, 1]),
    (fusion.NearestNeighbourMixing(byzantine=2), [0.6, 1.8, 0.6]),
    (fusion.NearestNeighbourMixing("nwa", byzantine=2), [2.2, 2.228571428571, -0.057142857143]),
    (fusion.NormClipping("nwa", radius=2.5), [0.898451424251, 1.212989012033, 0.254821199999]),
]


@pytest.mark.parametrize(("rule", "expected"), BYZFL, ids=[type(rule).__name__ for rule, _ in BYZFL])
def test_agrees_with_byzfl(rule, expected):
    fused = fuse(rule, points(DATA), previous=posterior([0.0, 0.0, 0.0], 0.0))
    np.testing.assert_allclose(fused.mean["w"], expected, rtol=1e-8)


test_what_cannot_be_is_refused = refusals(
    FusionError,
    (lambda: fusion.GeometricMedian(smoothing=0.0), "smoothing=0.0: give a finite number above 0"),
    (lambda: fusion.TrimmedMean(trim=0.5), r"trim=0.5: .* in \[0, 0.5\).*give an integer"),
    (lambda: fusion.TrimmedMean(trim=-1), "trim=-1: give at least 0"),
    (lambda: fuse(fusion.TrimmedMean(trim=2), points(DATA[:4])), "trim=2 at either end of 4 clients.*at most 1"),
    (lambda: fusion.Krum(byzantine=-1), "byzantine=-1: give at least 0"),
    (lambda: fuse(fusion.Krum(byzantine=2), points(DATA[:6])), "byzantine=2 of 6 clients.*give at most 1"),
    (lambda: fuse(fusion.MultiKrum(keep=5), points(DATA[:4])), "keep=5 of 4 clients; give at most 4"),
    (lambda: fuse(fusion.NearestNeighbourMixing(byzantine=2), points(DATA[:4])), "byzantine=2 of 4.*give at most 1"),
    (lambda: fusion.NearestNeighbourMixing("geometric_medians"), "did you mean 'geometric_median'"),
    (lambda: fuse("norm_clipping", points(DATA)), "norm_clipping needs the previous.*pass previous="),
    (lambda: fuse(fusion.NearestNeighbourMixing("dwc"), points(DATA)), "needs the previous"),
)


def scores(rows, byzantine):
    """Blanchard et al. 2017, §4, without a Gram matrix."""
    found = []
    for k, row in enumerate(rows):
        others = sorted(float(np.sum((row - other) ** 2)) for j, other in enumerate(rows) if j != k)
        found.append(sum(others[: len(rows) - byzantine - 2]))
    return np.array(found)


def drawn_clients(count, size, seed):
    random = np.random.default_rng(seed)
    rows = random.normal(0, 1, (count, size)) * 10 ** random.uniform(-1, 1, (count, 1))
    return rows, [posterior(row, random.uniform(0.1, 1, size)) for row in rows]


@given(count=st.integers(4, 12), size=st.integers(2, 20), seed=SEEDS, data=st.data())
@settings(deadline=None, max_examples=60)
def test_the_client_of_the_least_score(count, size, seed, data):
    byzantine = data.draw(st.integers(0, (count - 4) // 2))
    rows, clients = drawn_clients(count, size, seed)
    least = int(scores(rows, byzantine).argmin())
    assert_same(fuse(fusion.Krum(byzantine=byzantine), clients), clients[least], rtol=1e-14)


@given(count=st.integers(4, 12), size=st.integers(2, 20), seed=SEEDS, data=st.data())
@settings(deadline=None, max_examples=60)
def test_the_average_of_the_least_scores(count, size, seed, data):
    byzantine = data.draw(st.integers(0, (count - 4) // 2))
    keep = data.draw(st.none() | st.integers(1, count))
    rows, clients = drawn_clients(count, size, seed)
    kept = scores(rows, byzantine).argsort()[: count - byzantine if keep is None else keep]
    means, variances = (np.stack([np.asarray(getattr(clients[k], name)["w"]) for k in kept]) for name in PARTS)
    expected = posterior(means.mean(0), np.median(variances, 0))
    assert_same(fuse(fusion.MultiKrum(byzantine=byzantine, keep=keep), clients), expected, rtol=1e-12)


@pytest.mark.parametrize("rule", ["krum", "multi_krum", fusion.Krum(byzantine=3)])
@pytest.mark.parametrize("count", [1, 2])
def test_too_few_to_score_are_averaged(rule, count):
    _, clients = drawn_clients(count, 3, 0)
    assert_same(fuse(rule, clients), fuse("nwa", clients), rtol=1e-15)


def drawn_moments(count, seed):
    """Means and variances, (count, 6) each."""
    random = np.random.default_rng(seed)
    return random.normal(0, 1, (count, 6)), 10 ** random.uniform(-3, 2, (count, 6))


def clients_of(means, variances):
    return [posterior(mean, variance) for mean, variance in zip(means, variances, strict=True)]


@given(count=COUNTS, seed=SEEDS)
@FEW
def test_median_of_means_and_of_variances(count, seed):
    means, variances = drawn_moments(count, seed)
    expected = posterior(np.median(means, 0), np.median(variances, 0))
    assert_same(fuse("coordinate_median", clients_of(means, variances)), expected, rtol=1e-14)


@given(count=COUNTS, seed=SEEDS)
@FEW
def test_limits_are_the_average_and_the_median(count, seed):
    clients = clients_of(*drawn_moments(count, seed))
    assert_same(fuse(fusion.TrimmedMean(trim=0), clients), fuse("nwa", clients), rtol=1e-12)
    assert_same(fuse(fusion.TrimmedMean(trim=0.4999), clients), fuse("coordinate_median", clients), rtol=1e-12)


@pytest.mark.parametrize(
    ("trim", "count", "dropped"), [(0.1, 1, 0), (0.1, 3, 1), (0.07, 100, 7), (0.29, 100, 29), (0.45, 4, 1), (2, 5, 2)]
)
def test_a_fraction_is_rounded_up(trim, count, dropped):
    assert fusion.TrimmedMean(trim=trim).dropped(count) == dropped


def objective(y, rows, weights):
    return float(weights @ np.linalg.norm(rows - y, axis=1))


def slow(rows, weights):
    """The minimiser over all P parameters, by descent from the best client and from the average."""
    starts = [weights @ rows, min(rows, key=lambda row: objective(row, rows, weights)) + 1e-3]

    def value_and_gradient(y):
        away = y - rows
        norms = np.sqrt((away**2).sum(1) + 1e-18)
        return weights @ norms, (weights / norms) @ away

    found = [minimize(value_and_gradient, y, jac=True, method="BFGS", options={"gtol": 1e-10}).x for y in starts]
    return min([*found, *rows], key=lambda y: objective(y, rows, weights))


@pytest.mark.parametrize(("count", "size"), [(3, 2), (5, 3), (9, 30), (20, 4), (30, 100)])
@pytest.mark.parametrize("equal", [True, False])
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e5])
def test_agrees_with_slow_minimisation(count, size, equal, scale):
    random = np.random.default_rng(count * size)
    rows = random.normal(0, 1, (count, size)) * 10 ** random.uniform(-1, 1, (count, 1))
    weights = np.full(count, 1 / count) if equal else random.dirichlet(np.full(count, 2.0))
    fused = fuse("geometric_median", points(scale * rows), weights.tolist()).mean["w"].numpy() / scale
    expected = slow(rows, weights)
    np.testing.assert_allclose(fused, expected, atol=1e-5 * np.abs(rows).max())
    assert objective(fused, rows, weights) <= objective(expected, rows, weights) * (1 + 1e-6)
    assert fusion.get_rule("rfa").uses_weights


@pytest.mark.parametrize("others", [[[1e30, -1e30]], [[3.0, 4.0], [1e30, 0.0], [-7.0, 1e8]]])
def test_half_of_the_weight_on_one_point_is_the_answer(others):
    rows = [[1.0, 2.0]] * len(others) + others
    fused = fuse("geometric_median", points(rows[1:] + rows[:1] * 2))
    np.testing.assert_allclose(fused.mean["w"], [1.0, 2.0], atol=1e-12)


@pytest.mark.parametrize("bad", [1, 4])
@pytest.mark.parametrize("offset", [0.0, 1e6])
def test_updates_of_any_size_pull_as_much_as_their_direction(bad, offset):
    """The pull of a client is a unit vector, so 10³⁰ moves the median like 10⁹ in the same direction."""
    random = np.random.default_rng(bad)
    honest, directions = offset + random.normal(0, 1, (6, 8)), random.normal(0, 1, (bad, 8))
    far, farther = ([*honest, *(size * directions)] for size in (1e12, 1e30))
    once, twice = (fuse("geometric_median", points(rows)).mean["w"].numpy() for rows in (far, farther))
    np.testing.assert_allclose(once, twice, atol=1e-5)
    assert np.linalg.norm(once - honest.mean(0)) < 4 * np.linalg.norm(honest - honest.mean(0), axis=1).max()


@pytest.mark.parametrize("smoothing", [1.0, 0.1, 1e-3, 1e-6])
def test_smoothing_costs_at_most_half_of_itself(smoothing):
    random = np.random.default_rng(1)
    rows = np.concatenate([random.normal(0, 1, (8, 3)), np.full((5, 3), 4.0)])
    weights = np.full(13, 1 / 13)
    fused = fuse(fusion.GeometricMedian(smoothing=smoothing), points(rows)).mean["w"].numpy()
    _, scale = start(torch.cdist(torch.tensor(rows), torch.tensor(rows)), torch.tensor(weights))
    excess = objective(fused, rows, weights) - objective(slow(rows, weights), rows, weights)
    assert -1e-9 < excess <= smoothing * scale / 2 + 1e-9
