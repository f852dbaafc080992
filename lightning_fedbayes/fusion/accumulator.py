"""Fusion of client posteriors: one at a time, in one call (:func:`fuse`), or over several processes."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from lightning_fedbayes.core import posterior as gaussians
from lightning_fedbayes.core.errors import FusionError, check_number, shown
from lightning_fedbayes.core.exchange import Collective, shard_bounds, shards
from lightning_fedbayes.core.posterior import PIECE, Cuts, GaussianPosterior, is_dense, is_zero, zeros_like
from lightning_fedbayes.fusion.registry import FuseFunction, get_rule, rule_name
from lightning_fedbayes.fusion.rule import Cohort, Fused, FusionRule, RuleState, Statistics, SumRule

Watch = Callable[[int, Tensor, float, "tuple[Tensor, Tensor] | None"], None]
"""Function of a piece's number, its means as a vector, the client's weight, and :meth:`SumRule.average` of the
clients so far, this one included."""
AT_ONCE = 8
"""Clients of a list that are summed together."""
SHARD = "shard"
"""Name of the only parameter of a posterior that is a shard of all parameters."""


class FusionAccumulator:
    """Client posteriors for a rule: running sums for a :class:`SumRule`, copies for other rules.

    Args:
        rule: the fusion rule.
        previous: the global posterior that the clients started from, for rules that need it.
        relative: divide weights by the first client's, so that a single client has weight 1 exactly. Pass False where
            other processes accumulate other clients.

    Attributes:
        count: number of clients so far.

    Raises FusionError: the rule needs a previous posterior and there is none.
    """

    def __init__(self, rule: FusionRule, previous: GaussianPosterior | None = None, *, relative: bool = True) -> None:
        if rule.needs_previous and previous is None:
            need = "the previous global posterior, which the clients started from: pass previous=..."
            raise FusionError(f"{rule_name(rule)} needs {need}")
        if previous is not None:
            gaussians.check_posterior(previous, "previous", error=FusionError)
            check_finite(previous, "previous posterior")
        self.rule = rule
        has_state = isinstance(rule, SumRule) and type(rule).advance is not SumRule.advance
        self._is_whole = has_state or (isinstance(rule, SumRule) and not rule.by_columns)
        self.previous = previous
        self.count = 0
        self._sums: list[Statistics] = []
        self._scale = None if relative else 1.0
        self._like: GaussianPosterior | None = None
        self._cuts: Cuts | None = None
        self._posteriors: list[GaussianPosterior] = []
        self._weights: list[float] = []
        self._clients: list[int] = []

    def add(self, posterior: GaussianPosterior, weight: float = 1.0) -> None:
        """Add one client. Weight 0 changes nothing.

        Raises FusionError: names or shapes differ, a value is not finite, or the weight is negative or not finite. The
        earlier clients are kept as they were.
        """
        self.add_all([(posterior, weight)])

    def add_all(self, clients: Sequence[tuple[GaussianPosterior, float]], *, look: bool = True) -> None:
        """Add several clients in order, all or none. Without ``look`` :meth:`check_values` checks point masses."""
        checked = []
        like = self.previous if self.previous is not None else self._like
        for number, (posterior, weight) in enumerate(clients, start=self.count):
            who = f"client {number}"
            check_number(f"{who}: weight", weight, "[0, inf)", error=FusionError)
            like = posterior if like is None else like
            check_structure(posterior, like, who)
            posterior = posterior.ordered(like.names)
            if posterior.num_parameters <= PIECE:
                posterior = posterior.flattened()
            if look or weight == 0 or posterior.num_parameters <= PIECE or not posterior.is_point_mass:
                check_finite(posterior, who)
            checked.append((number, posterior, weight))
        self.add_checked(checked)

    def check_values(self, posteriors: Iterable[GaussianPosterior]) -> None:
        """Raise FusionError unless the clients so far are finite. Read them only if their mean is not known to be."""
        sums = self.rule if isinstance(self.rule, SumRule) else None
        means = [None if sums is None else sums.average(each) for each in self._sums] or [None]
        if not all(mean is not None and math.isfinite(mean[0].sum()) for mean in means):
            for number, posterior in enumerate(posteriors):
                check_finite(posterior, f"client {number}")

    def add_checked(self, clients: Sequence[tuple[int, GaussianPosterior, float]], watch: Watch | None = None) -> None:
        """Add clients that have been checked: numbers, posteriors with equal order of parameters, and weights.

        Each piece of a large network is summed over all clients before the next, so that the sums stay in the
        processor's cache, which changes no result. ``watch`` is called for every piece of every client that counts.
        """
        self.count += len(clients)
        counted = [each for each in clients if each[2] > 0 or not self.rule.uses_weights]
        if not counted:
            return
        _, first, weight = counted[0]
        if self._scale is None:
            self._scale = weight if weight > 0 else 1.0
        if self._like is None:
            self._like = GaussianPosterior.point_mass({n: zeros_like(m) for n, m in first.mean.items()})
            self._cuts = first.cuts()
        weights = [weight / self._scale for _, _, weight in counted]
        self._weights += weights
        self._clients += [client for client, _, _ in counted]
        sums = self.rule if isinstance(self.rule, SumRule) else None
        if sums is None:
            self._posteriors += [posterior.clone() for _, posterior, _ in counted]
            if watch is None:
                return
        room = None  # for the means of a piece, so that each piece need not map memory again
        if self._cuts is not None and len(self._cuts) > 1 and self.rule.by_columns and not self._is_whole:
            device = next(iter(first.mean.values())).device
            entries = max(sum(stop - start for _, start, stop in cut) for cut in self._cuts)
            room = torch.empty(entries, dtype=torch.float64, device="cpu" if device.type == "mps" else device)
        pieces = zip(*(self._pieces(posterior) for _, posterior, _ in counted), strict=True)
        for place, parts in enumerate(pieces):
            if sums is not None and place == len(self._sums):
                self._sums.append({})
            for part, weight, (_, _, given) in zip(parts, weights, counted, strict=True):
                mean, variance = part.flatten(room=room)
                if sums is not None:
                    sums.update(self._sums[place], mean, variance, weight)
                if watch is not None and given > 0:
                    watch(place, mean, given, None if sums is None else sums.average(self._sums[place]))

    @property
    def total(self) -> float:
        """Sum of the weights so far, relative to the first client's if ``relative``."""
        return sum(self._weights)

    @property
    def like(self) -> GaussianPosterior:
        """A posterior with the clients' names and shapes. Its values have no meaning."""
        like = self._like if self._like is not None else self.previous
        assert like is not None
        return like

    @property
    def statistics(self) -> Statistics:
        """The running sums of a :class:`SumRule` over all parameters: scalars, and vectors of shape (P,)."""
        lengths = [piece.num_parameters for piece in self._pieces(self.like)] if self._sums else []
        joined: Statistics = {}
        for name, value in {name: value for sums in self._sums for name, value in sums.items()}.items():
            joined[name] = value
            if value.dim():
                parts = [sums.get(name, value.new_zeros(1)).expand(n) for sums, n in zip(self._sums, lengths)]
                joined[name] = parts[0] if len(parts) == 1 else torch.cat(parts)
        return joined

    def compute(self) -> GaussianPosterior:
        """Return the global posterior of all clients so far, by the rule in its initial state."""
        self.check_not_empty(self.total)
        if isinstance(self.rule, SumRule):
            return self.result(self.rule.init(), {}).posterior
        return self.rule.apply(self.cohort(self.total), self.rule.init()).posterior

    def result(self, state: RuleState, weights: Mapping[int, float]) -> Fused:
        """Return the result of a :class:`SumRule` for all clients so far. See :meth:`SumRule.advance`."""
        assert isinstance(self.rule, SumRule)
        likes = self._pieces(self.like)
        if len(likes) == 1:
            return self.rule.advance(self._sums[0], self.like, self.previous, state, weights)
        before = [None] * len(likes) if self.previous is None else self._pieces(self.previous)
        try:
            parts = zip(self._sums, likes, before, strict=True)
            fused = (like.unflatten(*self.rule.compute(sums, like, previous)) for sums, like, previous in parts)
            return Fused(self.like.joined(fused), state=state)
        except FusionError:
            return self.finish(self.statistics, state, weights)  # so that the message speaks of the whole network

    def _pieces(self, posterior: GaussianPosterior) -> list[GaussianPosterior]:
        """Return the parts of ``posterior`` that the rule sums separately."""
        return [posterior] if self._is_whole else posterior.pieces(self._cuts)

    def finish(self, statistics: Statistics, state: RuleState, weights: Mapping[int, float]) -> Fused:
        """Return the result of a :class:`SumRule` from the sums over all clients of all processes."""
        assert isinstance(self.rule, SumRule)
        return self.rule.advance(statistics, self.like, self.previous, state, weights)

    def cohort(self, total: float) -> Cohort:
        """Return the clients for other rules. ``total`` is the sum of the weights in all processes."""
        weights = torch.tensor(self._weights, dtype=torch.float64) / total
        return Cohort(self._posteriors, weights, self.previous, tuple(self._clients))

    def check_not_empty(self, total: float) -> None:
        """Raise FusionError unless ``total``, the sum of all weights, is positive."""
        if not total > 0:
            remedy = "give at least one client and one positive weight"
            raise FusionError(f"nothing to fuse: {self.count} clients, of which none has a positive weight; {remedy}")


def fuse(
    rule: str | FusionRule | FuseFunction,
    posteriors: Iterable[GaussianPosterior],
    weights: Sequence[float] | Tensor | None = None,
    previous: GaussianPosterior | None = None,
) -> GaussianPosterior:
    """Fuse client posteriors into one global posterior, linearised if all of them are.

    Args:
        rule: a registered name or alias (see :func:`available_fusions`), a rule object or a function.
        posteriors: the clients. An iterator is consumed one by one: a :class:`SumRule` holds one client at a time.
        weights: one per client, at least 0, not all 0. They are normalised. None gives every client the same.
        previous: the global posterior that the clients started from. ``dwc`` needs it.

    Raises FusionError: unknown rule. No client. Names or shapes that differ. Values that are not finite. Weights of the
    wrong number, negative or all 0. A fusion that is not defined (see the rule).

    >>> import torch
    >>> a = GaussianPosterior({"w": torch.tensor([0.0])}, {"w": torch.tensor([1.0])})
    >>> b = GaussianPosterior({"w": torch.tensor([2.0])}, {"w": torch.tensor([0.25])})
    >>> q = fuse("reverse_kl_barycenter", [a, b])
    >>> q.mean["w"], q.variance["w"]
    (tensor([1.6000]), tensor([0.4000]))
    """
    accumulator = FusionAccumulator(get_rule(rule), previous)
    values: list[float] | None = None
    if weights is not None:
        values = as_weights(weights).tolist()
        if values and sum(values) == 0:
            raise FusionError(f"weights sum to 0: {values}; at least one client needs a positive weight")
        largest = max(values, default=1.0)
        values = [value / largest for value in values]
    if not isinstance(posteriors, Iterable) or hasattr(posteriors, "shape"):
        raise FusionError(f"posteriors={shown(posteriors)}: give the clients' posteriors")
    remaining, linearised = iter(posteriors), True
    held = posteriors if isinstance(posteriors, list | tuple) else None
    while group := list(islice(remaining, AT_ONCE if held else 1)):  # a generator shall hold only one client
        start = accumulator.count
        if values is not None and start + len(group) > len(values):
            raise FusionError(f"{len(values)} weights for more than {len(values)} posteriors; give one per client")
        shares = [1.0] * len(group) if values is None else values[start : start + len(group)]
        accumulator.add_all(list(zip(group, shares, strict=True)), look=held is None)
        linearised = linearised and all(each.linearised for each in group)
        group.clear()
    if held:
        accumulator.check_values(held)
    if values is not None and accumulator.count != len(values):
        raise FusionError(f"{len(values)} weights for {accumulator.count} posteriors; give one per client")
    return accumulator.compute().marked(linearised)


def as_weights(weights: Any, who: str = "") -> Tensor:
    """Return weights as a float64 vector, shape (clients,). Raise FusionError unless they are finite and at least 0."""
    try:
        if "complex" in str(getattr(weights, "dtype", "")):  # torch would drop the imaginary part
            raise TypeError
        values = torch.as_tensor(weights, dtype=torch.float64, device="cpu").detach().reshape(-1)
    except (TypeError, ValueError, RuntimeError, OverflowError):  # torch's errors for other than numbers
        raise FusionError(f"{who}weights={shown(weights)}; give a sequence of weights, one per client") from None
    if not bool((torch.isfinite(values) & (values >= 0)).all()):
        wrong = next(each for each in values.tolist() if not (math.isfinite(each) and each >= 0))
        raise FusionError(f"{who}weights must be finite and at least 0, got {wrong} among {shown(values.tolist())}")
    return values


def check_structure(posterior: GaussianPosterior, like: GaussianPosterior, who: str) -> None:
    """Raise FusionError unless ``posterior`` is valid and has the names and shapes of ``like``."""
    if not _is_like(posterior, like):
        gaussians.check_posterior(posterior, who, error=FusionError)
        gaussians.check_same_structure(like.mean, posterior.mean, "the global model", who, error=FusionError)


def _is_like(posterior: Any, like: GaussianPosterior) -> bool:
    """Return True if the structure is right: five times faster than finding out what is wrong."""
    if type(posterior) is not GaussianPosterior or type(posterior.mean) is not dict:
        return False
    mean, variance, shapes = posterior.mean, posterior.variance, like.mean
    if not isinstance(variance, dict) or not mean.keys() == variance.keys() == shapes.keys():
        return False
    device = None
    for name, value in mean.items():
        spread, shape = variance[name], shapes[name].shape
        if not (is_dense(value) and is_dense(spread) and value.shape == spread.shape == shape):
            return False
        device = value.device if device is None else device
        if not (value.is_floating_point() and spread.is_floating_point() and value.device == spread.device == device):
            return False
    return True


def check_finite(posterior: GaussianPosterior, who: str) -> None:
    """Raise FusionError if a mean or variance of ``posterior`` is not finite."""
    # one pass and no temporary: a sum is not finite if one of its terms is not; an overflow is sorted out below
    if posterior.num_parameters <= PIECE:
        mean, variance = posterior.flatten()
        total = mean.sum() if posterior.is_point_mass else mean.sum() + variance.sum()
    else:
        variances = (value for value in posterior.variance.values() if not is_zero(value))
        with torch.no_grad():
            total = torch.stack([value.sum() for value in (*posterior.mean.values(), *variances)]).sum()
    if math.isfinite(total):
        return
    for kind, values in (("mean", posterior.mean), ("variance", posterior.variance)):
        for name, value in values.items():
            wrong = int((~torch.isfinite(value)).sum())
            if wrong:
                raise FusionError(f"{who}: {kind} of '{name}' is not finite at {wrong} of {value.numel()} entries")


def fuse_distributed(
    rule: FusionRule, own: Cohort, like: GaussianPosterior, state: RuleState, collective: Collective
) -> Fused:
    """Fuse the clients of all processes, whose weights sum to 1. The result is the same in each.

    A rule ``by_columns`` gets a shard of the parameters of all clients in each process, any other rule all clients. A
    process may have no clients of its ``own``. Raises FusionError if the rule cannot fuse these posteriors.
    """
    if collective.size == 1:
        return rule.apply(own, state)
    if rule.by_columns:
        return _fuse_shards(rule, own, like, state, collective)
    sent = [posterior.to("cpu") for posterior in own.posteriors]
    received = collective.all_gather(list(zip(own.clients, own.weights.tolist(), sent, strict=True)))
    everyone = sorted((each for part in received for each in part), key=lambda each: each[0])
    clients, weights, posteriors = zip(*everyone, strict=True)
    moved = [posterior.to(next(iter(like.mean.values())).device) for posterior in posteriors]
    return rule.apply(Cohort(moved, torch.tensor(weights, dtype=torch.float64), own.previous, clients), state)


def _fuse_shards(
    rule: FusionRule, own: Cohort, like: GaussianPosterior, state: RuleState, collective: Collective
) -> Fused:
    """Fuse a shard of the parameters of all clients, then join the shards: two collective calls and the rule's."""
    numbers = list(zip(own.clients, own.weights.tolist(), strict=True))
    flat = [posterior.flatten() for posterior in own.posteriors]
    spread = any(not is_zero(each) for posterior in own.posteriors for each in posterior.variance.values())
    means, variances = ([each[i].cpu() for each in flat] for i in (0, 1))
    vectors = [*means, *(variances if spread else ())]
    rows = torch.stack(vectors) if vectors else torch.zeros(0, like.num_parameters, dtype=torch.float64)
    received = collective.all_to_all([(numbers, shard) for shard in shards(rows, collective.size)])
    everyone = []
    for facts, shard in received:
        rows = torch.from_numpy(shard)
        variances = rows[len(facts) :] if len(rows) > len(facts) else torch.zeros_like(rows)
        everyone += [(*fact, _shard(*pair)) for fact, *pair in zip(facts, rows, variances)]
    clients, weights, posteriors = zip(*sorted(everyone, key=lambda each: each[0]), strict=True)
    previous = None
    if own.previous is not None:
        start, end = shard_bounds(like.num_parameters, collective.size)[collective.rank :][:2]
        previous = _shard(*(each[start:end].cpu() for each in own.previous.flatten()))
    cohort = Cohort(posteriors, torch.tensor(weights, dtype=torch.float64), previous, clients, collective)
    try:
        fused: Fused | FusionError = rule.apply(cohort, state)
    except FusionError as error:  # perhaps only in this shard: the other processes must know
        fused = error
    result = torch.stack(fused.posterior.flatten()).cpu().numpy() if isinstance(fused, Fused) else fused
    results = collective.all_gather(result)
    for each in results:
        if isinstance(each, FusionError):
            raise each
    assert isinstance(fused, Fused)
    mean, variance = torch.cat([torch.from_numpy(each) for each in results], 1)
    return replace(fused, posterior=like.unflatten(mean, variance))


def _shard(mean: Tensor, variance: Tensor) -> GaussianPosterior:
    return GaussianPosterior({SHARD: mean}, {SHARD: variance})
