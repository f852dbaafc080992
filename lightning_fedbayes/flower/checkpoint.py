"""What a server of a Flower federation keeps on its disk, after every round."""

from __future__ import annotations

import os
import pickle
from dataclasses import dataclass, field
from pathlib import Path

import lightning as L
import torch
from torch import Tensor

from lightning_fedbayes.engines.state import BufferPolicy, ResidentModel
from lightning_fedbayes.errors import FederationError
from lightning_fedbayes.fusion import Memory
from lightning_fedbayes.posterior import GaussianPosterior


@dataclass
class ServerState:
    """A federation between two rounds.

    Args:
        posterior: the global posterior.
        buffers: the global buffers, name → tensor.
        federation: a name that no other federation has, by which clients know what they have kept.
        seed: where its random draws come from.
        rule: the fusion rule's name.
        memory: what the rule remembers.
        rounds: how many rounds are done.
        failed_rounds: how many of the last ones in a row came to nothing.
        accepted: client → the last round, from 1, that its update was part of.
        history: one dict of figures per round.
    """

    posterior: GaussianPosterior
    buffers: dict[str, Tensor]
    federation: str
    seed: int
    rule: str
    memory: Memory
    rounds: int = 0
    failed_rounds: int = 0
    accepted: dict[int, int] = field(default_factory=dict)
    history: list[dict[str, float]] = field(default_factory=list)

    def save(self, path: Path) -> None:
        """Write it all, or nothing: a crash leaves the file before."""
        stored = {**vars(self), "posterior": self.posterior.state_dict()}
        path.parent.mkdir(parents=True, exist_ok=True)
        written = path.with_name(path.name + ".new")
        torch.save(stored, written)
        os.replace(written, path)

    @classmethod
    def load(cls, path: Path) -> ServerState:
        """What :meth:`save` wrote.

        Raises:
            FederationError: the file is not one of these.
        """
        try:
            stored = torch.load(path, map_location="cpu", weights_only=True)
            return cls(**{**stored, "posterior": GaussianPosterior.from_state_dict(stored["posterior"])})
        except (pickle.UnpicklingError, RuntimeError, EOFError, KeyError, TypeError) as error:
            raise FederationError(
                f"{path} is no checkpoint of a Flower server: {error}; give checkpoint= a path of its own"
            ) from error


def load_checkpoint(
    module: L.LightningModule, path: str | Path, *, buffers: BufferPolicy = "average",
    local_parameters: tuple[str, ...] = (),
) -> ServerState:
    """Load the global posterior of a server's checkpoint into ``module``.

    When to use it: after the federation, to validate, predict or go on with the fused network.

    Args:
        module: the network, built as for the federation.
        path: the checkpoint of :class:`~lightning_fedbayes.flower.FusionStrategy`.
        buffers, local_parameters: as in the federation.

    Returns: the whole checkpoint, with the history of rounds.

    Raises:
        FederationError: the file is no such checkpoint.
        PosteriorError: it is one of another network.
    """
    state = ServerState.load(Path(path))
    ResidentModel(module, local_parameters, buffers).load_posterior(state.posterior, state.buffers)
    hook = getattr(module, "on_round_end", None)
    if hook is not None:
        hook(state.posterior, [])
    return state
