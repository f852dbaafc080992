"""What robust rules promise: a bound on what a minority can do, whatever it sends."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_fedbayes import FusionError, GaussianPosterior, fuse
from lightning_fedbayes.fusion import (
    Cohort,
    GeometricMedian,
    Krum,
    MultiKrum,
    NearestNeighbourMixing,
    NormClipping,
    TrimmedMean,
    get_rule,
)

from .strategies import assert_same, posterior

ROBUST = {
    "geometric_median": "geometric_median",
    "coordinate_median": "coordinate_median",
    "trimmed_mean": TrimmedMean(trim=0.49),
    "krum": "krum",
    "multi_krum": "multi_krum",
    "nnm, geometric_median": NearestNeighbourMixing(),
    "nnm, coordinate_median": NearestNeighbourMixing("coordinate_median"),
    "nnm, trimmed_mean": NearestNeighbourMixing(TrimmedMean(trim=0.49)),
    "norm_clipping, geometric_median": NormClipping("geometric_median"),
    "norm_clipping, coordinate_median": NormClipping("coordinate_median"),
}
robust = pytest.mark.parametrize("rule", ROBUST.values(), ids=ROBUST)
ATTACKS = ("scaled", "sign", "noise", "colluding", "zero")


def points(rows):
    return [GaussianPosterior.point_mass({"w": row}) for row in torch.as_tensor(np.asarray(rows)).unbind(0)]


def apply(rule, rows, previous=None, clients=None):
    """The outcome for point masses of equal weight."""
    count = len(rows)
    origin = None if previous is None else posterior(previous, 0.0)
    weights = torch.full((count,), 1 / count, dtype=torch.float64)
    return get_rule(rule).apply(Cohort(points(rows), weights, origin, clients or tuple(range(count))), {})


def attack(kind, honest, count, random):
    """What bad clients send."""
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
@pytest.mark.parametrize("offset", [0.0, 1e6])
@pytest.mark.parametrize("kind", ATTACKS)
@pytest.mark.parametrize(("good", "size"), [(4, 2), (9, 40), (9, 5)])
def test_just_under_half_cannot_leave_the_neighbourhood_of_the_others(rule, kind, offset, good, size):
    """2f + 2 < K for krum's sake, so f = good − 3."""
    random = np.random.default_rng(good)
    honest = random.normal(offset + 1, 1, (good, size))
    rows = np.concatenate([attack(kind, honest, good - 3, random), honest])
    fused = fuse(rule, points(rows), previous=posterior(np.full(size, float(offset)), 0.0)).mean["w"].numpy()
    spread = np.linalg.norm(honest - honest.mean(0), axis=1).max()
    assert np.linalg.norm(fused - honest.mean(0)) < (12 if kind == "sign" or kind == "zero" else 6) * spread


def test_the_average_does_leave_it():
    """The bound above would be no test if the plain average kept it."""
    random = np.random.default_rng(0)
    honest = random.normal(1, 1, (9, 40))
    for kind in ("scaled", "sign", "noise", "colluding"):
        rows = np.concatenate([attack(kind, honest, 6, random), honest])
        fused = fuse("nwa", points(rows)).mean["w"].numpy()
        spread = np.linalg.norm(honest - honest.mean(0), axis=1).max()
        assert np.linalg.norm(fused - honest.mean(0)) > (1 if kind == "noise" else 2) * spread


@robust
def test_identical_clients_are_that_client(rule):
    client = posterior([1.0, -2.0, 3e5], [0.5, 0.0, 2.0])
    for count in (1, 2, 3, 4, 7):
        assert_same(fuse(rule, [client] * count, previous=posterior([0.0, 0.0, 0.0], 1.0)), client, rtol=1e-15)


@robust
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_dtype_is_kept_and_more_clients_than_parameters_do_no_harm(rule, dtype):
    rows = torch.randn(11, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)
    fused = fuse(rule, points(rows.double()), previous=posterior([0.0, 0.0], 0.0))
    clients = [GaussianPosterior.point_mass({"w": row}) for row in rows]
    previous = GaussianPosterior.point_mass({"w": torch.zeros(2, dtype=dtype)})
    own = fuse(rule, clients, previous=previous)
    assert own.mean["w"].dtype == dtype
    torch.testing.assert_close(own.mean["w"].double(), fused.mean["w"], rtol=2 * torch.finfo(dtype).eps,
                               atol=4 * torch.finfo(dtype).eps)
    assert not own.variance["w"].any()


@pytest.mark.parametrize("rule", [GeometricMedian(), Krum(), MultiKrum(), NearestNeighbourMixing()])
@given(count=st.integers(1, 9), seed=st.integers(0, 2**32 - 1))
@settings(deadline=None, max_examples=30)
def test_reliability_is_the_share_of_mean_and_variance(rule, count, seed):
    random = np.random.default_rng(seed)
    means, variances = random.normal(0, 1, (count, 4)), 10 ** random.uniform(-3, 1, (count, 4))
    clients = tuple(int(number) for number in random.permutation(50)[:count])
    weights = torch.tensor(random.dirichlet(np.ones(count)))
    posteriors = [posterior(m, v) for m, v in zip(means, variances)]
    outcome = rule.apply(Cohort(posteriors, weights, None, clients), {"kept": 1})
    shares = np.array([outcome.reliability[client] for client in clients])
    assert outcome.memory == {"kept": 1}
    assert shares.sum() == pytest.approx(1)
    assert (shares >= 0).all()
    assert set(outcome.excluded) <= {client for client, share in outcome.reliability.items() if share == 0}
    np.testing.assert_allclose(outcome.posterior.mean["w"], shares @ means, atol=1e-12)
    np.testing.assert_allclose(outcome.posterior.variance["w"], shares @ variances, rtol=1e-12)


# byzfl 0.0.11 on the rows of DATA, equal weights: GeometricMedian(nu=1e-9, T=10000), Krum(f=2), MultiKrum(f=1),
# MultiKrum(f=2), TrMean(f=1), TrMean(f=2), Median(), NNM(f=2) before GeometricMedian and before Average,
# Clipping(c=2.5) before Average. Its Krum sums over K − f − 1 other clients, one more than the paper does.
DATA = np.array([[1, 2, -1], [0, 3, 1], [2, 1, 0], [1, 1, 1], [-1, 2, 2], [30, -20, 10], [25, 40, -30]], dtype=float)
BYZFL = [
    (GeometricMedian(smoothing=1e-9), [1.274385747594, 1.598642372441, 0.359075018804]),
    (Krum(byzantine=1), [1, 1, 1]),
    (MultiKrum(byzantine=1), [5.5, -1.833333333333, 2.166666666667]),
    (MultiKrum(byzantine=2), [0.6, 1.8, 0.6]),
    (TrimmedMean(trim=1), [5.8, 1.8, 0.6]),
    (TrimmedMean(trim=2), [1.333333333333, 1.666666666667, 0.666666666667]),
    (get_rule("coordinate_median"), [1, 2, 1]),
    (NearestNeighbourMixing(byzantine=2), [0.6, 1.8, 0.6]),
    (NearestNeighbourMixing("nwa", byzantine=2), [2.2, 2.228571428571, -0.057142857143]),
    (NormClipping("nwa", radius=2.5), [0.898451424251, 1.212989012033, 0.254821199999]),
]


@pytest.mark.parametrize(("rule", "expected"), BYZFL, ids=[type(rule).__name__ for rule, _ in BYZFL])
def test_agrees_with_byzfl(rule, expected):
    fused = fuse(rule, points(DATA), previous=posterior([0.0, 0.0, 0.0], 0.0))
    np.testing.assert_allclose(fused.mean["w"], expected, rtol=1e-8)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: GeometricMedian(smoothing=0.0), "smoothing must be positive, got 0"),
        (lambda: GeometricMedian(tolerance=-1.0), "tolerance must be positive, got -1"),
        (lambda: GeometricMedian(max_iterations=0), "max_iterations must be positive, got 0"),
        (lambda: TrimmedMean(trim=0.5), r"trim=0.5 is not in \[0, 0.5\).*give an integer"),
        (lambda: TrimmedMean(trim=-0.1), r"trim=-0.1 is not in"),
        (lambda: TrimmedMean(trim=-1), "trim=-1 is not a number of clients"),
        (lambda: fuse(TrimmedMean(trim=2), points(DATA[:4])), "trim=2 at either end of 4 clients.*at most 1"),
        (lambda: Krum(byzantine=-1), "byzantine must be a number of clients"),
        (lambda: MultiKrum(keep=0), "keep must be a number of clients, at least 1, got 0"),
        (lambda: fuse(Krum(byzantine=2), points(DATA[:6])), "byzantine=2 of 6 clients.*give at most 1"),
        (lambda: fuse(MultiKrum(keep=5), points(DATA[:4])), "keep=5 of 4 clients; give at most 4"),
        (lambda: NearestNeighbourMixing(byzantine=-1), "byzantine must be a number of clients"),
        (lambda: fuse(NearestNeighbourMixing(byzantine=2), points(DATA[:4])), "byzantine=2 of 4.*give at most 1"),
        (lambda: NearestNeighbourMixing("geometric_medians"), "did you mean 'geometric_median'"),
        (lambda: NormClipping(radius=0.0), "radius must be positive and finite, got 0"),
        (lambda: fuse("norm_clipping", points(DATA)), "norm_clipping needs the previous.*pass previous="),
        (lambda: fuse(NearestNeighbourMixing("dwc"), points(DATA)), "needs the previous"),
    ],
)
def test_what_cannot_be_is_refused(make, words):
    with pytest.raises(FusionError, match=words):
        make()
