"""Rules that infer each client's noise from the updates of all rounds, and a rule that uses them.

Squared distances are between K clients and, last, the origin, shape (K + 1, K + 1), unless a docstring says otherwise.
"""

from abc import abstractmethod
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_fedbayes.core.errors import FusionError, check_at_least, check_number, is_whole, shown
from lightning_fedbayes.fusion.gram import Gram, combine, fused_by_shares, gram_of, squared_distances
from lightning_fedbayes.fusion.registry import get_rule, register_fusion, rule_name
from lightning_fedbayes.fusion.robust import GeometricMedian
from lightning_fedbayes.fusion.rule import Cohort, Fused, FusionRule, ReliabilityRule, RuleState, check_part

FAR = 1e8
"""Squared distance to its nearest clients, in units of the others', from which a client is left out of a round."""
NOTHING = 1e-9
"""Ratio of noise variances below which the smaller is rounding."""


def consensus(distances: Tensor) -> Tensor:
    """Return the shares of the K clients in their geometric median, shape (K,)."""
    clients = distances[:-1, :-1]
    weights = torch.full((len(clients),), 1 / len(clients), dtype=torch.float64)
    centre = int(clients.sort(1).values[:, len(clients) // 2].argmin())
    towards = distances[:, centre]
    return GeometricMedian().infer_shares(Gram((towards[:, None] + towards - distances) / 2, 1), weights)[0]


def residuals(distances: Tensor, shares: Tensor) -> Tensor:
    """Return the squared distances of n points to their combination with ``shares``, of sum 1, shape (n,)."""
    return squared_lengths(distances, torch.eye(len(shares), dtype=torch.float64) - shares[:, None])


def signal_of(distances: Tensor, shares: Tensor) -> Tensor:
    """Return the squared distance from the clients' combination with ``shares`` to the origin, a scalar."""
    return squared_lengths(distances, torch.cat([shares, -shares.sum(0, keepdim=True)])[:, None])[0]


def centred_products(distances: Tensor, shares: Tensor) -> Tensor:
    """Return the products of n points' differences to their combination with ``shares``, of sum 1, shape (n, n)."""
    directions = torch.eye(len(shares), dtype=torch.float64) - shares[:, None]
    return -(directions.T @ distances @ directions) / 2


def gram_about_last(distances: Tensor) -> Tensor:
    """Return the inner products of the first n − 1 points relative to the last, shape (n − 1, n − 1)."""
    towards = distances[:-1, -1]
    return (towards[:, None] + towards - distances[:-1, :-1]) / 2


def squared_lengths(distances: Tensor, directions: Tensor) -> Tensor:
    """Return ‖Σ_i b_i p_i‖², (m,), for columns b of ``directions``, (n, m), of sum 0: a far origin costs no digits."""
    return (-(directions * (distances @ directions)).sum(0) / 2).clamp_min(0)


def least_noise(noise: Tensor, floor: float) -> float:
    """Return ``floor`` in units of the lower quartile of ``noise``, which a majority that sends noise does not raise.

    Where it is 0 compared with the median, the unit is the median, or, where both are 0, the largest.
    """
    return floor * (float(noise[lower_quartile(noise)]) or 1.0)


def lower_quartile(values: Tensor) -> int:
    """Return the position of the lower quartile of ``values``, or of its replacement in :func:`least_noise`."""
    order = values.argsort().tolist()
    quartile, median, largest = (order[place] for place in (len(order) // 4, len(order) // 2, -1))
    if values[quartile] > NOTHING * values[median]:
        return quartile
    return median if values[median] > NOTHING * values[largest] else largest


LEAST_WEIGHT = 1e-9
"""Least weight of a round. Weights of 0 have no average."""
NEGLIGIBLE = 0.01
"""Part of an equal share below which a client is reported as left out."""
ALIKE = 1e-4
"""Part of an update's squared length below which two updates' squared distance makes them count as one."""


class InferredRule(ReliabilityRule):
    r"""A rule under the model :math:`x_{ij} \sim N(y_i, \cdot)`: updates are noisy observations of one ground truth.

    An update is a client's mean minus the previous global mean (or 0). The state averages the clients' products around
    each round's consensus, per pair, so clients may miss rounds. If the previous global posterior is known, clients
    that send nearly the same update count as one and share its reliability. Variances are medians of the clients',
    weighted by the inferred shares.

    Args:
        memory: discount of earlier rounds per round, from 0 (each round by itself) to 1 (all rounds count the same, as
            in [Untrusted] Algorithm 1). Below 1 is for clients that change.

    Raises FusionError: ``memory`` is not in [0, 1].
    """

    by_columns: ClassVar[bool] = True
    by_progress: ClassVar[bool] = False
    """True if a round counts less the less the global model moves, see :func:`progress`."""

    def __init__(self, memory: float = 1.0) -> None:
        check_number("memory", memory, "[0, 1]", error=FusionError, why="it is the discount of earlier rounds")
        self.memory = float(memory)

    @abstractmethod
    def infer(self, distances: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """Return coefficients of the updates in the ground truth, (K,), and reliabilities, (K,), at least 0, of sum 1.

        Distances are mean squared differences per parameter. ``size`` is the number of parameters P.
        """

    def check_state(self, state: Any, parameters: int) -> None:
        """See :meth:`FusionRule.check_state`."""
        if not state:
            return
        clients = state.get("clients")
        if not isinstance(clients, list) or not all(map(is_whole, clients)) or len({*clients}) < len(clients):
            what = f"{type(self).__name__}: 'clients' of its state is {shown(clients)}, and not a list of different"
            raise FusionError(f"{what} numbers: the checkpoint is damaged; use another one, or start again")
        for name, dimensions in (("products", 2), ("counts", 2), ("along", 1)):
            check_part(self, state, name, (len(clients),) * dimensions)
        for name in ("signal", "rounds", *(["moved"] if self.by_progress else [])):
            check_number(f"{type(self).__name__}: state['{name}']", state.get(name), "[0, inf)", error=FusionError)

    def apply(self, cohort: Cohort, state: RuleState) -> Fused:
        """See :meth:`FusionRule.apply`."""
        gram = gram_of(cohort)
        now = squared_distances(gram.products) / max(gram.size, 1)
        others = now[:-1, :-1].sort(1).values
        nearest = others[:, min(len(others) - 1, max(1, len(others) // 4))]
        near = nearest <= FAR * least_noise(nearest, 1.0)  # farther off, rounding loses the distances of the others
        points = torch.cat([near, torch.ones(1, dtype=torch.bool)])
        clients = tuple(client for client, kept in zip(cohort.clients, near.tolist(), strict=True) if kept)
        now = now[points][:, points]
        weight = progress(now, state.get("moved")) if self.by_progress else 1.0
        distances, new_state = average_rounds(state, clients, now, self.memory, weight)
        coefficients, shares = torch.zeros(2, len(near), dtype=torch.float64)
        coefficients[near], shares[near] = self._infer(distances, gram.size, cohort.previous is not None)
        if new_state and self.by_progress:
            new_state["moved"] = float(signal_of(now, coefficients[near]))
        low = {k: share for k, share in enumerate(shares.tolist()) if share < NEGLIGIBLE / len(shares)}
        why = "is less than a hundredth of an equal one"
        reasons = {k: f"its inferred share of {share:.2g} {why}" for k, share in low.items()}
        mean = combine(cohort.posteriors, coefficients, cohort.previous)
        return fused_by_shares(cohort, mean, shares, shares, reasons, new_state)

    def _infer(self, distances: Tensor, size: int, known: bool) -> tuple[Tensor, Tensor]:
        """Call :meth:`infer` for one of each group of equal updates. The consensus where the result is not finite."""
        count = len(distances) - 1
        if count == 1 or not bool(distances[:-1, :-1].any()):
            equal = torch.full((count,), 1 / count, dtype=torch.float64)
            return equal, equal
        groups = alike(distances) if known else torch.eye(count, dtype=torch.bool)
        first = groups.float().argmax(0).unique()  # one of each group, in their order
        places = torch.cat([first, torch.tensor([count])])
        among = distances[places][:, places]
        inferred = self.infer(among, size)
        if not all(bool(torch.isfinite(each).all()) for each in inferred):
            inferred = (consensus(among),) * 2
        members = groups[first].to(torch.float64)
        spread = members / members.sum(1, keepdim=True)
        return inferred[0] @ spread, inferred[1] @ spread


def progress(distances: Tensor, moved: float | None) -> float:
    """Return the squared length of the last round's fused update, ``moved``, in this round's units, at most 1.

    Where the global model no longer moves, updates are the errors that it has been fitted to, and do not tell which are
    right. A first round, without ``moved``, counts 1.
    """
    lengths = distances[:-1, -1]
    length = float(lengths[lower_quartile(lengths)])
    return 1.0 if moved is None or not length else min(max(moved / length, LEAST_WEIGHT), 1.0)


def alike(distances: Tensor) -> Tensor:
    """Return a mask of nearly equal updates, (K, K): a client is in the row of the first within :data:`ALIKE` of it."""
    lengths, count = distances[:-1, -1], len(distances) - 1
    near = distances[:-1, :-1] <= ALIKE * torch.minimum(lengths[:, None], lengths)
    groups, left = torch.zeros(count, count, dtype=torch.bool), torch.ones(count, dtype=torch.bool)
    for client in range(count):
        if left[client]:
            groups[client] = near[client] & left
            left &= ~groups[client]
    return groups


def average_rounds(
    state: RuleState, clients: tuple[int, ...], now: Tensor, memory: float, weight: float = 1.0
) -> tuple[Tensor, RuleState]:
    r"""Return squared distances between clients and to the origin, averaged over the rounds so far, and the new state.

    With :math:`\hat y_i` the geometric median of round i and :math:`\delta_{ij} = x_{ij} - \hat y_i`, the products
    :math:`\delta_{ij} \cdot \delta_{ik}` are averaged per pair over the rounds of both ([Untrusted] Remark 1),
    :math:`\delta_{ij} \cdot \hat y_i` per client and :math:`\|\hat y_i\|^2` over all. ``memory`` discounts.
    """
    if memory == 0:
        return now, {}
    shares = consensus(now)
    point = torch.cat([shares, shares.new_zeros(1)])
    gram = centred_products(now, point)  # of the clients and the origin
    known = list(state.get("clients", []))
    place = {client: i for i, client in enumerate(known)}
    for client in clients:
        place.setdefault(client, len(place))
    products, counts = torch.zeros(2, len(place), len(place), dtype=torch.float64)
    along = torch.zeros(len(place), dtype=torch.float64)
    signal, rounds = memory * state.get("signal", 0.0), memory * state.get("rounds", 0.0)
    if known:
        old = slice(0, len(known))
        earlier = {name: memory * state[name].cpu() for name in ("products", "counts", "along")}
        products[old, old], counts[old, old], along[old] = earlier.values()
    rows = torch.tensor([place[client] for client in clients])
    here = rows[:, None], rows[None, :]
    products[here] += weight * gram[:-1, :-1]
    counts[here] += weight
    along[rows] += weight * gram[:-1, -1]
    signal, rounds = signal + weight * float(gram[-1, -1]), rounds + weight
    average = torch.zeros_like(now)
    average[:-1, :-1] = products[here] / counts[here]
    average[:-1, -1] = average[-1, :-1] = along[rows] / counts[here].diagonal()
    average[-1, -1] = signal / rounds
    if bool((counts[here] != rounds).any()):
        average = positive_semidefinite(average)
    updated = {"clients": list(place), "products": products, "counts": counts, "along": along}
    return squared_distances(average), {**updated, "signal": signal, "rounds": rounds}


def positive_semidefinite(products: Tensor) -> Tensor:
    """Return a Gram matrix near averages over different rounds, with their diagonal and no negative eigenvalues."""
    lengths = products.diagonal().clamp_min(0).sqrt()
    scale = torch.where(lengths > 0, 1 / lengths, 0.0)
    values, vectors = torch.linalg.eigh(products * scale[:, None] * scale)
    gram = (vectors * values.clamp_min(0)) @ vectors.T
    again = gram.diagonal().clamp_min(torch.finfo(gram.dtype).tiny).rsqrt() * lengths
    return gram * again[:, None] * again


class Reliability(ReliabilityRule):
    """Weights inferred by one rule, posteriors fused by another.

    ::

        FederatedBayes(fusion=Reliability("ivar_vb", then="reverse_kl_barycenter"))

    When to use it: Bayesian networks with clients that cannot be trusted. ``by`` uses only the means, since a client
    can claim any variance. ``then`` fuses means and variances with the reliabilities as weights.

    Args:
        by: a rule, or its name, that infers reliabilities: ``ivar_vb``, ``geometric_median``, …
        then: a rule, or its name, that takes weights.

    Raises FusionError: ``by`` infers no reliabilities, or ``then`` takes no weights.
    """

    def __init__(self, by: str | FusionRule = "ivar_vb", then: str | FusionRule = "reverse_kl_barycenter") -> None:
        self.by, self.then = get_rule(by), get_rule(then)
        if not isinstance(self.by, ReliabilityRule):
            what = f"Reliability(by='{rule_name(self.by)}'): that rule infers no reliability of clients"
            remedy = "give one that does, such as 'ivar_vb', 'icov_vb', 'geometric_median' or 'multi_krum'"
            raise FusionError(f"{what}; {remedy}")
        if not self.then.uses_weights:
            remedy = "give one that does, such as 'reverse_kl_barycenter' or 'weighted_average'"
            raise FusionError(f"Reliability(then='{rule_name(self.then)}'): that rule takes no weights; {remedy}")
        # attributes of this object, not of its class: they follow from the two rules
        vars(self).update({name: getattr(self.then, name) for name in ("resists", "narrows", "keeps_prior")})
        vars(self).update(needs_previous=self.by.needs_previous or self.then.needs_previous)
        vars(self).update(uses_weights=self.by.uses_weights, by_columns=self.by.by_columns and self.then.by_columns)

    def init(self) -> RuleState:
        """See :meth:`FusionRule.init`."""
        return {"by": self.by.init(), "then": self.then.init()}

    def check_state(self, state: Any, parameters: int) -> None:
        """See :meth:`FusionRule.check_state`."""
        for name, rule in (("by", self.by), ("then", self.then)):
            rule.check_state(check_part(self, state, name), parameters)

    def apply(self, cohort: Cohort, state: RuleState) -> Fused:
        """See :meth:`FusionRule.apply`."""
        inferred = self.by.apply(cohort, state["by"])
        shares = torch.tensor([inferred.reliability[client] for client in cohort.clients], dtype=torch.float64)
        trusted = [position for position, share in enumerate(shares.tolist()) if share > 0]
        posteriors = [cohort.posteriors[position] for position in trusted]
        clients, weights = tuple(cohort.clients[position] for position in trusted), shares[trusted]
        among = replace(cohort, posteriors=posteriors, weights=weights / weights.sum(), clients=clients)
        fused = self.then.apply(among, state["then"])
        return replace(inferred, posterior=fused.posterior, state={"by": inferred.state, "then": fused.state})


class _InverseVariance(InferredRule):
    """Arguments of both estimators: the least noise, and when to stop."""

    def __init__(
        self, memory: float = 1.0, floor: float = 0.01, tolerance: float = 1e-10, max_iterations: int = 2
    ) -> None:
        super().__init__(memory)
        check_number("floor", floor, "(0, inf)", error=FusionError)
        check_number("tolerance", tolerance, "(0, inf)", error=FusionError)
        check_at_least("max_iterations", max_iterations, 1, error=FusionError)
        self.floor, self.tolerance, self.max_iterations = floor, tolerance, max_iterations


@register_fusion("ivar_mle")
class InverseVarianceMLE(_InverseVariance):
    r"""Maximum likelihood of the ground truth y and of one noise variance per client.

    .. math:: y_i \leftarrow \frac{\sum_{j \in J_i} x_{ij} / \sigma_j^2}{\sum_{j \in J_i} 1/\sigma_j^2}, \qquad
              \sigma_j^2 \leftarrow \max\Bigl(\varepsilon, \frac{1}{P |I_j|} \sum_{i \in I_j} \|x_{ij} - y_i\|^2\Bigr)

    When to use it: more than a few clients of unknown quality. It needs neither weights nor a bound on the number of
    bad clients. The likelihood is unbounded: although the method starts at the geometric median, and keeps variances
    above ε, more iterations take y towards one client's update, above all where clients share data. The source needs
    fewer than five, and two are within 0.3 % of the estimate on MNIST. ``ivar_vb`` takes any number.

    Args:
        memory: discount of earlier rounds, see :class:`~lightning_fedbayes.fusion.InferredRule`.
        floor: ε in units of the lower quartile of the clients' mean squared distances to the geometric median.
        tolerance: stop when no share changes by more.
        max_iterations: bound of the number of iterations. Each costs O(K²).

    Source: [Untrusted] Algorithm 1, eq. (6), (7).
    """

    def infer(self, distances: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """See :meth:`InferredRule.infer`."""
        clients = distances[:-1, :-1]
        shares = consensus(distances)
        noise = residuals(clients, shares)
        least = least_noise(noise, self.floor)
        for _ in range(self.max_iterations):
            before, precision = shares, 1 / noise.clamp_min(least)
            shares = precision / precision.sum()
            noise = residuals(clients, shares)
            if bool((shares - before).abs().max() <= self.tolerance):
                break
        return shares, shares


@register_fusion("ivar_vb")
class InverseVarianceVB(_InverseVariance):
    r"""Posterior of the ground truth y under a Gaussian prior, with one noise variance per client.

    .. math:: \lambda_i = \Bigl(\frac{1}{\tau^2} + \sum_{j \in J_i} \frac{1}{\sigma_j^2}\Bigr)^{-1}, \qquad
              \bar y_i = \lambda_i \sum_{j \in J_i} \frac{x_{ij}}{\sigma_j^2}

    and the variances that maximise the evidence, :math:`\tau^2 = \lambda + \|\bar y\|^2 / P` and
    :math:`\sigma_j^2 = \lambda + \|x_j - \bar y\|^2 / P` (averages over rounds).

    When to use it: the default if clients cannot be trusted. It follows clients that agree: clients with unusual data
    may look like noise. y ends at one client's update less easily than under maximum likelihood.

    Args: see :class:`InverseVarianceMLE`. ``floor`` bounds the noise variances.

    Source: [Untrusted] eq. (10) to (13).
    """

    def __init__(
        self, memory: float = 1.0, floor: float = 1e-6, tolerance: float = 1e-10, max_iterations: int = 1000
    ) -> None:
        super().__init__(memory, floor, tolerance, max_iterations)

    def infer(self, distances: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """See :meth:`InferredRule.infer`."""
        shares = consensus(distances)
        noise = residuals(distances[:-1, :-1], shares)
        least = least_noise(noise, self.floor)
        noise, signal = noise.clamp_min(least), signal_of(distances, shares)
        coefficients = shares
        for _ in range(self.max_iterations):
            before = shares
            coefficients, noise, signal = coordinate_ascent(distances, noise, signal, least)
            shares = coefficients / coefficients.sum()
            if bool((shares - before).abs().max() <= self.tolerance):
                break
        return coefficients, shares


def coordinate_ascent(
    distances: Tensor, noise: Tensor, signal: Tensor, least: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Return coefficients of the posterior mean, noise (K,), at ``least``, and signal variance: eq. (10) to (13)."""
    posterior_variance = 1 / (1 / signal + (1 / noise).sum())
    coefficients = posterior_variance / noise
    point = torch.cat([coefficients, 1 - coefficients.sum(0, keepdim=True)])
    moments = posterior_variance + residuals(distances, point)
    return coefficients, moments[:-1].clamp_min(least), moments[-1]
