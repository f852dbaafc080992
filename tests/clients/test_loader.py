"""The round's batches: the user's data in the plan's order, whatever loads them."""

import os
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils import data as of_torch
from torch.utils.data import DataLoader, Dataset, RandomSampler, Subset, TensorDataset

import lightning_fedbayes as fb
from lightning_fedbayes.clients.loader import FederatedLoader, batching_of
from lightning_fedbayes.clients.vectorized.schedule import Scheduler, StackedBatches
from lightning_fedbayes.core.errors import FederationError
from lightning_fedbayes.core.loading import FailedBatch, Parts, tensors_of
from lightning_fedbayes.core.private_torch import tree_leaves
from lightning_fedbayes.data import Clients
from lightning_fedbayes.server.plan import Batching, batches_per_epoch, plan_round
from tests.federations import Made, Plain, blobs, loader, parameters, trainer


class Tensors(Dataset):
    def __init__(self, *tensors):
        self.data = TensorDataset(*tensors)

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        return self.data[index]


class Noisy(Tensors):
    def __getitem__(self, index):
        return *super().__getitem__(index), torch.rand(2), np.random.rand(), random.random()


class Broken(Tensors):
    def __getitem__(self, index):
        if index == 3:
            raise OSError(f"example {index} is lost")
        return super().__getitem__(index)


class ReadError(Exception):
    """An error that cannot be pickled as it is: its constructor takes more than the message."""

    def __init__(self, path, code):
        super().__init__(f"{path}: {code}")


class BrokenBadly(Tensors):
    def __getitem__(self, index):
        raise ReadError("data.bin", 5)


class BrokenLocally(Tensors):
    def __getitem__(self, index):
        class Local(Exception):
            pass

        raise Local("an error of a class that other processes do not know")


def data(size, start=0):
    numbers = torch.arange(start, start + size)
    return numbers.float().view(-1, 1).repeat(1, 2), numbers


def clients_of_sizes(sizes, kind=TensorDataset):
    starts = np.cumsum([0, *sizes])
    parts = tuple(kind(*data(size, int(start))) for size, start in zip(sizes, starts))
    return Clients(tuple(map(str, range(len(sizes)))), parts)


def federated(clients, batching, round=0, **options):
    """The federation's loader, and the plan that it follows."""
    plan = plan_round(round, clients.sizes, batching)
    user = DataLoader(clients.datasets[0], batch_size=batching.batch_size, **options)
    return FederatedLoader(user, clients, batching, lambda _: plan), plan


def batches_of(*arguments, **options):
    loader, plan = federated(*arguments, **options)
    batches = list(loader)
    assert len(batches) == len(loader) == plan.num_batches
    return batches


def assert_same_batches(first, second):
    assert len(first) == len(second) > 0
    for a, b in zip(first, second):
        assert (type(a), len(a)) == (type(b), len(b))
        for x, y in zip(a, b):
            assert x.dtype == y.dtype
            assert torch.equal(x, y)


class TestOrder:
    @given(
        sizes=st.lists(st.integers(1, 20), min_size=1, max_size=4),
        batch_size=st.integers(1, 7),
        shuffle=st.booleans(),
        drop_last=st.booleans(),
        epochs=st.integers(1, 3),
        round=st.integers(0, 5),
        kind=st.sampled_from([TensorDataset, Tensors]),
    )
    @settings(deadline=None, max_examples=60)
    def test_every_example_comes_once_per_local_epoch(self, sizes, batch_size, shuffle, drop_last, epochs, round, kind):
        batching = Batching(batch_size, shuffle, drop_last, epochs, seed=3)
        clients = clients_of_sizes(sizes, kind)
        batches = batches_of(clients, batching, round=round)
        starts = np.cumsum([0, *sizes])
        rest = iter(batches)
        for client, size in enumerate(sizes):
            own = list(range(starts[client], starts[client] + size))
            count = batches_per_epoch(size, batching)
            for _ in range(epochs):
                epoch = [next(rest) for _ in range(count)]
                seen = [number for _, numbers in epoch for number in numbers.tolist()]
                assert len(set(seen)) == len(seen)
                assert set(seen) <= set(own)
                assert len(seen) == (count * batch_size if drop_last else size)
                assert [len(numbers) for _, numbers in epoch[:-1]] == [batch_size] * max(count - 1, 0)
                if not shuffle:
                    assert seen == own[: len(seen)]
                for inputs, numbers in epoch:
                    assert torch.equal(inputs[:, 0], numbers.float())
        assert next(rest, None) is None

    @pytest.mark.parametrize("kind", [TensorDataset, Tensors])
    def test_loader_follows_the_current_plan(self, kind):
        """One loader for the whole fit; the plan changes under it."""
        clients, batching, now = clients_of_sizes([5, 7, 9], kind), Batching(4, fraction=0.4), [0]
        user = DataLoader(clients.datasets[0], batch_size=4)
        loader = FederatedLoader(user, clients, batching, lambda _: plan_round(now[0], clients.sizes, batching))
        for round in (0, 1, 2, 1):
            now[0] = round
            assert_same_batches(list(loader), batches_of(clients, batching, round=round))


@pytest.mark.slow
class TestWaysOfLoading:
    @pytest.mark.parametrize("drop_last", [False, True])
    @pytest.mark.parametrize("workers", [0, 2])
    def test_in_memory_equals_one_by_one(self, drop_last, workers):
        sizes, batching = [7, 12, 5], Batching(4, drop_last=drop_last, local_epochs=2, seed=1)
        slow = batches_of(clients_of_sizes(sizes, Tensors), batching, num_workers=workers)
        rows = Parts(TensorDataset(*data(24)), torch.arange(24).split(sizes))
        for datasets in (clients_of_sizes(sizes).datasets, rows):
            assert_same_batches(batches_of(Clients(("0", "1", "2"), datasets), batching), slow)

    @pytest.mark.parametrize(("workers", "start"), [(2, "fork"), (1, "spawn")])
    def test_random_transforms_do_not_depend_on_the_workers(self, workers, start):
        sizes, batching = [7, 5], Batching(4, local_epochs=2)
        clients = clients_of_sizes(sizes, Noisy)
        alone = batches_of(clients, batching)
        many = batches_of(clients, batching, num_workers=workers, multiprocessing_context=start)
        assert_same_batches(alone, many)
        draws = torch.cat([batch[2].flatten() for batch in alone])
        assert len(draws.unique()) == len(draws), "local epochs and clients must draw afresh"

    def test_random_collate_does_not_depend_on_the_workers(self):
        clients, options = clients_of_sizes([7, 5], Tensors), {"collate_fn": collate_with_noise}
        alone, many = (batches_of(clients, Batching(4), num_workers=workers, **options) for workers in (0, 2))
        assert_same_batches(alone, many)

    @pytest.mark.parametrize(
        "options",
        [{}, {"num_workers": 2}, {"collate_fn": lambda rows: [torch.rand(len(rows))]}],
        ids=["plain", "workers", "collate"],
    )
    @pytest.mark.parametrize("kind", [TensorDataset, Noisy, Broken])
    def test_global_generators_stay_as_they_are(self, kind, options):
        before = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
        batches_of(clients_of_sizes([7, 5], kind), Batching(4), **options)
        assert torch.equal(torch.get_rng_state(), before[0])
        assert np.array_equal(np.random.get_state()[1], before[1])
        assert random.getstate() == before[2]

    @pytest.mark.parametrize("arranged", [False, True])
    def test_workers_of_any_engine_stay_over_rounds(self, arranged):
        clients, batching, now = Clients(("a", "b"), (WORKERS, WORKERS)), Batching(4), [0]
        user = DataLoader(WORKERS, batch_size=4, num_workers=2, persistent_workers=True)
        loader = FederatedLoader(user, clients, batching, lambda _: plan_round(now[0], clients.sizes, batching))
        if arranged:
            loader.arrangement = StackedBatches(loader, Scheduler(clients.sizes, batching, 2))
        found = set()
        for now[0] in (0, 1, 2):
            for batch in loader:
                parts = [data for stacked in batch for _, data in stacked.parts] if arranged else batch
                found |= {int(each) for leaf in tree_leaves(parts) for each in leaf.flatten()}
        assert len(found) == 2
        assert os.getpid() not in found


WORKERS = Made(lambda index: torch.tensor(os.getpid()), count=12)
"""Examples that are the number of the process that loads them."""


def collate_with_noise(examples):
    inputs, _ = zip(*examples)
    return [torch.stack(inputs) + torch.rand(()), torch.tensor([np.random.rand(), random.random()])]


def broken_collate(examples):
    raise RuntimeError("no batch")


class TestFailures:
    @pytest.mark.parametrize("workers", [0, 2])
    def test_example_that_raises_fails_its_batch_only(self, workers):
        clients, batching = clients_of_sizes([6, 4], Broken), Batching(2, shuffle=False)
        batches = batches_of(clients, batching, num_workers=workers)
        failed = [isinstance(batch, FailedBatch) for batch in batches]
        assert failed == [False, True, False, False, True]
        assert isinstance(batches[1].error, OSError)
        assert "example 3 is lost" in str(batches[1].error)

    @pytest.mark.parametrize(
        ("kind", "options", "words"),
        [
            (Tensors, {"collate_fn": broken_collate}, "no batch"),
            (BrokenBadly, {}, "data.bin: 5"),  # which cannot be pickled, and so the next
            (BrokenLocally, {}, "other processes"),
        ],
    )
    @pytest.mark.parametrize("workers", [0, 1])
    def test_errors_of_any_kind_reach_the_round(self, kind, options, words, workers):
        clients = clients_of_sizes([4], kind)
        batches = batches_of(clients, Batching(2), num_workers=workers, timeout=5 * workers, **options)
        assert all(isinstance(batch, FailedBatch) for batch in batches)
        assert all(words in str(batch.error) for batch in batches)


class Stream(of_torch.IterableDataset):
    def __iter__(self):
        yield torch.zeros(1)


class Backwards(of_torch.SequentialSampler):
    def __iter__(self):
        return reversed(range(len(self.data_source)))


class TestSettings:
    @pytest.mark.parametrize("shuffle", [False, True])
    @pytest.mark.parametrize("drop_last", [False, True])
    def test_settings_are_taken_over(self, shuffle, drop_last):
        loader = DataLoader(TensorDataset(*data(10)), batch_size=3, shuffle=shuffle, drop_last=drop_last)
        batching = batching_of(loader, local_epochs=4, fraction=0.5, seed=7)
        assert batching == Batching(3, shuffle, drop_last, 4, 0.5, 7)

    @pytest.mark.parametrize(
        ("loader", "words"),
        [
            (lambda d: [DataLoader(d)], r"a list; give one torch DataLoader.*ClientDatasets"),
            (lambda d: {"a": DataLoader(d)}, "a dict; give one torch DataLoader"),
            (lambda d: None, "NoneType; give one torch DataLoader"),
            (lambda d: DataLoader(Stream()), "Stream is iterable.*map-style data set"),
            (
                lambda d: DataLoader(d, batch_sampler=of_torch.BatchSampler(RandomSampler(d), 3, True)),
                "batch sampler of",
            ),
            (lambda d: DataLoader(d, batch_sampler=[[0, 1], [2, 3]]), "batch sampler of its own.*give batch_size="),
            (lambda d: DataLoader(d, batch_size=None), "batch_size="),
            (lambda d: type("Mine", (DataLoader,), {"__iter__": iter})(d), "Mine has its own __iter__.*collate_fn="),
            (lambda d: type("Mine", (DataLoader,), {"_get_iterator": iter})(d), "Mine has its own _get_iterator"),
            (lambda d: DataLoader(d, sampler=Backwards(d)), "a Backwards; .*shuffle=True or False"),
            (
                lambda d: DataLoader(d, sampler=of_torch.WeightedRandomSampler([1.0] * 10, 10)),
                "a WeightedRandomSampler",
            ),
            (lambda d: DataLoader(d, sampler=RandomSampler(d, replacement=True)), "RandomSampler.*shuffle="),
            (lambda d: DataLoader(d, sampler=RandomSampler(d, num_samples=3)), "RandomSampler.*shuffle="),
        ],
    )
    def test_loaders_that_cannot_be_dealt_out_name_the_remedy(self, loader, words):
        loader = loader(TensorDataset(*data(10)))
        with pytest.raises(FederationError, match=words):
            batching_of(loader, local_epochs=1, fraction=1.0, seed=0)

    def test_tensors_of_memory_only(self):
        tensors = data(5)
        whole = TensorDataset(*tensors)
        assert tensors_of(whole) == (tensors, None)
        assert tensors_of(Tensors(*tensors)) is None
        assert tensors_of(Subset(Tensors(*tensors), [0])) is None

        class Flipped(TensorDataset):
            def __getitem__(self, index):
                return tuple(-tensor for tensor in super().__getitem__(index))

        assert tensors_of(Flipped(*tensors)) is None
        found, rows = tensors_of(Subset(Subset(whole, [4, 2, 0]), [2, 1]))
        assert found == tensors
        assert rows.tolist() == [0, 2]


class Resized(Tensors):
    size = 20

    def __len__(self):
        return self.size


def changing(dataset, change, where="on_train_epoch_start", rounds=range(1, 9)):
    """A module that changes its data set in a hook of the epoch."""

    class Changes(Plain):
        def train_dataloader(self):
            return loader(dataset, shuffle=False)

    setattr(Changes, where, lambda self: change(dataset, self) if self.current_epoch in rounds else None)
    return Changes()


def of_two(kind):
    return fb.ClientDatasets({f"c{k}": kind(k) for k in range(2)})


LENGTHS = {
    "of a client": lambda: (of_two(lambda k: Resized(*blobs(30).tensors)), lambda d: d.datasets[1]),
    "of all": lambda: (Resized(*blobs(30).tensors), lambda d: d),
}


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.parametrize("size", [12, 28])
@pytest.mark.parametrize("kind", LENGTHS)
def test_data_of_another_length_are_refused_at_that_moment_and_followed_where_loaders_are_made_again(
    kind, size, engine
):
    """Larger and smaller; with loaders that are made again it is as if each round had begun with them."""
    dataset, part = LENGTHS[kind]()
    partition = fb.IIDPartition(2) if kind == "of all" else None

    def fit(module, rounds=3, **options):
        federation = fb.FederatedBayes(partition, engine=engine, fusion="weighted_average")
        trainer(rounds, [federation], **options).fit(module)
        return federation

    def change(dataset, module):
        part(dataset).size = size

    with pytest.raises(FederationError, match=r"another length.*train_dataloader\(\).*reload_dataloaders_every_n"):
        fit(changing(dataset, change))
    part(dataset).size = 20
    made = fit(changing(dataset, change, "on_train_epoch_end", [0]), reload_dataloaders_every_n_epochs=1)
    assert sum(made.federation.engine.sizes) == (size if kind == "of all" else 20 + size)


CONTENTS = {
    "tensors": lambda whole, d: setattr(whole, "tensors", tuple(t.flip(0) for t in whole.tensors)),
    "in place": lambda whole, d: whole.tensors[0].mul_(2),
    "indices": lambda whole, d: setattr(d, "indices", d.indices[::-1]),
    "indices in place": lambda whole, d: d.indices.reverse(),
}


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.parametrize("is_dealt", [False, True])
@pytest.mark.parametrize("what", CONTENTS)
def test_contents_that_a_hook_replaces_are_those_of_the_next_round(what, is_dealt, engine):
    """Tensors in memory, which the federation indexes itself, as data sets that a loader reads."""
    learnt = []
    for hides in (False, True):
        whole = TensorDataset(*(each.clone() for each in blobs(40).tensors))
        subset = Subset(whole, list(range(3, 33)))
        shown = type("Hidden", (Subset,), {})(subset, range(30)) if hides else subset
        dataset = shown if is_dealt else of_two(lambda k, shown=shown, whole=whole: shown if k else whole)
        module = changing(dataset, lambda *_, whole=whole, subset=subset: CONTENTS[what](whole, subset), rounds=[1])
        federation = fb.FederatedBayes(fb.IIDPartition(2) if is_dealt else None, engine=engine, fusion="fedavg")
        trainer(2, [federation]).fit(module)
        assert bool(federation._loader.shapes) is not hides
        learnt.append(parameters(module))
    torch.testing.assert_close(*learnt)
