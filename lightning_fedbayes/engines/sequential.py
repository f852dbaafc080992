"""The sequential engine: clients train one after another in the one resident module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import lightning as L
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.optim import Optimizer

from lightning_fedbayes.engines.client import Client, ClientFailure, ClientState, parameters_of
from lightning_fedbayes.engines.engine import Engine
from lightning_fedbayes.engines.loader import FailedBatch
from lightning_fedbayes.engines.plain_steps import give_back, plain_step, steps_are_plain, take_over
from lightning_fedbayes.engines.plan import RoundPlan
from lightning_fedbayes.engines.round import ClientUpdate
from lightning_fedbayes.engines.state import ResidentModel
from lightning_fedbayes.engines.training_log import TrainingLog
from lightning_fedbayes.errors import FedBayesError, PosteriorError
from lightning_fedbayes.seeding import derive_seed, seed_everything


class SequentialEngine(Engine):
    """Trains any LightningModule, client by client; the reference for correctness.

    At a client's first batch the global model is copied into the module in place and the optimizer state is reset, or
    replaced by the client's own; at its last batch its posterior is read. Nothing is created anew.

    Args:
        trainer, model, names, sizes, optimizer_state, seed: see :class:`~lightning_fedbayes.engines.engine.Engine`.
    """

    name: ClassVar[str] = "sequential"

    def __init__(
        self, trainer: L.Trainer, model: ResidentModel, names: tuple[str, ...], sizes: tuple[int, ...], **options: Any
    ) -> None:
        super().__init__(trainer, model, names, sizes, TrainingLog(trainer.lightning_module), **options)
        self._client: Client | None = None
        self._failure: Exception | None = None
        self._losses: list[Tensor] = []
        self._together = isinstance(trainer.strategy, DDPStrategy)

    def install(self) -> None:
        """Guard the Trainer's step: a client that raises is left out, and the run goes on."""
        loop: Any = self.trainer.fit_loop.epoch_loop
        plain = steps_are_plain(self.trainer)
        step = plain_step(self.trainer) if plain else loop.automatic_optimization.run

        def guarded(optimizer: Optimizer, batch_idx: int, kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
            if self._failure is not None or not self.plan.cohort:
                return {}
            batch = self.log.batch = next(iter(kwargs.values()))
            try:
                if isinstance(batch, FailedBatch):
                    raise batch.error
                return step(optimizer, batch_idx, kwargs)
            except (MisconfigurationException, FedBayesError):
                raise  # a mistake in the set-up, the same for every client
            except Exception as error:
                if self._together:
                    raise  # the others wait for this process's gradient
                self._failure = error
                return {}

        loop.automatic_optimization.run = guarded
        if plain:
            take_over(self.trainer, guarded)
        self.log.install()

    def remove(self) -> None:
        """Give the Trainer its own step back."""
        loop = self.trainer.fit_loop.epoch_loop
        loop.automatic_optimization.__dict__.pop("run", None)
        give_back(self.trainer)
        self.log.remove()

    def num_batches(self, plan: RoundPlan) -> int:
        """One for each batch of each client."""
        return plan.num_batches if plan.cohort else 1

    def begin_round(self, plan: RoundPlan) -> None:
        """Prepare for the clients of ``plan``."""
        super().begin_round(plan)
        self._position = 0
        if plan.cohort:
            self._seed_client()

    def begin_batch(self, batch_idx: int) -> Sequence[Client]:
        """At a client's first batch, load the global model and what the client has kept."""
        if batch_idx != self.plan.starts[self._position]:
            return ()
        client = self.client(self._position)
        self._client, self._failure, self._losses = client, None, []
        state = self.states.get(client.number, ClientState())
        self.model.load_client(state.local)
        for i, optimizer in enumerate(self.trainer.optimizers):
            optimizer.zero_grad()
            optimizer.state.clear()
            if state.optimizers:
                parameters = parameters_of(optimizer)
                optimizer.state.update({parameters[j]: _copy(kept) for j, kept in state.optimizers[i].items()})
        on_client_start = getattr(self.model.module, "on_client_start", None)
        if on_client_start is not None:
            try:
                on_client_start(client)
            except Exception as error:
                self._failure = error
        return (client,)

    def end_batch(self, batch_idx: int, outputs: Any) -> Sequence[ClientUpdate | ClientFailure]:
        """At a client's last batch, read what it sends."""
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if isinstance(loss, Tensor):
            self._losses.append(loss)
        if batch_idx + 1 != self.plan.starts[self._position + 1]:
            return ()
        assert self._client is not None
        client, error = self._client, self._failure
        self._position += 1
        if self._position < len(self.plan.cohort):
            self._seed_client()
        logged = self.log.end_client(client.number)
        if error is not None:
            return (ClientFailure(client.number, error),)
        losses = [loss.flatten() for loss in self._losses]
        metrics = {"train_loss": float(torch.cat(losses).mean()), **logged} if losses else logged
        if self._together:  # each has seen its part of every batch
            reduce, device = self.trainer.strategy.reduce, self.trainer.strategy.root_device
            metrics = {name: float(reduce(torch.tensor(metrics[name], device=device))) for name in sorted(metrics)}
        try:
            posterior, buffers = self.model.read_posterior(), self.model.read_buffers()
        except PosteriorError as unreadable:
            return (ClientFailure(client.number, unreadable),)
        self._trained[client.number] = self._read_state()
        return (ClientUpdate(client.number, client.num_examples, posterior, buffers, metrics),)

    def _read_state(self) -> ClientState:
        """What the client that has just trained keeps."""
        optimizers = self.trainer.optimizers if self.keep_optimizer else []
        kept = [
            {i: optimizer.state[p] for i, p in enumerate(parameters_of(optimizer)) if p in optimizer.state}
            for optimizer in optimizers
        ]
        return ClientState(self.model.read_local(), kept)

    def _seed_client(self) -> None:
        """Seed the global generators for the next client.

        Done at the end of the client before it, so that transforms of its first batch on the device are covered.
        """
        seed_everything(derive_seed(self.seed, "training", self.plan.round, self.plan.cohort[self._position]))


def _copy(kept: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of an optimizer's state of one parameter, which the optimizer may write into."""
    return {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in kept.items()}
