"""State of the inferred rules, and their answer to clients that cannot be told apart or are far off."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_fedbayes import GaussianPosterior, fuse
from lightning_fedbayes.fusion import Cohort, InverseVarianceMLE, InverseVarianceVB, Reliability, get_rule, inferred

from .untrusted import distances_of, independent, normal, origin, point_masses

RULES = ("ivar_mle", "ivar_vb", "icov_mle", "icov_vb")


def cohort_of(updates, clients, at=None):
    count = len(updates)
    previous = origin(updates.shape[1]) if at is None else at
    return Cohort(point_masses(updates), torch.full((count,), 1 / count, dtype=torch.float64), previous, tuple(clients))


@pytest.mark.parametrize("name", RULES)
def test_state_is_not_changed_and_survives_torch_save(name, tmp_path):
    rule, (_, updates) = get_rule(name), independent([0.2, 0.3, 0.5, 1.0], 60)
    first = rule.apply(cohort_of(updates, (0, 1, 2, 3)), rule.init())
    torch.save(first.state, tmp_path / "state.pt")
    stored = torch.load(tmp_path / "state.pt", weights_only=True)
    later = cohort_of(updates.flip(1), (0, 1, 2, 3))
    again = rule.apply(later, stored)
    assert torch.equal(again.posterior.mean["w"], rule.apply(later, first.state).posterior.mean["w"])
    before = torch.load(tmp_path / "state.pt", weights_only=True)
    for state in (stored, first.state):
        torch.testing.assert_close(state, before, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["ivar_mle", "ivar_vb"])
def test_a_client_that_was_bad_before_counts_less_now(name):
    """In the second round all are alike; only the state tells them apart."""
    rule = get_rule(name)
    _, first = independent([0.1, 0.1, 0.1, 0.1, 3.0], 3000)
    _, second = independent([0.1] * 5, 3000, seed=5)
    state = rule.apply(cohort_of(first, range(5)), rule.init()).state
    alone = rule.apply(cohort_of(second, range(5)), rule.init())
    later = rule.apply(cohort_of(second, range(5)), state)
    assert alone.reliability[4] > 0.15
    assert later.reliability[4] < 0.01


@pytest.mark.parametrize("name", RULES)
def test_with_memory_zero_every_round_is_the_first(name):
    rule = type(get_rule(name))(memory=0.0)
    _, first = independent([0.1, 0.1, 0.1, 3.0], 300)
    _, second = independent([0.1] * 4, 300, seed=5)
    discarded = {"clients": [0, 1, 2, 3], "rounds": 7.0}
    assert rule.apply(cohort_of(first, range(4)), rule.init()).state == {}
    outcome = rule.apply(cohort_of(second, range(4)), discarded)
    assert outcome.state == {}
    assert outcome.reliability == rule.apply(cohort_of(second, range(4)), {}).reliability


@pytest.mark.slow
@pytest.mark.parametrize("name", RULES)
def test_clients_may_miss_rounds_and_come_in_any_order(name):
    """A client is recognised by its number, not by its place."""
    rule, state = get_rule(name), get_rule(name).init()
    noise = [0.1, 0.1, 0.1, 2.0, 0.1]
    for round, present in enumerate([(0, 1, 3), (4, 3, 2), (2, 0, 1, 4), (3, 1), (1, 2, 3, 4), (0, 1, 2, 3, 4)]):
        _, updates = independent([noise[client] for client in present], 20_000, seed=10 * round)
        fused = rule.apply(cohort_of(updates, present), state)
        state = fused.state
        assert set(fused.reliability) == set(present)
        assert bool(torch.isfinite(fused.posterior.mean["w"]).all())
    assert fused.reliability[3] < 0.02
    _, updates = independent([noise[client] for client in (4, 3, 2, 1, 0)], 20_000, seed=50)
    mixed = rule.apply(cohort_of(updates.flip(0), (0, 1, 2, 3, 4)), state).reliability
    straight = rule.apply(cohort_of(updates, (4, 3, 2, 1, 0)), state).reliability
    flat = name == "icov_vb"  # rounding moves where the ascent of its flat bound ends
    assert mixed == pytest.approx(straight, abs=1e-2 if flat else 1e-3)


def test_rounds_count_by_their_weight():
    """Squared distances of clients that are in all rounds are weighted means over the rounds."""
    (_, first), (_, second) = independent([0.2, 0.4, 1.0], 50), independent([0.2, 0.4, 1.0], 50, seed=5)
    _, state = inferred.average_rounds({}, (0, 1, 2), distances_of(first), 1.0)
    average, _ = inferred.average_rounds(state, (0, 1, 2), distances_of(second), 1.0, weight=3.0)
    torch.testing.assert_close(average, (distances_of(first) + 3 * distances_of(second)) / 4)


def test_a_round_counts_by_the_fused_update_of_the_round_before():
    """Lengths 1, 4, 9 and 16, of which the lower quartile is 4: a fused update of length 3 counts three quarters."""
    distances = distances_of(torch.diag(torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)) * 2)
    assert inferred.progress(distances, None) == 1.0
    assert inferred.progress(distances, 3.0) == pytest.approx(0.75)
    assert inferred.progress(distances, 100.0) == 1.0
    assert 0 < inferred.progress(distances, 0.0) < 1e-6
    rule, (_, updates) = get_rule("icov_vb"), independent([0.2, 0.3, 0.5, 1.0], 60)
    first = rule.apply(cohort_of(updates, range(4)), rule.init())
    assert first.state["moved"] == pytest.approx(float(first.posterior.mean["w"].square().mean()))
    second = rule.apply(cohort_of(updates, range(4)), first.state)
    expected = inferred.progress(distances_of(updates), first.state["moved"])
    assert second.state["rounds"] - first.state["rounds"] == pytest.approx(expected)
    assert expected < 1


def test_products_that_no_points_have_are_mended_and_true_ones_kept():
    updates = normal(5, 40)
    true = updates @ updates.T
    torch.testing.assert_close(inferred.positive_semidefinite(true), true)
    broken = true.clone()
    broken[0, 1] = broken[1, 0] = 100.0
    mended = inferred.positive_semidefinite(broken)
    assert float(torch.linalg.eigvalsh(mended).min()) > -1e-9
    torch.testing.assert_close(mended.diagonal(), true.diagonal())


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("far", [3.0, 1e9])
def test_a_client_that_misses_a_round_is_not_blamed_for_another_ones_outlier(name, far):
    """Only the last client is bad, and only in the first round; client 1 is away in the second."""
    rule, state = get_rule(name), get_rule(name).init()
    for round, present in enumerate([range(7), (0, 2, 3, 4, 5, 6), range(7)]):
        truth, updates = independent([0.3] * len(present), 2000, seed=round)
        if round == 0:
            updates[-1] = far * normal(2000, seed=99)
        fused = rule.apply(cohort_of(updates, present), state)
        state = fused.state
    honest = [fused.reliability[client] for client in range(6)]
    assert min(honest) > 0.1 or name in ("ivar_mle", "icov_mle")  # whose shares differ a lot anyway
    assert not set(fused.excluded) & set(range(6)) or name in ("ivar_mle", "icov_mle")
    assert float((fused.posterior.mean["w"] - truth).square().mean()) < 0.1


@pytest.mark.slow
@pytest.mark.parametrize("name", RULES)
def test_updates_that_shrink_do_not_make_those_who_were_away_look_bad(name):
    """Rounds with ever smaller updates and noise, three of five clients in each."""
    rule, state = get_rule(name), get_rule(name).init()
    for round in range(12):
        present = sorted({(round * 3 + step * 2) % 5 for step in range(4)})
        truth, updates = independent([0.3] * len(present), 3000, seed=round)
        fused = rule.apply(cohort_of(updates * 0.8**round, present), state)
        state = fused.state
        error = float((fused.posterior.mean["w"] / 0.8**round - truth).square().mean())
        assert error < 0.1


ROBUST = [
    *("geometric_median", "coordinate_median", "krum", "multi_krum", "trimmed_mean"),
    *("nearest_neighbour_mixing", "norm_clipping"),
]
SENT = {
    "one client": normal(1, 30),
    "identical clients": normal(1, 30).expand(5, 30),
    "identical but one": torch.cat([normal(1, 30).expand(4, 30), normal(1, 30, seed=2)]),
    "two clients": normal(2, 30),
    "more clients than parameters": normal(8, 2),
    "a client equal to the consensus": torch.cat([normal(6, 30), normal(6, 30).mean(0, keepdim=True)]),
    "updates of 1e30": torch.cat([normal(5, 30), 1e30 * normal(2, 30, seed=1)]),
    "an update of 1e18": torch.cat([normal(6, 30), 1e18 * normal(1, 30, seed=1)]),
    "updates of 1e-30": 1e-30 * normal(5, 30),
    "no update at all": torch.zeros(5, 30, dtype=torch.float64),
    "one free rider": torch.cat([normal(4, 30), torch.zeros(1, 30, dtype=torch.float64)]),
    "one parameter": normal(4, 1),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", [*RULES, *ROBUST])
@pytest.mark.parametrize(("kind", "dtype"), list(zip(SENT, [torch.float32, torch.float64] * len(SENT))))
def test_bad_input_has_a_defined_answer(name, kind, dtype):
    sent = SENT[kind].to(dtype)
    previous = GaussianPosterior.point_mass({"w": torch.zeros(sent.shape[1], dtype=dtype)})
    fused = fuse(name, point_masses(sent), previous=previous).mean["w"]
    assert bool(torch.isfinite(fused).all())
    low, high = sent.amin(0), sent.amax(0)
    if kind in ("one client", "identical clients"):
        torch.testing.assert_close(fused, sent[0])
    elif "of 1e" in kind and "-" not in kind and name != "trimmed_mean":  # whose default may trim too few
        assert float(fused.abs().max()) < 10
    elif name not in ("icov_mle", "icov_vb"):  # their coefficients may be negative
        slack = 1e-6 * sent.abs().max() + 1e-30
        assert bool((fused >= torch.minimum(low, torch.zeros(()).to(dtype)) - slack).all())
        assert bool((fused <= torch.maximum(high, torch.zeros(()).to(dtype)) + slack).all())


@pytest.mark.parametrize("name", RULES)
def test_the_variance_is_the_median_weighted_by_reliability(name):
    _, updates = independent([0.1, 0.1, 5.0], 500)
    pairs = zip(updates, (1.0, 3.0, 100.0), strict=True)
    clients = [GaussianPosterior({"w": row}, {"w": torch.full_like(row, variance)}) for row, variance in pairs]
    weights = torch.full((3,), 1 / 3, dtype=torch.float64)
    fused = get_rule(name).apply(Cohort(clients, weights, origin(500), (0, 1, 2)), {})
    shares = [fused.reliability[client] for client in range(3)]
    expected = 1.0 if shares[0] > 0.5 else 3.0
    assert shares[2] < 0.5
    assert shares[0] != 0.5
    torch.testing.assert_close(fused.posterior.variance["w"], torch.full_like(updates[0], expected))


@pytest.mark.parametrize(("by", "then"), [("ivar_vb", "linear_pool"), ("icov_mle", "wb"), ("multi_krum", "rklb")])
def test_reliability_drives_another_rule(by, then):
    """As if the inferred shares were the clients' weights."""
    _, updates = independent([0.1, 0.2, 0.1, 5.0], 200)
    variances = normal(4, 200, seed=8).square() + 0.1
    clients = [GaussianPosterior({"w": m}, {"w": v}) for m, v in zip(updates, variances, strict=True)]
    cohort = Cohort(clients, torch.full((4,), 0.25, dtype=torch.float64), origin(200), (0, 1, 2, 3))
    shares = get_rule(by).apply(cohort, get_rule(by).init()).reliability
    expected = fuse(then, clients, [shares[client] for client in range(4)])
    rule = Reliability(by, then=then)
    fused = rule.apply(cohort, rule.init())
    assert fused.reliability == pytest.approx(shares)
    torch.testing.assert_close(fused.posterior.mean["w"], expected.mean["w"])
    torch.testing.assert_close(fused.posterior.variance["w"], expected.variance["w"])
    again = fuse(rule, clients, previous=origin(200))
    torch.testing.assert_close(again.mean["w"], expected.mean["w"])


@pytest.mark.parametrize("name", ["ivar_vb", "ivar_mle", "icov_vb"])
@pytest.mark.parametrize("jitter", [0.0, 1e-3])
def test_colluders_who_send_the_same_count_as_one(name, jitter):
    """Inner product manipulation by three of ten: −0.1 times the mean of the honest updates."""
    _, updates = independent([1.0] * 7, 500)
    lie = -0.1 * updates.mean(0)
    lies = lie + jitter * lie.norm() / 500**0.5 * torch.randn(3, 500, generator=torch.Generator().manual_seed(0))
    clients = point_masses(torch.cat([lies, updates]))
    weights = torch.full((10,), 0.1, dtype=torch.float64)
    fused = get_rule(name).apply(Cohort(clients, weights, origin(500), tuple(range(10))), {})
    once = get_rule(name).apply(Cohort(clients[2:], torch.full((8,), 1 / 8), origin(500), tuple(range(2, 10))), {})
    shares = [fused.reliability[client] for client in range(10)]
    assert shares[0] == shares[1] == shares[2]
    assert sum(shares[:3]) == pytest.approx(once.reliability[2], rel=0.05, abs=1e-3)
    torch.testing.assert_close(fused.posterior.mean["w"], once.posterior.mean["w"], rtol=0, atol=0.02)


IVAR = ("ivar_mle", "ivar_vb")
NOISE = [0.3, 0.5, 0.8, 1.0, 1.5, 2.0]


def evidence(distances, noise, signal):
    """Log evidence per parameter, of N(x; 0, τ² 11ᵀ + diag σ²)."""
    covariance = signal + torch.diag(noise)
    quadratic = (torch.linalg.inv(covariance) * inferred.gram_about_last(distances)).sum()
    constant = len(noise) * torch.log(torch.tensor(2 * torch.pi, dtype=torch.float64))
    return -(constant + torch.logdet(covariance) + quadratic) / 2


def slow_geometric_median(x):
    y = x.mean(0)
    for _ in range(5000):
        weights = 1 / (x - y).norm(dim=1)
        y = (weights[:, None] * x).sum(0) / weights.sum()
    return y


def slow_mle(x):
    """Eq. (6) and (7) on the data themselves, with the floor that belongs to the method."""
    y = slow_geometric_median(x)
    floor = 0.01 * (x - y).square().mean(1).sort().values[len(x) // 4]
    for _ in range(2):
        variance = (x - y).square().mean(1).clamp_min(floor)
        y = (x / variance[:, None]).sum(0) / (1 / variance).sum()
    return y


def slow_vb(x):
    """Eq. (10) to (13) on the data themselves."""
    y = slow_geometric_median(x)
    signal, noise = y.square().mean(), (x - y).square().mean(1)
    for _ in range(5000):
        posterior_variance = 1 / (1 / signal + (1 / noise).sum())
        y = posterior_variance * (x / noise[:, None]).sum(0)
        signal = posterior_variance + y.square().mean()
        noise = posterior_variance + (x - y).square().mean(1)
    return y


@pytest.mark.parametrize(("rule", "reference"), [("ivar_mle", slow_mle), ("ivar_vb", slow_vb)])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("shift", [0.0, 1e6])
def test_agrees_with_the_slow_reference(rule, reference, seed, shift):
    _, updates = independent(NOISE, 400, seed)
    fused = fuse(rule, point_masses(updates + shift), previous=origin(400, shift))
    torch.testing.assert_close(fused.mean["w"] - shift, reference(updates), rtol=0, atol=1e-5)


@pytest.mark.parametrize("rule", IVAR)
@pytest.mark.parametrize("seed", range(3))
def test_order_shift_and_scale_do_not_matter_far_from_saddles(rule, seed):
    _, updates = independent(NOISE, 400, seed)
    fused = fuse(rule, point_masses(updates), previous=origin(400)).mean["w"]
    moved = fuse(rule, point_masses(3 - 2 * updates.flip(0)), previous=origin(400, 3)).mean["w"]
    torch.testing.assert_close((3 - moved) / 2, fused, rtol=0, atol=1e-9)


@given(st.integers(0, 1000), st.integers(1, 8), st.integers(1, 50), st.floats(-3, 3))
@settings(deadline=None, max_examples=50)
def test_evidence_never_falls(seed, clients, size, order):
    spread = 10 ** (order * normal(clients, 1, seed=seed))
    distances = distances_of(normal(size, seed=seed + 1) + spread * normal(clients, size, seed=seed + 2))
    noise, signal = distances[:-1, -1] + 1e-3, distances[:-1, -1].mean() + 1e-3
    reached = [float(evidence(distances, noise, signal))]
    for _ in range(30):
        _, noise, signal = inferred.coordinate_ascent(distances, noise, signal)
        reached.append(float(evidence(distances, noise, signal)))
    assert all(later >= earlier - 1e-9 * abs(earlier) for earlier, later in pairwise(reached))


def test_where_it_stops_the_evidence_is_stationary():
    _, updates = independent(NOISE, 300)
    distances = distances_of(updates)
    noise, signal = distances[:-1, -1], distances[:-1, -1].mean()
    for _ in range(3000):
        _, noise, signal = inferred.coordinate_ascent(distances, noise, signal)
    free = torch.cat([noise, signal[None]]).log().requires_grad_()
    evidence(distances, free[:-1].exp(), free[-1].exp()).backward()
    torch.testing.assert_close(free.grad, torch.zeros(len(free), dtype=torch.float64), rtol=0, atol=1e-8)


def test_evidence_is_the_density_of_the_updates():
    _, updates = independent(NOISE, 5)
    noise, signal = torch.tensor(NOISE, dtype=torch.float64) ** 2, torch.tensor(0.7, dtype=torch.float64)
    density = torch.distributions.MultivariateNormal(torch.zeros(6, dtype=torch.float64), signal + torch.diag(noise))
    expected = density.log_prob(updates.T).mean()
    torch.testing.assert_close(evidence(distances_of(updates), noise, signal), expected)


def test_shares_approach_the_oracle_as_parameters_grow():
    precision = 1 / torch.tensor(NOISE, dtype=torch.float64) ** 2
    oracle = precision / precision.sum()
    worst = []
    for size in (100, 10_000, 1_000_000):
        _, updates = independent(NOISE, size)
        _, shares = InverseVarianceVB().infer(distances_of(updates), size)
        worst.append(float((shares - oracle).abs().max()))
    assert worst[0] > worst[1] > worst[2]
    assert worst[2] < 0.003


def test_maximum_likelihood_believes_the_best_client_too_much():
    """Its likelihood is unbounded there; few iterations or the floor are what stops it."""
    _, updates = independent(NOISE, 10_000)
    shares = InverseVarianceMLE(max_iterations=1000).infer(distances_of(updates), 10_000)[1]
    assert shares[0] > InverseVarianceMLE().infer(distances_of(updates), 10_000)[1][0]
    assert shares[0] > 1.3 * InverseVarianceVB().infer(distances_of(updates), 10_000)[1][0]
    assert shares[0] < 0.99
    assert InverseVarianceMLE(floor=1e-6, max_iterations=1000).infer(distances_of(updates), 10_000)[1][0] > 0.99


def test_prior_pulls_an_update_that_noise_drowns_to_the_previous_model():
    _, updates = independent([30.0] * 3, 2000)
    fused = fuse("ivar_vb", point_masses(updates), previous=origin(2000))
    assert fused.mean["w"].norm() < 0.2 * updates.mean(0).norm()
