"""Gradients of single examples in Bayesian layers, which Opacus does not know.

Given its noise, a layer treats every example by itself, whatever the estimator: the gradient of one example is a
function of that example, of the parameters and of noise that does not depend on the data. So Opacus may clip it as any
other. All estimators come down to the weight gradient D(x, b) of the deterministic ``op`` for one example with input x
and gradient b at the output:

============================  =============  ============================================
estimator                     ∂/∂μ           ∂/∂σ
============================  =============  ============================================
``reparameterization``        D(x, b)        D(x, b) ⊙ ε
``flipout``                   D(x, b)        D(x ⊙ s, b ⊙ r) ⊙ ε
``local_reparameterization``  D(x, b)        2σ ⊙ D(x², b ⊙ η / 2 sd(y))
============================  =============  ============================================

The noise is drawn once more from the state in which the forward pass found torch's generator.
"""

import warnings
from collections.abc import Iterator
from typing import Any

import torch
from bayesian_torch.layers.base_variational_layer import BaseVariationalLayer_
from torch import Tensor, nn

from lightning_fedbayes import layers
from lightning_fedbayes.clients.privacy.accountant import import_opacus
from lightning_fedbayes.core.errors import FederationError
from lightning_fedbayes.layers.base import BayesianAffine, random_signs
from lightning_fedbayes.layers.functional import Normal, output_moments, softplus_std

BAYESIAN: tuple[type[BayesianAffine], ...] = tuple(
    layer for layer in vars(layers).values() if isinstance(layer, type) and issubclass(layer, BayesianAffine)
)
"""The layers with gradients per example here: linear, convolutions, transposed convolutions."""
STATES = "_generator_states"
"""Attribute of a layer: the states of torch's generator before its forward passes, last one last."""


def remember_generator(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    """Forward pre-hook: note the state of torch's generator from which the layer is about to draw."""
    if layer.training and torch.is_grad_enabled():
        device = inputs[0].device
        state = torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
        layer.__dict__.setdefault(STATES, []).append(state)


def example_gradients(layer: BayesianAffine, activations: list[Tensor], backprops: Tensor) -> dict[Any, Tensor]:
    """Gradient of every example with respect to the layer's parameters, in the form of an Opacus grad sampler.

    Of a layer in training, with :func:`remember_generator` as a forward pre-hook, by its input x, shape (batch, *), and
    the gradient of the examples' losses by its output. Return parameter → tensor of shape (batch, *parameter).
    """
    (x,) = activations
    weight, rho = (getattr(layer, f"{part}_{layer.weight_name}") for part in ("mu", "rho"))
    bias = layer.bias if layer.mu_bias is None else layer.mu_bias
    weight_step, bias_step = affine_gradients(layer, x, backprops)
    gradients = {weight: weight_step}
    if bias is not None:
        gradients[bias] = bias_step
    state, device = layer.__dict__[STATES].pop(), x.device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        if device.type == "cuda":
            torch.cuda.set_rng_state(state, device)
        else:
            torch.set_rng_state(state)
        spread, bias_spread = std_gradients(layer, x, backprops, weight_step, bias_step)
    gradients[rho] = spread * rho.sigmoid()
    if layer.rho_bias is not None:
        gradients[layer.rho_bias] = bias_spread * layer.rho_bias.sigmoid()
    return {parameter: gradient.detach() for parameter, gradient in gradients.items()}


def std_gradients(
    layer: BayesianAffine, x: Tensor, backprops: Tensor, weight_step: Tensor, bias_step: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of every example with respect to σ of weight and bias. The noise is drawn as the layer draws it."""
    weight, rho = (getattr(layer, f"{part}_{layer.weight_name}").detach() for part in ("mu", "rho"))
    bias_mean, bias_rho = layer.mu_bias, layer.rho_bias
    if layer.mean_only:
        return torch.zeros_like(weight_step), torch.zeros_like(bias_step)
    if layer.estimator == "local_reparameterization":
        std = softplus_std(rho)
        bias_std = None if bias_rho is None else softplus_std(bias_rho.detach())
        bias = None if bias_mean is None else Normal(bias_mean.detach(), bias_std)
        mean, output_std = output_moments(layer.op, x, Normal(weight, std), bias)
        by_variance = backprops * torch.randn_like(mean) / (2 * output_std)
        weight_step, bias_step = affine_gradients(layer, x * x, by_variance)
        return weight_step * 2 * std, bias_step if bias_std is None else bias_step * 2 * bias_std
    noise = torch.randn_like(weight)
    bias_noise = torch.ones_like(bias_step[0]) if bias_mean is None else torch.randn_like(bias_mean)
    if layer.estimator == "flipout":
        input_signs, output_signs = random_signs(layer.sign_shapes(x), x)
        weight_step, bias_step = affine_gradients(layer, x * input_signs, backprops * output_signs)
    return weight_step * noise, bias_step * bias_noise


def affine_gradients(layer: BayesianAffine, x: Tensor, backprops: Tensor) -> tuple[Tensor, Tensor]:
    """D(x, b): gradients of every example by weight, (batch, *weight), and bias, (batch, outputs), of ``op``."""
    weight = getattr(layer, f"mu_{layer.weight_name}").detach()
    outputs = backprops.shape[-1] if layer.weight_name == "weight" else backprops.shape[1]
    bias = weight.new_zeros(outputs)

    def of_one(example: Tensor, backprop: Tensor) -> Any:
        pull: Any = torch.func.vjp(lambda w, b: layer.op(example[None], w, b), weight, bias)[1]
        return pull(backprop[None])

    return torch.vmap(of_one)(x, backprops)


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
    """Raise FederationError, naming all such layers, if examples of a batch have no separate gradients in ``module``.

    It does not find what mixes examples between the layers, such as subtracting the mean of a batch.
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
        if isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d | nn.SyncBatchNorm):
            yield f"{what} mixes the examples of a batch; put nn.GroupNorm or nn.LayerNorm in its place"
        elif isinstance(layer, nn.InstanceNorm1d | nn.InstanceNorm2d | nn.InstanceNorm3d) and layer.track_running_stats:
            yield f"{what} keeps running statistics of the examples; use track_running_stats=False"
        elif getattr(layer, "inplace", False) is True:
            yield f"{what} works in place, on what the hooks of the layer before have to see; use inplace=False"
        elif not any(p.requires_grad for p in layer.parameters(recurse=False)) or kind in known or kind in recurrent:
            continue
        elif isinstance(layer, BaseVariationalLayer_):
            remedy = "use a linear or convolutional layer of lightning_fedbayes.layers, such as LinearFlipout"
            yield f"{what} is a Bayesian layer whose examples have no gradients of their own here; {remedy}"
        elif kind in ALTERNATIVES:
            yield f"{what} has no gradients per example in Opacus; put {ALTERNATIVES[kind]} in its place"
        else:
            remedy = "or add yours with opacus.grad_sample.register_grad_sampler"
            remedy = f"build it from layers that have one, {remedy}"
            yield f"{what} has parameters of its own, and Opacus no grad sampler for them; {remedy}"


class GradSamples:
    """Lets every backward pass of a mean loss leave ``parameter.grad_sample``, shape (batch, *). Names stay."""

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
            layer.__dict__.pop(STATES, None)
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
