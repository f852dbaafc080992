"""A client that trains, and the state that it keeps between rounds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from lightning_fedbayes.core.errors import check_number
from lightning_fedbayes.core.posterior import GaussianPosterior
from lightning_fedbayes.fusion import fuse
from lightning_fedbayes.server.plan import STRIDE


@dataclass(frozen=True)
class Client:
    """A client that begins to train.

    Args:
        number: the client's number, from 0.
        name: its name.
        num_examples: its number of training examples n_k.
        round: the round, from 0.
        position: its position among the clients of the round that this process trains, from 0.
        cohort: number of those clients.
        problem: which of the client's problems this is, from 0 (:attr:`~lightning_fedbayes.Method.problems`).
    """

    number: int
    name: str
    num_examples: int
    round: int
    position: int
    cohort: int
    problem: int = 0

    @property
    def job(self) -> int:
        """The number by which an engine tells problems of clients apart."""
        return self.number + self.problem * STRIDE


@dataclass
class ClientState:
    """State that a client keeps from round to round; it never leaves the client.

    Args:
        local: local parameters and buffers, name → tensor.
        optimizers: state of each optimizer: number of the parameter → the optimizer's entries for it.
        options: what training has changed in each optimizer's options: see
            :meth:`~lightning_fedbayes.clients.optimizers.ClientOptimizer.read`.
        kept: what the method keeps at the client, such as its site; empty for nothing.
        own: the posterior that the client has trained last, as :meth:`GaussianPosterior.state_dict` has it; empty if
            it keeps none.
        rounds: of the federation, when the optimizers' states were kept; 0 if they are not.
    """

    local: dict[str, Tensor] = field(default_factory=dict)
    optimizers: list[dict[int, dict[str, Any]]] = field(default_factory=list)
    options: list[list[dict[str, Any]]] = field(default_factory=list)
    kept: dict[str, Tensor] = field(default_factory=dict)
    own: dict[str, Any] = field(default_factory=dict)
    rounds: int = 0

    def personal(self, posterior: GaussianPosterior, weight: float) -> GaussianPosterior:
        """Return the barycenter of the global ``posterior`` and the own one, of weight ``weight``.

        It is the global one if the client has none.

        Raises:
            FederationError: the weight is not in [0, 1].
        """
        check_number("weight", weight, "[0, 1]", why="the client's own part of its personal posterior")
        if not self.own or not weight:
            return posterior
        own = GaussianPosterior.from_state_dict(self.own)
        fused = own if weight == 1 else fuse("reverse_kl_barycenter", [posterior, own], [1 - weight, weight])
        return fused.marked(posterior.linearised)


def options_of(optimizer: Any) -> list[dict[str, Any]]:
    """Return the options of an optimizer's groups, without the parameters."""
    return [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]


def parameters_of(optimizer: Any) -> list[Tensor]:
    """Return the parameters of an optimizer, in the order of its ``state_dict``."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
