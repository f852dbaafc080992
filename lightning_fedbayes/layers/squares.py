r"""Squares of the gradients of single examples, beside the backward pass of a batch.

A layer that is linear in its weight W has :math:`\partial L / \partial W = \sum_i g_i` over the examples i of a batch,
for ``F.linear`` :math:`g_i = \delta_i x_i^\top` with the gradient :math:`\delta_i` of the loss by the layer's i-th
output. The sum of squares :math:`\sum_i g_i^2` becomes the gradient of a zero, the *tally*.

Source: Dangel et al. 2020 (BackPACK).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from lightning_fedbayes.layers.functional import Op


def with_tallies(output: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, op: Op, dims: int) -> Tensor:
    """Return ``output``, whose backward pass gives the tallies of weight and bias their gradients.

    Dimension 0 of input and output counts the examples, unless there is one without that dimension. A
    ``TorchFunctionMode`` can override this function, as it can torch's own.

    Args:
        output: of the layer, (examples, \\*, channels, \\*space).
        x: its input, (examples, \\*).
        weight, bias: tallies, zeros of the shapes of its parameters; None: none is taken.
        op: the deterministic layer.
        dims: of space.

    Returns: of the shape of ``output``.
    """
    tensors = tuple(each for each in (output, x, weight, bias) if each is not None)
    if has_torch_function(tensors):
        return handle_torch_function(with_tallies, tensors, output, x, weight, bias, op, dims)
    if dims == 0 and x.dim() == output.dim() == 2:
        return RowTally.apply(output, x, weight, bias)  # pyright: ignore[reportReturnType]
    return SquareTally.apply(output, x, weight, bias, op, dims)  # pyright: ignore[reportReturnType]


class RowTally(torch.autograd.Function):
    r""":func:`with_tallies` of a linear layer whose examples are the rows of its input, or of each one in a stack.

    .. math:: \sum_i g_i^2 = (\delta^2)^\top x^2

    Shapes: (\*, examples, features).
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(output: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """Return ``output``; arguments as for :func:`with_tallies`."""
        return output.view_as(output)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Keep the input."""
        _, x, weight, bias = inputs
        ctx.has_weight, ctx.has_bias = weight is not None, bias is not None
        ctx.save_for_backward(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of the output as it is, and the sums of squares."""
        (gradient,), (x,) = gradients, ctx.saved_tensors
        squares = in_single_precision(gradient).square()
        of_weight = squares.mT @ in_single_precision(x).square() if ctx.has_weight else None
        return gradient, None, of_weight, squares.sum(-2) if ctx.has_bias else None


class SquareTally(torch.autograd.Function):
    """:func:`with_tallies` of any layer that is linear in its weight; one gradient of the weight for every example."""

    generate_vmap_rule = True

    @staticmethod
    def forward(output: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, op: Op, dims: int) -> Tensor:
        """Return ``output``; arguments as for :func:`with_tallies`."""
        return output.view_as(output)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Keep the input."""
        _, x, weight, bias, ctx.op, ctx.dims = inputs
        ctx.has_bias = bias is not None
        ctx.save_for_backward(x, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of the output as it is, and the sums of squares."""
        (gradient,), (x, weight), dims = gradients, ctx.saved_tensors, ctx.dims
        each = in_single_precision(gradient)
        if gradient.dim() == 1 + dims:
            x, each = x.unsqueeze(0), each.unsqueeze(0)
        of_weight = None if weight is None else weight_squares(ctx.op, x.to(weight), each.to(weight), weight)
        of_bias = None
        if ctx.has_bias:
            others = [dim for dim in range(1, each.dim()) if dim != each.dim() - 1 - dims]
            of_bias = (each.sum(others) if others else each).square().sum(0)
        return gradient, None, of_weight, of_bias, None, None


def weight_squares(op: Op, x: Tensor, gradient: Tensor, weight: Tensor) -> Tensor:
    """Return the sum over examples of squared gradients by the weight, of its shape.

    Args:
        op: the deterministic layer.
        x: input (examples, \\*).
        gradient: of the output (examples, \\*).
        weight: any tensor of its shape.

    >>> x, gradient = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[1.0], [-1.0]])
    >>> weight_squares(torch.nn.functional.linear, x, gradient, torch.zeros(1, 2))
    tensor([[10., 20.]])
    """

    def of_one(row: Tensor, slope: Tensor) -> Tensor:
        backward = torch.func.vjp(lambda parameter: op(row.unsqueeze(0), parameter, None), weight)[1]
        return backward(slope.unsqueeze(0))[0]

    return torch.func.vmap(of_one)(x, gradient).square().sum(0)


def in_single_precision(tensor: Tensor) -> Tensor:
    """Return a tensor of half precision in single precision, whose squares do not vanish; others as they are."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor
