"""What every engine is: it trains the clients of a round and hands over what each one sends."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, Literal

import lightning as L
from torch import Tensor
from torch.utils._pytree import tree_map_only

from lightning_fedbayes.engines.client import Client, ClientFailure, ClientState
from lightning_fedbayes.engines.loader import FederatedLoader
from lightning_fedbayes.engines.plan import RoundPlan
from lightning_fedbayes.engines.round import ClientUpdate
from lightning_fedbayes.engines.state import ResidentModel
from lightning_fedbayes.engines.training_log import Collected, TrainingLog

OptimizerPolicy = Literal["reset", "keep"]


class Engine(ABC):
    """Trains the clients of a round inside the Trainer's own batches.

    Args:
        trainer: the Trainer, whose step is taken over between :meth:`install` and :meth:`remove`.
        model: the resident network.
        names, sizes: name and number of examples of every client.
        log: collects what ``training_step`` logs.
        optimizer_state: "reset" in every round, or "keep" one per client.
        seed: where all random draws come from.

    Attributes:
        states: what every client keeps, by its number.
    """

    name: ClassVar[str]

    def __init__(
        self,
        trainer: L.Trainer,
        model: ResidentModel,
        names: tuple[str, ...],
        sizes: tuple[int, ...],
        log: TrainingLog,
        *,
        optimizer_state: OptimizerPolicy = "reset",
        seed: int = 0,
    ) -> None:
        self.trainer = trainer
        self.model = model
        self.names = names
        self.sizes = sizes
        self.log = log
        self.keep_optimizer = optimizer_state == "keep"
        self.seed = seed
        self.states: dict[int, ClientState] = {}
        self._trained: dict[int, ClientState] = {}
        self.plan = RoundPlan(-1, (), (0,))

    def set_clients(self, names: tuple[str, ...], sizes: tuple[int, ...]) -> None:
        """Take over names and numbers of examples of the clients; their number stays."""
        self.names, self.sizes = names, sizes

    def client(self, position: int) -> Client:
        """The client at ``position`` of the round's cohort."""
        number = self.plan.cohort[position]
        return Client(
            number, self.names[number], self.sizes[number], self.plan.round, position, len(self.plan.cohort)
        )

    def arrange(self, loader: FederatedLoader) -> None:  # noqa: B027
        """Let ``loader`` bring batches as this engine wants them: by default client after client."""

    @abstractmethod
    def install(self) -> None:
        """Take over the Trainer's step: a client that raises is left out, and the run goes on."""

    @abstractmethod
    def remove(self) -> None:
        """Give the Trainer its own step back."""

    @abstractmethod
    def num_batches(self, plan: RoundPlan) -> int:
        """How many of the Trainer's batches the clients of ``plan`` take; one, in which nothing happens, for none."""

    def begin_round(self, plan: RoundPlan) -> None:
        """Prepare for the clients of ``plan``, which may be none."""
        self.plan = plan
        self._trained = {}

    @abstractmethod
    def begin_batch(self, batch_idx: int) -> Sequence[Client]:
        """Called before every batch. Returns the clients whose first batch it is."""

    @abstractmethod
    def end_batch(self, batch_idx: int, outputs: Any) -> Sequence[ClientUpdate | ClientFailure]:
        """Called after every batch. Returns what became of the clients whose last batch it was.

        The tensors of an update may be views that the next batch overwrites.
        """

    def threads(self) -> AbstractContextManager[None]:
        """Inside, torch uses the threads that suit reading, fusing and loading the round's posteriors.

        By default its own number: after any change oneDNN has to prepare every convolution anew.
        """
        return nullcontext()

    def forget(self, client: int) -> None:
        """Drop what a client has logged and would have kept of this round, because its update is not used."""
        self._trained.pop(client, None)
        self.log.forget(client)

    def trained(self) -> tuple[Collected, dict[int, dict[str, Any]]]:
        """What the clients of this process have logged and keep, as other processes can take it."""
        states = {client: tree_map_only(Tensor, Tensor.cpu, vars(state)) for client, state in self._trained.items()}
        return self.log.collected(), states

    def take_trained(self, everyone: Sequence[tuple[Collected, dict[int, dict[str, Any]]]]) -> None:
        """Take what the clients of each process have :meth:`trained` for what those of this one have."""
        self.log.take([logged for logged, _ in everyone])
        device = self.trainer.strategy.root_device
        self._trained = {
            client: ClientState(**tree_map_only(Tensor, lambda tensor: tensor.to(device), state))
            for _, states in everyone for client, state in states.items()
        }

    def end_round(self, *, success: bool) -> None:
        """Keep what the clients keep, if the round counts."""
        if success:
            self.states.update(self._trained)
        self._trained = {}
        for optimizer in self.trainer.optimizers:
            optimizer.zero_grad()
            optimizer.state.clear()

    def state_dict(self) -> dict[int, dict[str, Any]]:
        """What every client keeps; the same for every engine."""
        return {client: {"local": s.local, "optimizers": s.optimizers} for client, s in self.states.items()}

    def load_state_dict(self, states: Mapping[int, Mapping[str, Any]]) -> None:
        """Restore what :meth:`state_dict` gave."""
        self.states = {
            client: ClientState(dict(state["local"]), list(state["optimizers"])) for client, state in states.items()
        }
