"""Inverse-covariance weighting: the free energy, the equations of the source, and clients that share data."""

from itertools import pairwise

import pytest
import torch

from lightning_fedbayes import FusionError, fuse
from lightning_fedbayes.fusion import InverseCovarianceMLE, InverseCovarianceVB
from lightning_fedbayes.fusion.inferred import centred_products, gram_about_last
from lightning_fedbayes.fusion.inverse_covariance import confirmed, expectation_maximisation, standard_error
from lightning_fedbayes.fusion.latent_noise import (
    Latent,
    climb,
    free_energy,
    least_squares,
    posterior_of_truth,
    update_spread,
)

from .untrusted import distances_of, error, independent, normal, origin, overlapping, point_masses

FOUR_SHARE = [{*range(20), 100 + client} for client in range(4)] + [set(range(40, 60)), set(range(60, 80))]
TWO_GROUPS = [
    *({*range(20), 100 + client} for client in range(4)),
    *({*range(20, 40), 110 + client} for client in range(2)),
    set(range(40, 60)), set(range(60, 80)),
]


def some_latent(clients=5, count=2):
    root = 0.3 * normal(clients, count, count, seed=1)
    return Latent(
        features=normal(clients, count, seed=2), spread=root @ root.mT + 0.1 * torch.eye(count, dtype=torch.float64),
        feature_variance=torch.tensor(0.8, dtype=torch.float64), noise=normal(clients, seed=3).square() + 0.2,
        signal=torch.tensor(1.5, dtype=torch.float64),
    )


def log_normal(x, mean, covariance):
    return torch.distributions.MultivariateNormal(mean, covariance).log_prob(x)


def test_free_energy_is_the_expected_log_joint_plus_the_entropies():
    """Term by term, from the definition, with one q(y, u) for each of three parameters."""
    latent, size = some_latent(), 3
    x = normal(5, size, seed=4)
    precision, rows = posterior_of_truth(latent)
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
        prior = torch.distributions.MultivariateNormal(
            torch.zeros(2, dtype=torch.float64), latent.feature_variance * torch.eye(2, dtype=torch.float64)
        )
        total -= torch.distributions.kl_divergence(q, prior)
    torch.testing.assert_close(free_energy(latent, x @ x.T / size, size) * size, total)


def test_free_energy_without_features_is_the_log_density():
    latent, x = some_latent(count=0), normal(5, 7, seed=4)
    expected = log_normal(x.T, torch.zeros(5, dtype=torch.float64), latent.signal + torch.diag(latent.noise)).mean()
    torch.testing.assert_close(free_energy(latent, x @ x.T / 7, 7), expected)


def test_free_energy_with_known_features_is_the_log_density():
    """Of many parameters, the features' own terms vanish and the bound is tight."""
    latent, x = some_latent(), normal(5, 7, seed=4)
    known = Latent(latent.features, 1e-12 * latent.spread, latent.feature_variance, latent.noise, latent.signal)
    expected = log_normal(x.T, torch.zeros(5, dtype=torch.float64), latent.signal + known.covariance()).mean()
    torch.testing.assert_close(free_energy(known, x @ x.T / 7, 10**12), expected)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("latent", [1, 2, 4])
def test_free_energy_never_falls(seed, latent):
    _, updates, _ = overlapping(FOUR_SHARE, 300, seed)
    scale, model, least = InverseCovarianceVB(latent).begin(distances_of(updates))
    products = updates @ updates.T / 300 / scale
    reached = []
    for _ in range(4):
        for step in (lambda model: update_spread(model, products, 300), lambda m: climb(m, products, 300, least, 5)):
            model = step(model)
            reached.append(float(free_energy(model, products, 300)))
    assert all(later >= earlier - 1e-10 for earlier, later in pairwise(reached))


def test_features_satisfy_their_equation_where_the_search_ends():
    r"""Eq. (19): v_j = Ψ_j σ_j^{-2} Σ_i E[u_i (x_ij − y_i)], with y and u jointly Gaussian."""
    size = 5000
    _, updates, _ = overlapping(FOUR_SHARE, size)
    rule = InverseCovarianceVB(1)
    scale, model, least = rule.begin(distances_of(updates))
    products = updates @ updates.T / size / scale
    for _ in range(20):
        model = climb(update_spread(model, products, size), products, size, least, 100)
    model = update_spread(model, products, size)
    precision, rows = posterior_of_truth(model)
    inverse = torch.linalg.inv(precision)
    towards = inverse @ rows.T
    with_data = (towards @ products)[1:]
    with_truth = (inverse + towards @ products @ towards.T)[1:, 0]
    expected = model.spread @ ((with_data.T - with_truth) * size / model.noise[:, None])[:, :, None]
    torch.testing.assert_close(expected[..., 0], model.features, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("shares", "latent"), [(FOUR_SHARE, 1), (FOUR_SHARE, 2), (TWO_GROUPS, 2)])
def test_clients_that_share_data_count_once(shares, latent):
    """Proposition 2: close to generalised least squares with the true covariance, eq. (5), and far from ivar."""
    size = 20_000
    truth, updates, covariance = overlapping(shares, size)
    clients, previous = point_masses(updates), origin(size)
    oracle = float((least_squares(covariance) @ updates - truth).square().mean())
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
    best = least_squares(variance * group[:, None] * group + torch.diag(noise)) @ updates
    oracle = float((best - truth).square().mean())
    reached = error(fuse("icov_vb", point_masses(updates), previous=origin(size)), truth)
    assert reached < 1.1 * oracle
    assert reached < float((updates.mean(0) - truth).square().mean())


def products_of(gains, noise, shared=0.0, first=0):
    """Expected products of updates g y + e, y of variance 1; the ``first`` clients share an error of that variance."""
    group = (torch.arange(len(gains)) < first).to(torch.float64)
    gains = torch.tensor(gains, dtype=torch.float64)
    return gains[:, None] * gains + shared * group[:, None] * group + noise * torch.eye(len(gains), dtype=torch.float64)


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
    ],
)
def test_only_those_who_hold_all_of_y_confirm_each_other(case, products):
    assert confirmed(RIGHT, products, 10**6) == case.startswith("share")


def test_fewer_than_half_of_the_clients_or_too_few_parameters_confirm_nothing():
    products = products_of([1.0] * 8, 0.3, shared=2.0, first=4)
    assert confirmed(RIGHT, products, 3000)
    assert not confirmed(RIGHT, products, 100)
    three = torch.tensor([0.0] * 5 + [1 / 3] * 3, dtype=torch.float64)
    assert not confirmed(three, products_of([1.0] * 8, 0.3, shared=2.0, first=5), 10**6)
    assert not confirmed(torch.tensor([0.1, 0.9], dtype=torch.float64), torch.eye(2, dtype=torch.float64) + 1, 10**6)


@pytest.mark.parametrize(("clients", "group"), [(8, 7), (5, 3)])
def test_a_shared_error_and_a_shorter_update_have_the_same_products(clients, group):
    """The group is wrong with one error, or right beside others who hold a part of y, and share an error if several."""
    part, noise = 0.7, 2.0
    wrong = part * products_of([1.0] * clients, 0.0) + products_of([0.0] * clients, noise, 1 - part, group)
    others = torch.arange(clients) >= group
    right = products_of([1.0] * group + [part] * (clients - group), noise)
    right += part * (1 - part) * torch.outer(others.double(), others.double())
    torch.testing.assert_close(wrong, right)


def test_a_client_of_fewer_steps_gets_no_more_than_by_differences():
    """Half of the steps on half of the noise: the shortest combination of sum 1 is nearly it alone."""
    truth, updates = independent([2.0] * 8, 8000)
    updates[7] *= 0.5
    reached = fuse("icov_vb", point_masses(updates), previous=origin(8000))
    assert error(reached, truth) < 2 * error(fuse("ivar_vb", point_masses(updates), previous=origin(8000)), truth)


def test_standard_error_of_a_form_of_products():
    form = torch.tensor([[0.0, 1.0, -0.5], [1.0, 0.2, 0.0], [-0.5, 0.0, -0.3]], dtype=torch.float64)
    root, size, draws = normal(3, 3, seed=1), 40, 20_000
    updates = root @ normal(draws, 3, size, seed=2)
    sampled = ((updates @ updates.mT / size) * form).sum((1, 2)).std()
    assert standard_error(form, root @ root.T, size) == pytest.approx(float(sampled), rel=0.02)


def test_error_approaches_the_oracle_as_parameters_grow():
    excess = []
    for size in (300, 3000, 30_000):
        _, updates, covariance = overlapping(FOUR_SHARE, size)
        fused = fuse(InverseCovarianceVB(1), point_masses(updates), previous=origin(size))
        excess.append(error(fused, least_squares(covariance) @ updates))
    assert excess[0] > excess[1] > excess[2]
    assert excess[2] < 5e-4


@pytest.mark.parametrize(("rule", "bound"), [("icov_vb", 0.1), ("icov_mle", 0.01)])
@pytest.mark.parametrize("adversaries", [1, 5, 10])
def test_noise_of_adversaries_is_seen(rule, bound, adversaries):
    """The average is off by up to 50. That they do not contain y at all pulls ``icov_vb`` a little towards 0."""
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
        features, noise = expectation_maximisation(features, noise, residual)
        covariance = features @ features.T + torch.diag(noise)
        reached.append(float(-torch.logdet(covariance) - (torch.linalg.inv(covariance) * residual).sum()))
    assert all(later >= earlier - 1e-10 for earlier, later in pairwise(reached))
    inverse = torch.linalg.inv(covariance)
    gradient = inverse @ residual @ inverse - inverse
    torch.testing.assert_close(gradient @ features, torch.zeros_like(features), rtol=0, atol=1e-6)
    torch.testing.assert_close(gradient.diagonal(), torch.zeros_like(noise), rtol=0, atol=1e-6)


def test_products_follow_from_distances():
    _, updates = independent([1.0, 2.0, 0.5], 50)
    torch.testing.assert_close(gram_about_last(distances_of(updates)), updates @ updates.T / 50)
    shares = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
    centred = updates - shares @ updates
    torch.testing.assert_close(centred_products(distances_of(updates)[:-1, :-1], shares), centred @ centred.T / 50)


@pytest.mark.parametrize("kind", [InverseCovarianceVB, InverseCovarianceMLE])
@pytest.mark.parametrize("wrong", [{"latent": -1}, {"floor": 0.0}, {"memory": 1.5}])
def test_arguments_are_checked(kind, wrong):
    with pytest.raises(FusionError, match=next(iter(wrong))):
        kind(**wrong)
