"""How a stack lies in memory: as gradients come, so that none has to be rearranged.

The gradient of a stacked weight matrix comes out of a batched product transposed. Autograd copies a gradient into the
layout of its parameter, and for a matrix that copy takes several times as long as the product itself.
"""

from __future__ import annotations

from torch import Tensor

Layout = tuple[int, ...]
"""The dimensions of a tensor from the one with the largest stride to the one with the smallest."""


def layout_of(tensor: Tensor) -> Layout | None:
    """The layout of a stacked tensor; None if its entries do not lie side by side, client after client.

    >>> import torch
    >>> layout_of(torch.zeros(2, 3, 4).transpose(1, 2))
    (0, 2, 1)
    """
    layout = tuple(sorted(range(tensor.dim()), key=lambda d: (-tensor.stride(d), d)))
    dense = tensor.permute(layout).is_contiguous()
    return layout if dense and layout[:1] == (0,) else None


def empty_with_layout(shape: tuple[int, ...], layout: Layout | None, like: Tensor) -> Tensor:
    """An uninitialised tensor of this shape, laid out so; dtype and device are those of ``like``."""
    if layout is None:
        return like.new_empty(shape)
    inverse = sorted(range(len(layout)), key=lambda place: layout[place])
    return like.new_empty([shape[d] for d in layout]).permute(inverse)
