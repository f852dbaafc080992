"""The sequential engine: clients train one after another in the one resident module."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import lightning as L
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.optim import Optimizer

from lightning_fedbayes.engines.loader import FailedBatch
from lightning_fedbayes.engines.plain_steps import plain_advance, plain_step, steps_are_plain
from lightning_fedbayes.engines.plan import RoundPlan
from lightning_fedbayes.engines.round import ClientUpdate
from lightning_fedbayes.engines.state import ResidentModel, Tensors
from lightning_fedbayes.engines.training_log import TrainingLog
from lightning_fedbayes.errors import FedBayesError, PosteriorError
from lightning_fedbayes.seeding import derive_seed, seed_everything

OptimizerPolicy = Literal["reset", "keep"]


@dataclass(frozen=True)
class Client:
    """The client whose turn it is.

    Args:
        number: the client's number, from 0.
        name: its name.
        num_examples: its number of training examples n_k.
        round: the round, from 0.
        position: its place in the cohort, from 0.
        cohort: number of clients in the cohort.
    """

    number: int
    name: str
    num_examples: int
    round: int
    position: int
    cohort: int


@dataclass(frozen=True)
class ClientFailure:
    """A client that is left out of the round.

    Args:
        client: the client's number.
        error: why.
    """

    client: int
    error: Exception


@dataclass
class ClientState:
    """What a client keeps from round to round.

    Args:
        local: parameters and buffers that never leave it, name → tensor.
        optimizers: state of each optimizer, parameter → what the optimizer keeps of it.
    """

    local: Tensors = field(default_factory=dict)
    optimizers: list[dict[Tensor, Any]] = field(default_factory=list)


class SequentialEngine:
    """Trains any LightningModule, client by client; the reference for correctness.

    At a client's first batch the global model is copied into the module in place and the optimizer state is reset, or
    replaced by the client's own; at its last batch its posterior is read. Nothing is created anew.

    Args:
        trainer: the Trainer, whose step is guarded while the engine is installed.
        model: the resident network.
        names, sizes: name and number of examples of every client.
        optimizer_state: "reset" in every round, or "keep" one per client.
        seed: where all random draws come from.
    """

    def __init__(
        self,
        trainer: L.Trainer,
        model: ResidentModel,
        names: tuple[str, ...],
        sizes: tuple[int, ...],
        *,
        optimizer_state: OptimizerPolicy = "reset",
        seed: int = 0,
    ) -> None:
        self.trainer = trainer
        self.model = model
        self.names = names
        self.sizes = sizes
        self.keep_optimizer = optimizer_state == "keep"
        self.seed = seed
        self.log = TrainingLog(trainer.lightning_module)
        self.states: dict[int, ClientState] = {}
        self._trained: dict[int, ClientState] = {}
        self._client: Client | None = None
        self._failure: Exception | None = None
        self._loss: Tensor | float = 0.0
        self._batches = 0

    def set_clients(self, names: tuple[str, ...], sizes: tuple[int, ...]) -> None:
        """Take over names and numbers of examples of the clients; their number stays."""
        self.names, self.sizes = names, sizes

    def install(self) -> None:
        """Guard the Trainer's step: a client that raises is left out, and the run goes on."""
        loop: Any = self.trainer.fit_loop.epoch_loop
        plain = steps_are_plain(self.trainer)
        step = plain_step(self.trainer) if plain else loop.automatic_optimization.run

        def guarded(optimizer: Optimizer, batch_idx: int, kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
            if self._failure is not None:
                return {}
            batch = self.log.batch = next(iter(kwargs.values()))
            if isinstance(batch, FailedBatch):
                self._failure = batch.error
                return {}
            try:
                return step(optimizer, batch_idx, kwargs)
            except (MisconfigurationException, FedBayesError):
                raise  # a mistake in the set-up, the same for every client
            except Exception as error:
                self._failure = error
                return {}

        loop.automatic_optimization.run = guarded
        if plain:
            loop.advance = plain_advance(self.trainer, guarded)
        self.log.install()

    def remove(self) -> None:
        """Give the Trainer its own step back."""
        loop = self.trainer.fit_loop.epoch_loop
        loop.automatic_optimization.__dict__.pop("run", None)
        loop.__dict__.pop("advance", None)
        self.log.remove()

    def begin_round(self, plan: RoundPlan) -> None:
        """Prepare for the clients of ``plan``."""
        self.plan = plan
        self._trained = {}
        self._position = 0
        self._seed_client()

    def begin_batch(self, batch_idx: int) -> Client | None:
        """Called before every batch. Returns the client, if this is its first batch."""
        if batch_idx != self.plan.starts[self._position]:
            return None
        number = self.plan.cohort[self._position]
        place, cohort = self._position, len(self.plan.cohort)
        client = Client(number, self.names[number], self.sizes[number], self.plan.round, place, cohort)
        self._client, self._failure, self._loss, self._batches = client, None, 0.0, 0
        state = self.states.get(number, ClientState())
        self.model.load_client(state.local)
        for i, optimizer in enumerate(self.trainer.optimizers):
            optimizer.zero_grad()
            optimizer.state.clear()
            if state.optimizers:
                optimizer.state.update({p: _copy(kept) for p, kept in state.optimizers[i].items()})
        on_client_start = getattr(self.model.module, "on_client_start", None)
        if on_client_start is not None:
            try:
                on_client_start(client)
            except Exception as error:
                self._failure = error
        return client

    def end_batch(self, batch_idx: int, outputs: Any) -> ClientUpdate | ClientFailure | None:
        """Called after every batch. Returns what became of the client, if this was its last batch."""
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if isinstance(loss, Tensor):
            self._loss = self._loss + loss
            self._batches += 1
        if batch_idx + 1 != self.plan.starts[self._position + 1]:
            return None
        assert self._client is not None
        client, error = self._client, self._failure
        self._position += 1
        if self._position < len(self.plan.cohort):
            self._seed_client()
        logged = self.log.end_client(client.number)
        if error is not None:
            return ClientFailure(client.number, error)
        metrics = {"train_loss": float(self._loss) / self._batches, **logged} if self._batches else logged
        try:
            posterior, buffers = self.model.read_posterior(), self.model.read_buffers()
        except PosteriorError as unreadable:
            return ClientFailure(client.number, unreadable)
        self._trained[client.number] = self._read_state()
        return ClientUpdate(client.number, client.num_examples, posterior, buffers, metrics)

    def forget(self, client: int) -> None:
        """Drop what a client has logged and would have kept of this round, because its update is not used."""
        self._trained.pop(client, None)
        self.log.forget(client)

    def end_round(self, *, success: bool) -> None:
        """Keep what the clients keep, if the round counts."""
        if success:
            self.states.update(self._trained)
        self._trained = {}
        for optimizer in self.trainer.optimizers:
            optimizer.zero_grad()
            optimizer.state.clear()

    def state_dict(self) -> dict[int, dict[str, Any]]:
        """What every client keeps, with parameters numbered as in the optimizers."""
        return {client: {"local": s.local, "optimizers": self._numbered(s)} for client, s in self.states.items()}

    def load_state_dict(self, states: Mapping[int, Mapping[str, Any]]) -> None:
        """Restore what :meth:`state_dict` gave."""
        self.states = {}
        for client, state in states.items():
            optimizers = [
                {parameters[i]: kept for i, kept in numbered.items()}
                for parameters, numbered in zip(self._parameters(), state["optimizers"], strict=False)
            ]
            self.states[client] = ClientState(dict(state["local"]), optimizers)

    def _read_state(self) -> ClientState:
        """What the client that has just trained keeps."""
        optimizers = [dict(optimizer.state) for optimizer in self.trainer.optimizers] if self.keep_optimizer else []
        return ClientState(self.model.read_local(), optimizers)

    def _seed_client(self) -> None:
        """Seed the global generators for the next client.

        Done at the end of the client before it, so that transforms of its first batch on the device are covered.
        """
        seed_everything(derive_seed(self.seed, "training", self.plan.round, self.plan.cohort[self._position]))

    def _parameters(self) -> list[list[Tensor]]:
        return [[p for group in o.param_groups for p in group["params"]] for o in self.trainer.optimizers]

    def _numbered(self, state: ClientState) -> list[dict[int, Any]]:
        return [
            {i: kept[p] for i, p in enumerate(parameters) if p in kept}
            for parameters, kept in zip(self._parameters(), state.optimizers, strict=False)
        ]


def _copy(kept: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of an optimizer's state of one parameter, which the optimizer may write into."""
    return {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in kept.items()}
