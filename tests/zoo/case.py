"""A case of the zoo: a way to train, with plain Lightning and as a federation."""

import copy
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import lightning_fedbayes as fb
from lightning_fedbayes.core.seeding import derive_seed, seed_everything
from tests import federations
from tests.federations import blobs, network

SIZES = (20, 13, 7)
"""Ragged: with batches of 4 the clients have 5, 4 and 2 batches, some of them not full."""

EQUAL, REFUSED = "equal", "refused"


class Net(L.LightningModule):
    """A user's module; cases replace some of its methods."""

    def __init__(self, net: nn.Module | None = None, optimizer: Callable[[Any], Any] | None = None) -> None:
        super().__init__()
        self.net = network() if net is None else net
        self.make_optimizer = optimizer or (lambda parameters: torch.optim.SGD(parameters, lr=0.1))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self(x), y)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", self.loss(batch))

    def configure_optimizers(self) -> Any:
        return self.make_optimizer(self.parameters())


def net(**methods: Any) -> Callable[[], Net]:
    """Return a maker of modules with these ``methods``."""
    made = type("Variant", (Net,), {"__module__": __name__, **methods})
    return lambda: made()


def callback(**hooks: Any) -> Callable[[], list[L.Callback]]:
    """Return a maker of a user's callback with these ``hooks``."""
    made = type("Variant", (L.Callback,), {"__module__": __name__, **hooks})
    return lambda: [made()]


@dataclass(frozen=True)
class Case:
    """One row of the zoo; what is further than its group and name are options."""

    group: str
    name: str
    make: Callable[[], L.LightningModule] = Net
    callbacks: Callable[[], Sequence[L.Callback]] = list
    trainer: dict[str, Any] = field(default_factory=dict)
    federation: dict[str, Any] = field(default_factory=dict)
    loading: dict[str, Any] = field(default_factory=dict)
    given: Callable[[DataLoader], Any] = lambda loader: loader  # what the Trainer gets for it
    dataset: Callable[[TensorDataset], Dataset] = lambda dataset: dataset
    rounds: int = 2
    sequential: str = EQUAL
    vectorized: str = EQUAL
    noisy: bool = False  # noise is drawn: engines agree in distribution only
    validates: bool = False
    tolerance: float = 1e-5  # of parameters, absolute and relative
    keeps: bool = True  # the optimizer's state for each client; else it starts anew in every round

    def module(self) -> L.LightningModule:
        """Make the module with its first parameters."""
        torch.manual_seed(0)
        return self.make()


class Positions(L.Callback):
    """Makes a plain fit one of a client in a round: its seed, its round, its schedules."""

    def __init__(self, case: Case, client: int, first: int) -> None:
        self.seed, self.client, self.first = case.federation.get("seed", 0), client, first

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        for config in trainer.lr_scheduler_configs:
            per_round = max(SIZES) // 4 // config.frequency  # batches of the longest client
            steps = self.first * per_round if config.interval == "step" else self.first // config.frequency
            for _ in range(steps):
                config.scheduler.step()  # pyright: ignore[reportCallIssue]

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        seed_everything(derive_seed(self.seed, "training", trainer.current_epoch, self.client))


def parts(case: Case, sizes: Sequence[int]) -> dict[str, Dataset]:
    """Return each client's data."""
    x, y = blobs(sum(sizes)).tensors
    rows = zip(x.split(list(sizes)), y.split(list(sizes)))
    return {str(client): case.dataset(TensorDataset(*each)) for client, each in enumerate(rows)}


def loader(case: Case, dataset: Dataset) -> Any:
    """Return a loader of ``dataset`` in its own order, so that orders need no comparison."""
    own = torch.Generator()  # an iterator would draw a seed for its workers from the global one
    return case.given(DataLoader(dataset, **{"batch_size": 4, "shuffle": False, "generator": own, **case.loading}))


def fit(
    case: Case,
    module: L.LightningModule,
    dataset: Dataset,
    callbacks: Sequence[L.Callback],
    rounds: int,
    first: int = 0,
) -> L.Trainer:
    """Train ``module`` up to round ``rounds``, from round ``first``."""
    options = {"num_sanity_val_steps": 0, **case.trainer}
    trainer = federations.trainer(rounds, [*case.callbacks(), *callbacks], **options)
    progress = trainer.fit_loop.epoch_progress
    for scope in (progress.total, progress.current):
        scope.ready = scope.started = scope.processed = scope.completed = first
    val = [loader(case, next(iter(parts(case, (8,)).values())))] if case.validates else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, loader(case, dataset), val)
    return trainer


def values(module: nn.Module) -> dict[str, Tensor]:
    """Return the floating-point part of the state, which a federation averages."""
    return {name: value.detach().clone() for name, value in module.state_dict().items() if value.is_floating_point()}


def plain(case: Case) -> dict[str, Tensor]:
    """Train on all data by one plain fit."""
    module = case.module()
    ((_, dataset),) = parts(case, (sum(SIZES),)).items()
    fit(case, module, dataset, [Positions(case, 0, 0)], case.rounds)
    return values(module)


def loop_of_plain_fits(case: Case) -> dict[str, Tensor]:
    """Federated averaging by plain fits: in every round, each client trains a copy of the global module."""
    shared = case.module()
    for round in range(case.rounds):
        total: dict[str, Tensor] = {}
        for client, (size, dataset) in enumerate(zip(SIZES, parts(case, SIZES).values())):
            own = copy.deepcopy(shared)
            fit(case, own, dataset, [Positions(case, client, round)], round + 1, round)
            for name, value in values(own).items():
                total[name] = total.get(name, 0) + value.double() * size / sum(SIZES)
        shared.load_state_dict({**shared.state_dict(), **total})
    return values(shared)


def federated(case: Case, engine: str, sizes: Sequence[int] = SIZES) -> tuple[dict[str, Tensor], fb.FederatedBayes]:
    """Train as a federation, or raise FedBayesError."""
    module = case.module()
    options = {"fusion": "weighted_average", **case.federation}
    federation = fb.FederatedBayes(engine=engine, **options)  # pyright: ignore[reportArgumentType]
    fit(case, module, fb.ClientDatasets(parts(case, sizes)), [federation], case.rounds)
    return values(module), federation


def difference(first: dict[str, Tensor], second: dict[str, Tensor]) -> float:
    """Return the largest difference of two states, relative to values above 1."""
    assert first.keys() == second.keys()
    return max(
        float(((first[n].double() - v.double()).abs() / v.double().abs().clamp_min(1)).max())
        for n, v in second.items()
        if v.numel()
    )
