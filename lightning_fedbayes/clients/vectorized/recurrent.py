"""Recurrent layers of torch, written out over time for a stack of clients: torch takes one client only."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

State = tuple[Tensor, ...]
"""Hidden state of every client, (h,) or (h, c), each of shape (clients, batch, hidden)."""
Cell = Callable[[Tensor, State, Tensor, Tensor | None], State]
"""One step in time: (W x + b, state, Uᵀ, b′) → state. The first of shape (clients, batch, gates · hidden)."""
Weights = tuple[Tensor, Tensor, Tensor | None, Tensor | None]
"""W, U, b and b′ of one direction of one layer, each with a first dimension of clients."""


def gru_step(gates: Tensor, state: State, weight: Tensor, bias: Tensor | None) -> State:
    r"""Return h' = (1 - z) n + z h with r, z = σ(gates + U h + b') and n = tanh(gates + r (U h + b'))."""
    (h,) = state
    own = torch.bmm(h, weight) if bias is None else torch.baddbmm(bias, h, weight)
    size = h.shape[-1]
    r, z = (gates[..., : 2 * size] + own[..., : 2 * size]).sigmoid().chunk(2, -1)
    n = torch.addcmul(gates[..., 2 * size :], r, own[..., 2 * size :]).tanh()
    return (torch.lerp(n, h, z),)


def lstm_step(gates: Tensor, state: State, weight: Tensor, bias: Tensor | None) -> State:
    """Return c' = σ(f) c + σ(i) tanh(g) and h' = σ(o) tanh(c') with i, f, g, o = gates + U h. Gates hold ``bias``."""
    h, c = state
    size = h.shape[-1]
    i_f, g, o = torch.baddbmm(gates, h, weight).split((2 * size, size, size), -1)
    i, f = i_f.sigmoid().chunk(2, -1)
    c = torch.addcmul(f * c, i, g.tanh())
    return o.sigmoid() * c.tanh(), c


def tanh_step(gates: Tensor, state: State, weight: Tensor, bias: Tensor | None) -> State:
    """Return h' = tanh(gates + U h). Gates hold ``bias``."""
    return (torch.baddbmm(gates, state[0], weight).tanh(),)


def relu_step(gates: Tensor, state: State, weight: Tensor, bias: Tensor | None) -> State:
    """Return h' = max(0, gates + U h). Gates hold ``bias``."""
    return (torch.baddbmm(gates, state[0], weight).relu(),)


def weights_of(cell: Cell, tensors: Sequence[Tensor], has_biases: bool) -> list[Weights]:
    """Return the weights of each layer and direction. All cells but the GRU's add both biases to the gates."""
    if not has_biases:
        return [(w, u, None, None) for w, u in zip(tensors[::2], tensors[1::2], strict=True)]
    groups = zip(tensors[::4], tensors[1::4], tensors[2::4], tensors[3::4], strict=True)
    return [(w, u, b, own) if cell is gru_step else (w, u, b + own, None) for w, u, b, own in groups]


def run_layers(
    cell: Cell, x: Tensor, states: State, weights: Sequence[Weights], directions: int
) -> tuple[Tensor, State]:
    """Run the layers one above the other, and both directions of each.

    ``x`` is of shape (clients, time, batch, features), and each of the first ``states`` of shape (clients, layers ·
    directions, batch, hidden). Return the outputs of the last layer, (clients, time, batch, directions · hidden), and
    the last states.
    """
    clients, times, batch, _ = x.shape
    lasts: list[State] = []
    for layer in range(len(weights) // directions):
        outputs: list[Tensor] = []
        for i in range(layer * directions, (layer + 1) * directions):
            w, u, bias, own = weights[i]
            backwards, state = i % directions == 1, tuple(each[:, i] for each in states)
            rows = x.reshape(clients, times * batch, -1)  # one product for the inputs of all times
            gates = linear_rows(rows, w, bias).view(clients, times, batch, -1).unbind(1)
            u, own = u.transpose(1, 2), None if own is None else own.unsqueeze(1)
            hidden: list[Tensor] = []
            for gate in reversed(gates) if backwards else gates:
                state = cell(gate, state, u, own)
                hidden.append(state[0])
            outputs.append(torch.stack(hidden[::-1] if backwards else hidden, 1))
            lasts.append(state)
        x = torch.cat(outputs, -1) if directions == 2 else outputs[0]
    return x, tuple(torch.stack(each, 1) for each in zip(*lasts))


def linear_rows(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return rows · weightᵀ + bias of every client, of shapes (clients, n, in), (clients, out, in), (clients, out)."""
    transposed = weight.transpose(1, 2)
    return torch.bmm(rows, transposed) if bias is None else torch.baddbmm(bias.unsqueeze(1), rows, transposed)
