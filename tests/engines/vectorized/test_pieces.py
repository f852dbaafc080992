"""Schedules, layouts, clipping and the stacked optimizer, each by itself."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lightning_fedbayes.engines.plan import Batching, batches_per_epoch, client_batches, plan_round
from lightning_fedbayes.engines.vectorized.clipping import clip_norms, clip_values
from lightning_fedbayes.engines.vectorized.entrywise import check_entrywise
from lightning_fedbayes.engines.vectorized.layout import empty_with_layout, layout_of
from lightning_fedbayes.engines.vectorized.optimizer import StackedOptimizer
from lightning_fedbayes.engines.vectorized.reasons import CannotVectorize
from lightning_fedbayes.engines.vectorized.schedule import Scheduler


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
        (batches_per_epoch(size, batching) for size in sizes), reverse=True)
    counts = [len(chunk.clients) for chunk in planned.chunks]
    assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 3, 1, 2), (0, 2, 1, 3)])
def test_a_layout_is_made_as_it_was_read(order):
    inverse = sorted(range(4), key=lambda place: order[place])
    tensor = torch.zeros([(2, 3, 4, 5)[d] for d in order]).permute(inverse)
    assert tensor.shape == (2, 3, 4, 5)
    assert layout_of(tensor) == order
    made = empty_with_layout((7, 3, 4, 5), order, torch.zeros(1, dtype=torch.float64))
    assert layout_of(made) == order
    assert (made.shape, made.dtype) == ((7, 3, 4, 5), torch.float64)


def test_a_tensor_with_gaps_or_mixed_clients_has_no_layout():
    assert layout_of(torch.zeros(3, 2).t()) is None
    assert layout_of(torch.zeros(2, 4)[:, :2]) is None
    assert layout_of(torch.zeros(()).expand(2, 3)) is None


def test_clipping_is_that_of_each_client_alone():
    torch.manual_seed(0)
    gradients = [torch.randn(4, 3, 2), torch.randn(4), 10 * torch.randn(4, 5)]
    gradients[0][2], gradients[1][2], gradients[2][2] = 0.01, 0.0, 0.02  # below the limit
    for clip, reference in (
        (clip_norms, nn.utils.clip_grad_norm_), (clip_values, nn.utils.clip_grad_value_)
    ):
        clipped = [gradient.clone() for gradient in gradients]
        clip(clipped, 0.5)
        for slot in range(4):
            alone = [nn.Parameter(torch.zeros_like(gradient[slot])) for gradient in gradients]
            for parameter, gradient in zip(alone, gradients):
                parameter.grad = gradient[slot].clone()
            reference(alone, 0.5)
            for parameter, stacked in zip(alone, clipped):
                torch.testing.assert_close(stacked[slot], parameter.grad, rtol=1e-6, atol=1e-8)


ENTRYWISE = {
    "SGD": {"momentum": 0.9}, "Adam": {"amsgrad": True}, "AdamW": {}, "NAdam": {}, "RMSprop": {"centered": True},
    "Adagrad": {}, "Rprop": {},
}
STACKED = {
    "SGD": {"momentum_buffer"}, "Adam": {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"},
    "AdamW": {"exp_avg", "exp_avg_sq"}, "NAdam": {"exp_avg", "exp_avg_sq"},
    "RMSprop": {"square_avg", "grad_avg"}, "Adagrad": {"sum"}, "Rprop": {"prev", "step_size"},
}


@pytest.mark.parametrize("name", ENTRYWISE)
def test_entrywise_optimizers_are_known_by_trying_and_stay_as_they_were(name):
    parameters = [nn.Parameter(torch.randn(20, 30)), nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.zeros(0, 3))]
    optimizer = getattr(torch.optim, name)(parameters, lr=0.1, **ENTRYWISE[name])
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    before = copy.deepcopy([p.detach() for p in parameters])
    assert check_entrywise(optimizer) == STACKED[name]
    assert all(torch.equal(a, b) for a, b in zip(before, parameters))
    assert not any("exp_avg" in state for state in optimizer.state.values())
    assert optimizer.param_groups[0]["params"][0] is parameters[0]
    assert scheduler.last_epoch == 0


def test_optimizers_that_look_at_whole_tensors_are_refused():
    parameters = [nn.Parameter(torch.randn(20, 30)), nn.Parameter(torch.randn(30))]
    with pytest.raises(CannotVectorize, match="Adafactor"):
        check_entrywise(torch.optim.Adafactor(parameters))


def test_groups_that_step_apart_keep_their_own_number_of_steps():
    """Adam on four clients, of which two step apart at one point, against Adam on each."""
    torch.manual_seed(0)
    start, gradients = torch.randn(3), torch.randn(5, 4, 3)
    own = nn.Parameter(start.clone())
    optimizer = torch.optim.Adam([own], lr=0.1)
    keys = check_entrywise(optimizer)
    rows = torch.stack([start] * 4)
    stacked = StackedOptimizer(optimizer, [rows], [{}] * 4, keys)
    whole = range(4)
    for step in range(5):
        groups = [whole] if step in (0, 1, 4) else [(0, 2), (1, 3)]
        for slots in groups:
            stacked.select(slots, step, alone=len(groups) == 1)
            stacked.parameters[0].grad = gradients[step][list(slots)]
            stacked.step()
    stacked.write_back()
    for slot in range(4):
        alone = nn.Parameter(start.clone())
        adam = torch.optim.Adam([alone], lr=0.1)
        for step in range(5):
            alone.grad = gradients[step, slot]
            adam.step()
        torch.testing.assert_close(rows[slot], alone.detach())
    kept = [stacked.keep(slot) for slot in (0, 1)] if stacked._selected == whole else []
    assert [float(state[0]["step"]) for state in kept] == [5.0, 5.0]
    stacked.remove()
    assert optimizer.param_groups[0]["params"] == [own]
