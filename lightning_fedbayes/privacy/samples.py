"""Gradients of single examples for a module as it is: Opacus's hooks on its layers, and which layers they fit."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

from bayesian_torch.layers.base_variational_layer import BaseVariationalLayer_
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from lightning_fedbayes.errors import FederationError
from lightning_fedbayes.privacy.bayesian import BAYESIAN, example_gradients, forget_generator, remember_generator
from lightning_fedbayes.privacy.extra import import_opacus

ALTERNATIVES = {
    nn.LSTM: "opacus.layers.DPLSTM",
    nn.GRU: "opacus.layers.DPGRU",
    nn.RNN: "opacus.layers.DPRNN",
    nn.MultiheadAttention: "opacus.layers.DPMultiheadAttention",
}
"""Layers of torch that Opacus has rewritten."""


def register_bayesian_layers() -> dict[Any, Any]:
    """Tell Opacus of this package's layers. Returns all the layers that it knows, and how it treats them."""
    known = import_opacus("opacus.grad_sample").GradSampleHooks.GRAD_SAMPLERS
    known.update({layer: example_gradients for layer in BAYESIAN if layer not in known})
    return known


def check_network(module: nn.Module) -> None:
    """Raise FederationError if examples of a batch have no gradients of their own in ``module``; all layers are named.

    What mixes examples between the layers, such as subtracting the mean of a batch, is not found.
    """
    reasons = list(_reasons(module, register_bayesian_layers()))
    if reasons:
        raise FederationError(
            "ExamplePrivacy cannot bound what one example does to this network:\n"
            + "\n".join(f"  * {each}" for each in reasons)
        )


def _reasons(module: nn.Module, known: dict[Any, Any]) -> Iterator[str]:
    rewritten = import_opacus("opacus.layers")
    recurrent = (rewritten.DPRNN, rewritten.DPLSTM, rewritten.DPGRU)
    for path, layer in module.named_modules():
        kind = type(layer)
        what = f"{path or 'the module'} ({kind.__name__})"
        if isinstance(layer, _BatchNorm):
            yield f"{what} mixes the examples of a batch; put nn.GroupNorm or nn.LayerNorm in its place"
        elif isinstance(layer, _InstanceNorm) and layer.track_running_stats:
            yield f"{what} keeps running statistics of the examples; use track_running_stats=False"
        elif getattr(layer, "inplace", False) is True:
            yield f"{what} works in place, on what the hooks of the layer before have to see; use inplace=False"
        elif not any(p.requires_grad for p in layer.parameters(recurse=False)) or kind in known or kind in recurrent:
            continue
        elif isinstance(layer, BaseVariationalLayer_):
            yield (
                f"{what} is a Bayesian layer whose examples have no gradients of their own here; use a linear or "
                "convolutional layer of lightning_fedbayes.layers, such as LinearFlipout"
            )
        elif kind in ALTERNATIVES:
            yield f"{what} has no gradients per example in Opacus; put {ALTERNATIVES[kind]} in its place"
        else:
            yield (
                f"{what} has parameters of its own, and Opacus no grad sampler for them; build it from layers that "
                "have one, or add yours with opacus.grad_sample.register_grad_sampler"
            )


class GradSamples:
    """Lets every backward pass leave the gradient of each example in ``parameter.grad_sample``, shape (batch, *).

    The module itself stays what it is: no wrapper, no other names. The loss is the mean over the batch.

    Args:
        module: in which :func:`check_network` finds nothing.
    """

    def __init__(self, module: nn.Module) -> None:
        register_bayesian_layers()
        # a first layer has no input with a gradient, and needs none
        warnings.filterwarnings("ignore", message="Full backward hook is firing when gradients are computed")
        self._module = module
        self._hooks = import_opacus("opacus.grad_sample").GradSampleHooks(module, strict=False)
        self._bayesian = [layer for layer in module.modules() if isinstance(layer, BAYESIAN)]
        self._handles = [layer.register_forward_pre_hook(remember_generator) for layer in self._bayesian]

    def reset(self) -> None:
        """Forget the last pass, even one that was cut short between forward and backward."""
        for layer in self._module.modules():
            layer.__dict__.pop("activations", None)
            layer.__dict__.pop("max_batch_len", None)
        for layer in self._bayesian:
            forget_generator(layer)
        for parameter in self._module.parameters():
            if parameter.requires_grad:
                tagged: Any = parameter
                tagged.grad_sample, tagged.summed_grad, tagged._forward_counter = None, None, 0
                tagged.__dict__.pop("_current_grad_sample", None)

    def remove(self) -> None:
        """Take everything off the module again."""
        self.reset()
        for handle in self._handles:
            handle.remove()
        self._hooks.cleanup()
        for parameter in self._module.parameters():
            vars(parameter).pop("summed_grad", None)  # of Opacus's optimizer
