"""Inverse-covariance weighting: the free energy, the equations of the source, and clients that share data."""

from itertools import pairwise

import pytest
import torch

from lightning_fedbayes import FusionError, GaussianPosterior, fuse
from lightning_fedbayes.fusion import Cohort, InverseCovarianceMLE, InverseCovarianceVB
from lightning_fedbayes.fusion.inferred import centred_products, gram_about_last
from lightning_fedbayes.fusion.inverse_covariance import (
    as_far_as_certain,
    bounded_average,
    expectation_maximisation,
    in_common,
)
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


def regression(rule, shared, seed, rounds=8):
    """Excess error of linear regression by five parties, three of whom hold the same data; ``rule`` None: the average.

    Noise of the labels: ``shared`` for all who hold an example, and 1 to 5 of the parties' own.
    """
    inputs, truth = normal(750, 50, seed=seed), normal(50, seed=1000 + seed)
    labels, own = inputs @ truth + shared * normal(750, seed=2000 + seed), normal(5, 250, seed=3000 + seed)
    windows = [slice(begin, begin + 250) for begin in (0, 0, 0, 250, 500)]
    parties = [(inputs[each], labels[each] + (k + 1) * own[k]) for k, each in enumerate(windows)]
    at, state = torch.zeros(50, dtype=torch.float64), {}
    for _ in range(rounds):
        sent = torch.stack([at - 0.5 * x.T @ (x @ at - t) / 250 for x, t in parties])
        previous = GaussianPosterior.point_mass({"w": at})
        if rule is None:
            at = sent.mean(0)
            continue
        weights = torch.full((5,), 0.2, dtype=torch.float64)
        fused = rule.apply(Cohort(point_masses(sent), weights, previous, tuple(range(5))), state)
        at, state = fused.posterior.mean["w"], fused.state
    return float((at - truth).square().sum())


@pytest.mark.parametrize("shared", [1.0, 5.0, 20.0])
def test_regression_on_the_same_data_is_no_worse_than_the_average(shared):
    """Three parties who agree look precise. In 50 parameters only their length could show that they are not."""
    pairs = [(regression(InverseCovarianceVB(), shared, seed), regression(None, shared, seed)) for seed in range(3)]
    assert sum(reached for reached, _ in pairs) <= 1.001 * sum(average for _, average in pairs)


def test_updates_of_the_opposite_sign_are_not_explained_away():
    """The combination of sum 1 without any part in y is the shortest, but not the answer."""
    truth, updates = independent([0.3] * 10, 3000)
    updates[7:] = -updates[7:]
    assert error(fuse("icov_vb", point_masses(updates), previous=origin(3000)), truth) < 0.1


def test_clients_that_send_noise_of_honest_length_cost_less_than_in_the_average():
    """Most of y would be taken for error of those who hold it; the geometric median takes its place."""
    truth, updates = independent([0.3] * 6, 8000)
    clients = point_masses(torch.cat([updates, normal(4, 8000, seed=9)]))
    assert 4 * error(fuse("icov_vb", clients, previous=origin(8000)), truth) < error(fuse("fedavg", clients), truth)


def latent_of(features, noise, signal):
    count = features.shape[1]
    return Latent(features, torch.zeros(len(features), count, count, dtype=torch.float64), torch.tensor(1.0), noise,
                  torch.tensor(signal, dtype=torch.float64))


def test_in_common_is_least_squares_where_the_model_holds():
    model = latent_of(normal(6, 2), normal(6, seed=1).square() + 0.2, 2.0)
    coefficients, gains = in_common(model, 10**9)
    torch.testing.assert_close(gains, torch.ones(6, dtype=torch.float64), rtol=0, atol=1e-4)
    torch.testing.assert_close(coefficients, least_squares(model.covariance()), rtol=0, atol=1e-4)


def test_in_common_without_signal_is_the_matched_filter_of_the_loadings():
    """x = a y + e: the gains are the projection of 1 onto a, the coefficients in proportion to a / σ²."""
    loadings, noise = torch.tensor([1.0, 1, 1, -1, 0], dtype=torch.float64), normal(5, seed=1).square() + 0.2
    coefficients, gains = in_common(latent_of(loadings[:, None], noise, 0.0), 10**9)
    expected = loadings * (loadings / noise).sum() / (loadings.square() / noise).sum()
    torch.testing.assert_close(gains, expected, rtol=0, atol=1e-4)
    torch.testing.assert_close(coefficients / coefficients[0], loadings / noise * noise[0], rtol=0, atol=1e-4)
    torch.testing.assert_close(coefficients @ gains, torch.ones((), dtype=torch.float64))


def test_common_part_below_the_noise_of_a_sample_does_not_count():
    """Of an eigenvalue at the Marchenko–Pastur edge one half counts."""
    size, noise = 500, torch.ones(5, dtype=torch.float64)
    edge = (1 + (5 / size) ** 0.5) ** 2 - 1
    _, gains = in_common(latent_of(torch.zeros(5, 1, dtype=torch.float64), noise, edge / 5), size)
    torch.testing.assert_close(gains, 0.5 * noise)


def test_average_with_bounds():
    """Lengths 1, 1, 4, 16 and 1, the last opposite to the others: four times the quartile counts whole."""
    along = torch.tensor([1.0, 1.0, 2.0, 4.0, -1.0], dtype=torch.float64)
    agreed = torch.tensor([0.5, 0.5, 0, 0, 0], dtype=torch.float64)
    expected = torch.tensor([1.0, 1.0, 1.0, 0.25, 0.0], dtype=torch.float64)
    torch.testing.assert_close(
        bounded_average(along[:, None] * along, agreed, 100), expected / expected.sum())


@pytest.mark.parametrize(("size", "counts"), [(800, True), (1000, False)])
def test_a_client_is_opposite_from_three_standard_errors_on(size, counts):
    """A cosine of -0.1: 2.8 standard errors of 800 parameters, 3.2 of 1,000."""
    products = torch.tensor([[1.0, 1.0, -0.1], [1.0, 1.0, -0.1], [-0.1, -0.1, 1.0]], dtype=torch.float64)
    agreed = torch.tensor([0.5, 0.5, 0.0], dtype=torch.float64)
    assert (bounded_average(products, agreed, size)[2] > 0) == counts


@pytest.mark.parametrize("size", [4, 50])
@pytest.mark.parametrize("factor", [30.0, 1e3])
def test_a_long_update_costs_little_however_few_parameters_there_are(size, factor):
    """The bounded average lets in less than a usual length of it."""
    reached, honest = 0.0, 0.0
    for seed in range(4):
        truth, updates = independent([0.5] * 5, size, seed)
        honest += float((updates[1:].mean(0) - truth).square().mean())
        updates[0] *= factor
        reached += error(fuse("icov_vb", point_masses(updates), previous=origin(size)), truth)
    assert reached < 2 * honest


def test_noise_of_one_client_of_five_is_no_truth():
    """Four honest clients would be one group with a common error, had the fifth errors that take y back."""
    truth, updates = independent([0.5] * 4, 8000)
    clients = point_masses(torch.cat([updates, normal(1, 8000, seed=9)]))
    assert error(fuse("icov_vb", clients, previous=origin(8000)), truth) < error(fuse("fedavg", clients), truth)


def test_part_of_the_way_from_the_average():
    """Of many parameters, the shortest point between; of few, two standard errors less, and never past the ends."""
    updates = normal(4, 3, seed=3) + torch.tensor([3.0, 0, 0], dtype=torch.float64)
    products, ones = updates @ updates.T / 3, torch.ones(4, dtype=torch.float64)
    towards = torch.tensor([1.2, 0.4, -0.3, -0.3], dtype=torch.float64)
    parts = torch.linspace(0, 1, 10_001, dtype=torch.float64)
    way = parts[:, None] * towards + (1 - parts[:, None]) / 4
    lengths = ((way @ products) * way).sum(1)
    torch.testing.assert_close(
        as_far_as_certain(ones / 4, towards, ones, products, 10**14), way[lengths.argmin()], rtol=0, atol=2e-4
    )
    torch.testing.assert_close(as_far_as_certain(ones / 4, towards, ones, products, 1), ones / 4)


@pytest.mark.parametrize("size", [100, 400])
def test_doubt_is_two_standard_errors_of_a_regression(size):
    """The part of the way is a regression of the average on its difference to the result; its error in theory."""
    products = torch.tensor([[1.2, 1.0], [1.0, 2.0]], dtype=torch.float64)
    towards, half = torch.tensor([1.0, 0.0], dtype=torch.float64), torch.tensor([0.5, 0.5], dtype=torch.float64)
    apart = half - towards
    spread = apart @ products @ apart
    standard_error = (1.2 / size / spread) ** 0.5
    part = float((half @ products @ apart) / spread - 2 * standard_error)
    expected = max(0.0, min(1.0, part))
    reached = as_far_as_certain(half, towards, torch.ones(2, dtype=torch.float64), products, size)
    torch.testing.assert_close(reached, expected * towards + (1 - expected) * half)


def test_error_approaches_the_oracle_as_parameters_grow():
    """With few, the rule stays on the average, which is better than what can be inferred."""
    for size in (300, 3000, 30_000):
        _, updates, covariance = overlapping(FOUR_SHARE, size)
        oracle = least_squares(covariance) @ updates
        excess = error(fuse(InverseCovarianceVB(1), point_masses(updates), previous=origin(size)), oracle)
        assert excess < 1.001 * float((updates.mean(0) - oracle).square().mean())
    assert excess < 5e-4


@pytest.mark.parametrize(("rule", "bound"), [("icov_vb", 0.05), ("icov_mle", 0.01)])
@pytest.mark.parametrize("adversaries", [1, 5, 10])
def test_noise_of_adversaries_is_seen(rule, bound, adversaries):
    """The average is off by up to 50. Some of their coefficient stays in ``icov_vb``."""
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
