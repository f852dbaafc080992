"""Base of the engines: an engine trains the clients of a round and returns their updates."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, ClassVar

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.optim import Optimizer

from lightning_fedbayes.clients.client import Client, ClientState
from lightning_fedbayes.clients.context import Step, TrainingContext
from lightning_fedbayes.clients.learned import TrainedClient
from lightning_fedbayes.clients.loader import FederatedLoader
from lightning_fedbayes.clients.log import Collected, TrainingLog
from lightning_fedbayes.clients.model import ResidentModel, Tensors
from lightning_fedbayes.clients.optimizers import OptimizerState
from lightning_fedbayes.clients.sites import Pull, RoundSites
from lightning_fedbayes.core.messages import ClientFailure, ClientUpdate
from lightning_fedbayes.core.posterior import GaussianPosterior
from lightning_fedbayes.fusion import RuleState, Sites
from lightning_fedbayes.layers.priors import CavityPrior
from lightning_fedbayes.server.plan import RoundPlan

Trained = tuple[Collected, dict[int, dict[str, Any]]]
"""Logged figures and kept states of the clients that one process has trained, ready to be sent."""

SMALL_STEP = 5e6
"""Floating-point operations of a step, or of the work between steps, up to which one thread of the CPU takes them.

More threads would gain microseconds there. When another process has one of the cores they wait for it at every
operation, some for a millisecond, and a step takes twenty times as long.
"""


class Engine(ABC):
    """Trains the clients of a round inside the batches of a training loop.

    The loop calls :meth:`begin_batch`, :meth:`train_batch` and :meth:`end_batch` for each of its batches.

    Args:
        context: the training loop's module, optimizers and options.
        model: the resident network.
        loader: brings the clients' batches; it knows the clients.
        log: collects the figures that ``training_step`` logs.
        keep_optimizer: keep one optimizer state per client, instead of a new one in every round.
        proximal: strength of FedProx's term in the clients' losses; 0 for none.
        keep_posteriors: let every client keep the posterior that it has trained last.
        seed: source of all random draws.

    Attributes:
        states: the state that every client keeps, by its number.
        plan: the clients of the round that this process trains.
        prepare: brings the loop's batch to the device; None: the loop does it as it always does.
        sites: the clients' sites in this round; None where the rule has none.
    """

    name: ClassVar[str]
    takes_own_steps: ClassVar[bool] = False
    """True if the engine needs the fast loop, because it does not call the loop's own step."""

    def __init__(
        self, context: TrainingContext, model: ResidentModel, loader: FederatedLoader, log: TrainingLog,
        *, keep_optimizer: bool = False, proximal: float = 0.0, keep_posteriors: bool = False, seed: int = 0,
    ) -> None:
        self.context = context
        self.model = model
        self.log = log
        self.keep_optimizer = keep_optimizer
        self.proximal = proximal
        self.keep_posteriors = keep_posteriors
        self.seed = seed
        self.states: dict[int, ClientState] = {}
        self.plan = RoundPlan(-1, ())
        self.prepare: Callable[[Any], Any] | None = None
        self.sites: RoundSites | None = None
        self._trained: dict[int, ClientState] = {}
        self._start = 0.0
        self.use(loader)

    def use(self, loader: FederatedLoader) -> None:
        """Take the clients and their batches from ``loader`` from now on; the number of clients stays."""
        self._loader = loader
        self.names, self.sizes = loader.clients.names, loader.clients.sizes

    def client(self, position: int) -> Client:
        """Return the client at ``position`` of the round's cohort."""
        number = self.plan.cohort[position]
        return Client(
            number, self.names[number], self.sizes[number], self.plan.round, position, len(self.plan.cohort)
        )

    @abstractmethod
    def num_batches(self, plan: RoundPlan) -> int:
        """Return how many of the loop's batches the clients of ``plan`` take; without clients one, which is idle."""

    def begin_round(self, plan: RoundPlan) -> None:
        """Prepare for the clients of ``plan``, which may be none."""
        self.plan = plan
        self._trained = {}

    def begin_sites(
        self, rule: Sites, posterior: GaussianPosterior, state: RuleState, share: float, round: int
    ) -> None:
        """Before a round by sites, let clients take their cavities as priors and keep their sites.

        Args:
            rule: the fusion rule.
            posterior: the global posterior that the clients start from.
            state: the rule's state; a rule that begins anew knows of no site, so the clients forget theirs.
            share: of one client among all, 1 / K.
            round: the round, from 0.

        Raises:
            FederationError: the module has no parameters for sites, other priors than the rule, or other parameters
                than a client's site.
        """
        if not state:
            self.states = {client: replace(kept, site={}) for client, kept in self.states.items()}
        base = rule.base(posterior, state)
        context = self.context
        self.sites = RoundSites(
            rule, self.model, base, share, round, context.takes_gradient_steps, context.mean_over_processes is None
        )
        for client, kept in self.states.items():
            self.sites.check(client, kept.site)

    def optimizer_states(self, client: Client, state: ClientState) -> list[OptimizerState]:
        """Return the states with which a client's optimizers start; none if they are new.

        One that learns a posterior starts from the global one.

        Args:
            client: that starts.
            state: what it has kept.
        """
        if self.model.learned is None:
            return state.optimizers
        kept = state.optimizers[0] if state.optimizers else {}
        started = self.model.learned.start(kept, client.num_examples, self._priors(state), state.local)
        return [started, *state.optimizers[1:]]

    def terms(self, clients: Sequence[Client], states: Sequence[ClientState], *, stacked: bool = False) -> list[Pull]:
        """Return what the loss of a client, or of each client in a stack, gains: pulls of sites, a prior, FedProx."""
        sites, learned = self.sites, self.model.learned
        own = [state.site for state in states]
        found = [] if sites is None else [sites.pull(own, stacked=stacked)]
        if learned is not None:
            parts = [learned.term(c.num_examples, self._priors(state)) for c, state in zip(clients, states)]
            strengths, duals = (
                {name: torch.stack([each[i][name] for each in parts]) if stacked else parts[0][i][name]
                 for name in parts[0][i]} for i in range(2)
            )
            zeros = {name: torch.zeros_like(value) for name, value in parts[0][0].items()}
            found += [Pull(strengths, zeros, duals)] if zeros else []
        if self.proximal:
            found.append(Pull(self.proximal, self.model.anchor()))
        return [each for each in found if each is not None]

    def _priors(self, state: ClientState) -> dict[str, CavityPrior] | None:
        """Return a client's own priors of parameters outside of Bayesian layers."""
        return None if self.sites is None else self.sites.priors(state.site)

    def measured(
        self, client: Client, state: ClientState, values: Mapping[str, Tensor], buffers: Tensors,
        optimizer: Mapping[int, Any],
    ) -> Tensors:
        """Return the variances of a client that has trained, outside of Bayesian layers.

        Args:
            client: that has trained.
            state: that it started with.
            values, buffers: its parameters and buffers, name → tensor.
            optimizer: the state of its optimizer, by the number of the parameter.
        """
        assert self.model.learned is not None
        batches = (self.context.bring(batch) for batch in self._loader.batches(client.round, client.number))
        return self.model.learned.measured(TrainedClient(
            client.num_examples, values, buffers, optimizer, self._priors(state), self.model.received(state.local),
            lambda: batches,
        ))

    def sent_and_kept(
        self, client: int, posterior: GaussianPosterior, measured: Tensors | None = None
    ) -> tuple[GaussianPosterior, dict[str, Any]]:
        """Return what a client that has trained to ``posterior`` sends, and what it keeps of it: its site, itself.

        Args:
            client: its number.
            posterior: after its training.
            measured: see :meth:`RoundSites.sent`.

        Raises:
            FusionError: training by sites has left the finite numbers.
            FederationError: it has changed what is frozen.
        """
        self.model.check_frozen()
        kept: dict[str, Any] = {"own": posterior.clone().state_dict()} if self.keep_posteriors else {}
        if self.sites is None:
            return posterior, kept
        site = self.states.get(client, ClientState()).site
        sent, kept["site"] = self.sites.sent(client, site, posterior, measured)
        return sent, kept

    def span(self, batch_idx: int) -> tuple[int, int]:
        """Return the range of the loop's batches that hooks and ``training_step`` see as one epoch.

        By default the whole round.
        """
        return 0, self.num_batches(self.plan)

    @abstractmethod
    def begin_batch(self, batch_idx: int) -> Sequence[Client]:
        """Begin the clients whose first batch this is, and return them.

        Args:
            batch_idx: the number of the batch in the round.
        """

    @abstractmethod
    def train_batch(self, step: Step, optimizer: Optimizer, batch_idx: int, kwargs: Mapping[str, Any]) -> Any:
        """Train on the batch that has begun; a client that raises is left out of the round, and training goes on.

        Args:
            step: the loop's own step.
            optimizer, batch_idx, kwargs: its arguments; the number of the batch is that in its :meth:`span`.
        """

    @abstractmethod
    def end_batch(self, batch_idx: int) -> Sequence[ClientUpdate | ClientFailure]:
        """Return the updates, or failures, of the clients whose last batch this was.

        The tensors of an update may be views that the next batch overwrites.

        Args:
            batch_idx: the number of the batch in the round.
        """

    def seconds(self) -> float:
        """Return the time since the clients under way have begun."""
        return time.perf_counter() - self._start

    def threads(self) -> AbstractContextManager[None]:
        """Inside, torch uses the number of threads that suits the posteriors of the round.

        By default its own number: after any change oneDNN prepares every convolution anew.
        """
        return nullcontext()

    def forget(self, client: int) -> None:
        """Drop the figures and the state of a client whose update is not used."""
        self._trained.pop(client, None)
        self.log.forget(client)

    def trained(self) -> Trained:
        """Return figures and states of this process's clients, to be sent to other processes."""
        states = {
            client: apply_to_collection(vars(state), Tensor, Tensor.cpu) for client, state in self._trained.items()
        }
        return self.log.collected(), states

    def take_trained(self, everyone: Sequence[Trained]) -> None:
        """Take figures and states of the clients of all processes in place of this one's own."""
        self.log.take([logged for logged, _ in everyone])
        device = self.context.device
        self._trained = {
            client: ClientState(**apply_to_collection(state, Tensor, lambda tensor: tensor.to(device)))
            for _, states in everyone for client, state in states.items()
        }

    def end_round(self, *, success: bool) -> None:
        """End the round; clients keep their new state if it was fused."""
        if success:
            self.states.update(self._trained)
        self._trained = {}
        if self.sites is not None:
            self.sites.remove()

    def close(self) -> None:  # noqa: B027
        """Give the optimizers back as they were; a second call does nothing."""

    def state_dict(self) -> dict[int, dict[str, Any]]:
        """Return the state of every client, in a form that all engines share."""
        return {client: dict(vars(state)) for client, state in self.states.items()}

    def load_state_dict(self, states: Mapping[int, Mapping[str, Any]]) -> None:
        """Restore what :meth:`state_dict` gave."""
        self.states = {client: ClientState(**state) for client, state in states.items()}


def threads_for(operations: float) -> AbstractContextManager[None]:
    """Inside, torch uses one thread if so few ``operations`` do not repay more (:data:`SMALL_STEP`)."""
    if operations > SMALL_STEP or torch.get_num_threads() == 1:
        return nullcontext()
    return _one_thread()


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
