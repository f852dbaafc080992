"""One client's local epochs in one round, by a Lightning Trainer that is used again and again."""

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import lightning as L
from torch import Tensor
from torch.utils.data import Dataset

from lightning_fedbayes.callbacks.trainer import FitLoop, TrainsClients, check_schedulers, check_trainer
from lightning_fedbayes.clients.learned import LearnedPosterior
from lightning_fedbayes.clients.loader import FederatedLoader, batching_of
from lightning_fedbayes.clients.model import ResidentModel, call_hook, frozen_names
from lightning_fedbayes.clients.sequential import SequentialEngine
from lightning_fedbayes.clients.settings import FederationSettings
from lightning_fedbayes.core import errors, seeding
from lightning_fedbayes.core.messages import ClientFailure, ClientUpdate
from lightning_fedbayes.core.posterior import GaussianPosterior
from lightning_fedbayes.data.clients import ClientDatasets, Clients, clients_of
from lightning_fedbayes.data.partition import Partition
from lightning_fedbayes.fusion.accumulator import check_structure
from lightning_fedbayes.methods.method import Shared, split
from lightning_fedbayes.server.plan import STRIDE, Batching, RoundPlan, batches_per_epoch, check_batches
from lightning_fedbayes.transport.schedules import begun


@dataclass(frozen=True)
class Task:
    """Task of a client in one round, from 0: the federation's seed, the global model, what the client has kept so far.

    ``begun``: the server has fused a round. ``share`` is the client's of all clients, ``frozen`` a digest of the frozen
    parameters. ``buffers`` hold the method's tensors, too, and are empty if they are frozen. ``rounds`` and ``steps``
    are of the whole federation, 0 where the server does not know them, ``moved`` is :class:`.Steps`'.
    """

    client: int
    round: int
    seed: int
    posterior: GaussianPosterior
    buffers: Mapping[str, Tensor]
    kept: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    begun: bool = False
    share: float = 1.0
    frozen: str = ""
    rounds: int = 0
    steps: int = 0
    moved: Sequence[int] = ()


def own_clients(dataset: Dataset, partition: Partition | None, client: int, seed: int) -> Clients:
    """Return clients up to number ``client``, all with the data of that one: only it will train.

    With a ``partition``, or as a :class:`~lightning_fedbayes.ClientDatasets`, ``dataset`` is of all clients, otherwise
    of this one. Raises FederationError if there are fewer clients.

    >>> import torch
    >>> from torch.utils.data import TensorDataset
    >>> own_clients(TensorDataset(torch.zeros(5, 2)), None, client=1, seed=0).sizes
    (5, 5)
    """
    name, data = str(client), dataset
    if partition is not None or isinstance(dataset, ClientDatasets):
        clients = clients_of(dataset, partition, seed)
        if client >= len(clients):
            found = f"this is client {client}, but the data are those of {len(clients)} clients, numbered from 0"
            raise errors.FederationError(f"{found}: start fewer clients, or deal out to more")
        name, data = clients.names[client], clients.datasets[client]
    return Clients((name,) * (client + 1), (data,) * (client + 1))


def check_same_frozen(model: ResidentModel, digest: str) -> None:
    """Raise ClientMismatch unless the frozen parameters have the server's ``digest``."""
    if model.digest() != digest:
        remedy = "build it with the same weights at both ends, from one file or one seed"
        raise errors.ClientMismatch(f"the frozen parameters of this client's module are not the server's: {remedy}")


class ClientTraining(TrainsClients):
    """Lets a Trainer train one client in one round, as :class:`~lightning_fedbayes.FederatedBayes` would.

    Draws come from (seed, round, client): the update is the same as in one process. The server's settings are ignored.
    """

    def __init__(self, settings: FederationSettings) -> None:
        self.settings, self.method = settings, settings.method
        if self.method.auto is not None:
            why = "chooses at the server, and needs its validation data"
            raise errors.FederationError(f"fusion='auto' {why}; name one rule")
        self._initial: dict[str, Tensor] | None = None
        self._engine: Any = None
        self.figures: dict[str, float] = {}  # of the last round's steps
        self.is_as_planned = True  # as many as batches, whatever is in them

    @property
    def engine(self) -> SequentialEngine:
        """The engine of the present task."""
        return self._engine

    def train(
        self, trainer: L.Trainer, module: L.LightningModule, datamodule: L.LightningDataModule, task: Task
    ) -> tuple[ClientUpdate, dict[int, dict[str, Any]]]:
        """Train ``module``. Return the update, which the next task overwrites, and the client's next state."""
        self._reset(module)
        self._task, self._result = task, None
        FitLoop(trainer, module).set_epoch(task.round)
        every, trainer.check_val_every_n_epoch = trainer.check_val_every_n_epoch, task.round + 2  # after it: never
        try:
            trainer.fit(module, datamodule=datamodule)
        finally:
            trainer.check_val_every_n_epoch = every
        if self._result is None:
            what = "the Trainer stopped before the client's last batch"
            raise errors.FederationError(f"{what}; its options must not cut rounds")
        if isinstance(self._result, ClientFailure):
            raise self._result.error
        course = self._engine.context.course
        self.figures = {} if course is None else course.figures()
        planned = self._planned(trainer, self._round.starts[1] // self.settings.local_epochs)
        self.is_as_planned = {planned} >= {*self.figures.values()} - {0.0}
        return self._result, self._kept

    def steps(self, trainer: L.Trainer, datamodule: L.LightningDataModule, task: Task) -> tuple[int, int]:
        """Return the client's number of examples, and of its optimizer's steps in a round."""
        datamodule.prepare_data()
        datamodule.setup("fit")
        loader: Any = datamodule.train_dataloader()
        batching, clients = self._dealt(loader, task, trainer.limit_train_batches)
        return clients.sizes[-1], self._planned(trainer, batches_per_epoch(clients.sizes[-1], batching))

    def _planned(self, trainer: L.Trainer, batches: int) -> int:
        return self.settings.local_epochs * math.ceil(batches / trainer.accumulate_grad_batches)

    def evaluate(
        self, trainer: L.Trainer, module: L.LightningModule, datamodule: L.LightningDataModule, task: Task
    ) -> tuple[dict[str, float], int]:
        """Validate ``module`` with the global posterior of ``task``, after its round, and with the client's own.

        Returns: the finite figures that ``validation_step`` logs, "personal/..." for the posterior, parameters and
        buffers that the client keeps, and the number of examples. Raises FederationError without validation data.
        """
        model = self.load_global(module, task)
        kept = task.kept.get(task.client + (self.method.problems - 1) * STRIDE, {})
        found = self._validate(trainer, module, datamodule, task)
        loaders: Any = trainer.val_dataloaders
        loaders = loaders if isinstance(loaders, list | tuple) else [loaders]
        count = sum(len(loader.dataset) for loader in loaders)
        if kept.get("own") or kept.get("local"):
            own = GaussianPosterior.from_state_dict(kept["own"]) if kept.get("own") else task.posterior
            model.load_client(kept["local"])
            model.view.load(own)
            call_hook(module, "on_round_end", model.whole(own), [])
            personal = self._validate(trainer, module, datamodule, task)
            found |= {f"personal/{name}": value for name, value in personal.items()}
        return found, count

    @staticmethod
    def _validate(
        trainer: L.Trainer, module: L.LightningModule, datamodule: L.LightningDataModule, task: Task
    ) -> dict[str, float]:
        seeding.seed_everything(seeding.derive_seed(task.seed, "validation", task.round, task.client))
        found = trainer.validate(module, datamodule=datamodule, verbose=False)
        if not found:
            what = "this client's data module has no validation data"
            raise errors.FederationError(f"{what}; give it some, or evaluate=False")
        return {name: value for figures in found for name, value in figures.items() if math.isfinite(value)}

    def load_global(self, module: L.LightningModule, task: Task) -> ResidentModel:
        """Load the global model of ``task`` into ``module``, as after its round."""
        self._reset(module)
        model = self._load(module, task)
        call_hook(module, "on_round_end", model.whole(task.posterior), [])
        return model

    def check_frozen(self, module: L.LightningModule, task: Task) -> None:
        """Raise ClientMismatch unless the frozen parameters of ``module``, as it was built, are the server's."""
        self._reset(module)
        check_same_frozen(ResidentModel(module, frozen=frozen_names(module)), task.frozen)

    def _reset(self, module: L.LightningModule) -> None:
        """Bring ``module`` back to how it was built, as in a new process."""
        if self._initial is None:
            self._initial = copy.deepcopy(module.state_dict())
        module.load_state_dict(self._initial)

    def _load(self, module: L.LightningModule, task: Task, learned: LearnedPosterior | None = None) -> ResidentModel:
        """Load the global model of ``task``. Raise ClientMismatch for another network or other frozen parameters."""
        settings = self.settings
        rest = frozen_names(module) - task.posterior.mean.keys()
        options = (settings.local_parameters, settings.buffers, learned, self.method.own_starts, rest)
        model = ResidentModel(module, *options)
        try:
            check_structure(task.posterior, model.read_posterior(), "this client's network")
        except errors.FusionError as other:
            raise errors.ClientMismatch(str(other)) from None
        check_same_frozen(model, task.frozen)
        model.load_posterior(task.posterior, split(task.buffers)[0])
        return model

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Check the Trainer and put the client's plan between it and its training loader."""
        if stage == "fit":
            check_trainer(trainer, pl_module, self.settings)
            self._loop = FitLoop(trainer, pl_module)
            self._loop.told = self._task.rounds, self._task.steps
            self._loop.replace_data(self._plan)

    def _dealt(self, loader: Any, task: Task, limit: int | float) -> tuple[Batching, Clients]:
        batching = batching_of(loader, self.settings.local_epochs, fraction=1.0, seed=task.seed, limit=limit)
        return batching, own_clients(loader.dataset, self.settings.partition, task.client, task.seed)

    def _plan(self, loader: Any) -> FederatedLoader:
        """Return the client's batches of this round, from the user's ``loader``."""
        task, settings = self._task, self.settings
        batching, clients = self._dealt(loader, task, self._loop.limits["limit"])
        check_batches(clients.names[-1:], clients.sizes[-1:], batching)
        count = settings.local_epochs * batches_per_epoch(clients.sizes[-1], batching)
        jobs = tuple(task.client + problem * STRIDE for problem in range(self.method.problems))
        self._round = RoundPlan(task.round, jobs, tuple(range(0, count * len(jobs) + 1, count)), settings.local_epochs)
        self._loader = FederatedLoader(loader, clients, batching, lambda _: self._round)
        return self._loader

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Load the global posterior and make the engine."""
        task, settings = self._task, self.settings
        check_schedulers(trainer)
        context = begun(self._loop, task.round, task.moved)
        model = self._load(pl_module, task, context.learned_posterior(settings.posterior))
        options = {"keep_optimizer": context.keeps_state(settings), "keep_posteriors": settings.keeps_posteriors}
        self._engine = SequentialEngine(context, model, self._loader, method=self.method, seed=task.seed, **options)
        self._engine.states.load_state_dict(task.kept)
        self._engine.only = task.client if self.method.problems == 1 else None
        self._engine.show_states()
        tensors = {name: value.to(pl_module.device) for name, value in split(task.buffers)[1].items()}
        self._engine.begin_method(Shared(task.posterior.to(pl_module.device), tensors, task.share, not task.begun))
        self._loop.install(self._engine, self._begin_batch, self._end_batch)
        call_hook(pl_module, "on_federation_start")

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Give the round its length."""
        self._loop.set_length(self._engine.num_batches(self._round))

    def _begin_batch(self, batch_idx: int) -> None:
        """Begin the round at its first batch, when the module's hooks of the epoch have run, and the client."""
        if batch_idx == 0:
            self._engine.take_over_states()
            self._engine.begin_round(self._round)
        self._engine.begin_batch(batch_idx)

    def _end_batch(self, batch_idx: int) -> None:
        """After the last batch, take the posterior and the client's state."""
        for result in self._engine.end_batch(batch_idx):
            if result.client < STRIDE:  # the client's next problem overwrites the tensors
                self._result = result
                if isinstance(result, ClientUpdate) and self.method.problems > 1:
                    self._result = replace(result, posterior=result.posterior.clone())
            elif isinstance(result, ClientFailure):
                raise result.error
            self._kept = {}
            if isinstance(result, ClientUpdate) and result.client == self._round.cohort[-1]:
                self._engine.end_round(success=True)
                self._kept = self._engine.states.state_dict()

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Log what the module has logged of its training."""
        self._engine.log.end_round()
