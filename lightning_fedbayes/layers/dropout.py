"""Dropout as an approximate posterior."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from lightning_fedbayes.errors import ConversionError


class MCDropout(nn.Module):
    r"""Dropout that stays active at prediction, :math:`y = x \odot z / (1 - p)` with z 0 at probability p, else 1.

    Averaging predictions over its masks is Monte Carlo dropout (Gal & Ghahramani 2016). It is on in training and in
    evaluation alike, and off inside :func:`~lightning_fedbayes.layers.mean_only`.

    Args:
        p: probability that an entry is dropped, in [0, 1).

    Shapes: any; the output has the shape of the input.

    Raises:
        ConversionError: ``p`` is out of range.
    """

    def __init__(self, p: float = 0.5) -> None:
        super().__init__()
        if not 0 <= p < 1:
            raise ConversionError(f"dropout probability p={p} is not in [0, 1)")
        self.p = p
        self.mean_only = False

    def forward(self, x: Tensor) -> Tensor:
        """``x`` with a fresh mask, scaled to keep its mean."""
        return F.dropout(x, self.p, training=not self.mean_only)

    def extra_repr(self) -> str:
        """The dropout probability."""
        return f"p={self.p}"
