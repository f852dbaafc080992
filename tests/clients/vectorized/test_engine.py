"""Clients that fail, and the module and optimizer during a round."""

import logging
from contextlib import suppress

import lightning as L
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import lightning_fedbayes as fb
from lightning_fedbayes.clients.vectorized import engine as vectorized
from lightning_fedbayes.clients.vectorized.optimizer import StackedOptimizer, clip_norms, clip_values
from lightning_fedbayes.clients.vectorized.probe import check_elementwise
from lightning_fedbayes.clients.vectorized.schedule import Scheduler, stack_batches
from lightning_fedbayes.clients.vectorized.step import ParameterSwap
from lightning_fedbayes.core.errors import CannotVectorize
from lightning_fedbayes.core.loading import FailedBatch
from lightning_fedbayes.server.plan import Batching, batches_per_epoch, client_batches, plan_round
from tests.federations import CLASSES, Made, Plain, assert_equal, blobs, federate, loader, parameters


def with_fault(fault: str) -> Made:
    """Example 7 cannot be read; example 3 has a label that the network has not, or no number."""
    inner = blobs(24)

    def example(index):
        if fault == "torn" and index == 7:
            raise OSError("truncated file")
        x, y = inner[index]
        if index == 3 and fault in ("label", "nan"):
            return (x, torch.tensor(CLASSES + 5)) if fault == "label" else (x * float("nan"), y)
        return x, y

    return Made(example, count=24)


@pytest.mark.parametrize("fault", ["torn", "label", "nan"])
def test_a_client_with_bad_data_is_left_out_and_the_others_end_as_without_it(fault, caplog):
    names = ("first", "bad", "last")
    parts = {name: with_fault(fault if name == "bad" else "none") for name in names}
    federation = fb.FederatedBayes(engine="vectorized", keep=["optimizer"])
    module = Plain()
    with caplog.at_level(logging.INFO):
        federate(module, federation, 2, loader(fb.ClientDatasets(parts)))
    assert [row["failed_clients"] for row in federation.history] == [1, 1]
    assert sum("client bad is left out" in line for line in caplog.messages) == 2

    class OnlyGood(Plain):  # the same by the reference, which trains the good clients under their own numbers
        def training_step(self, batch, batch_idx):
            if self.client.number == 1:
                raise RuntimeError("left out")
            return super().training_step(batch, batch_idx)

        def on_client_start(self, client):
            self.client = client

    reference = OnlyGood()
    federate(reference, fb.FederatedBayes(engine="sequential", keep=["optimizer"]), 2, loader(fb.ClientDatasets(parts)))
    torch.testing.assert_close(parameters(module), parameters(reference), rtol=1e-5, atol=1e-6)


def test_the_module_holds_the_global_model_during_a_round_and_the_optimizer_its_own_parameters_after_it(monkeypatch):
    monkeypatch.setattr(vectorized, "STEPS_PER_BATCH", 1)
    seen = []

    class Spy(L.Callback):
        sees_stacks = True

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if batch_idx + 1 < trainer.num_training_batches:
                seen.append((trainer.current_epoch, parameters(pl_module)))

        def on_train_epoch_end(self, trainer, pl_module):
            held = [p for group in trainer.optimizers[0].param_groups for p in group["params"]]
            assert all(a is b for a, b in zip(held, pl_module.parameters(), strict=True))
            assert not trainer.optimizers[0].state

    module = Plain()
    start = parameters(module)
    federate(module, fb.FederatedBayes(fb.IIDPartition(3), engine="vectorized"), 2, callbacks=[Spy()])
    assert_equal(seen[0][1], start)
    assert_equal(seen[-1][1], next(p for epoch, p in seen if epoch == 1))
    assert "log" not in vars(module)


def test_clipping_is_that_of_each_client_alone():
    gradients = [torch.randn(4, 3, 2), torch.randn(4), 10 * torch.randn(4, 5)]
    gradients[0][2], gradients[1][2], gradients[2][2] = 0.01, 0.0, 0.02  # below the limit
    for clip, reference in ((clip_norms, nn.utils.clip_grad_norm_), (clip_values, nn.utils.clip_grad_value_)):
        clipped = [gradient.clone() for gradient in gradients]
        clip(clipped, 0.5)
        for slot in range(4):
            alone = [nn.Parameter(torch.zeros_like(gradient[slot])) for gradient in gradients]
            for parameter, gradient in zip(alone, gradients):
                parameter.grad = gradient[slot].clone()
            reference(alone, 0.5)
            for parameter, stacked in zip(alone, clipped):
                torch.testing.assert_close(stacked[slot], parameter.grad, rtol=1e-6, atol=1e-8)


def test_groups_that_step_apart_keep_their_own_number_of_steps():
    """Adam on four clients, of which two step apart at one point, against Adam on each."""
    start, gradients = torch.randn(3), torch.randn(5, 4, 3)
    own = nn.Parameter(start.clone())
    optimizer = torch.optim.Adam([own], lr=0.1)
    keys = check_elementwise(optimizer)
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
    kept = [stacked.read_state(slot) for slot in (0, 1)]
    assert [float(state[0]["step"]) for state in kept] == [5.0, 5.0]
    stacked.remove()
    assert optimizer.param_groups[0]["params"] == [own]


def test_a_swap_reaches_tied_tensors_and_is_undone_after_an_error():
    module = nn.ModuleDict({"first": nn.Linear(2, 2), "second": nn.Linear(2, 2), "norm": nn.BatchNorm1d(2)})
    module["second"].weight = module["first"].weight
    before = dict(module.state_dict(keep_vars=True))
    swap = ParameterSwap(module)
    other, mean = torch.zeros(3, 2, 2), torch.ones(3, 2)
    with suppress(RuntimeError), swap.using({"first.weight": other, "norm.running_mean": mean}):
        assert module["first"].weight is module["second"].weight is swap["first.weight"] is other
        assert module["norm"].running_mean is mean
        raise RuntimeError
    assert all(tensor is before[name] for name, tensor in module.state_dict(keep_vars=True).items())


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
