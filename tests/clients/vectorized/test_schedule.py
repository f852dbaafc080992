"""The schedule of a round, and loaded batches that become stacks."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_fedbayes.clients.vectorized.schedule import Scheduler, stack_batches
from lightning_fedbayes.core.errors import CannotVectorize
from lightning_fedbayes.core.loading import FailedBatch
from lightning_fedbayes.server.plan import Batching, batches_per_epoch, client_batches, plan_round


@settings(deadline=None, max_examples=200)
@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=12),
    batch_size=st.integers(1, 9),
    epochs=st.integers(1, 3),
    at_once=st.integers(1, 12),
    drop_last=st.booleans(),
    steps_per_batch=st.integers(1, 9),
)
def test_a_schedule_has_every_batch_of_every_client_once_and_in_order(
    sizes, batch_size, epochs, at_once, drop_last, steps_per_batch
):
    batching = Batching(batch_size, drop_last=drop_last, local_epochs=epochs)
    sizes = [max(size, batch_size) if drop_last else size for size in sizes]
    plan = plan_round(0, sizes, batching)
    planned = Scheduler(sizes, batching, at_once, steps_per_batch)(plan)
    taken: dict[int, list[int]] = {client: [] for client in range(len(sizes))}
    assert all(1 <= len(groups) <= steps_per_batch for _, groups in planned.batches)
    for chunk, group in ((chunk, group) for chunk, groups in planned.batches for group in groups):
        assert len(chunk.clients) <= at_once
        assert group.alone == (sum(other.step == group.step for other in chunk.groups) == 1)
        for slot in group.slots:
            client = chunk.clients[slot]
            assert group.step == len(taken[client])
            taken[client].append(group.batch_size)
    for client, size in enumerate(sizes):
        assert taken[client] == [len(batch) for batch in client_batches(0, client, size, batching)]
    lengths = [[batches_per_epoch(sizes[client], batching) for client in chunk.clients] for chunk in planned.chunks]
    assert [length for chunk in lengths for length in chunk] == sorted(
        (batches_per_epoch(size, batching) for size in sizes), reverse=True
    )
    counts = [len(chunk.clients) for chunk in planned.chunks]
    assert max(counts) - min(counts) <= 1


def test_loaded_batches_of_equal_structure_shape_and_dtype_are_stacked():
    def batch(value, length=2, dtype=torch.float32):
        return {"x": torch.full((length,), value, dtype=dtype), "y": [torch.tensor(value)]}

    error = OSError("torn")
    others = [batch(3), batch(4, dtype=torch.float64), (torch.ones(2),)]
    batches = [batch(0), batch(1, length=3), FailedBatch(error), *others]
    stacked = stack_batches(range(6), batches)
    assert stacked.failures == {2: error}
    assert [slots for slots, _ in stacked.parts] == [(0, 3), range(1, 2), range(4, 5), range(5, 6)]
    assert stacked.parts[0][1]["x"].tolist() == [[0.0, 0.0], [3.0, 3.0]]
    assert stacked.parts[0][1]["y"][0].tolist() == [0, 3]
    with pytest.raises(CannotVectorize, match="more than tensors \\(str\\)"):
        stack_batches(range(1), [{"x": "text"}])
