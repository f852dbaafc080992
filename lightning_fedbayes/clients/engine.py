"""Base of the engines: an engine trains the clients of a round and returns their updates."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_fedbayes.clients.between import Between, Change, changed_state
from lightning_fedbayes.clients.context import Collected, Step, TrainingContext, TrainingLog
from lightning_fedbayes.clients.learned import OptimizerPosterior, TrainedClient
from lightning_fedbayes.clients.loader import FailedBatch, FederatedLoader
from lightning_fedbayes.clients.model import ResidentModel, Tensors
from lightning_fedbayes.clients.problems import LocalPriors, Measured, Pull, pull_of
from lightning_fedbayes.clients.states import Client, ClientState, OptimizerState, States, after_absence, has_own_state
from lightning_fedbayes.clients.states import Trained as NewStates
from lightning_fedbayes.core.messages import ClientFailure, ClientUpdate
from lightning_fedbayes.core.posterior import GaussianPosterior
from lightning_fedbayes.layers.posterior_view import gaussian_parameters
from lightning_fedbayes.layers.priors import LocalPrior
from lightning_fedbayes.methods import method as methods
from lightning_fedbayes.server.plan import STRIDE, OfClients, RoundPlan

Results = tuple[Collected, NewStates, Any]
"""Logged figures, kept states and longest course of the clients that one process has trained, ready to be sent."""
SMALL_STEP = 5e6
"""Floating-point operations of a step, or of the work between steps, up to which one thread of the CPU takes them.

More threads would gain microseconds there. When another process has one of the cores they wait for it at every
operation, some for a millisecond, and a step takes twenty times as long.
"""


class Engine(ABC):
    """Trains the clients of a round inside the batches of a training loop.

    The loop calls :meth:`begin_batch`, :meth:`train_batch` and :meth:`end_batch` for each of its batches.

    Args:
        context, model, loader, log: of the training loop, the resident network, the clients and their batches, and the
            figures that ``training_step`` logs.
        method: the federated method, which says what clients minimise, send and keep.
        keep_optimizer, keep_posteriors: clients keep the state of their optimizers, and what they have trained last.
        folder, writes: see :class:`~lightning_fedbayes.clients.states.States`.

    Attributes:
        states: what every client keeps.
        plan, shared: the clients of the round that this process trains, and what the server has sent to all of them.
        prepare: brings the loop's batch to the device. None: the loop does.
        local: puts the clients' priors into the network in this round. None where there is no need for it.
        shows_states: optimizers have a state between rounds (:meth:`show_states`).
        only: the client, where there is one with one problem, that begins with all that hooks change between rounds.
    """

    name: ClassVar[str]
    takes_own_steps: ClassVar[bool] = False
    """True if the engine needs the fast loop, because it does not call the loop's own step."""

    def __init__(
        self,
        context: TrainingContext,
        model: ResidentModel,
        loader: FederatedLoader,
        log: TrainingLog,
        *,
        method: methods.Method,
        keep_optimizer: bool = False,
        keep_posteriors: bool = False,
        folder: str | Path | None = None,
        writes: bool = True,
        seed: int = 0,
    ) -> None:
        self.context, self.model, self.log, self.method, self.seed = context, model, log, method, seed
        self.keep_optimizer, self.keep_posteriors = keep_optimizer, keep_posteriors
        self.states = States(folder, writes=writes, device=context.device)
        self.plan = RoundPlan(-1, ())
        self.prepare: Callable[[Any], Any] | None = None
        self.shared: methods.Shared
        self.local: LocalPriors | None = None
        self._prior: GaussianPosterior | None = None
        self._under_way: dict[int, tuple[methods.Participant, methods.LocalProblem]] = {}
        self._start = 0.0
        self._has_precisions = isinstance(model.learned, OptimizerPosterior)
        self.shows_states = keep_optimizer or self._has_precisions
        self._plain = [] if self.shows_states else [each for each in context.optimizers if not has_own_state(each)]
        self._between: Between | None = None
        self.use(loader)
        self.only = 0 if len(self.sizes) == method.problems == 1 else None

    def use(self, loader: FederatedLoader) -> None:
        """Take the clients and their batches from ``loader`` from now on. Their number must not change."""
        self._loader = loader
        self.names, self.sizes = OfClients(loader.clients.names), OfClients(loader.clients.sizes)

    def client(self, position: int) -> Client:
        """Return the client at ``position`` of the round's cohort."""
        job = self.plan.cohort[position]
        number, problem, cohort = job % STRIDE, job // STRIDE, len(self.plan.cohort)
        return Client(number, self.names[job], self.sizes[job], self.plan.round, position, cohort, problem)

    @abstractmethod
    def num_batches(self, plan: RoundPlan) -> int:
        """Return the number of the loop's batches for the clients of ``plan``. One, which is idle, without clients."""

    def show_states(self) -> None:
        """Give the optimizers the states of a client until the next round, for hooks to read and change, if any."""
        if not self.shows_states:
            return
        states, learned = self.states.sample or [{} for _ in self.context.optimizers], self.model.learned
        if learned is not None and states:
            states = [learned.shown(states[0]), *states[1:]]
        options = {"only": self.only is not None, "fixed": self._has_precisions}
        self._between = Between(self.context.optimizers, states, **options)

    def take_over_states(self) -> Change | None:
        """Let clients follow what hooks have changed in the optimizers' states since the last round, and return it.

        Raise FederationError if they cannot.
        """
        change = None if self._between is None else self._between.change()
        if change is not None:
            if self.only is not None and self.only not in self.states.clients():
                self.states.keep(self.only, change(ClientState(rounds=self.plan.round + 1)))
                self.states.end_round(success=True)
            else:
                self.states.change(change)
            for optimizer in self.context.optimizers:
                optimizer.state.clear()
            self.show_states()
        return change

    def begin_round(self, plan: RoundPlan) -> None:
        """Prepare for the clients of ``plan``, which may be none."""
        self.plan, self._between = plan, None
        for optimizer in self._plain:
            if any(optimizer.state.values()):
                raise changed_state(optimizer, "was loaded or written into")
        self.states.begin_round()
        if self.context.course is not None:
            self.context.course.begin_round()

    def begin_method(self, shared: methods.Shared) -> None:
        """Take what the server has sent, and set the method's priors. Clients of a new server forget what they kept."""
        if shared.is_new:
            self.states.change(lambda state: replace(state, kept={}))
        self.shared, self.local = shared, None
        prior = self.method.prior(shared)
        if prior is not self._prior:
            self.model.set_prior(prior)
            self._prior = prior
        model, federated = self.model, shared.posterior.mean.keys()
        self._gaussian = frozenset({*gaussian_parameters(model.module), *model.variances} & federated)
        self._frozen = frozenset({name for name, p in model.parameters.items() if not p.requires_grad} & federated)

    def restore_priors(self) -> None:
        """Restore the network's priors."""
        if self._prior is not None or self.local is not None:
            self.model.set_prior(None)
        self._prior = None

    def problem(self, client: int, state: ClientState) -> methods.LocalProblem:
        """Ask the method what a client minimises, and remember it until the client's report."""
        context, lengths, epochs = self.context, self.plan.lengths, self.plan.local_epochs
        steps = epochs * -(-(lengths.get(client, 0) // epochs) // context.accumulate)
        who = client % STRIDE, self.sizes[client], state.kept, client // STRIDE
        participant = methods.Participant(*who, steps, context.rate, self._gaussian, self._frozen)
        if state.kept:
            self.method.check(self.shared, participant)
        problem = methods.problem_of(self.method, self.shared, participant)
        if problem.measures and self.local is None:
            self.local = LocalPriors(problem, self.shared.posterior.names, self.model)
            self.local.check(self.method, self.context)
        self._under_way[client] = participant, problem
        return problem

    def found(
        self, measured: Measured, client: Client, processes: int = 1, slot: int | None = None
    ) -> tuple[Tensors, Tensors]:
        """Return gradients and curvatures of a client's data, see :class:`~lightning_fedbayes.methods.Trained`."""
        assert self.local is not None
        count, learned = client.num_examples, self.model.learned
        scales = {name: count / (1.0 if learned is None else learned.temperature(name)) for name in self.local.others}
        variances = {name: each.variance.detach() for name, each in self.local.layers.items()}
        return measured.found(count / processes, self.plan.local_epochs, variances, scales, slot)

    def optimizer_states(
        self, client: Client, state: ClientState, problem: methods.LocalProblem
    ) -> list[OptimizerState]:
        """Return the states with which a client's optimizers start, a posterior with the global one. Empty if new."""
        states = state.optimizers
        if states:
            missed = self._under_way[client.job][0].steps * (client.round - state.rounds)
            states = [after_absence(*each, missed) for each in zip(self.context.optimizers, states)]
        if self.model.learned is None:
            return states
        kept = states[0] if states else {}
        started = self.model.learned.start(kept, client.num_examples, self._priors(problem), state.local)
        return [started, *states[1:]]

    def terms(
        self, clients: Sequence[Client], problems: Sequence[methods.LocalProblem], *, stacked: bool = False
    ) -> list[Pull]:
        """Return the terms in the loss of a client, or of each in a stack: its quadratic, and a learned prior."""
        learned = self.model.learned
        quadratics = [each.quadratic for each in problems]
        found = [pull_of(quadratics, self.model, stacked=stacked)] if any(quadratics) else []
        if learned is not None:
            parts = [learned.term(c.num_examples, self._priors(each)) for c, each in zip(clients, problems)]
            strengths, duals = parts[0]
            zeros = {name: torch.zeros_like(value) for name, value in strengths.items()}
            if stacked:
                strengths, duals = (
                    {n: torch.stack([each[i][n] for each in parts]) for n in parts[0][i]} for i in (0, 1)
                )
            found += [Pull(strengths, zeros, duals)] if zeros else []
        return found

    def _priors(self, problem: methods.LocalProblem) -> dict[str, LocalPrior] | None:
        """Return a client's priors of parameters outside of Bayesian layers. None where it has the network's."""
        if problem.prior is None:
            return None
        assert self.local is not None
        found = self.local.priors([problem.prior])
        return {name: found[name] for name in self.local.learned}

    def measured(
        self,
        client: Client,
        local: Tensors,
        values: Mapping[str, Tensor],
        buffers: Tensors,
        optimizer: Mapping[int, Any],
    ) -> Tensors:
        """Return the variances, outside of Bayesian layers, of a client that has trained and had kept ``local``."""
        assert self.model.learned is not None
        batches, priors = self._brought(client.round, client.job), self._priors(self._under_way[client.job][1])
        ends = client.num_examples, values, buffers, optimizer
        trained = TrainedClient(*ends, priors, self.model.received(local), lambda: batches)
        return {name: each.detach() for name, each in self.model.learned.measured(trained).items()}

    def check_posterior(self) -> None:
        """Before any training, raise FederationError if variances cannot be measured with the clients' batches."""
        if self.model.learned is not None:
            self.model.learned.check(self._brought(0, 0))

    def _brought(self, round: int, client: int) -> Iterator[Any]:
        """Yield the batches of a client's first local epoch as ``training_step`` would get them."""
        for batch in self._loader.batches(round, client):
            if isinstance(batch, FailedBatch):
                raise batch.error
            yield self.context.bring(batch)

    def sent_and_kept(
        self,
        client: int,
        posterior: GaussianPosterior,
        buffers: Tensors,
        measured: tuple[Tensors, Tensors] | None = None,
    ) -> tuple[GaussianPosterior, Tensors, dict[str, Any]]:
        """Return what a client that has trained sends, and what it keeps for the method and of its posterior.

        ``measured`` is the result of :meth:`found`. The posterior has views of the network. The server copies them, and
        refuses values that are not finite. Raise FusionError if the method has nothing to send, and FederationError if
        training has changed what is frozen.
        """
        if self.model.frozen:
            self.model.check_frozen()
        is_last = client // STRIDE == self.method.problems - 1
        own: dict[str, Any] = {"rounds": self.plan.round + 1} if self.keep_optimizer else {}
        if self.keep_posteriors and is_last:
            own["own"] = (posterior if self.states.writes_at_once else posterior.clone()).state_dict()
        participant, _ = self._under_way.pop(client)
        report = methods.report_of(self.method, self.shared, participant, methods.Trained(posterior, *(measured or ())))
        own["kept"] = {}
        if report.kept:
            tensors = (*posterior.mean.values(), *posterior.variance.values())
            views = {each.untyped_storage().data_ptr() for each in tensors}  # of the network, soon another client's
            for name, value in report.kept.items():
                is_view = value.untyped_storage().data_ptr() in views
                own["kept"][name] = value.detach().clone() if is_view else value.detach()
        return report.posterior, methods.joined(buffers, report.sent), own

    def kept_states(self, states: list[OptimizerState]) -> list[OptimizerState]:
        """Return what a client keeps of the ``states`` of its optimizers."""
        learned = self.model.learned
        return states if learned is None or not states else [learned.kept(states[0]), *states[1:]]

    def span(self, batch_idx: int) -> tuple[int, int]:
        """Return the loop's batches, first and stop, that hooks and ``training_step`` see as one epoch: all."""
        return 0, self.num_batches(self.plan)

    @abstractmethod
    def begin_batch(self, batch_idx: int) -> Sequence[Client]:
        """Begin and return the clients with their first batch in number ``batch_idx`` of the round."""

    @abstractmethod
    def train_batch(self, step: Step, optimizer: Optimizer, batch_idx: int, kwargs: Mapping[str, Any]) -> Any:
        """Train on the batch that has begun. A client that raises is left out of the round, and training goes on.

        ``step`` is the loop's, with its arguments. The number of the batch counts within its :meth:`span`.
        """

    @abstractmethod
    def end_batch(self, batch_idx: int) -> Iterable[ClientUpdate | ClientFailure]:
        """Return updates or failures of clients that end with this batch. The next may overwrite their tensors."""

    def threads(self) -> AbstractContextManager[None]:
        """Inside, torch uses threads that suit the posteriors. By default no others: oneDNN would prepare again."""
        return nullcontext()

    def forget(self, client: int) -> None:
        """Drop the figures and the new state of a client, because its update is not used."""
        self.states.forget(client)
        self.log.forget(client)

    def take_trained(self, everyone: Sequence[Results]) -> None:
        """Take figures, states and learning rates of the clients of all processes in place of this one's."""
        self.log.take([logged for logged, *_ in everyone])
        self.states.take([states for _, states, _ in everyone])
        if self.context.course is not None:
            self.context.course.longest = max((longest for *_, longest in everyone), key=itemgetter(0))

    def end_round(self, *, success: bool) -> None:
        """End the round. Clients keep their new state if it was fused."""
        self.states.end_round(success=success)
        if self.shows_states:
            self.show_states()
        self._under_way = {}
        if self.local is not None:
            self.local.remove()

    def close(self) -> None:
        """Restore the optimizers, and release the folder of states. A second call does nothing."""
        self.states.close()
        self._between = None


@contextmanager
def threads_for(operations: float) -> Iterator[None]:
    """Inside, torch uses one thread if there are few ``operations`` (:data:`SMALL_STEP`)."""
    threads = torch.get_num_threads()
    if operations > SMALL_STEP or threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
