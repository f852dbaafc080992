"""Memory layouts of stacks."""

import pytest
import torch

from lightning_fedbayes.clients.vectorized.stack import empty_with_layout, layout_of


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
