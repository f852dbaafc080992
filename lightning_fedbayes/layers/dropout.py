"""Dropout as an approximate posterior."""

from __future__ import annotations

import copy
from typing import Any

import torch.nn.functional as F
from bayesian_torch.layers.base_variational_layer import BaseVariationalLayer_
from torch import Tensor, nn

from lightning_fedbayes.core.errors import ConversionError, check_kind, check_number
from lightning_fedbayes.core.private_torch import remove_forward_hook
from lightning_fedbayes.layers.base import refuse_export
from lightning_fedbayes.layers.convert import affine_kind, candidate_modules

CHILD = "mc_dropout"
"""Name of the submodule that a layer gets for the dropout of its output."""


class MCDropout(nn.Module):
    r"""Dropout that stays active at prediction, :math:`y = x \odot z / (1 - p)` with z 0 at probability p, else 1.

    Averaging predictions over its masks is Monte Carlo dropout (Gal & Ghahramani 2016). It is active in training and
    evaluation, and off inside :func:`~lightning_fedbayes.layers.mean_only`.

    Args:
        p: probability that an entry is dropped, in [0, 1).

    Shapes: any; the output has the shape of the input.

    Raises:
        ConversionError: ``p`` is out of range.
    """

    def __init__(self, p: float = 0.5) -> None:
        super().__init__()
        check_number("p", p, "[0, 1)", error=ConversionError, why="it is the probability of dropout")
        self.p = p
        self.mean_only = False

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` under a fresh mask, scaled to keep its mean."""
        if not self.mean_only:
            refuse_export(self)
        return F.dropout(x, self.p, training=not self.mean_only)

    def extra_repr(self) -> str:
        """The dropout probability."""
        return f"p={self.p}"


def with_mc_dropout(network: nn.Module, rate: float = 0.2) -> nn.Module:
    """A copy of ``network`` with Monte Carlo dropout after its linear layers and convolutions; ``network`` stays as is.

    The last such layer in the order of definition, which makes the outputs, gets no dropout: at rate 0.2, a mask over
    ten logits alone gives an NLL of 0.117 nats even to a network that is certain and right, and a masked target of a
    regression means nothing. The names in the ``state_dict`` are those of ``network``, so that checkpoints of one load
    into the other, and clients' models fuse in the same way.

    When to use it: a posterior at the price of a deterministic network, [FBDL] §3.9; dropout comes before BatchNorm
    and the activation there. It has no KL; weight decay is its prior (Gal & Ghahramani 2016).

    Args:
        network: any module.
        rate: probability that an entry of a layer's output is dropped, in [0, 1).

    Raises:
        ConversionError: ``rate`` is out of range, ``network`` has Bayesian layers or fewer than two linear layers and
            convolutions, or it has been converted before.

    Source: [FBDL] §3.1 and Figure 1b: "a dropout layer after each convolutional and linear layer" of a block.

    >>> with_mc_dropout(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), rate=0.1)
    Sequential(
      (0): Linear(
        in_features=4, out_features=8, bias=True
        (mc_dropout): MCDropout(p=0.1)
      )
      (1): ReLU()
      (2): Linear(in_features=8, out_features=2, bias=True)
    )
    """
    check_kind("network", network, nn.Module, "give a torch.nn.Module", error=ConversionError)
    copied = copy.deepcopy(network)
    candidates = candidate_modules(copied)
    layers = {name: module for name, module in candidates.items() if affine_kind(module) is not None}
    bayesian = [name for name, module in candidates.items() if isinstance(module, BaseVariationalLayer_)]
    if bayesian:
        raise ConversionError(f"{bayesian} are Bayesian already; Monte Carlo dropout is for a deterministic network")
    if len(layers) < 2:
        raise ConversionError(
            f"the network has {len(layers)} linear layers or convolutions, and the last one gets no dropout; give a "
            "network with at least two, or put MCDropout into it where it belongs"
        )
    *hidden, _ = layers.items()
    for name, layer in hidden:
        if CHILD in layer._modules:
            raise ConversionError(f"'{name}' ({type(layer).__name__}) has Monte Carlo dropout already; convert once")
        layer.add_module(CHILD, MCDropout(rate))
        layer.register_forward_hook(_drop_output)
    return copied


def _drop_output(layer: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    """Drop entries of ``output``; the dropout is found through ``layer``, so that a copy of the layer uses its own."""
    return layer.get_submodule(CHILD)(output)


def remove_mc_dropout(layer: nn.Module) -> None:
    """Undo :func:`with_mc_dropout` of one layer, in place; do nothing to any other."""
    if isinstance(layer._modules.get(CHILD), MCDropout):
        del layer._modules[CHILD]
        remove_forward_hook(layer, _drop_output)
