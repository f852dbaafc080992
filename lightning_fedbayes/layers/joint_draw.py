"""Draws of several small Gaussian parameters at once: they cost what their calls cost, not what their entries cost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_fedbayes.layers.autograd import GaussianKL
from lightning_fedbayes.layers.functional import softplus_std


class JointDraw(torch.autograd.Function):
    r"""Reparameterised draws of several parameters of several networks, and each network's divergence from its prior.

    .. math:: w = \mu + \sigma \odot \epsilon, \qquad
              \mathrm{KL} = \sum_i \log\frac{s}{\sigma_i} + \frac{\sigma_i^2 + (\mu_i - m)^2}{2 s^2} - \frac12

    with the gradients, for :math:`g = \partial L / \partial w` and :math:`h = \partial L / \partial \mathrm{KL}`,

    .. math:: \frac{\partial L}{\partial \mu} = g + h\,\frac{\mu - m}{s^2}, \qquad
              \frac{\partial L}{\partial \rho} = \left(g \odot \epsilon + h \left(\frac{\sigma}{s^2}
              - \frac1\sigma\right)\right) \odot \mathrm{sigmoid}(\rho).

    A parameter whose draw goes nowhere gets no gradient, as if it had been drawn alone. The backward pass can be
    differentiated again. Use it where no transform of ``torch.func`` is at work.

    Source: Kingma & Welling 2014; Blundell et al. 2015.

    Args:
        prior: m and s of the prior N(m, s²) that all parameters share; None for no divergence.
        parameters: all means, then all ρ in the same order, each of shape (networks, \*) and of one dtype and device.

    Returns: a draw of each parameter, of its shape; all means, ρ and σ side by side, shape (networks, entries) each;
    the divergences in nats, shape (networks,), if there is a prior.
    """

    @staticmethod
    def forward(ctx: Any, prior: tuple[float, float] | None, *parameters: Tensor) -> tuple[Tensor, ...]:
        """Draw from torch's global generator."""
        count = len(parameters) // 2
        means, rhos = parameters[:count], parameters[count:]
        mean, rho = torch.cat([_rows(each) for each in means], 1), torch.cat([_rows(each) for each in rhos], 1)
        std = softplus_std(rho)
        noise = torch.randn_like(mean)
        ctx.prior = prior
        ctx.shapes = [each.shape for each in means]
        ctx.sizes = [shape[1:].numel() for shape in ctx.shapes]
        ctx.save_for_backward(mean, rho, std, noise)  # outputs, but for the noise: their own gradients count, too
        ctx.set_materialize_grads(False)
        draws = _split(torch.addcmul(mean, std, noise), ctx)
        return *draws, mean, rho, std, *([] if prior is None else [GaussianKL.forward(mean, std, *prior)])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore
        """Gradients of the means, then of the ρ."""
        mean, rho, std, noise = ctx.saved_tensors
        count = len(ctx.shapes)
        of_draws, of_joint = gradients[:count], gradients[count : count + 3]
        of_divergence = gradients[-1] if len(gradients) > count + 3 else None
        of_mean, of_rho, of_std = of_joint
        used = [each is not None for each in of_draws]
        if any(used):
            of_draw = torch.cat([
                mean.new_zeros(len(mean), size) if each is None else _rows(each)
                for each, size in zip(of_draws, ctx.sizes)
            ], 1)
            of_std = _plus(of_draw * noise, of_std)
            of_mean = _plus(of_draw, of_mean)
        if of_divergence is not None:
            prior_mean, prior_std = ctx.prior
            scale = of_divergence.unsqueeze(1)
            inverse = scale / std
            scale = scale if prior_std == 1 else scale / prior_std**2
            of_mean = _plus((mean if prior_mean == 0 else mean - prior_mean) * scale, of_mean)
            of_std = _plus((std * scale).sub_(inverse), of_std)
        if of_std is not None:
            of_rho = _plus(of_std * torch.sigmoid(rho), of_rho)
        alone = of_divergence is None and all(each is None for each in of_joint)
        parts = [[None] * count if each is None else _split(each, ctx) for each in (of_mean, of_rho)]
        if alone and not all(used):
            parts = [[part if use else None for part, use in zip(each, used)] for each in parts]
        return None, *parts[0], *parts[1]


def _rows(tensor: Tensor) -> Tensor:
    """The entries of each network side by side, shape (networks, entries)."""
    return tensor if tensor.dim() == 2 else tensor.reshape(len(tensor), -1)


def _split(joint: Tensor, ctx: Any) -> list[Tensor]:
    """Each parameter's part of ``joint``, in its shape."""
    parts: Sequence[Tensor] = torch.split_with_sizes(joint, ctx.sizes, 1)
    return [part if len(shape) == 2 else part.view(shape) for part, shape in zip(parts, ctx.shapes)]


def _plus(new: Tensor, other: Tensor | None) -> Tensor:
    """The sum of a tensor that nobody else holds and a gradient, if there is one."""
    return new if other is None else new.add_(other)
