"""Inverse-covariance weighting: the free energy, the equations of the source, and clients that share data."""

from itertools import pairwise

import pytest
import torch

from lightning_fedbayes import GaussianPosterior, fuse
from lightning_fedbayes.core.errors import FusionError
from lightning_fedbayes.fusion import Cohort, InverseCovarianceMLE, InverseCovarianceVB
from lightning_fedbayes.fusion import inverse_covariance as icov
from lightning_fedbayes.fusion.inferred import centred_products

from .untrusted import distances_of, error, independent, normal, origin, overlapping, point_masses

as_printed = icov.as_printed
FOUR_SHARE = [{*range(20), 100 + client} for client in range(4)] + [set(range(40, 60)), set(range(60, 80))]
TWO_GROUPS = [
    *({*range(20), 100 + client} for client in range(4)),
    *({*range(20, 40), 110 + client} for client in range(2)),
    set(range(40, 60)),
    set(range(60, 80)),
]


def some_latent(clients=5, count=2):
    root = 0.3 * normal(clients, count, count, seed=1)
    return icov.Latent(
        features=normal(clients, count, seed=2),
        spread=root @ root.mT + 0.1 * torch.eye(count, dtype=torch.float64),
        feature_variance=torch.tensor(0.8, dtype=torch.float64),
        noise=normal(clients, seed=3).square() + 0.2,
        signal=torch.tensor(1.5, dtype=torch.float64),
    )


def test_free_energy_is_the_expected_log_joint_plus_the_entropies():
    """Term by term, from the definition, with one q(y, u) for each of three parameters."""
    latent, size = some_latent(), 3
    x = normal(5, size, seed=4)
    precision, rows = icov.posterior_of_truth(latent)
    covariance = torch.linalg.inv(precision)
    total = torch.zeros((), dtype=torch.float64)
    for i in range(size):
        mean = covariance @ (rows.T @ x[:, i])
        second = covariance + torch.outer(mean, mean)
        for j in range(5):
            z = torch.cat([torch.ones(1, dtype=torch.float64), latent.features[j]])
            square = z @ second @ z + (latent.spread[j] * second[1:, 1:]).sum()
            residual = x[j, i] ** 2 - 2 * x[j, i] * (z @ mean) + square
            total -= (torch.log(2 * torch.pi * latent.noise[j]) + residual / latent.noise[j]) / 2
        total -= (torch.log(2 * torch.pi * latent.signal) + second[0, 0] / latent.signal) / 2
        total -= (2 * torch.log(torch.tensor(2 * torch.pi)) + second[1:, 1:].trace()) / 2
        total += torch.distributions.MultivariateNormal(mean, covariance).entropy()
    for j in range(5):
        q = torch.distributions.MultivariateNormal(latent.features[j], latent.spread[j])
        covariance = latent.feature_variance * torch.eye(2, dtype=torch.float64)
        prior = torch.distributions.MultivariateNormal(torch.zeros(2, dtype=torch.float64), covariance)
        total -= torch.distributions.kl_divergence(q, prior)
    torch.testing.assert_close(icov.free_energy(latent, x @ x.T / size, size) * size, total)


def test_free_energy_without_features_is_the_log_density():
    latent, x = some_latent(count=0), normal(5, 7, seed=4)
    covariance = latent.signal + torch.diag(latent.noise)
    density = torch.distributions.MultivariateNormal(torch.zeros(5, dtype=torch.float64), covariance)
    torch.testing.assert_close(icov.free_energy(latent, x @ x.T / 7, 7), density.log_prob(x.T).mean())


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("latent", [1, 2, 4])
def test_free_energy_never_falls(seed, latent):
    _, updates, _ = overlapping(FOUR_SHARE, 300, seed)
    scale, model, least = InverseCovarianceVB(latent).begin(distances_of(updates))
    products = updates @ updates.T / 300 / scale
    reached = []
    for _ in range(4):
        for step in (
            lambda model: icov.update_spread(model, products, 300),
            lambda m: icov.climb(m, products, 300, least, 5),
        ):
            model = step(model)
            reached.append(float(icov.free_energy(model, products, 300)))
    assert all(later >= earlier - 1e-10 for earlier, later in pairwise(reached))


def test_features_satisfy_their_equation_where_the_search_ends():
    r"""Eq. (19): v_j = Ψ_j σ_j^{-2} Σ_i E[u_i (x_ij − y_i)], with y and u jointly Gaussian."""
    size = 5000
    _, updates, _ = overlapping(FOUR_SHARE, size)
    rule = InverseCovarianceVB(1)
    scale, model, least = rule.begin(distances_of(updates))
    products = updates @ updates.T / size / scale
    for _ in range(20):
        model = icov.climb(icov.update_spread(model, products, size), products, size, least, 100)
    model = icov.update_spread(model, products, size)
    precision, rows = icov.posterior_of_truth(model)
    inverse = torch.linalg.inv(precision)
    towards = inverse @ rows.T
    with_data = (towards @ products)[1:]
    with_truth = (inverse + towards @ products @ towards.T)[1:, 0]
    expected = model.spread @ ((with_data.T - with_truth) * size / model.noise[:, None])[:, :, None]
    torch.testing.assert_close(expected[..., 0], model.features, rtol=1e-3, atol=1e-3)


def slow_printed(x, features, steps):
    """Eq. (14) to (23) one after the other, on the data themselves: every parameter is a task."""
    clients, size = x.shape
    count = features.shape[1]
    y_variance = u_variance = v_variance = noise = 1.0
    u, v = torch.zeros(size, count, dtype=torch.float64), features
    spread_v = torch.eye(count, dtype=torch.float64).repeat(clients, 1, 1)
    for _ in range(steps):
        y_spread = 1 / (1 / y_variance + sum(1 / noise for _ in x))
        y = y_spread * sum((x[j] - u @ v[j]) / noise for j in range(clients))
        squares = sum((spread_v[j] + torch.outer(v[j], v[j])) / noise for j in range(clients))
        spread_u = torch.linalg.inv(torch.eye(count, dtype=torch.float64) / u_variance + squares)
        u = sum(torch.outer(x[j] - y, v[j]) / noise for j in range(clients)) @ spread_u
        moments = size * spread_u + u.T @ u
        spread_v = torch.stack(
            [torch.linalg.inv(torch.eye(count, dtype=torch.float64) / v_variance + moments / noise) for _ in x]
        )
        v = torch.stack([spread_v[j] @ u.T @ (x[j] - y) / noise for j in range(clients)])
        y_variance = y_spread + float((y**2).mean())
        u_variance = float(moments.trace()) / (count * size)
        v_variance = (
            sum(float((spread_v[j] + torch.outer(v[j], v[j])).trace()) for j in range(clients)) / count / clients
        )
        total = 0.0
        for j in range(clients):
            of_both = float((moments * (spread_v[j] + torch.outer(v[j], v[j]))).sum())
            residual = x[j] - y
            total += size * y_spread + residual @ residual - 2 * residual @ (u @ v[j]) + of_both
        noise = float(total) / (clients * size)
    return u_variance * v @ v.T + noise * torch.eye(clients, dtype=torch.float64)


@pytest.mark.parametrize("steps", [1, 2, 30])
def test_printed_equations_on_products_are_those_on_the_data(steps):
    _, updates = independent([0.2, 0.3, 0.5, 0.8, 2.0], 40)
    features = normal(5, 2, seed=7)
    found = icov.as_printed(updates @ updates.T / 40, 40, features, steps)
    torch.testing.assert_close(found, slow_printed(updates, features, steps))


def test_the_printed_rule_starts_from_standard_normal_features(monkeypatch):
    _, updates = independent([0.2, 0.3, 0.5, 0.8, 2.0], 40)
    features = torch.randn(5, 2, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    expected = icov.least_squares(slow_printed(updates, features, 1)) @ updates
    monkeypatch.setattr(icov, "as_printed", lambda *start: as_printed(*start, steps=1))  # before the start is forgotten
    found = fuse(InverseCovarianceVB(2, printed=True, seed=3), point_masses(updates), previous=origin(40))
    torch.testing.assert_close(found.flatten()[0].double(), expected, rtol=1e-4, atol=1e-5)


def test_printed_equations_need_a_feature_for_each_adversary():
    """One noise variance for all: noise without a feature of its own counts as much as anybody."""
    truth, updates = independent([0.1] * 5, 8000)
    sent = point_masses(torch.cat([updates, 10 * normal(5, 8000, seed=9)]))
    four, five = (
        error(fuse(InverseCovarianceVB(count, printed=True), sent, previous=origin(8000)), truth) for count in (4, 5)
    )
    assert five < 0.5 * four


@pytest.mark.parametrize(("shares", "latent"), [(FOUR_SHARE, 1), (FOUR_SHARE, 2), (TWO_GROUPS, 2)])
def test_clients_that_share_data_count_once(shares, latent):
    """Proposition 2: close to generalised least squares with the true covariance, eq. (5), and far from ivar."""
    size = 20_000
    truth, updates, covariance = overlapping(shares, size)
    clients, previous = point_masses(updates), origin(size)
    oracle = float((icov.least_squares(covariance) @ updates - truth).square().mean())
    inferred = error(fuse(InverseCovarianceVB(latent), clients, previous=previous), truth)
    assert inferred < 1.06 * oracle
    assert 2 * inferred < error(fuse("ivar_vb", clients, previous=previous), truth)
    assert inferred < 0.85 * error(fuse("fedavg", clients), truth)


@pytest.mark.parametrize("variance", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("seed", range(3))
def test_four_of_eight_clients_share_an_error(variance, seed):
    """However large it is, and though it pulls the geometric median half of the way."""
    size, noise = 3000, torch.linspace(0.1, 0.5, 8, dtype=torch.float64)
    group = torch.tensor([1.0] * 4 + [0.0] * 4, dtype=torch.float64)
    truth, shared, own = normal(size, seed=seed), normal(size, seed=100 + seed), normal(8, size, seed=200 + seed)
    updates = truth + variance**0.5 * group[:, None] * shared + noise.sqrt()[:, None] * own
    best = icov.least_squares(variance * group[:, None] * group + torch.diag(noise)) @ updates
    oracle = float((best - truth).square().mean())
    reached = error(fuse("icov_vb", point_masses(updates), previous=origin(size)), truth)
    assert reached < 1.1 * oracle
    assert reached < float((updates.mean(0) - truth).square().mean())


def regression(rule, shared, seed, rounds=8):
    """Squared error of linear regression by five parties, three with the same data; ``rule`` None: the average."""
    inputs, truth = normal(750, 50, seed=seed), normal(50, seed=1000 + seed)
    labels, own = inputs @ truth + shared * normal(750, seed=2000 + seed), normal(5, 250, seed=3000 + seed)
    windows = [slice(begin, begin + 250) for begin in (0, 0, 0, 250, 500)]
    parties = [(inputs[each], labels[each] + (k + 1) * own[k]) for k, each in enumerate(windows)]
    at, state = torch.zeros(50, dtype=torch.float64), {}
    for _ in range(rounds):
        sent = torch.stack([at - 0.5 * x.T @ (x @ at - t) / 250 for x, t in parties])
        if rule is None:
            at = sent.mean(0)
            continue
        weights, previous = torch.full((5,), 0.2, dtype=torch.float64), GaussianPosterior.point_mass({"w": at})
        fused = rule.apply(Cohort(point_masses(sent), weights, previous, tuple(range(5))), state)
        at, state = fused.posterior.mean["w"], fused.state
    return float((at - truth).square().sum())


@pytest.mark.slow
@pytest.mark.parametrize(("shared", "rounds"), [(1, 8), (2, 8), (5, 8), (10, 8), (20, 8), (40, 8), (20, 80), (40, 80)])
def test_regression_on_the_same_data_is_no_worse_than_the_average(shared, rounds):
    """Three parties who agree look precise. In 50 parameters only their lengths could show that they are not."""
    pairs = [
        (regression(InverseCovarianceVB(), shared, seed, rounds), regression(None, shared, seed, rounds))
        for seed in range(3 if rounds == 8 else 1)
    ]
    assert sum(reached for reached, _ in pairs) <= 1.001 * sum(average for _, average in pairs)


@pytest.mark.parametrize(("clients", "liars", "size"), [(5, 2, 300), (5, 2, 3000), (10, 5, 3000)])
def test_noise_of_honest_length_from_half_of_the_clients_leaves_the_average(clients, liars, size):
    """Its products are those of an error that the others share, so that nothing tells who is right."""
    truth, updates = independent([0.5] * clients, size)
    updates[:liars] = 1.5**0.5 * normal(liars, size, seed=9)
    average = float((updates.mean(0) - truth).square().mean())
    assert error(fuse("icov_vb", point_masses(updates), previous=origin(size)), truth) < 1.01 * average


@pytest.mark.slow
@pytest.mark.parametrize("clients", [5, 10])
@pytest.mark.parametrize(
    "attack",
    [
        lambda u: -u,
        lambda u: 0 * u,
        lambda u: 10 * u,
        lambda u: normal(*u.shape, seed=9),
        lambda u: 3 * normal(*u.shape, seed=9),
        lambda u: 1000 * normal(*u.shape, seed=9),
    ],
)
def test_a_few_liars_cost_next_to_nothing(clients, attack):
    """The opposite, nothing, too much, and noise of any length, from one of five or three of ten."""
    size, liars = 3000, 1 if clients == 5 else 3
    truth, updates = independent([0.5] * clients, size)
    honest = float((updates[liars:].mean(0) - truth).square().mean())
    updates[:liars] = attack(updates[:liars])
    assert error(fuse("icov_vb", point_masses(updates), previous=origin(size)), truth) < 1.1 * honest


@pytest.mark.parametrize(("size", "counts"), [(700, True), (1000, False)])
def test_a_client_is_opposite_from_three_standard_errors_on(size, counts):
    """Its cosine with the average is -0.1: 2.7 standard errors of 700 parameters, 3.2 of 1,000."""
    products = torch.tensor([[1.0, 1.0, -0.582], [1.0, 1.0, -0.582], [-0.582, -0.582, 1.0]], dtype=torch.float64)
    assert float(products[2].sum() / products.sum().sqrt()) == pytest.approx(-0.1, abs=1e-3)
    assert (icov.bounded_average(products, size)[2] > 0) == counts


def products_of(gains, noise, shared=0.0, first=0):
    """Expected products of updates g y + e, y of variance 1; the ``first`` clients share an error of that variance."""
    group = (torch.arange(len(gains)) < first).to(torch.float64)
    gains = torch.tensor(gains, dtype=torch.float64)
    return gains[:, None] * gains + shared * group[:, None] * group + noise * torch.eye(len(gains), dtype=torch.float64)


@pytest.mark.parametrize(
    ("gains", "shared", "first", "size", "expected"),
    [
        ([1.0] * 4 + [0.0], 0.0, 0, 1000, [4]),
        ([1.0] * 4 + [-1.0] * 2, 0.0, 0, 1000, [4, 5]),
        ([1.0] * 4 + [0.6], 0.0, 0, 10**9, []),
        ([1.0] * 4 + [0.4], 0.0, 0, 10**9, [4]),
        ([1.0] * 4 + [0.0], 0.0, 0, 20, []),
        ([1.0] * 5, 10.0, 3, 10**9, []),
    ],
    ids=["noise", "opposite", "more than half", "less than half", "few parameters", "three share an error"],
)
def test_a_client_lacks_y_where_most_say_so(gains, shared, first, size, expected):
    products = products_of(gains, 0.5, shared, first)
    found = icov.lacking(products, torch.ones(len(gains), dtype=torch.float64), size)
    assert found.nonzero().flatten().tolist() == expected


RIGHT = torch.tensor([0.0] * 4 + [0.25] * 4, dtype=torch.float64)
"""Coefficients that trust the last four of eight clients."""


@pytest.mark.parametrize(
    ("case", "products"),
    [
        ("share", products_of([1.0] * 8, 0.3, shared=2.0, first=4)),
        ("share, and own noise", products_of([1.0] * 8, 3.0, shared=2.0, first=4)),
        ("fewer steps", products_of([1.0] * 4 + [0.5] * 4, 0.3)),
        ("noise", products_of([1.0] * 4 + [0.0] * 4, 1.0)),
        ("opposite", products_of([1.0] * 4 + [-1.0] * 4, 0.3)),
        ("longer", products_of([3.0] * 4 + [1.0] * 4, 0.3)),
        ("one error of their own", products_of([1.0] * 8, 0.3, shared=2.0, first=4).flip(0, 1)),
    ],
)
def test_only_those_who_hold_all_of_y_are_plausible(case, products):
    assert icov.plausible(RIGHT, products, 10**6) == case.startswith("share")


@pytest.mark.parametrize(("shared", "expected"), [(0.5, True), (1.0, False)])
def test_fewer_than_half_may_leave_four_fifths_of_the_average_and_no_less(shared, expected):
    """Five of eight share an error: the three others leave 0.84 of the average's update, or 0.73."""
    three = torch.tensor([0.0] * 5 + [1 / 3] * 3, dtype=torch.float64)
    assert icov.plausible(three, 10 * products_of([1.0] * 8, 0.3, shared, first=5), 10**9) == expected


@pytest.mark.parametrize("size", [100, 400])
def test_doubt_is_the_standard_error_of_a_regression(size):
    """The part of the way is a regression of the average on its difference to the estimate, here the truth."""
    truth, apart = normal(20_000, size, seed=1), 0.5 * normal(20_000, size, seed=2)
    sampled = ((truth + apart) * apart).sum(1) / apart.square().sum(1)
    products = torch.tensor([[1.0, 1.0], [1.0, 1.25]], dtype=torch.float64)
    first, second = torch.eye(2, dtype=torch.float64)
    part = float(icov.as_far_as_certain(second, first, products, size)[0])
    assert 1 - part == pytest.approx(float(sampled.std()), rel=0.03)


def test_standard_error_of_a_form_of_products():
    form = torch.tensor([[0.0, 1.0, -0.5], [1.0, 0.2, 0.0], [-0.5, 0.0, -0.3]], dtype=torch.float64)
    root, size, draws = normal(3, 3, seed=1), 40, 20_000
    updates = root @ normal(draws, 3, size, seed=2)
    sampled = ((updates @ updates.mT / size) * form).sum((1, 2)).std()
    assert icov.standard_error(form, root @ root.T, size) == pytest.approx(float(sampled), rel=0.02)


def test_error_approaches_the_oracle_as_parameters_grow():
    excess = []
    for size in (300, 3000, 30_000):
        _, updates, covariance = overlapping(FOUR_SHARE, size)
        fused = fuse(InverseCovarianceVB(1), point_masses(updates), previous=origin(size))
        excess.append(error(fused, icov.least_squares(covariance) @ updates))
    assert excess[0] > excess[1] > excess[2]
    assert excess[2] < 5e-4


BOUNDS = {"icov_vb": 0.1, "icov_mle": 0.01, "ivar_vb": 0.0026, "ivar_mle": 0.0026}


@pytest.mark.parametrize(("rule", "bound"), BOUNDS.items())
@pytest.mark.parametrize("adversaries", [1, 5, 10])
def test_noise_of_adversaries_is_seen(rule, bound, adversaries):
    """The average is off by up to 50, and by 0.002 without them. That they lack y pulls ``icov_vb`` a little to 0."""
    truth, updates = independent([0.1] * 5, 8000)
    sent = torch.cat([updates, 10 * normal(adversaries, 8000, seed=9)])
    assert error(fuse(rule, point_masses(sent), previous=origin(8000)), truth) < bound


@pytest.mark.parametrize("rule", ["icov_vb", "icov_mle"])
def test_order_and_shift_do_not_matter(rule):
    _, updates, _ = overlapping(FOUR_SHARE, 2000)
    fused = fuse(rule, point_masses(updates), previous=origin(2000)).mean["w"]
    mixed = fuse(rule, point_masses(updates[[3, 0, 5, 1, 4, 2]]), previous=origin(2000)).mean["w"]
    moved = fuse(rule, point_masses(64 * updates + 100), previous=origin(2000, 100.0)).mean["w"]
    torch.testing.assert_close(mixed, fused, rtol=0, atol=1e-3)
    torch.testing.assert_close((moved - 100) / 64, fused, rtol=0, atol=1e-3)


def test_maximum_likelihood_never_falls_and_its_gradients_vanish():
    """Eq. (9a) and (9b): G V = 0 and, with a noise per client, diag(G) = 0, for G = Φ⁻¹ΔΦ⁻¹ − Φ⁻¹."""
    _, updates, _ = overlapping(FOUR_SHARE, 2000)
    shares = torch.full((6,), 1 / 6, dtype=torch.float64)
    residual = centred_products(distances_of(updates)[:-1, :-1], shares) + 0.01 * torch.eye(6, dtype=torch.float64)
    features, noise, reached = 0.1 * normal(6, 1), residual.diagonal().clone(), []
    for _ in range(3000):
        features, noise = icov.expectation_maximisation(features, noise, residual)
        covariance = features @ features.T + torch.diag(noise)
        reached.append(float(-torch.logdet(covariance) - (torch.linalg.inv(covariance) * residual).sum()))
    assert all(later >= earlier - 1e-10 for earlier, later in pairwise(reached))
    inverse = torch.linalg.inv(covariance)
    gradient = inverse @ residual @ inverse - inverse
    torch.testing.assert_close(gradient @ features, torch.zeros_like(features), rtol=0, atol=1e-6)
    torch.testing.assert_close(gradient.diagonal(), torch.zeros_like(noise), rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", [InverseCovarianceVB, InverseCovarianceMLE])
@pytest.mark.parametrize("wrong", [{"latent": -1}, {"floor": 0.0}, {"memory": 1.5}])
def test_arguments_are_checked(kind, wrong):
    with pytest.raises(FusionError, match=next(iter(wrong))):
        kind(**wrong)
