"""The sequential engine: clients train one after another in the one resident module."""

import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.optim import Optimizer

from lightning_fedbayes.clients.context import MOVING, Step, TrainingContext, TrainingLog
from lightning_fedbayes.clients.engine import Engine
from lightning_fedbayes.clients.learned import LearnedPosterior
from lightning_fedbayes.clients.loader import FederatedLoader
from lightning_fedbayes.clients.model import REPLACED, ResidentModel, Tensors
from lightning_fedbayes.clients.problems import Pull, Watch
from lightning_fedbayes.clients.snapshot import RoundState
from lightning_fedbayes.clients.states import Client, ClientOptimizer, ClientState, parameters_of, remade
from lightning_fedbayes.core.errors import FedBayesError, FederationError, FusionError, PosteriorError, listed
from lightning_fedbayes.core.loading import FailedBatch
from lightning_fedbayes.core.messages import ClientFailure, ClientUpdate
from lightning_fedbayes.core.seeding import derive_seed, seed_everything
from lightning_fedbayes.server.plan import RoundPlan


class SequentialEngine(Engine):
    """Trains any LightningModule, client by client. The reference for correctness.

    At a client's first batch the global model is copied into the module in place, and the optimizer state is reset or
    replaced by the client's. At its last batch its posterior is read. All objects stay the same.

    Args:
        context, model, loader, options: see :class:`~lightning_fedbayes.clients.engine.Engine`.
        is_alone: True if there is only one client, so that the module need not be restored for the next one.
    """

    name: ClassVar[str] = "sequential"

    def __init__(
        self,
        context: TrainingContext,
        model: ResidentModel,
        loader: FederatedLoader,
        *,
        is_alone: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(context, model, loader, TrainingLog(context.module, context.in_training_step), **options)
        self._client: Client | None = None
        self._failure: Exception | None = None
        self._losses, self._counts = list[Tensor](), list[int]()  # and the examples of each loss
        self._added: list[Any] = []  # what a method adds to each loss
        self._is_alone = is_alone
        self._state: RoundState | None = None
        self._told: set[str] = set()
        self._terms: list[Pull] = []
        self._watch: Watch | None = None
        moving = () if context.course is None else MOVING
        self._optimizers = [
            ClientOptimizer(each, partial(remade, context.remake_optimizers, i, each), self.keep_optimizer, moving)
            for i, each in enumerate(context.optimizers)
        ]

    def num_batches(self, plan: RoundPlan) -> int:
        """See :meth:`Engine.num_batches`: one for each batch of each client."""
        return plan.num_batches if plan.cohort else 1

    @property
    def turn(self) -> tuple[int, int]:
        """The client that trains now, and the number of its batch in the round."""
        return self.plan.cohort[self._position], self._batch_idx - self.plan.starts[self._position]

    def span(self, batch_idx: int) -> tuple[int, int]:
        """Return the batches of the client's local epoch."""
        if not self.plan.cohort:
            return 0, 1
        start, stop = self.plan.starts[self._position : self._position + 2]
        length = (stop - start) // self.plan.local_epochs
        first = batch_idx - (batch_idx - start) % length
        return first, first + length

    def begin_round(self, plan: RoundPlan) -> None:
        """Prepare for the clients of ``plan``."""
        super().begin_round(plan)
        self._position = 0
        self._steps = self.context.steps.total
        course = self.context.course
        self._steps_seen = self._steps.completed if course is None else course.done
        for optimizer in self._optimizers:
            optimizer.begin_round()
        model, watchers = self.model, self.context.watchers
        self._state = None if self._is_alone else RoundState(model.module, model.global_buffers, watchers)
        if plan.cohort:
            self._seed_client()

    def begin_batch(self, batch_idx: int) -> Sequence[Client]:
        """At a client's first batch, load the global model and the client's state."""
        self._batch_idx = batch_idx
        if not self.plan.cohort or batch_idx != self.plan.starts[self._position]:
            return ()
        client = self.client(self._position)
        self._client, self._failure, self._losses, self._counts, self._added = client, None, [], [], []
        state = self.states.of(client.job)
        problem = self.problem(client.job, state)
        self.model.load_client(state.local, problem.start)
        if self._watch is not None:
            self._watch.close()
            self._watch = None
        if self._state is not None:
            self._state.restore()
        self._terms = self.terms([client], [problem])
        if problem.measures:
            assert self.local is not None
            self._watch = Watch(self.local, problem.prior, self._terms, self.model.parameters, self.context.accumulate)
        states = self.optimizer_states(client, state, problem)
        for i, optimizer in enumerate(self._optimizers):
            optimizer.reset(states[i] if states else {}, state.options[i] if state.options else ())
        if self.context.course is not None:
            self.context.course.begin_client()
        on_client_start = getattr(self.model.module, "on_client_start", None)
        if on_client_start is not None:
            try:
                on_client_start(client)
            except Exception as error:
                self._failure = error
            if self._state is not None:
                self._state.note_hook()
        self._others_steps = self._steps.completed - self._steps_seen
        self._start = time.perf_counter()
        return (client,)

    def train_batch(self, step: Step, optimizer: Optimizer, batch_idx: int, kwargs: Mapping[str, Any]) -> Any:
        """Take the loop's step as if no other client of the round had trained, unless the client has failed.

        Where learning rates may move in every step, only the longest client of each earlier round has.
        """
        client = self._client
        if self._failure is not None or client is None or not self.plan.cohort:
            return {}
        batch = self.log.batch = next(iter(kwargs.values()))
        others = self._others_steps
        self._steps.ready -= others
        self._steps.completed -= others
        try:
            if isinstance(batch, FailedBatch):
                raise batch.error
            for term in reversed(self._terms):  # the first is added first
                step = term.added(self.context.module, self.model.parameters)(step)
            outputs = step(optimizer, batch_idx, kwargs)
        except (MisconfigurationException, FedBayesError):
            raise  # a mistake in the set-up, the same for every client
        except Exception as error:
            if self.context.mean_over_processes is not None:
                raise  # the other processes wait for this one's gradient
            self._failure = error
            return {}
        finally:
            self._steps.ready += others
            self._steps.completed += others
        loss = outputs.get("loss")
        if self._watch is not None:
            self._watch.observe()
        if self.model.learned is not None and loss is not None:
            start, stop = self.plan.starts[self._position : self._position + 2]
            self.model.learned.observe(optimizer, [(self._batch_idx + 1 - start) / (stop - start)])
        if isinstance(loss, Tensor):
            most = self._loader.batch_size
            self._losses.append(loss.clone() if loss.ndim == 0 else loss.sum())  # a compiled step may write there again
            self._counts.append(min(client.num_examples - batch_idx * most, most))
            if self._watch is not None or self._terms:
                self._added.append(
                    sum((term.value for term in self._terms), 0.0 if self._watch is None else self._watch.value)
                )
        return outputs

    def end_batch(self, batch_idx: int) -> Sequence[ClientUpdate | ClientFailure]:
        """At a client's last batch, read its update."""
        if not self.plan.cohort or batch_idx + 1 != self.plan.starts[self._position + 1]:
            return ()
        result = self._read_update()
        self._position += 1
        if self._position < len(self.plan.cohort):
            self._seed_client()
        elif self._state is not None:
            self._state.restore(keep_hooks=True)
        return (result,)

    def _read_update(self) -> ClientUpdate | ClientFailure:
        """Return the update of the client that has just trained, and note what it keeps."""
        assert self._client is not None
        client, error = self._client, self._failure
        live = dict(self.model.module.named_parameters())
        for name, parameter in self.model.parameters.items():
            if live.get(name) is not parameter:
                raise FederationError(REPLACED.format(name))
        if error is None and self.model.learned is not None:
            error = self._measure(client, self.model.learned)
        if self.context.course is not None:
            self.context.course.end_client(self._steps.completed - self._others_steps - self._steps_seen)
        logged, seconds = self.log.end_client(client.job), time.perf_counter() - self._start
        if error is not None:
            return ClientFailure(client.job, error, client.num_examples, seconds)
        metrics = {}
        if self._losses:
            losses = torch.stack(self._losses)
            dtype = torch.promote_types(losses.dtype, torch.float32)  # sums in half precision are coarse
            total = (losses * losses.new_tensor(self._counts, dtype=dtype)).sum()
            metrics["train_loss"] = float(total) / sum(self._counts) * self.context.accumulate
            if self._added:
                added = float(sum(each * count for each, count in zip(self._added, self._counts))) / sum(self._counts)
                metrics |= {"train_loss": metrics["train_loss"] - added, "added_loss": added} if added else {}
        metrics.update(logged)
        mean = self.context.mean_over_processes
        if mean is not None:  # each process has seen its part of every batch
            device = self.context.device
            metrics = {name: float(mean(torch.tensor(metrics[name], device=device))) for name in sorted(metrics)}
        try:
            posterior, buffers = self.model.read_posterior(), self.model.read_buffers()
            measured = None if self._watch is None else self._found(client, self._watch)
            posterior, buffers, own = self.sent_and_kept(client.job, posterior, buffers, measured)
        except (PosteriorError, FusionError) as unusable:
            return ClientFailure(client.job, unusable, client.num_examples, seconds)
        states, options = [], []
        if self.keep_optimizer:
            read = [optimizer.read() for optimizer in self._optimizers]
            states, options = self.kept_states([state for state, _ in read]), [changes for _, changes in read]
        self.states.keep(client.job, ClientState(self.model.read_local(), states, options, **own))
        return ClientUpdate(client.job, client.num_examples, posterior, buffers, metrics, seconds, own["kept"])

    def _measure(self, client: Client, learned: LearnedPosterior) -> Exception | None:
        """Measure the variances of the client that has just trained. Return the error if that fails."""
        optimizer = self.context.optimizers[0]
        held = {i: optimizer.state[p] for i, p in enumerate(parameters_of(optimizer)) if p in optimizer.state}
        local, buffers = self.states.of(client.job).local, dict(self.model.module.named_buffers())
        try:
            learned.variances.update(self.measured(client, local, self.model.parameters, buffers, held))
        except (MisconfigurationException, FedBayesError):
            raise
        except Exception as error:  # of the client's data, or its network
            return error
        return None

    def _found(self, client: Client, watch: Watch) -> tuple[Tensors, Tensors]:
        mean = self.context.mean_over_processes
        if mean is None:
            return self.found(watch.measured, client)
        parts = self.found(watch.measured, client, torch.distributed.get_world_size())
        gradients, precisions = ({name: mean(each) for name, each in part.items()} for part in parts)
        return gradients, precisions

    def end_round(self, *, success: bool) -> None:
        """Restore what clients have changed in the module and its optimizers, and name it once."""
        if self._watch is not None:
            self._watch.close()
            self._watch = None
        for optimizer in self._optimizers:
            optimizer.reset()
        if self.context.course is not None:
            self.context.course.end_round(is_whole=self._position == len(self.plan.cohort))
        if self._state is not None:
            if self._position < len(self.plan.cohort):  # the round was cut short
                self._state.restore(keep_hooks=True)
            dropped = "Every client starts a round with the module's own {}: what training changes there is dropped."
            shared = "Clients share {}, which training changes and which cannot be put back."
            for text, names in ((dropped, self._state.dropped), (shared, self._state.shared)):
                if names - self._told:
                    rank_zero_info(text.format(listed(sorted(names - self._told))))
                self._told |= names
        self._state = None
        super().end_round(success=success)

    def _seed_client(self) -> None:
        """Seed the global generators for the next client, before transforms of its first batch on the device."""
        seed_everything(derive_seed(self.seed, "training", self.plan.round, self.plan.cohort[self._position]))
