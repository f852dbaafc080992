"""Gradient clipping client by client."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def clip_norms(gradients: Sequence[Tensor], max_norm: float) -> None:
    r"""Scale each client's gradient to a norm of at most ``max_norm``, in place.

    .. math:: g_k \leftarrow g_k \min\left(1, \frac{c}{\|g_k\| + 10^{-6}}\right)

    the norm over all parameters of the client, as ``torch.nn.utils.clip_grad_norm_`` takes it for one network.

    Args:
        gradients: one per parameter, shape (clients, *).
        max_norm: c > 0.
    """
    norms = torch.stack([torch.linalg.vector_norm(each.flatten(1), dim=1) for each in map(_at_least_2d, gradients)])
    factor = (max_norm / (torch.linalg.vector_norm(norms, dim=0) + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(factor.view(-1, *[1] * (gradient.dim() - 1)).to(gradient.dtype))


def clip_values(gradients: Sequence[Tensor], max_value: float) -> None:
    """Clamp every entry to [−``max_value``, ``max_value``], in place."""
    for gradient in gradients:
        gradient.clamp_(-max_value, max_value)


def _at_least_2d(gradient: Tensor) -> Tensor:
    return gradient.unsqueeze(1) if gradient.dim() == 1 else gradient
