"""Batches of a round, client after client, from the user's own loader and its settings."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler, default_collate

from lightning_fedbayes.clients.contents import digests
from lightning_fedbayes.clients.privacy import Door
from lightning_fedbayes.clients.settings import FederationSettings, check_cohort
from lightning_fedbayes.core.errors import FederationError, listed
from lightning_fedbayes.core.exchange import Collective
from lightning_fedbayes.core.loading import FailedBatch as FailedBatch
from lightning_fedbayes.core.loading import Parts, PlannedBatch, ReproducibleDataset, TensorsOfClients, loaded
from lightning_fedbayes.core.seeding import derive_seed
from lightning_fedbayes.data.clients import Clients, clients_of
from lightning_fedbayes.layers.scaler import ScaleSums, Table, asking, compared, load_scale
from lightning_fedbayes.server import plan as plans
from lightning_fedbayes.server.guard import FEWEST
from lightning_fedbayes.server.plan import STRIDE
from lightning_fedbayes.server.schedule import Timeline

BatchOrder = Callable[[plans.RoundPlan], Iterator[tuple[int, int]]]
"""Order of a round's batches: pairs of a client and the number of its batch."""
KEPT = "num_workers pin_memory timeout worker_init_fn multiprocessing_context prefetch_factor persistent_workers"
"""Settings of the user's loader that are taken over."""


class FederatedLoader:
    """Iterates over the batches of the current round, client after client unless an engine arranges them otherwise.

    It indexes whole batches where every client's data are tensors in memory. Otherwise a
    :class:`torch.utils.data.DataLoader` with the user's settings (workers, collate function, pinning) loads them. Both
    give the same batches, with any number of workers: random transforms draw from (seed, round, client, batch).

    Args:
        loader: of the user. Its settings are taken over.
        clients, batching: the clients, and how their examples become batches.
        plan: returns, for this loader, the plan of the current round, of the clients that this process trains.
        part: number of this process, and number of the processes that split every batch. See :func:`part_of`.

    Attributes:
        timeline: of a federation without rounds. None with rounds.
        arrangement: gives ``length`` and ``batches`` of a plan in another order. None: client after client.
        tensors: per client, the tensors in memory that hold its data, and its rows of them. Empty for other data.
        shapes: of single examples in memory.
        statistics: columns and rows of the table of the clients' data. None where no module asks for the scale.
    """

    def __init__(
        self,
        loader: DataLoader,
        clients: Clients,
        batching: plans.Batching,
        plan: "Callable[[FederatedLoader], plans.RoundPlan]",
        part: tuple[int, int] = (0, 1),
    ) -> None:
        self.part, self.clients, self.batching = part, clients, batching
        self.dataset, self.batch_size = loader.dataset, batching.batch_size
        self.arrangement: Any = None
        self.timeline: Timeline | None = None
        self.collate_fn = loader.collate_fn
        self.statistics: Table | None = None
        self._user_loader = loader
        self._plan = plan
        self._worker_seed = torch.Generator()
        in_memory = loader.collate_fn is default_collate and not loader.pin_memory
        self.tensors = plans.OfClients(tensors := TensorsOfClients(clients.datasets if in_memory else ()))
        self.shapes = tensors.shapes
        self._sizes = plans.OfClients(clients.sizes)
        self._loader = None if len(self.tensors) else self.dataloader(client_after_client)

    @cached_property
    def digests(self) -> Tensor:
        """Digests of the clients' data (:func:`~lightning_fedbayes.clients.contents.digests`)."""
        return digests(self.clients.datasets)

    def __len__(self) -> int:
        plan = self._plan(self)
        if not plan.cohort:
            return 1
        return plan.num_batches if self.arrangement is None else self.arrangement.length(plan)

    def most_batches(self, round: int) -> int:
        """Return the batches of the largest client of a round in a local epoch."""
        sizes, batching = self.clients.sizes, self.batching
        if batching.fraction != 1.0 and self.timeline is None:
            sizes = [sizes[k] for k in plans.choose_cohort(round, len(sizes), batching.fraction, batching.seed)]
        return plans.batches_per_epoch(max(sizes), batching)

    def fill_scalers(self, module: nn.Module, collective: Collective, door: Door) -> None:
        """Fill the scalers of ``module`` that ask for the clients' scale. Raise NotSent if the data are private."""
        if all(each.is_filled for each in asking(module)):
            return
        door.check("scale")
        own = dict[int, ScaleSums]()
        for client in range(collective.rank, len(self.clients), collective.size):
            own[client] = ScaleSums(0, {})
            with suppress(Exception):  # of the client's data set: its training will report it
                own[client] = ScaleSums.of(self.clients.datasets[client], self.collate_fn, module)
        sums = {client: each for part in collective.all_gather(own) for client, each in part.items()}
        whole, self.statistics = compared({self.clients.names[client]: sums[client] for client in sorted(sums)})
        load_scale(module, whole.scale())

    def __iter__(self) -> Iterator[Any]:
        # a generator: Lightning makes the first iterator before there is an engine, and asks it for batches afterwards
        plan = self._plan(self)
        datasets: Any = self.clients.datasets
        numbers = [client % STRIDE for client in plan.cohort]
        if isinstance(datasets, Parts):
            resized = [] if len(datasets.dataset) == datasets.length else numbers  # pyright: ignore
        else:
            resized = [client for client in numbers if len(datasets[client]) != self._sizes[client]]
        if resized:
            raise FederationError(
                f"the training data of {listed(self.clients.names[client] for client in resized)} have another length "
                "than when the loader was made, and the rounds are planned for that one: change data in "
                "train_dataloader() of the module or data module, which "
                "Trainer(reload_dataloaders_every_n_epochs=1) calls before each round"
            )
        self.tensors.values.is_stale = True  # pyright: ignore[reportAttributeAccessIssue]
        if not plan.cohort:  # a process without clients: the loop needs a batch, and hooks a real one
            yield [] if self.arrangement is not None else self.load(plan.round, 0)
        elif self.arrangement is not None:
            yield from self.arrangement.batches(plan)
        elif self._loader is not None:
            yield from self.iterate(self._loader, plan)
        else:
            for client in plan.cohort:
                tensors, rows = self.tensors[client]
                size = len(tensors[0]) if rows is None else len(rows)
                batches = plans.client_batches(plan.round, client, size, self.batching)
                if rows is not None:
                    batches = rows[torch.cat(batches)].split([len(each) for each in batches])
                for indices in batches:
                    picked = part_of(indices, *self.part)
                    yield [examples(tensor, picked) for tensor in tensors]

    def iterate(self, loader: DataLoader, plan: plans.RoundPlan) -> Iterator[Any]:
        """Iterate over a round's batches of a loader that :meth:`dataloader` made."""
        # the workers' base seed must not be drawn from the global generator: a resumed run would draw it elsewhere
        self._worker_seed.manual_seed(derive_seed(self.batching.seed, "loading", plan.round))
        return iter(loader)

    def dataloader(self, sequence: BatchOrder) -> DataLoader:
        """Return a loader with the user's settings over all clients' data, in the order of ``sequence``."""
        loader = self._user_loader
        dataset = ReproducibleDataset(self.clients.datasets, loader.collate_fn, self.batching.seed)
        sampler = _PlannedBatches(self._sizes, self.batching, partial(self._plan, self), sequence, self.part)
        kept = {name: getattr(loader, name) for name in KEPT.split()}
        return DataLoader(dataset, batch_sampler=sampler, collate_fn=loaded, generator=self._worker_seed, **kept)

    def load(self, round: int, client: int) -> Any:
        """Load the first batch of a client, in this process."""
        return next(self.batches(round, client))

    def batches(self, round: int, client: int) -> Iterator[Any]:
        """Yield all batches of a client's first local epoch, with all its examples, loaded in this process."""
        dataset = ReproducibleDataset(self.clients.datasets, self._user_loader.collate_fn, self.batching.seed)
        indices = plans.client_order(round, client, self._sizes[client], self.batching)[0]
        for step, chosen in enumerate(indices.split(self.batch_size)):
            yield dataset.__getitems__(PlannedBatch(chosen.tolist(), round, client, step, client % STRIDE))


def part_of(batch: Tensor, rank: int, count: int) -> Tensor:
    """Return the part of a batch for process ``rank`` of ``count``. One example of a batch that is too small.

    >>> part_of(torch.arange(5), 1, 2)
    tensor([1, 3])
    """
    return batch if count == 1 else batch[rank % len(batch) :: count]


def examples(tensor: Tensor, rows: Tensor) -> Tensor:
    """Return the examples ``rows`` of ``tensor``, in a third of the time of an index in brackets."""
    return tensor.index_select(0, rows.to(tensor.device))


def client_after_client(plan: plans.RoundPlan) -> Iterator[tuple[int, int]]:
    """Yield each client's batches in a row."""
    for position, client in enumerate(plan.cohort):
        yield from ((client, step) for step in range(plan.starts[position + 1] - plan.starts[position]))


@dataclass(eq=False)
class _PlannedBatches:
    """Batch sampler over the plan of the current round.

    It must not hold the loader: torch waits five seconds for every persistent worker that the garbage collector frees.
    """

    sizes: Sequence[int]
    batching: plans.Batching
    plan: Callable[[], plans.RoundPlan]
    sequence: BatchOrder
    part: tuple[int, int]

    def __len__(self) -> int:
        return self.plan().num_batches

    def __iter__(self) -> Iterator[PlannedBatch]:
        plan = self.plan()
        under_way: dict[int, list[Tensor]] = {}
        for client, step in self.sequence(plan):
            if client not in under_way:
                under_way[client] = plans.client_batches(plan.round, client, self.sizes[client], self.batching)
            batches = under_way[client]
            indices = part_of(batches[step], *self.part).tolist()
            yield PlannedBatch(indices, plan.round, client, step, client % STRIDE)
            if step + 1 == len(batches):
                del under_way[client]


def batching_of(
    loader: Any, local_epochs: int, fraction: plans.Fraction, seed: int, limit: int | float = 1.0, problems: int = 1
) -> plans.Batching:
    """Return the batching of the user's loader, which must be a DataLoader in plain or shuffled order."""
    if not isinstance(loader, DataLoader):
        remedy = "give one torch DataLoader, over a ClientDatasets if the clients' data are separate"
        raise FederationError(f"the training loader is a {type(loader).__name__}; {remedy}")
    if isinstance(loader.dataset, IterableDataset) or not hasattr(loader.dataset, "__len__"):
        raise FederationError(
            f"the training data set {type(loader.dataset).__name__} is iterable and has no length: its examples "
            "cannot be dealt out to clients. Use a map-style data set, or one per client in a ClientDatasets"
        )
    for name in ("__iter__", "_get_iterator", "__len__"):
        if getattr(type(loader), name) is not getattr(DataLoader, name):
            remedy = "do that in collate_fn=, in the data set or in the module's on_after_batch_transfer"
            what = f"the training loader's class {type(loader).__name__} has its own {name}"
            raise FederationError(f"{what}, and clients' batches do not come from it; {remedy}")
    if loader.batch_size is None or type(loader.batch_sampler) is not torch.utils.data.BatchSampler:
        remedy = "clients' batches are planned by FederatedBayes: give batch_size=, shuffle= and drop_last= instead"
        raise FederationError(f"the training loader has a batch sampler of its own; {remedy}")
    sampler: Any = loader.sampler
    shuffle = type(sampler) is RandomSampler and not sampler.replacement
    shuffle = shuffle and sampler.num_samples == len(sampler.data_source)
    if not shuffle and type(sampler) is not SequentialSampler:
        remedy = "clients' orders are planned by FederatedBayes: give shuffle=True or False instead"
        raise FederationError(f"the training loader has a {type(sampler).__name__}; {remedy}")
    return plans.Batching(loader.batch_size, shuffle, loader.drop_last, local_epochs, fraction, seed, limit, problems)


def federated_loader(
    loader: Any,
    settings: FederationSettings,
    plan: Callable[[FederatedLoader], plans.RoundPlan],
    part: tuple[int, int] = (0, 1),
    limit: int | float = 1.0,
    clients_in_a_round: int | None = None,
) -> FederatedLoader:
    """Deal the examples of the user's training ``loader`` out to clients.

    Arguments as of :func:`batching_of` and :class:`FederatedLoader`. A trial run has at most ``clients_in_a_round``.
    Raise FederationError or PartitionError if the loader, the partition or the sizes of the clients cannot be used, or
    every round would have too few clients.
    """
    problems = 1 if settings.fusion is None else settings.method.problems
    epochs, fraction, seed = settings.local_epochs, settings.fraction, settings.seed
    batching = batching_of(loader, epochs, fraction, seed, limit, problems)
    clients = clients_of(loader.dataset, settings.partition, settings.seed)
    if clients_in_a_round is not None and batching.fraction != "turns":
        most = max(clients_in_a_round, settings.safeguards.min_clients) / len(clients)
        batching = replace(batching, fraction=min(batching.fraction, most))
    plans.check_batches(clients.names, clients.sizes, batching)
    timeline, fewest = None, settings.safeguards.min_clients
    if settings.schedule is None:
        check_cohort(len(clients), settings.fraction, fewest)
    else:
        first = 0 if settings.safeguards.max_influence is None else FEWEST
        timeline = Timeline(settings.schedule, clients.sizes, settings.seed, fewest, first, clients_in_a_round)
    made = FederatedLoader(loader, clients, batching, plan, part)
    made.timeline = timeline
    return made
