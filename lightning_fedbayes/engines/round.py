"""One round on the server: client updates in, the fused posterior and what can be said of it out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from lightning_fedbayes.errors import FusionError
from lightning_fedbayes.fusion import FusionAccumulator, FusionRule, Memory, Statistics, SumRule
from lightning_fedbayes.fusion.accumulator import check_finite, check_structure
from lightning_fedbayes.fusion.cohort import Fused
from lightning_fedbayes.fusion.pools import add_disagreement
from lightning_fedbayes.posterior import GaussianPosterior, is_zero
from lightning_fedbayes.processes import ALONE, Processes, Talk
from lightning_fedbayes.processes.base import blocks
from lightning_fedbayes.weighting import (
    PER_CLIENT,
    ClientFacts,
    CohortWeights,
    client_weights,
    effective_clients,
    normalised,
)


@dataclass(frozen=True)
class ClientUpdate:
    """What a client sends after its local epochs.

    Args:
        client: the client's number.
        num_examples: its number of training examples.
        posterior: its posterior.
        buffers: its buffers, name → tensor.
        metrics: what it measured while training, name → value.
    """

    client: int
    num_examples: int
    posterior: GaussianPosterior
    buffers: Mapping[str, Tensor] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """Bytes of posterior and buffers."""
        return self.posterior.num_bytes + sum(b.numel() * b.element_size() for b in self.buffers.values())


@dataclass(frozen=True)
class RoundResult:
    """The outcome of a round.

    Args:
        posterior: the new global posterior.
        buffers: the new global buffers, name → tensor of the buffer's dtype.
        weights: client → normalised weight ω, or the reliability that the rule infers.
        metrics: diagnostics of the fusion, name → value.
        judged: whether the weights are what the rule infers.
        excluded: client → why the rule left it out.
        memory: what the rule remembers for the next round.
    """

    posterior: GaussianPosterior
    buffers: dict[str, Tensor]
    weights: dict[int, float]
    metrics: dict[str, float]
    judged: bool
    excluded: dict[int, str]
    memory: Memory


@dataclass(frozen=True)
class Admitted:
    """The clients that a process has admitted, as the others have to know them before the fusion.

    Args:
        clients: their numbers, in the order in which they came.
        weights: their weights, not normalised; empty where the weighting compares clients.
        facts: what such a weighting looks at; otherwise empty.
        error: why a weight cannot be had.
    """

    clients: tuple[int, ...]
    weights: tuple[float, ...] = ()
    facts: tuple[ClientFacts, ...] = ()
    error: FusionError | None = None


class RoundFusion:
    """Collects the updates of a round.

    With a sum-type rule and weights that look at one client at a time nothing is kept but sums.

    Args:
        rule: the fusion rule.
        weighting: a name, or a function of all clients' facts (see :mod:`lightning_fedbayes.weighting`).
        previous: the global posterior that the clients started from.
        buffers: the global buffers that the clients started from; None takes the first client's for what they
            must look like.
        memory: what the rule remembers of the rounds before.
        processes: of which each adds clients of its own; with others, ``buffers`` must be given.
    """

    def __init__(
        self,
        rule: FusionRule,
        weighting: str | CohortWeights,
        previous: GaussianPosterior,
        buffers: Mapping[str, Tensor] | None = None,
        memory: Memory | None = None,
        processes: Processes = ALONE,
    ) -> None:
        self.rule = rule
        self.memory = rule.init() if memory is None else memory
        self.weighting = weighting
        self.previous = previous
        self._streams = isinstance(rule, SumRule) and isinstance(weighting, str) and weighting in PER_CLIENT
        self.processes = processes
        self._accumulator = FusionAccumulator(rule, previous, processes)
        self._held: list[ClientUpdate] = []
        self._weights: dict[int, float] = {}
        self._buffers: dict[str, Tensor] = {}
        self._previous_buffers = buffers
        self._disagreement: Statistics = {}

    def __len__(self) -> int:
        """Number of clients that this process has admitted."""
        return len(self._held) if self._held else len(self._weights)

    def add(self, update: ClientUpdate) -> None:
        """Admit one client's update.

        Raises:
            FusionError: names or shapes are not those of the global model, or a value is not finite. The round is as
                it was before.
        """
        who = f"client {update.client}"
        check_structure(update.posterior, self.previous, who)
        if update.posterior.names != self.previous.names:
            update = replace(update, posterior=update.posterior.ordered(self.previous.names))
        mean, variance = update.posterior.flatten()
        check_finite(update.posterior, mean, variance, who)
        self._check_buffers(update.buffers, who)
        if self._streams:
            self._fuse(update, mean, variance, self._weight(update))
        else:
            held = ClientUpdate(
                update.client, update.num_examples, update.posterior.clone(), dict(update.buffers), update.metrics
            )
            self._held.append(held)
        if self._previous_buffers is None:
            self._previous_buffers = dict(update.buffers)

    def _check_buffers(self, buffers: Mapping[str, Tensor], who: str) -> None:
        """Raise FusionError unless ``buffers`` look like those before and are finite wherever those are.

        A mask of minus infinities is a buffer, too.
        """
        like = buffers if self._previous_buffers is None else self._previous_buffers
        wrong = [name for name in sorted(like.keys() | buffers.keys()) if not _alike(like.get(name), buffers.get(name))]
        if wrong:
            raise FusionError(
                f"{who}: buffers {', '.join(wrong)} are not those of the clients before (names, shapes or dtypes "
                "differ); all clients must train the same network"
            )
        for name, value in buffers.items():
            known = torch.isfinite(like[name]) if self._previous_buffers is not None else torch.tensor(True)
            if bool((~torch.isfinite(value) & known.to(value.device)).any()):
                raise FusionError(f"{who}: buffer '{name}' is not finite")

    def admitted(self) -> Admitted:
        """What the other processes have to know of this one's clients before all :meth:`finish`."""
        if self._streams:
            return Admitted(tuple(self._weights), tuple(self._weights.values()))
        clients = tuple(update.client for update in self._held)
        if not self.rule.uses_weights:
            return Admitted(clients, (1.0,) * len(clients))
        facts = [self._facts(update) for update in self._held]
        if isinstance(self.weighting, str) and self.weighting in PER_CLIENT:
            one = PER_CLIENT[self.weighting]
            try:
                return Admitted(clients, tuple(one(fact) for fact in facts))
            except FusionError as error:
                return Admitted(clients, error=error)
        if self.processes.count > 1:
            before = self.previous.to("cpu")
            facts = [replace(fact, posterior=fact.posterior.to("cpu"), previous=before) for fact in facts]
        return Admitted(clients, facts=tuple(facts))

    def finish(self, everyone: Sequence[Admitted] | None = None) -> RoundResult:
        """Fuse; the result is the same in all processes.

        Args:
            everyone: what each process has :meth:`admitted`; None: the processes meet for it.

        Raises:
            FusionError: the weights cannot be used, or the rule cannot fuse these posteriors.
        """
        everyone = self.processes.gather(self.admitted()) if everyone is None else everyone
        weights = self._weights_of(everyone)
        for update in self._held:
            self._fuse(update, *update.posterior.flatten(), weights[update.client])
        total = sum(weights.values())
        talks = (
            self._accumulator.finishing(self.memory, total if self.processes.count > 1 else None),
            disagreeing(self._disagreement, self.previous.num_parameters, self.processes),
        )
        early = [self._averaging_buffers(total)] if self._streams else []  # else what a client counts is not known yet
        fused: Fused
        fused, disagreement, *averages = self.processes.hold(*talks, *early)
        check_finite(fused.posterior, *fused.posterior.flatten(), "the fused posterior")
        shares = shares_of(dict(sorted(weights.items())), fused.reliability)
        for update in self._held:
            self._add_buffers(update, shares[update.client])
        [buffers] = averages or self.processes.hold(self._averaging_buffers(1.0))
        return RoundResult(
            fused.posterior,
            buffers=buffers,
            weights=shares,
            metrics=self._diagnostics(fused.posterior, shares, disagreement),
            judged=bool(fused.reliability),
            excluded=fused.excluded,
            memory=fused.memory,
        )

    def _weights_of(self, everyone: Sequence[Admitted]) -> dict[int, float]:
        """The weights of all clients; normalised where they were held back until all were known."""
        for each in everyone:
            if each.error is not None:
                raise each.error
        clients = [client for each in everyone for client in each.clients]
        values = [weight for each in everyone for weight in each.weights]
        facts = sorted((fact for each in everyone for fact in each.facts), key=lambda fact: fact.client)
        if facts:
            return dict(zip([fact.client for fact in facts], client_weights(self.weighting, facts), strict=True))
        if values and not self._streams and self.rule.uses_weights:
            values = normalised(values, self.weighting, len(clients))
        return dict(zip(clients, values, strict=True))

    def _averaging_buffers(self, total: float) -> Talk[dict[str, Tensor]]:
        """The averages of all clients' buffers, which have the global ones' dtypes; one meeting if there are any."""
        if self.processes.count == 1:
            return {name: self._average(name, value / total) for name, value in self._buffers.items()}
        like = self._previous_buffers or {}
        if not like:
            return {}
        own = [_as_real(self._buffers.get(name, torch.zeros_like(value))) for name, value in like.items()]
        flat = torch.cat([each.flatten() for each in own])
        everyone = yield [flat.numpy()] * self.processes.count
        sums = torch.from_numpy(sum(everyone)).split([each.numel() for each in own])
        averaged = {}
        for (name, value), summed in zip(like.items(), sums, strict=True):
            average = torch.view_as_complex(summed.view(-1, 2)) if value.is_complex() else summed
            averaged[name] = self._average(name, average.view(value.shape) / total).to(value.device)
        return averaged

    def _average(self, name: str, value: Tensor) -> Tensor:
        """An averaged buffer in its own dtype, integers rounded."""
        assert self._previous_buffers is not None
        dtype = self._previous_buffers[name].dtype
        return (value if dtype.is_floating_point or dtype.is_complex else value.round()).to(dtype)

    def _weight(self, update: ClientUpdate) -> float:
        """The weight ω, not normalised, of one client."""
        if not self.rule.uses_weights:
            return 1.0
        assert isinstance(self.weighting, str)
        return PER_CLIENT[self.weighting](self._facts(update))

    def _facts(self, update: ClientUpdate) -> ClientFacts:
        return ClientFacts(update.client, update.num_examples, update.posterior, self.previous, update.metrics)

    def _fuse(self, update: ClientUpdate, mean: Tensor, variance: Tensor, weight: float) -> None:
        """Add one admitted client, whose flat posterior is (mean, variance), to all running sums."""
        self._accumulator.add_checked(update.client, update.posterior, mean, variance, weight)
        self._weights[update.client] = weight
        if weight == 0:
            return
        add_disagreement(self._disagreement, mean, mean.new_tensor(weight))
        if self._streams:
            self._add_buffers(update, weight)

    def _add_buffers(self, update: ClientUpdate, weight: float) -> None:
        """Add a client's buffers to the running sums."""
        if weight == 0:
            return
        for name, value in update.buffers.items():
            term = value.to(torch.complex128 if value.is_complex() else torch.float64) * weight
            self._buffers[name] = self._buffers[name] + term if name in self._buffers else term

    def _diagnostics(
        self, posterior: GaussianPosterior, shares: dict[int, float], disagreement: float
    ) -> dict[str, float]:
        """What is logged of a fusion."""
        metrics = {"effective_clients": effective_clients(list(shares.values())), "disagreement": disagreement}
        variances = [value.detach().flatten() for value in posterior.variance.values() if not is_zero(value)]
        if variances:
            flat = torch.cat([value.to(torch.float64) for value in variances])
            metrics["posterior_variance"] = float(flat.mean())
        return metrics


def shares_of(weights: Mapping[int, float], reliability: Mapping[int, float]) -> dict[int, float]:
    """Each client's part in the fusion: its weight, unless the rule has judged it."""
    if reliability:
        return {client: reliability.get(client, 0.0) for client in weights}
    total = sum(weights.values())
    return {client: weight / total for client, weight in weights.items()}


def disagreeing(own: Statistics, size: int, processes: Processes) -> Talk[float]:
    r"""Mean over the parameters of the weighted variance of the clients' means, from the sums of each process.

    Two meetings: each process gets its columns of the mean of all, and tells the others how far those are apart.

    Args:
        own: what :func:`~lightning_fedbayes.fusion.pools.add_disagreement` has made of this process's clients.
        size: number of parameters P.
        processes: of which each has a part of the clients.
    """
    if processes.count == 1:
        return float((own["disagreement"] / own["weight"]).mean())
    sums = (float(own["weight"]), float(own["disagreement"].sum())) if own else None
    mean = own["mean"].cpu()[None] if own else torch.zeros(0, size, dtype=torch.float64)
    everyone = yield [(sums, block) for block in blocks(mean, processes.count)]
    there = [(*sums, torch.from_numpy(block)[0]) for sums, block in everyone if sums is not None]
    between: Statistics = {}
    for weight, _, mean in there:
        add_disagreement(between, mean, mean.new_tensor(weight))
    apart = yield [float(between["disagreement"].sum())] * processes.count
    within = sum(each for _, each, _ in there)
    return (sum(apart) + within) / sum(weight for weight, _, _ in there) / size


def _as_real(buffer: Tensor) -> Tensor:
    """``buffer`` on the CPU in double precision, real and imaginary parts as two numbers."""
    if buffer.is_complex():
        return torch.view_as_real(buffer.to("cpu", torch.complex128))
    return buffer.to("cpu", torch.float64)


def _alike(first: Tensor | None, second: Tensor | None) -> bool:
    """Whether two tensors are both there and agree in shape and dtype."""
    return first is not None and second is not None and (first.shape, first.dtype) == (second.shape, second.dtype)
