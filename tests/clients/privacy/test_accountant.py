"""ε against closed forms, and its inverse."""

import math

import numpy as np
import pytest
from scipy.optimize import brentq
from scipy.stats import norm

from lightning_fedbayes.clients.privacy import UpdatePrivacy, accountant, epsilon_of, noise_multiplier_for
from lightning_fedbayes.core.errors import FederationError
from tests.refusals import refusals

opacus = pytest.importorskip("opacus")
DELTA = 1e-5


def analytic(noise_multiplier, delta=DELTA):
    """The smallest ε of one Gaussian mechanism, Balle & Wang 2018, Theorem 8."""
    z = noise_multiplier

    def excess(epsilon):
        below = norm.logcdf(-0.5 / z - epsilon * z)
        return norm.cdf(0.5 / z - epsilon * z) - math.exp(epsilon + below) - delta

    return brentq(excess, 0.0, 500.0)


@pytest.mark.whole
@pytest.mark.parametrize("noise_multiplier", [0.3, 0.5, 1.0, 2.0, 5.0, 20.0])
@pytest.mark.parametrize("rounds", [1, 16])
def test_without_sampling_epsilon_bounds_the_analytic_mechanism_closely(noise_multiplier, rounds):
    """Gaussian mechanisms compose to one of noise z/√T; Rényi orders lose at most a tenth of ε and a hundredth."""
    exact = analytic(noise_multiplier / math.sqrt(rounds))
    assert exact <= epsilon_of(noise_multiplier, DELTA, rounds) <= 1.1 * exact + 0.01


def test_the_best_order_of_one_gaussian():
    """min over α of α/2z² + log((α−1)/α) − log(δα)/(α−1), written out."""
    z = 1.0
    bounds = [
        alpha / (2 * z**2) + math.log((alpha - 1) / alpha) - math.log(DELTA * alpha) / (alpha - 1)
        for alpha in (1 + i / 100 for i in range(1, 2000))
    ]
    assert epsilon_of(z, DELTA, 1) == pytest.approx(min(bounds), rel=1e-3)


def test_more_rounds_give_more_away_and_noise_and_secrecy_less():
    rounds = [epsilon_of(1.0, DELTA, count) for count in (0, 1, 2, 10, 100)]
    assert rounds[0] == 0
    assert rounds == sorted(rounds)
    assert rounds[2] < 2 * rounds[1], "composition is better than adding up"
    fractions = [epsilon_of(1.0, DELTA, 10, fraction) for fraction in (0.01, 0.1, 0.5, 1.0)]
    assert fractions == sorted(fractions)
    assert fractions[0] < fractions[-1] / 10
    noises = [epsilon_of(z, DELTA, 10) for z in (0.5, 1.0, 4.0)]
    assert noises == sorted(noises, reverse=True)


def exact_of_a_fixed_cohort(z, fraction, delta=DELTA):
    """ε by the definition: others send −1, the client +1 or nothing; with it the sum has mean 2 or 1, without it 0."""
    x = np.linspace(-12 * z, 2 + 12 * z, 100_001)
    absent = (1 - fraction) * norm.pdf(x, 0, z)
    own, nothing = (absent + fraction * norm.pdf(x, mean, z) for mean in (2, 1))

    def excess(epsilon):
        return np.maximum(own - math.exp(epsilon) * nothing, 0).sum() * (x[1] - x[0]) - delta

    return brentq(excess, 0.0, 100.0)


@pytest.mark.parametrize("fraction", [0.05, 0.1, 0.5])
@pytest.mark.parametrize("noise_multiplier", [0.7, 1.0, 2.0, 4.0])
def test_fixed_cohorts_give_away_more_than_poisson_samples_and_less_than_known_ones(noise_multiplier, fraction):
    exact = exact_of_a_fixed_cohort(noise_multiplier, fraction)
    assert epsilon_of(noise_multiplier, DELTA, 1, fraction) < exact, "the account of Poisson samples is no bound"
    assert exact < UpdatePrivacy(1.0, noise_multiplier, DELTA).figures(1)["privacy/epsilon"]


def test_no_noise_is_no_privacy():
    assert epsilon_of(0.0, DELTA, 1) == math.inf
    assert epsilon_of(0.0, DELTA, 0) == 0


@pytest.mark.parametrize(("epsilon", "rounds", "fraction"), [(1.0, 10, 1.0), (8.0, 100, 0.1), (0.5, 1, 1.0)])
def test_the_noise_for_an_epsilon_is_its_inverse(epsilon, rounds, fraction):
    noise = noise_multiplier_for(epsilon, DELTA, rounds, fraction)
    assert 0.99 * epsilon <= epsilon_of(noise, DELTA, rounds, fraction) <= epsilon
    search = pytest.importorskip("opacus.accountants.utils").get_noise_multiplier
    target = {"target_epsilon": epsilon, "target_delta": DELTA, "epsilon_tolerance": epsilon / 100}
    assert noise == search(sample_rate=fraction, steps=rounds, accountant="rdp", alphas=accountant.ORDERS, **target)


def test_kinds_of_messages_add_up_as_their_renyi_divergences():
    one_kind = accountant.epsilon_spent([(1.0, 0.5, 6)], DELTA)
    assert accountant.epsilon_spent([(1.0, 0.5, 4), (1.0, 0.5, 2)], DELTA) == pytest.approx(one_kind)
    assert accountant.epsilon_spent([(1.0, 0.5, 6), (1.0, 0.5, 0)], DELTA) == one_kind
    assert accountant.epsilon_spent([], DELTA) == 0


test_arguments_out_of_range_are_refused_by_name = refusals(
    FederationError,
    (lambda: epsilon_of(-1.0, DELTA, 1), "noise_multiplier=-1.0"),
    (lambda: epsilon_of(1.0, 0.0, 1), "delta=0.0"),
    (lambda: epsilon_of(1.0, DELTA, -1), "rounds=-1"),
    (lambda: epsilon_of(1.0, DELTA, 1, 0.0), "fraction=0.0"),
    (lambda: noise_multiplier_for(0.0, DELTA, 1), "epsilon=0.0"),
    (lambda: noise_multiplier_for(1.0, DELTA, 0), "rounds=0"),
    (lambda: noise_multiplier_for(1e-3, 1e-300, 10**15), "no noise is enough"),
)


def test_without_opacus_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setattr(accountant.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(FederationError, match=r"pip install lightning-fedbayes\[privacy\]"):
        epsilon_of(1.0, DELTA, 1)
