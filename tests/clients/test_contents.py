"""Digests of the clients' data: another split is noticed on resuming, and random data are not taken for another."""

from __future__ import annotations

import random
import secrets
import time

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Subset, random_split

import lightning_fedbayes as fb
from lightning_fedbayes.clients import contents
from lightning_fedbayes.core.errors import FederationError
from lightning_fedbayes.data.clients import clients_of
from tests.federations import Made, Plain, blobs, federate, trainer

KINDS = {
    "tensor": lambda k: torch.tensor([float(k)]),
    "bfloat16": lambda k: torch.tensor([float(k)], dtype=torch.bfloat16),
    "empty tensor": lambda k: (torch.zeros(0), k),
    "number tensor": lambda k: torch.tensor(k),
    "array": lambda k: np.array([k, 0]),
    "number": lambda k: k,
    "numpy's number": lambda k: np.float32(k),
    "text": lambda k: f"text {k}",
    "bytes": lambda k: bytes([k]),
    "dict": lambda k: {"x": torch.zeros(2), "y": {"inner": [k]}},
    "names of a dict": lambda k: {f"x{k}": 0},
    "list": lambda k: [[0] * k, [0]],
    "several": lambda k: (torch.zeros(1), (k, None), "text"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_other_contents_have_another_digest_and_equal_ones_the_same(kind):
    def made(*firsts):
        return [Made(KINDS[kind], first) for first in firsts]

    stored = contents.digests(made(0, 20, 40))
    assert (stored != 0).all()
    assert contents.differing(made(0, 20, 40), stored) == []
    assert contents.differing(made(0, 21, 40), stored) == [1]
    assert contents.differing([Subset(each, [0, 1, 2]) for each in made(0, 20, 41)], stored) == [2]
    assert contents.differing([Subset(each, [0, 2, 1]) for each in made(0, 20, 40)], stored) == [0, 1, 2]


def test_what_cannot_be_read_counts_for_its_type():
    (whole, other, text) = contents.digests([Made(lambda k: object()), Made(lambda k: object(), 9), Made(str)])
    assert whole == other != text


OWN = np.random.default_rng(0)
RANDOM = {
    "torch": lambda k: torch.rand(1),
    "NumPy": lambda k: np.random.rand(),
    "Python": lambda k: random.random() < 0.5,
    "the system": lambda k: secrets.randbelow(2),
    "a generator elsewhere": lambda k: OWN.random() < 0.5,
    "the clock": lambda k: time.perf_counter_ns(),
}


@pytest.mark.parametrize("source", RANDOM)
@pytest.mark.parametrize("clients", [1, 3, 40])
def test_random_examples_are_never_taken_for_other_ones_and_leave_generators_alone(source, clients):
    datasets = [Made(RANDOM[source]) for _ in range(clients)]
    for _ in range(50):
        states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
        stored = contents.digests(datasets)
        assert states == (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
        assert stored.bool().tolist() == [source in ("torch", "NumPy", "Python")] * clients
        torch.rand(1), np.random.rand(), random.random()
        assert contents.differing(datasets, stored) == []


@pytest.mark.parametrize("generator", [None, torch.Generator()])
def test_a_data_set_with_a_generator_is_not_read_and_the_file_of_another_stays_closed(generator):
    class Own(Made):
        file = None

        def __getitem__(self, index):
            self.file = "open"
            return index if self.generator is None else float(torch.rand(1, generator=self.generator))

    own, state = Own(str), None if generator is None else generator.get_state()
    own.generator = generator
    assert contents.digests([own]).bool().tolist() == [generator is None]
    assert own.file is None
    assert generator is None or torch.equal(generator.get_state(), state)


def test_a_client_that_raises_is_left_to_its_training():
    assert contents.digests([Made(lambda k: 1 / 0), Made(str)]).bool().tolist() == [False, True]


def test_reading_ends_after_a_second(monkeypatch):
    monkeypatch.setattr(contents, "SECONDS", 0.05)
    datasets = clients_of(blobs(2000), fb.IIDPartition(2000), 0).datasets
    stored = contents.digests(datasets)
    assert 1 < stored.count_nonzero() < 2000
    others = contents.differing(clients_of(blobs(2000), fb.IIDPartition(2000), 1).datasets, stored)
    assert len(others) > 0.9 * stored.count_nonzero()


def split(seed):
    parts = random_split(blobs(60), [20, 20, 20], torch.Generator().manual_seed(seed))
    return DataLoader(fb.ClientDatasets({f"{'north' * 500}{k}": part for k, part in enumerate(parts)}), 8)


@pytest.mark.parametrize("by_checkpoint", [True, False])
def test_a_run_that_goes_on_with_another_split_is_refused_with_its_clients(by_checkpoint, tmp_path):
    federation, module = fb.FederatedBayes(), Plain()
    made = federate(module, federation, 1, split(0))
    made.save_checkpoint(tmp_path / "one.ckpt")
    for seed in (1, 0):
        if by_checkpoint:
            again = trainer(2, [fb.FederatedBayes()])
        else:
            again = made
            made.fit_loop.max_epochs = 2
        path = tmp_path / "one.ckpt" if by_checkpoint else None
        if seed:
            with pytest.raises(
                FederationError, match=r"other data than .* of 3 clients differs: .north.*a seed"
            ) as refusal:
                again.fit(module, split(seed), ckpt_path=path)
            assert len(str(refusal.value)) < 1000
        else:
            again.fit(module, split(seed), ckpt_path=path)


def test_data_that_are_loaded_anew_in_every_round_may_be_others(tmp_path):
    class Reloads(Plain):
        def train_dataloader(self):
            return split(self.trainer.current_epoch)

    options = {"reload_dataloaders_every_n_epochs": 1}
    for rounds, path in ((1, None), (2, tmp_path / "one.ckpt")):
        made = trainer(rounds, [fb.FederatedBayes()], **options)
        made.fit(Reloads(), ckpt_path=path)
        made.save_checkpoint(tmp_path / "one.ckpt")
