"""Processes that meet, as threads of this one."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch._C._distributed_c10d import HashStore

from lightning_fedbayes.processes import ALONE, GlooProcesses
from lightning_fedbayes.processes.base import blocks

COUNT = 3


@pytest.fixture(name="here")
def processes():
    """Three processes that have found each other."""
    store = HashStore()
    return everywhere(lambda rank: GlooProcesses(store, rank, COUNT), range(COUNT))


def everywhere(action, these):
    """What ``action`` gives in each process, all at once."""
    with ThreadPoolExecutor(len(these)) as threads:
        return list(threads.map(action, these))


def test_each_process_hears_what_was_meant_for_it(here):
    heard = everywhere(lambda process: process.exchange([(process.rank, other) for other in range(COUNT)]), here)
    assert heard == [[(other, rank) for other in range(COUNT)] for rank in range(COUNT)]


@pytest.mark.parametrize("size", [0, 1, 3_000_000])
def test_arrays_arrive_bit_by_bit(here, size):
    arrays = [np.random.default_rng(rank).normal(size=(2, size)) for rank in range(COUNT)]
    for heard in everywhere(lambda process: process.gather({"x": arrays[process.rank], "of": process.rank}), here):
        assert [each["of"] for each in heard] == list(range(COUNT))
        for each, array in zip(heard, arrays, strict=True):
            assert np.array_equal(each["x"], array)
            assert each["x"].flags.writeable


def test_columns_that_do_not_lie_in_a_row_arrive(here):
    rows = torch.arange(21.0, dtype=torch.float64).view(3, 7)
    heard = everywhere(lambda process: process.exchange(blocks(rows * (1 + process.rank), COUNT)), here)
    for rank in range(COUNT):
        joined = torch.cat([torch.from_numpy(heard[place][rank]) for place in range(COUNT)], 1)
        torch.testing.assert_close(joined, rows * (1 + rank), rtol=0, atol=0)


def test_one_process_tells_the_others(here):
    assert everywhere(lambda process: process.broadcast(f"from {process.rank}", source=1), here) == ["from 1"] * COUNT


def test_sums_are_the_same_bits_everywhere(here):
    parts = [torch.randn(1000, generator=torch.Generator().manual_seed(rank)) for rank in range(COUNT)]
    for total in everywhere(lambda process: process.sum(parts[process.rank]), here):
        torch.testing.assert_close(total, parts[0] + parts[1] + parts[2], rtol=0, atol=0)
    assert parts[0].eq(ALONE.sum(parts[0])).all()


def test_talks_that_are_held_at_once_share_their_meetings(here):
    def counting(process, steps):
        total = 0
        for step in range(steps):
            total += sum((yield [10**step * (1 + process.rank)] * COUNT))
        return total

    before = here[0].meetings
    results = everywhere(lambda process: process.hold(*(counting(process, steps) for steps in (1, 3, 0, 2))), here)
    assert results == [[6, 666, 0, 66]] * COUNT
    assert here[0].meetings - before == 3


def test_meetings_and_bytes_are_counted(here):
    meetings, sent = here[0].meetings, here[0].bytes_sent
    everywhere(lambda process: process.gather(np.zeros(1000) if process.rank == 0 else None), here)
    assert here[0].meetings - meetings == 1
    assert 0 <= here[0].bytes_sent - sent - (COUNT - 1) * 8000 < 500 * (COUNT - 1)
