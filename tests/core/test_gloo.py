"""Collective operations of processes, which are threads of this one."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch.distributed import HashStore

from lightning_fedbayes.core.exchange import ALONE, Reduction, merge_statistics
from lightning_fedbayes.core.gloo import GlooCollective

COUNT = 3


@pytest.fixture(name="here")
def processes():
    """Three connected processes."""
    store = HashStore()
    return everywhere(lambda rank: GlooCollective(store, rank, COUNT), range(COUNT))


def everywhere(action, these):
    """Return the result of ``action`` in each process, all at once."""
    with ThreadPoolExecutor(len(these)) as threads:
        return list(threads.map(action, these))


def test_each_process_receives_the_value_for_it(here):
    received = everywhere(lambda process: process.all_to_all([(process.rank, other) for other in range(COUNT)]), here)
    assert received == [[(other, rank) for other in range(COUNT)] for rank in range(COUNT)]


@pytest.mark.parametrize("size", [0, 1, 3_000_000])
def test_arrays_arrive_bit_by_bit(here, size):
    arrays = [np.random.default_rng(rank).normal(size=(2, size)) for rank in range(COUNT)]
    gathered = everywhere(lambda process: process.all_gather({"x": arrays[process.rank], "of": process.rank}), here)
    for received in gathered:
        assert [each["of"] for each in received] == list(range(COUNT))
        for each, array in zip(received, arrays, strict=True):
            assert np.array_equal(each["x"], array)
            assert each["x"].flags.writeable


def test_sums_are_the_same_bits_everywhere(here):
    parts = [torch.randn(1000, generator=torch.Generator().manual_seed(rank)) for rank in range(COUNT)]
    for total in everywhere(lambda process: process.all_reduce(parts[process.rank]), here):
        torch.testing.assert_close(total, parts[0] + parts[1] + parts[2], rtol=0, atol=0)
    assert parts[0].eq(ALONE.all_reduce(parts[0])).all()


def add(statistics, other):
    for name, value in other.items():
        statistics[name] = statistics[name] + value if name in statistics else value


@pytest.mark.parametrize("totals_only", [False, True])
def test_merged_statistics_are_sums_over_all_processes_in_two_calls(here, totals_only):
    """Process 2 has no client; "zero" is 0 everywhere and not sent."""
    parts = [
        {
            "weight": torch.tensor(1.0 + rank, dtype=torch.float64),
            "vector": torch.arange(7, dtype=torch.float64) * (1 + rank),
            "zero": torch.zeros(7, dtype=torch.float64),
        }
        for rank in range(2)
    ] + [{}]
    other = [{"short": torch.full((2,), 1.0 + rank, dtype=torch.float64)} for rank in range(COUNT)]
    before = here[0].calls
    merged = everywhere(
        lambda process: merge_statistics(
            [Reduction(parts[process.rank], 7, add, totals_only), Reduction(other[process.rank], 2, add)], process
        ),
        here,
    )
    assert here[0].calls - before == 2
    for first, second in merged:
        assert float(first["weight"]) == 3
        vector = 3 * torch.arange(7, dtype=torch.float64)
        torch.testing.assert_close(first["vector"], vector.sum() if totals_only else vector, rtol=0, atol=0)
        assert not first["zero"].any()
        torch.testing.assert_close(second["short"], torch.full((2,), 6.0, dtype=torch.float64), rtol=0, atol=0)
