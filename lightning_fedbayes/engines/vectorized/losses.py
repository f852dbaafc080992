"""The two usual losses of several clients at once: mean cross-entropy and mean squared error."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class CrossEntropy(torch.autograd.Function):
    r"""The cross-entropy of every example, with its closed-form gradient.

    .. math:: L = \log \sum_c e^{z_c} - z_y, \qquad \frac{\partial L}{\partial z_c} = p_c - [c = y],
              \qquad p = \mathrm{softmax}(z)

    Half the time of torch's own for ten classes, whose softmax is not vectorised. The backward pass can be
    differentiated again. Use it where no transform of ``torch.func`` is at work.

    Args:
        logits: z, shape (\*, classes).
        labels: y, shape (\*).

    Returns: L, shape (\*), and p, shape (\*, classes).
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """The losses, and the probabilities that their gradient needs."""
        labels = labels.unsqueeze(-1)
        largest = logits.amax(-1, keepdim=True)
        probabilities = (logits - largest).exp_()
        total = probabilities.sum(-1, keepdim=True)
        losses = (total.log().add_(largest)).sub_(logits.gather(-1, labels)).squeeze(-1)
        probabilities.div_(total)
        ctx.save_for_backward(probabilities, labels)
        ctx.set_materialize_grads(False)
        return losses, probabilities

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, None]:  # pyright: ignore
        """The gradient of the logits."""
        probabilities, labels = ctx.saved_tensors
        of_losses, of_probabilities = gradients
        total: Tensor | None = None
        if of_losses is not None:
            scale = of_losses.unsqueeze(-1)
            total = (probabilities * scale).scatter_add(-1, labels, -scale)
        if of_probabilities is not None:
            weighted = probabilities * of_probabilities
            own = weighted - probabilities * weighted.sum(-1, keepdim=True)
            total = own if total is None else total + own
        return total, None


def mean_cross_entropy(logits: Tensor, labels: Tensor, ignored: int) -> Tensor:
    """Each client's mean cross-entropy over the examples whose label is not ``ignored``, NaN if there is none.

    Args:
        logits: shape (clients, batch, classes).
        labels: shape (clients, batch).
        ignored: a label that does not count.

    Returns: shape (clients,).
    """
    if labels.is_cpu and ignored < 0:  # a GPU would have to be waited for
        try:
            losses, _ = CrossEntropy.apply(logits, labels)  # pyright: ignore[reportGeneralTypeIssues]
        except (IndexError, RuntimeError):
            pass  # a label that is no class, such as the ignored one
        else:
            return losses.mean(1)
    counts = labels != ignored
    losses, _ = CrossEntropy.apply(logits, labels.where(counts, 0))  # pyright: ignore[reportGeneralTypeIssues]
    return losses.where(counts, 0.0).sum(1) / counts.sum(1)


def mean_squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """Each client's mean squared error; both of shape (clients, \\*). Returns shape (clients,)."""
    errors = (outputs - targets).reshape(len(outputs), -1)
    return (errors * errors).mean(1)
