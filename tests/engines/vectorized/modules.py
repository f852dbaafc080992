"""Modules that several tests share."""

from __future__ import annotations

from torch import Tensor, nn

from lightning_fedbayes.layers import kl_divergence


class Divergence(nn.Module):
    """KL(q‖p) of the network inside as an output, for ``functional_call``."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self) -> Tensor:
        return kl_divergence(self.inner)
