"""One round on the server: client updates in, the fused posterior and what can be said of it out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_fedbayes.errors import FusionError
from lightning_fedbayes.fusion import FusionAccumulator, FusionRule, Statistics, SumRule
from lightning_fedbayes.fusion.accumulator import check_finite, check_structure
from lightning_fedbayes.fusion.pools import add_disagreement
from lightning_fedbayes.posterior import GaussianPosterior, is_zero
from lightning_fedbayes.weighting import PER_CLIENT, ClientFacts, CohortWeights, client_weights, effective_clients


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
        weights: client → normalised weight ω.
        metrics: diagnostics of the fusion, name → value.
    """

    posterior: GaussianPosterior
    buffers: dict[str, Tensor]
    weights: dict[int, float]
    metrics: dict[str, float]


class RoundFusion:
    """Collects the updates of a round.

    With a sum-type rule and weights that look at one client at a time nothing is kept but sums.

    Args:
        rule: the fusion rule.
        weighting: a name, or a function of all clients' facts (see :mod:`lightning_fedbayes.weighting`).
        previous: the global posterior that the clients started from.
    """

    def __init__(self, rule: FusionRule, weighting: str | CohortWeights, previous: GaussianPosterior) -> None:
        self.rule = rule
        self.weighting = weighting
        self.previous = previous
        self._streams = isinstance(rule, SumRule) and isinstance(weighting, str) and weighting in PER_CLIENT
        self._accumulator = FusionAccumulator(rule, previous)
        self._held: list[ClientUpdate] = []
        self._weights: dict[int, float] = {}
        self._buffers: dict[str, Tensor] = {}
        self._integer_buffers: set[str] = set()
        self._disagreement: Statistics = {}

    def __len__(self) -> int:
        return len(self._held) if self._held else len(self._weights)

    def add(self, update: ClientUpdate) -> None:
        """Admit one client's update.

        Raises:
            FusionError: names or shapes are not those of the global model, or a value is not finite. The round is as
                it was before.
        """
        who = f"client {update.client}"
        check_structure(update.posterior, self.previous, who)
        mean, variance = update.posterior.flatten()
        check_finite(update.posterior, mean, variance, who)
        for name, value in update.buffers.items():
            if not bool(torch.isfinite(value).all()):
                raise FusionError(f"{who}: buffer '{name}' is not finite")
        if self._streams:
            self._fuse(update, self._weight(update))
        else:
            held = ClientUpdate(
                update.client, update.num_examples, update.posterior.clone(), dict(update.buffers), update.metrics
            )
            self._held.append(held)

    def finish(self) -> RoundResult:
        """Fuse.

        Raises:
            FusionError: the weights cannot be used, or the rule cannot fuse these posteriors.
        """
        if self._held:
            if self.rule.uses_weights:
                weights = client_weights(self.weighting, [self._facts(update) for update in self._held])
            else:
                weights = [1.0] * len(self._held)
            for update, weight in zip(self._held, weights, strict=True):
                self._fuse(update, weight)
        posterior = self._accumulator.compute()
        total = sum(self._weights.values())
        buffers = {name: value / total for name, value in self._buffers.items()}
        buffers |= {name: buffers[name].round() for name in self._integer_buffers}
        return RoundResult(
            posterior,
            buffers=buffers,
            weights={client: weight / total for client, weight in self._weights.items()},
            metrics=self._diagnostics(posterior),
        )

    def _weight(self, update: ClientUpdate) -> float:
        """The weight ω, not normalised, of one client."""
        if not self.rule.uses_weights:
            return 1.0
        assert isinstance(self.weighting, str)
        return PER_CLIENT[self.weighting](self._facts(update))

    def _facts(self, update: ClientUpdate) -> ClientFacts:
        return ClientFacts(update.client, update.num_examples, update.posterior, self.previous, update.metrics)

    def _fuse(self, update: ClientUpdate, weight: float) -> None:
        """Add one admitted client to all running sums."""
        self._accumulator.add(update.posterior, weight)
        self._weights[update.client] = weight
        if weight == 0:
            return
        mean, _ = update.posterior.flatten()
        add_disagreement(self._disagreement, mean, mean.new_tensor(weight))
        self._integer_buffers = {name for name, value in update.buffers.items() if not value.is_floating_point()}
        for name, value in update.buffers.items():
            term = value.to(torch.float64) * weight
            self._buffers[name] = self._buffers[name] + term if name in self._buffers else term

    def _diagnostics(self, posterior: GaussianPosterior) -> dict[str, float]:
        """What is logged of a fusion."""
        metrics = {
            "effective_clients": effective_clients(list(self._weights.values())),
            "disagreement": float((self._disagreement["disagreement"] / self._disagreement["weight"]).mean()),
        }
        variances = [value.detach().flatten() for value in posterior.variance.values() if not is_zero(value)]
        if variances:
            flat = torch.cat([value.to(torch.float64) for value in variances])
            metrics["posterior_variance"] = float(flat.mean())
        return metrics
