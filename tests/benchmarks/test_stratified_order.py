"""The order of examples that makes samples stratified."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.readers import stratified_order


@given(st.lists(st.integers(0, 4), min_size=1, max_size=60), st.integers(0, 2**31))
@settings(deadline=None)
def test_every_beginning_of_a_stratified_order_is_stratified(labels, seed):
    """n of N examples hold n·N_c/N of class c, to less than two."""
    y = torch.tensor(labels)
    order = stratified_order(y, torch.Generator().manual_seed(seed))
    assert torch.equal(order.sort().values, torch.arange(len(y)))
    counts = torch.nn.functional.one_hot(y[order], 5).cumsum(0)
    shares = torch.arange(1, len(y) + 1).view(-1, 1) * counts[-1] / len(y)
    assert (counts - shares).abs().max() < 2


def test_a_stratified_order_is_uniform():
    """Each example of class 0 is the first of its class equally often, and class 0 comes first half of the time."""
    y = torch.tensor([0] * 5 + [1] * 5)
    draws = torch.Generator().manual_seed(0)
    orders = torch.stack([stratified_order(y, draws) for _ in range(4000)])
    firsts = torch.stack([order[y[order] == 0][0] for order in orders]).bincount(minlength=5) / 4000
    assert (firsts - 0.2).abs().max() < 5 * (0.2 * 0.8 / 4000) ** 0.5
    assert (y[orders[:, 0]] == 0).double().mean().item() == pytest.approx(0.5, abs=5 * 0.5 / 4000**0.5)
