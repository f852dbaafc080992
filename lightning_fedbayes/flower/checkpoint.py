"""Checkpoint of a Flower federation, which its server writes after every round."""

from __future__ import annotations

import os
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor

from lightning_fedbayes.errors import FederationError
from lightning_fedbayes.flower.training import call_round_end
from lightning_fedbayes.posterior import GaussianPosterior
from lightning_fedbayes.settings import BufferPolicy
from lightning_fedbayes.trainer import damage
from lightning_fedbayes.training.model import ResidentModel


@dataclass(frozen=True)
class ServerState:
    """A federation between two rounds.

    Args:
        federation: a name that no other federation has, by which clients recognise their own states.
        seed: source of its random draws.
        server: state of the server (:meth:`Server.state_dict <lightning_fedbayes.Server.state_dict>`).
        calibration: state of each calibration of the global posterior, by its ``state_key``; none before
            :meth:`FusionStrategy.calibrate`.
    """

    federation: str
    seed: int
    server: dict[str, Any]
    calibration: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def posterior(self) -> GaussianPosterior:
        """The global posterior."""
        return GaussianPosterior.from_state_dict(self.server["posterior"])

    @property
    def buffers(self) -> dict[str, Tensor]:
        """The global buffers, name → tensor."""
        return self.server["buffers"]

    @property
    def rounds(self) -> int:
        """Number of finished rounds."""
        return self.server["rounds"]

    @property
    def history(self) -> list[dict[str, float]]:
        """One dict of figures per finished round, in order; its "round" counts from 1."""
        return self.server["history"]

    def save(self, path: Path) -> None:
        """Write all of it, or nothing: a crash leaves the file before."""
        path.parent.mkdir(parents=True, exist_ok=True)
        written = path.with_name(path.name + ".new")
        torch.save(vars(self), written)
        os.replace(written, path)

    @classmethod
    def load(cls, path: Path) -> ServerState:
        """Read what :meth:`save` wrote.

        Raises:
            FederationError: the file is not one of these, or damaged.
        """
        try:
            if (reason := damage(path)) is not None:
                raise ValueError(reason)
            state = cls(**torch.load(path, map_location="cpu", weights_only=True))
            GaussianPosterior.from_state_dict(state.server["posterior"])
        except (pickle.UnpicklingError, RuntimeError, EOFError, KeyError, TypeError, OSError, ValueError) as error:
            raise FederationError(
                f"{path} is no checkpoint of a Flower server: {error}; give checkpoint= a path of its own"
            ) from error
        return state


def load_checkpoint(
    module: L.LightningModule, path: str | Path, *, buffers: BufferPolicy = "average",
    local_parameters: Sequence[str] = (),
) -> ServerState:
    """Load the global posterior of a server's checkpoint into ``module``.

    When to use it: after the federation, to validate, predict or go on with the fused network.

    Args:
        module: the network, built as for the federation.
        path: the checkpoint of :class:`~lightning_fedbayes.flower.FusionStrategy`.
        buffers, local_parameters: as in the federation.

    Returns: the whole checkpoint, with the history of rounds. Calibration is loaded into a callback of the same options
    by ``scaling.load_state_dict(state.calibration[scaling.state_key])``.

    Raises:
        FederationError: the file is no such checkpoint.
        PosteriorError: it is one of another network.
    """
    state = ServerState.load(Path(path))
    ResidentModel(module, local_parameters, buffers).load_posterior(state.posterior, state.buffers)
    call_round_end(module, state.posterior)
    return state
