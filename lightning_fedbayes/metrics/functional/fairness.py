"""Fairness over clients: summaries of their accuracies."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_fedbayes.core.errors import FedBayesError, check_number, shown
from lightning_fedbayes.metrics.functional.utilities import check_numbers, check_vectors

Vector = Tensor | Sequence[float]


def weighted_accuracy(accuracies: Vector, weights: Vector) -> Tensor:
    r"""Average accuracy over clients, :math:`\sum_k \omega_k \mathrm{Acc}_k`: utilitarian fairness.

    Args:
        accuracies: accuracy of each client, shape (clients,); a client without test examples (NaN) does not count.
        weights: weight of each client, non-negative, shape (clients,), not necessarily normalised; the source takes the
            numbers of training examples.

    Returns: a scalar.

    Source: [BA-BFL] §4, Acc_avg.

    >>> import torch
    >>> weighted_accuracy(torch.tensor([0.5, 1.0, torch.nan]), torch.tensor([3, 1, 6]))
    tensor(0.6250)
    """
    accuracies, weights = as_floats(accuracies), as_floats(weights)
    check_vectors(accuracies=accuracies, weights=weights)
    known = ~accuracies.isnan()
    return (accuracies[known] * weights[known]).sum() / weights[known].sum()


def worst_fraction_accuracy(accuracies: Vector, fraction: float = 0.1) -> Tensor:
    """Mean accuracy of the worst ⌈fraction·K⌉ clients: egalitarian fairness.

    Args:
        accuracies: accuracy of each client, shape (clients,); a client without test examples (NaN) does not count.
        fraction: above 0 and at most 1.

    Returns: a scalar; with fraction 1 the plain mean.

    Source: [BA-BFL] §4, worst 10% accuracies.

    >>> import torch
    >>> worst_fraction_accuracy(torch.tensor([0.9, 0.4, 0.6, 0.8]), fraction=0.5)
    tensor(0.5000)
    """
    check_number("fraction", fraction, "(0, 1]", error=FedBayesError)
    accuracies = as_floats(accuracies)
    check_vectors(accuracies=accuracies)
    known = accuracies[~accuracies.isnan()]
    # 0.1 · 30 is a little more than 3 in floating point, but means 3 clients
    return known.sort().values[: math.ceil(fraction * len(known) - 1e-9)].mean()


def as_floats(values: Vector) -> Tensor:
    """Return a list or a tensor of any numbers as a floating-point tensor."""
    try:
        tensor = torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError, OverflowError):  # torch's words for what is no sequence of numbers
        raise FedBayesError(f"{shown(values)} cannot be read as numbers: give one per client") from None
    check_numbers(values=tensor)
    return tensor if tensor.is_floating_point() else tensor.to(torch.get_default_dtype())
