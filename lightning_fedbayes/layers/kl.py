"""The KL divergence of Gaussian parameters from their prior, and their joint draws, with closed-form gradients.

The closed form takes a few passes, autograd dozens. A ``TorchFunctionMode`` can override :func:`joined_kl_sum`.
"""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, ClassVar, cast
from weakref import WeakValueDictionary, ref

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from lightning_fedbayes.core.private_torch import backward_pass, version_if_any
from lightning_fedbayes.layers.functional import softplus_std

SMALL = 2**14
"""Number of entries below which a tensor operation costs mainly the call. Smaller parameters are concatenated for their
KL. Under ``torch.func`` they have autograd's gradient in place of the closed form."""


class KLWatch:
    """Note of whether this process has computed the KL divergence of a layer or network, for advice on losses."""

    seen: ClassVar[bool] = False
    """True once it has. Set it to False to begin again."""

    @classmethod
    def note(cls) -> None:
        """Note that one is computed. Not inside ``torch.compile``, which would compile again."""
        if not torch.compiler.is_compiling():
            cls.seen = True


def gaussian_kl_sum(
    mean: Tensor, std: Tensor, prior_mean: Tensor | float, prior_std: Tensor | float, kept: int = 0
) -> Tensor:
    r"""KL divergence of independent Gaussians from their prior N(m, s²), **summed** over the entries, in nats.

    .. math:: \mathrm{KL}(q\|p) = \sum_i \log\frac{s_i}{\sigma_i}
              + \frac{\sigma_i^2 + (\mu_i - m_i)^2}{2 s_i^2} - \frac12

    The prior's moments are numbers or broadcast to q's shape. Half precision is computed in float32. The first ``kept``
    dimensions are not summed over.
    """
    if mean.dtype in (torch.float16, torch.bfloat16):
        mean, std = mean.float(), std.float()
    moments = prior_mean, prior_std
    prior = [each.expand(mean.shape) if isinstance(each, Tensor) else each for each in moments]
    if not torch.compiler.is_compiling():
        with suppress(RuntimeError):  # of a transform of torch.func
            return cast("Tensor", PlainGaussianKL.apply(mean, std, *prior, kept))
    if mean.numel() < SMALL:
        shift, ratio = standardised(mean, std, prior_mean, prior_std)
        # 1 is subtracted per entry: after the sum it would cancel away a small divergence of many entries
        spread = (ratio * ratio).sub_(1).sub_(ratio.log(), alpha=2)
        return (spread + shift * shift).flatten(kept).sum(-1) / 2
    return cast("Tensor", GaussianKL.apply(mean, std, *prior, kept))


def joined_kl_sum(means: Sequence[Tensor], rhos: Sequence[Tensor], prior_mean: float, prior_std: float) -> Tensor:
    """:func:`gaussian_kl_sum` over several parameters (μ, ρ) with one prior."""
    if has_torch_function((*means, *rhos)):
        return handle_torch_function(joined_kl_sum, (*means, *rhos), means, rhos, prior_mean, prior_std)
    mean, rho = (torch.cat([each.flatten() for each in part]) for part in (means, rhos))
    return gaussian_kl_sum(mean, softplus_std(rho), prior_mean, prior_std)


class GaussianKL(torch.autograd.Function):
    r"""The function behind :func:`gaussian_kl_sum`, over all dimensions but the first ``kept``.

    .. math:: \frac{\partial}{\partial \mu_i} = \frac{\mu_i - m_i}{s_i^2}, \qquad
              \frac{\partial}{\partial \sigma_i} = \frac{\sigma_i}{s_i^2} - \frac{1}{\sigma_i}, \qquad
              \frac{\partial}{\partial s_i} = \frac{1}{s_i} - \frac{\sigma_i^2 + (\mu_i - m_i)^2}{s_i^3}

    The backward pass can be differentiated again. Under ``vmap`` it runs once on the stacked tensors.
    ``prior_mean`` and ``prior_std`` are numbers, or tensors that broadcast to the shape of mean and std.
    """

    @staticmethod
    def forward(mean: Tensor, std: Tensor, prior_mean: Tensor | float, prior_std: Tensor | float, kept: int) -> Tensor:
        """The sum, of shape (\\*kept)."""
        shift, ratio = standardised(mean, std, prior_mean, prior_std)
        terms = ratio.log().mul_(-2).sub_(1).addcmul_(ratio, ratio).addcmul_(shift, shift)
        return terms.flatten(kept).sum(-1) / 2

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Keep the inputs."""
        ctx.save_for_backward(*(value for value in inputs if isinstance(value, Tensor)))
        ctx.inputs = tuple(None if isinstance(value, Tensor) else value for value in inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        """Return the gradients of all four inputs."""
        tensors = iter(ctx.saved_tensors)
        mean, std, prior_mean, prior_std, kept = (next(tensors) if value is None else value for value in ctx.inputs)
        gradient = gradients[0].view(*gradients[0].shape, *(1,) * (mean.dim() - kept))
        scale = gradient / (prior_std * prior_std)
        shift = mean if ctx.inputs[2] == 0 else mean - prior_mean
        of_mean = shift * scale
        of_std = (std * scale).addcdiv_(gradient, std, value=-1)
        of_prior_mean = of_prior_std = None
        if ctx.needs_input_grad[2]:
            of_prior_mean = -of_mean.sum_to_size(prior_mean.shape)
        if ctx.needs_input_grad[3]:
            squares = std * std + (mean - prior_mean) ** 2
            of_prior_std = ((gradient - scale * squares) / prior_std).sum_to_size(prior_std.shape)
        return of_mean, of_std, of_prior_mean, of_prior_std, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> tuple[Tensor, int]:  # pyright: ignore
        """Compute all stacked divergences at once."""
        stacked = [
            value if not isinstance(value, Tensor) else value.unsqueeze(0) if dim is None else value.movedim(dim, 0)
            for value, dim in zip(inputs[:4], in_dims)
        ]
        mean, std = (each.expand(info.batch_size, *each.shape[1:]) for each in stacked[:2])
        return GaussianKL.apply(mean, std, *stacked[2:], inputs[4] + 1), 0


class PlainGaussianKL(torch.autograd.Function):
    """:class:`GaussianKL` outside of ``torch.func``: saves the 45 µs in which torch binds arguments by name."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        """See :meth:`GaussianKL.forward`."""
        output = GaussianKL.forward(*inputs)
        GaussianKL.setup_context(ctx, inputs, output)
        mean, std, *prior, _ = inputs
        is_known = mean.grad_fn is std.grad_fn and hasattr(std.grad_fn, "pulls")
        ctx.known = std.grad_fn if is_known and not any(isinstance(each, Tensor) for each in prior) else None
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        """Return the gradients, or leave them to :class:`Known`."""
        for node in () if ctx.known is None or torch.is_grad_enabled() else (ctx.known.draw(), ctx.known):
            number = None if node is None else backward_pass(node)
            if node is not None and number not in (None, node.ran):
                node.pulls.setdefault(number, []).append((*gradients, *ctx.inputs[2:4]))
                return (None,) * 5
        return GaussianKL.backward(ctx, *gradients)


def standardised(
    mean: Tensor, std: Tensor, prior_mean: Tensor | float, prior_std: Tensor | float
) -> tuple[Tensor, Tensor]:
    r"""Return :math:`(\mu - m) / s` and :math:`\sigma / s`. For N(0, 1), μ and σ themselves."""
    if not isinstance(prior_mean, Tensor) and not isinstance(prior_std, Tensor) and (prior_mean, prior_std) == (0, 1):
        return mean, std
    return (mean - prior_mean) / prior_std, std / prior_std


class Known(torch.autograd.Function):
    r"""Mean and standard deviation of a parameter, for its draws and its divergence in a step.

    Several calls share the standard deviation. The divergence from N(m, s²) leaves its gradient to the last draw, if
    that is still to come in the same backward pass: with :math:`h = \partial L / \partial \mathrm{KL}`,

    .. math:: \frac{\partial L}{\partial \mu} \mathrel{+}= h\,\frac{\mu - m}{s^2}, \qquad
              \frac{\partial L}{\partial \sigma} \mathrel{+}= h \left(\frac{\sigma}{s^2} - \frac1\sigma\right).
    """

    values: ClassVar[WeakValueDictionary[int, Any]] = WeakValueDictionary()
    """Identity of ρ → the last call, as long as its output's graph waits for the backward pass."""

    @staticmethod
    def forward(ctx: Any, mean: Tensor, rho: Tensor, draws: bool) -> tuple[Tensor, Tensor]:
        """Return what :func:`known` does."""
        last: Any = Known.values.get(id(rho))
        if last is None or last.std is None or last.mean is not mean or last.version != version_if_any(rho):
            last, std = ctx, softplus_std(rho)
        else:
            std = last.std.view_as(rho)
        change = torch.randn_like(mean).mul_(std) if draws else std
        ctx.save_for_backward(mean, rho, std, change)
        ctx.set_materialize_grads(False)
        ctx.std, ctx.version, ctx.draw = std.detach(), version_if_any(rho), ref(last)
        ctx.mean, ctx.draws, ctx.pulls, ctx.ran = mean, draws, {}, None
        Known.values[id(rho)] = ctx
        return mean.view_as(mean), change

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore
        """Return the gradients of the mean and of ρ, in place unless they are differentiated again."""
        (of_mean, of_std), (mean, rho, std, change) = gradients, ctx.saved_tensors
        ctx.std, ctx.ran = None, backward_pass(ctx)
        if of_std is not None and ctx.draws:
            of_std = (change.detach() / std.detach()).mul_(of_std)
        for pull, centre, width in ctx.pulls.pop(ctx.ran, ()):
            shift, scale = mean if centre == 0 else mean - centre, pull if width == 1 else pull / width**2
            of_mean = shift * scale if of_mean is None else torch.addcmul(of_mean, shift, scale)
            of_std = (
                std * scale if of_std is None else torch.addcmul(of_std, std, scale, out=of_std if ctx.draws else None)
            )
            of_std.addcdiv_(pull, std, value=-1)
        if of_std is None:
            return of_mean, None, None
        slope = rho.sigmoid()
        return of_mean, of_std * slope if torch.is_grad_enabled() else slope.mul_(of_std), None


def known(mean: Tensor, rho: Tensor, draws: bool = False) -> tuple[Tensor, Tensor]:
    r"""Return a parameter's mean and :func:`~lightning_fedbayes.layers.functional.softplus_std`.

    With ``draws`` mean and :math:`\sigma \odot \epsilon`, by torch's global generator. Large ones by :class:`Known`.
    """
    trained = rho.requires_grad and torch.is_grad_enabled() and rho.numel() >= SMALL
    if trained and not torch.compiler.is_compiling() and not has_torch_function((mean, rho)):
        with suppress(RuntimeError):  # of a transform of torch.func, whose tensors must not outlive it
            return cast("tuple[Tensor, Tensor]", Known.apply(mean, rho, draws))
    std = softplus_std(rho)
    return mean, std * torch.randn_like(mean) if draws else std


class JointDraw(torch.autograd.Function):
    r"""Reparameterised draws of several parameters of several networks, and each network's divergence from its prior.

    :math:`w = \mu + \sigma \odot \epsilon` and :func:`gaussian_kl_sum`, with the gradients, for
    :math:`g = \partial L / \partial w` and :math:`h = \partial L / \partial \mathrm{KL}`,

    .. math:: \frac{\partial L}{\partial \mu} = g + h\,\frac{\mu - m}{s^2}, \qquad
              \frac{\partial L}{\partial \rho} = \left(g \odot \epsilon + h \left(\frac{\sigma}{s^2}
              - \frac1\sigma\right)\right) \odot \mathrm{sigmoid}(\rho).

    A parameter without a used draw gets no gradient. For several small parameters, outside of ``torch.func``. After the
    common prior, or None, come all means, then all ρ, of shape (networks, \*). It returns a draw of each, all means, ρ
    and σ side by side, (networks, entries), and the divergences. Source: Kingma & Welling 2014; Blundell et al. 2015.
    """

    @staticmethod
    def forward(ctx: Any, prior: Any, *parameters: Tensor) -> tuple[Tensor, ...]:
        """Draw from torch's global generator."""
        count = len(parameters) // 2
        means, rhos = parameters[:count], parameters[count:]
        mean, rho = (torch.cat([side_by_side(each) for each in part], 1) for part in (means, rhos))
        std = softplus_std(rho)
        noise = torch.randn_like(mean)
        ctx.prior = prior
        ctx.shapes = [(each.mT if each.dim() == 3 else each).shape for each in means]
        ctx.sizes = [shape[1:].numel() for shape in ctx.shapes]
        ctx.save_for_backward(mean, rho, std, noise)  # all but the noise are outputs: their own gradients count too
        ctx.set_materialize_grads(False)
        draws = _split(torch.addcmul(mean, std, noise), ctx)
        if prior is None:
            return *draws, mean, rho, std
        kl = GaussianKL.forward(mean, std, *prior, kept=1) if isinstance(prior, tuple) else prior.values(mean)
        return *draws, mean, rho, std, kl

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore
        """Return the gradients of the means, then of the ρ."""
        mean, rho, std, noise = ctx.saved_tensors
        count = len(ctx.shapes)
        of_draws, of_joint = gradients[:count], gradients[count : count + 3]
        of_divergence = gradients[-1] if len(gradients) > count + 3 else None
        used = [each is not None for each in of_draws]
        sized = zip(of_draws, ctx.sizes)
        rows = [mean.new_zeros(len(mean), size) if each is None else side_by_side(each) for each, size in sized]
        of_mean = torch.cat(rows, 1)
        of_std = _plus(of_mean * noise, of_joint[2])
        of_mean = _plus(of_mean, of_joint[0])
        if of_divergence is not None:
            scale = of_divergence.unsqueeze(1)
            if not isinstance(ctx.prior, tuple):
                of_mean.addcmul_(ctx.prior.gradient(mean), scale)
            else:
                prior_mean, prior_std = ctx.prior
                of_std.addcdiv_(scale, std, value=-1)
                scale = scale if prior_std == 1 else scale / prior_std**2
                of_mean.addcmul_(mean if prior_mean == 0 else mean - prior_mean, scale)
                of_std.addcmul_(std, scale)
        of_rho = _plus(of_std.mul_(rho.sigmoid()), of_joint[1])
        parts = [_split(each, ctx) for each in (of_mean, of_rho)]
        if of_divergence is None and all(each is None for each in of_joint):  # the draws' gradients only
            parts = [[part if use else None for part, use in zip(each, used)] for each in parts]
        return None, *parts[0], *parts[1]


def side_by_side(tensor: Tensor) -> Tensor:
    """The entries of each network in a row, (networks, entries): of a matrix by columns, as it lies in a stack."""
    return tensor if tensor.dim() == 2 else (tensor.mT if tensor.dim() == 3 else tensor).reshape(tensor.shape[0], -1)


def _split(joint: Tensor, ctx: Any) -> list[Tensor]:
    """Each parameter's part of ``joint``, in its shape."""
    parts: Sequence[Tensor] = torch.split_with_sizes(joint, ctx.sizes, 1)
    views = (part.view(shape) for part, shape in zip(parts, ctx.shapes))
    return [each.mT if each.dim() == 3 else each for each in views]


def _plus(new: Tensor, other: Tensor | None) -> Tensor:
    """Add ``other`` to ``new`` in place if it is not None. No other code may hold ``new``."""
    return new if other is None else new.add_(other)
