"""One round on the server: client updates in, the fused posterior and what can be said of it out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from lightning_fedbayes.errors import FusionError
from lightning_fedbayes.fusion import FusionAccumulator, FusionRule, Memory, Statistics, SumRule
from lightning_fedbayes.fusion.accumulator import check_finite, check_structure
from lightning_fedbayes.fusion.pools import add_disagreement
from lightning_fedbayes.posterior import GaussianPosterior, is_zero
from lightning_fedbayes.processes import ALONE, Processes
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

    def finish(self) -> RoundResult:
        """Fuse; the result is the same in all processes.

        Raises:
            FusionError: the weights cannot be used, or the rule cannot fuse these posteriors.
        """
        for update, weight in zip(self._held, self._held_weights(), strict=True):
            self._fuse(update, *update.posterior.flatten(), weight)
        fused = self._accumulator.finish(self.memory)
        check_finite(fused.posterior, *fused.posterior.flatten(), "the fused posterior")
        weights = {client: weight for part in self.processes.gather(self._weights) for client, weight in part.items()}
        shares = shares_of(dict(sorted(weights.items())), fused.reliability)
        for update in self._held:
            self._add_buffers(update, shares[update.client])
        total = sum(weights.values()) if self._streams else 1.0
        return RoundResult(
            fused.posterior,
            buffers=self._averaged_buffers(total),
            weights=shares,
            metrics=self._diagnostics(fused.posterior, shares),
            judged=bool(fused.reliability),
            excluded=fused.excluded,
            memory=fused.memory,
        )

    def _held_weights(self) -> list[float]:
        """The weights of the clients that were held back until all are known."""
        if self._streams:
            return []
        if not self.rule.uses_weights:
            return [1.0] * len(self._held)
        facts = [self._facts(update) for update in self._held]
        clients = [each for part in self.processes.gather([fact.client for fact in facts]) for each in part]
        if not clients:
            return []
        if isinstance(self.weighting, str) and self.weighting in PER_CLIENT:
            one = PER_CLIENT[self.weighting]
            own = self.processes.agree(lambda: [one(fact) for fact in facts])
            values = [each for part in self.processes.gather(own) for each in part]
            weights = dict(zip(clients, normalised(values, self.weighting, len(clients)), strict=True))
        else:  # which compares clients
            sent = facts
            if self.processes.count > 1:
                before = self.previous.to("cpu")
                sent = [replace(fact, posterior=fact.posterior.to("cpu"), previous=before) for fact in facts]
            everyone = sorted((e for part in self.processes.gather(sent) for e in part), key=lambda fact: fact.client)
            values = client_weights(self.weighting, everyone)
            weights = {fact.client: value for fact, value in zip(everyone, values, strict=True)}
        return [weights[update.client] for update in self._held]

    def _averaged_buffers(self, total: float) -> dict[str, Tensor]:
        """The averages of the clients' buffers, which have the global ones' dtypes."""
        if self.processes.count == 1:
            return {name: self._average(name, value / total) for name, value in self._buffers.items()}
        averaged = {}
        for name, like in (self._previous_buffers or {}).items():
            kind = torch.complex128 if like.is_complex() else torch.float64
            own = self._buffers.get(name, torch.zeros(like.shape, dtype=kind)).cpu()
            summed = self.processes.sum(torch.view_as_real(own) if own.is_complex() else own)
            value = torch.view_as_complex(summed) if own.is_complex() else summed
            averaged[name] = self._average(name, value / total).to(like.device)
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

    def _diagnostics(self, posterior: GaussianPosterior, shares: dict[int, float]) -> dict[str, float]:
        """What is logged of a fusion."""
        metrics = {
            "effective_clients": effective_clients(list(shares.values())),
            "disagreement": mean_disagreement(self._disagreement, self.previous.num_parameters, self.processes),
        }
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


def mean_disagreement(own: Statistics, size: int, processes: Processes) -> float:
    r"""Mean over the parameters of the weighted variance of the clients' means, from the sums of each process.

    Args:
        own: what :func:`~lightning_fedbayes.fusion.pools.add_disagreement` has made of this process's clients.
        size: number of parameters P.
        processes: of which each has a part of the clients.
    """
    if processes.count == 1:
        return float((own["disagreement"] / own["weight"]).mean())
    within = processes.gather((float(own["weight"]), float(own["disagreement"].sum())) if own else None)
    means = processes.columns(own["mean"].cpu()[None] if own else torch.zeros(0, size, dtype=torch.float64))
    there = [each for each in within if each is not None]
    between: Statistics = {}
    for (weight, _), mean in zip(there, means, strict=True):
        add_disagreement(between, mean, mean.new_tensor(weight))
    total = float(processes.sum(between["disagreement"].sum())) + sum(each for _, each in there)
    return total / sum(weight for weight, _ in there) / size


def _alike(first: Tensor | None, second: Tensor | None) -> bool:
    """Whether two tensors are both there and agree in shape and dtype."""
    return first is not None and second is not None and (first.shape, first.dtype) == (second.shape, second.dtype)
