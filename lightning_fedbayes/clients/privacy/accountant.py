"""Privacy accounting: the ε that messages spend, and the noise that keeps a given ε.

Opacus does the sums, by Rényi differential privacy (Mironov 2017; sampled: Mironov, Talwar & Zhang 2019). They hold for
a Gaussian mechanism on a quantity of sensitivity 1, with standard deviation ``noise_multiplier``, in each of the
rounds. The cohort is drawn by *Poisson sampling*: each client takes part with probability ``fraction``, whatever the
others do. Neighbouring federations differ by one client's contribution: its update, or nothing.
"""

import importlib
import importlib.util
import logging
import math
import warnings
from collections.abc import Iterable, Mapping
from functools import lru_cache
from itertools import chain
from types import ModuleType

import numpy as np

from lightning_fedbayes.core.errors import FederationError, check_at_least, check_number

ORDERS = (
    *(1.01, 1.02, 1.05),
    *(1 + tenth / 10 for tenth in range(1, 100)),
    *range(11, 64),
    *(64, 80, 96, 128, 192, 256, 384, 512),
)
"""Rényi orders over which ε is minimised. Opacus's default ends at 63, too early for an ε below 0.2."""
LEAST_EPSILON = 1e-3
"""Smallest ε for which a noise is searched."""
LEAST_NOISE = 1e-100
"""Noise multiplier below which ε is larger than a float holds. One over it is the largest that is counted with."""
Spent = list[tuple[float, float, int]]
"""Messages by kind: noise multiplier, sampling fraction, number of messages."""


def epsilon_of(noise_multiplier: float, delta: float, rounds: int, fraction: float = 1.0) -> float:
    r"""ε of the (ε, δ)-differential privacy that ``rounds`` messages leave, in nats.

    .. math:: \varepsilon = \min_\alpha\, T\,\rho_\alpha(q, z) + \log\frac{\alpha - 1}{\alpha}
              - \frac{\log \delta + \log \alpha}{\alpha - 1}, \qquad \rho_\alpha(1, z) = \frac{\alpha}{2 z^2}

    Raise FederationError if an argument is outside its range, or Opacus is not installed.

    When to use it: to say what a finished federation has given away. Cohorts of a fixed size, as
    :class:`~lightning_fedbayes.FederatedBayes` draws them, are no Poisson samples, and the figure is no bound for them:
    with z = 1, δ = 1e-5 and one client of ten in a single round it is 2.1, and the true ε up to 3.7, because another
    client takes the place of an absent one. The figure for ``fraction=1`` and the rounds in which a client did take
    part is a bound. Source: Balle et al. 2020, Theorem 21, for the way from Rényi to (ε, δ).

    Args:
        noise_multiplier: z ≥ 0, the noise's standard deviation over the sensitivity.
        delta: δ in (0, 1). Well below one over the number of those protected.
        rounds: T ≥ 0.
        fraction: q in (0, 1], the probability of taking part in a round, independently of all others and unknown to
            those that ε holds against.

    >>> round(epsilon_of(noise_multiplier=1.0, delta=1e-5, rounds=1), 2)
    4.73
    """
    check_noise(noise_multiplier)
    check_fraction(fraction)
    check_at_least("rounds", rounds, 0)
    return epsilon_spent([(noise_multiplier, fraction, rounds)], delta)


def check_steps(steps: Mapping[int, Iterable[tuple[float, float, int]]]) -> None:
    """Raise FederationError unless the steps of clients, client → :data:`Spent`, can be counted."""
    for noise, share, count in chain.from_iterable(steps.values()):
        check_noise(noise)
        check_fraction(share)
        check_at_least("steps", count, 1)


def epsilon_spent(spent: Spent, delta: float) -> float:
    """ε of messages of several kinds, 0 without a message, see :func:`epsilon_of`."""
    check_delta(delta)
    spent = [kind for kind in spent if kind[2] > 0]
    if not spent:
        return 0.0
    if any(noise < LEAST_NOISE for noise, _, _ in spent):
        return math.inf
    divergence = sum(messages * renyi_divergence(noise, fraction) for noise, fraction, messages in spent)
    convert = import_opacus("opacus.accountants.analysis.rdp").get_privacy_spent
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Optimal order is the")  # the bound holds at every order, the last one too
        epsilon, _ = convert(orders=ORDERS, rdp=divergence, delta=delta)
    return max(0.0, float(epsilon))


@lru_cache(maxsize=4096)
def renyi_divergence(noise_multiplier: float, fraction: float) -> np.ndarray:
    """Rényi divergence of one message at each of :data:`ORDERS`, in nats. It takes 60 ms for a fraction below 1."""
    analysis = import_opacus("opacus.accountants.analysis.rdp")
    return analysis.compute_rdp(q=fraction, noise_multiplier=noise_multiplier, steps=1, orders=list(ORDERS))


def noise_multiplier_for(epsilon: float, delta: float, rounds: int, fraction: float = 1.0) -> float:
    """The smallest noise multiplier z with which ``rounds`` messages give away no more than ``epsilon``.

    Raise FederationError if an argument is outside its range, Opacus is not installed, or no noise is enough.

    When to use it: before a federation, to choose ``UpdatePrivacy(noise_multiplier=...)``. ``epsilon_of`` of the
    result lies at most 1 % below ``epsilon``.

    Args:
        epsilon: what may be given away, from 0.001 to a million, in nats.
        delta, rounds, fraction: see :func:`epsilon_of`. At least one round. For a federation with ``fraction=`` below 1
            give the most rounds that one client may take part in, not the fraction.

    >>> z = noise_multiplier_for(epsilon=8.0, delta=1e-5, rounds=20)
    >>> 7.92 < epsilon_of(z, 1e-5, 20) <= 8.0
    True
    """
    check_delta(delta)
    check_fraction(fraction)
    check_number("epsilon", epsilon, f"[{LEAST_EPSILON}, 1e6]", why="it is the budget, in nats")
    check_at_least("rounds", rounds, 1)
    search = import_opacus("opacus.accountants.utils").get_noise_multiplier
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Optimal order is the")
        try:
            budget = {"target_epsilon": epsilon, "target_delta": delta, "epsilon_tolerance": epsilon / 100}
            noise = search(**budget, sample_rate=fraction, steps=rounds, accountant="rdp", alphas=ORDERS)
        except ValueError as error:
            why = "no noise is enough; allow a larger epsilon, a larger delta or fewer rounds"
            raise FederationError(f"epsilon={epsilon} in {rounds} rounds with delta={delta}: {why}") from error
    return float(noise)


def check_noise(noise_multiplier: float) -> None:
    """Raise FederationError unless ``noise_multiplier`` is a finite number of at least 0."""
    why = "noise_multiplier_for(epsilon, delta, rounds) finds one"
    check_number("noise_multiplier", noise_multiplier, f"[0, {1 / LEAST_NOISE}]", why=why)


def check_clip(clip: float) -> None:
    """Raise FederationError unless ``clip`` is a finite number above 0."""
    check_number("clip", clip, "(0, inf)", why="it is the longest L2 norm that is let through")


def check_delta(delta: float) -> None:
    """Raise FederationError unless ``delta`` lies in (0, 1)."""
    why = "it is a probability, well below one over the number of those protected"
    check_number("delta", delta, "(0, 1)", why=why)


def check_fraction(fraction: float) -> None:
    """Raise FederationError unless ``fraction`` lies in (0, 1]."""
    check_number("fraction", fraction, "[1e-100, 1]", why="it is the share that takes part")


def check_opacus() -> None:
    """Raise FederationError unless Opacus is installed."""
    if importlib.util.find_spec("opacus") is None:
        why = "pip install lightning-fedbayes[privacy]"
        raise FederationError(f"differential privacy needs Opacus, which is not installed: {why}")


def import_opacus(name: str) -> ModuleType:
    """Import a module of Opacus, such as "opacus.accountants". Raise FederationError if it is not installed."""
    check_opacus()
    root = logging.getLogger()
    handlers = list(root.handlers)
    try:
        return importlib.import_module(name)
    finally:
        root.handlers = handlers  # the import puts one there, through which every library would speak
