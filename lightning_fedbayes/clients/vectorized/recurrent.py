"""Recurrent layers of torch, written out over time for a stack of clients: torch takes one client only."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Cell = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
"""One step in time: (W x + b, h, Uᵀ, b′) → h'. The first is of shape (clients, batch, gates · hidden)."""
Weights = tuple[Tensor, Tensor, Tensor | None, Tensor | None]
"""W, U, b and b′ of one direction of one layer, each with a first dimension of clients."""


def gru_step(gates: Tensor, h: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    r"""Return h' = (1 - z) n + z h with r, z = σ(gates + U h + b') and n = tanh(gates + r (U h + b'))."""
    own = torch.bmm(h, weight) if bias is None else torch.baddbmm(bias, h, weight)
    size = h.shape[-1]
    r, z = (gates[..., : 2 * size] + own[..., : 2 * size]).sigmoid().chunk(2, -1)
    n = torch.addcmul(gates[..., 2 * size :], r, own[..., 2 * size :]).tanh()
    return torch.lerp(n, h, z)


def tanh_step(gates: Tensor, h: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return h' = tanh(gates + U h). Gates hold ``bias``."""
    return torch.baddbmm(gates, h, weight).tanh()


def relu_step(gates: Tensor, h: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return h' = max(0, gates + U h). Gates hold ``bias``."""
    return torch.baddbmm(gates, h, weight).relu()


def weights_of(cell: Cell, tensors: Sequence[Tensor], has_biases: bool) -> list[Weights]:
    """Return the weights of each layer and direction. All cells but the GRU's add both biases to the gates."""
    if not has_biases:
        return [(w, u, None, None) for w, u in zip(tensors[::2], tensors[1::2], strict=True)]
    groups = zip(tensors[::4], tensors[1::4], tensors[2::4], tensors[3::4], strict=True)
    return [(w, u, b, own) if cell is gru_step else (w, u, b + own, None) for w, u, b, own in groups]


def run_layers(
    cell: Cell, x: Tensor, start: Tensor, weights: Sequence[Weights], directions: int
) -> tuple[Tensor, Tensor]:
    """Run the layers one above the other, and both directions of each.

    ``x`` is of shape (clients, time, batch, features), and ``start`` of shape (clients, layers · directions, batch,
    hidden). Return the outputs of the last layer, (clients, time, batch, directions · hidden), and the last states.
    """
    clients, times, batch, _ = x.shape
    lasts: list[Tensor] = []
    for layer in range(len(weights) // directions):
        outputs: list[Tensor] = []
        for i in range(layer * directions, (layer + 1) * directions):
            w, u, bias, own = weights[i]
            backwards, h = i % directions == 1, start[:, i]
            rows = x.reshape(clients, times * batch, -1)  # one product for the inputs of all times
            gates = linear_rows(rows, w, bias).view(clients, times, batch, -1).unbind(1)
            u, own = u.transpose(1, 2), None if own is None else own.unsqueeze(1)
            hidden: list[Tensor] = []
            for gate in reversed(gates) if backwards else gates:
                h = cell(gate, h, u, own)
                hidden.append(h)
            outputs.append(torch.stack(hidden[::-1] if backwards else hidden, 1))
            lasts.append(h)
        x = torch.cat(outputs, -1) if directions == 2 else outputs[0]
    return x, torch.stack(lasts, 1)


def linear_rows(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return rows · weightᵀ + bias of every client, of shapes (clients, n, in), (clients, out, in), (clients, out)."""
    transposed = weight.transpose(1, 2)
    return torch.bmm(rows, transposed) if bias is None else torch.baddbmm(bias.unsqueeze(1), rows, transposed)
