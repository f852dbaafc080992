"""The sequential engine: clients train one after another in the one resident module."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.optim import Optimizer

from lightning_fedbayes.errors import FedBayesError, PosteriorError
from lightning_fedbayes.messages import ClientFailure, ClientUpdate
from lightning_fedbayes.plan import RoundPlan
from lightning_fedbayes.seeding import derive_seed, seed_everything
from lightning_fedbayes.training.client import Client, ClientState, parameters_of
from lightning_fedbayes.training.context import Step, TrainingContext
from lightning_fedbayes.training.engine import Engine
from lightning_fedbayes.training.loader import FailedBatch, FederatedLoader
from lightning_fedbayes.training.log import TrainingLog
from lightning_fedbayes.training.model import ResidentModel


class SequentialEngine(Engine):
    """Trains any LightningModule, client by client; the reference for correctness.

    At a client's first batch the global model is copied into the module in place and the optimizer state is reset, or
    replaced by the client's own; at its last batch its posterior is read. Nothing is created anew.

    Args:
        context, model, loader, keep_optimizer, seed: see :class:`~lightning_fedbayes.training.engine.Engine`.
    """

    name: ClassVar[str] = "sequential"

    def __init__(
        self, context: TrainingContext, model: ResidentModel, loader: FederatedLoader, **options: Any
    ) -> None:
        log = TrainingLog(context.module, context.in_training_step)
        super().__init__(context, model, loader, log, **options)
        self._client: Client | None = None
        self._failure: Exception | None = None
        self._losses: list[Tensor] = []

    def num_batches(self, plan: RoundPlan) -> int:
        """Return one for each batch of each client."""
        return plan.num_batches if plan.cohort else 1

    def begin_round(self, plan: RoundPlan) -> None:
        """Prepare for the clients of ``plan``."""
        super().begin_round(plan)
        self._position = 0
        if plan.cohort:
            self._seed_client()

    def begin_batch(self, batch_idx: int) -> Sequence[Client]:
        """At a client's first batch, load the global model and the client's state."""
        if not self.plan.cohort or batch_idx != self.plan.starts[self._position]:
            return ()
        client = self.client(self._position)
        self._client, self._failure, self._losses = client, None, []
        state = self.states.get(client.number, ClientState())
        self.model.load_client(state.local)
        for i, optimizer in enumerate(self.context.optimizers):
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
        self._start = time.perf_counter()
        return (client,)

    def train_batch(self, step: Step, optimizer: Optimizer, batch_idx: int, kwargs: Mapping[str, Any]) -> Any:
        """Take the loop's own step, unless the client has failed."""
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
            if self.context.mean_over_processes is not None:
                raise  # the other processes wait for this one's gradient
            self._failure = error
            return {}

    def end_batch(self, batch_idx: int, outputs: Any) -> Sequence[ClientUpdate | ClientFailure]:
        """At a client's last batch, read its update."""
        if not self.plan.cohort:
            return ()
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
            return (ClientFailure(client.number, error, client.num_examples, self.seconds()),)
        losses = [loss.flatten() for loss in self._losses]
        metrics = {"train_loss": float(torch.cat(losses).mean()), **logged} if losses else logged
        mean = self.context.mean_over_processes
        if mean is not None:  # each process has seen its part of every batch
            device = self.context.device
            metrics = {name: float(mean(torch.tensor(metrics[name], device=device))) for name in sorted(metrics)}
        try:
            posterior, buffers = self.model.read_posterior(), self.model.read_buffers()
        except PosteriorError as unreadable:
            return (ClientFailure(client.number, unreadable, client.num_examples, self.seconds()),)
        self._trained[client.number] = self._read_state()
        return (
            ClientUpdate(client.number, client.num_examples, posterior, buffers, metrics, self.seconds()),
        )

    def _read_state(self) -> ClientState:
        """Return the state of the client that has just trained."""
        optimizers = self.context.optimizers if self.keep_optimizer else []
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
    """Return a copy of an optimizer's entries for one parameter, which the optimizer may write into."""
    return {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in kept.items()}
