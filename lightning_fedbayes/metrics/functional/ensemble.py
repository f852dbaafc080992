"""CRPS of a forecast that is known by samples only."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_fedbayes.errors import FedBayesError
from lightning_fedbayes.metrics.functional.checks import at_least_float32, check_same_shape


def ensemble_crps(samples: Tensor, target: Tensor) -> Tensor:
    r"""Fair CRPS of M samples, :math:`\frac1M\sum_i|x_i-y| - \frac1{2M(M-1)}\sum_{ij}|x_i-x_j|`.

    Its expectation over the samples is the CRPS of the distribution they come from, whatever M is; with 1/2M² instead
    a forecast looks the worse the fewer samples it has. It can be negative for single examples. The double sum comes
    from the order statistics: O(M log M), without a table of pairs.

    Args:
        samples: draws from the predictive distribution of y (noise included), shape (samples, *), at least 2 samples.
        target: y, shape (*).

    Returns: shape (*); its mean is the score, in the units of the target.

    Source: Ferro (2014); Zamo and Naveau (2018) eq. (PWM).

    >>> ensemble_crps(torch.tensor([[0.0], [2.0]]), torch.tensor([1.0]))
    tensor([0.])
    """
    if samples.ndim == 0 or len(samples) < 2:
        raise FedBayesError(
            f"samples has shape {tuple(samples.shape)}, but the fair CRPS needs at least 2 samples along the first "
            "dimension; draw more samples, or use the absolute error"
        )
    check_same_shape(samples_but_first=samples[0], target=target)
    number = len(samples)
    error = at_least_float32(samples - target).sort(0).values
    rank = torch.arange(1, number + 1, dtype=error.dtype, device=error.device)
    spread = torch.tensordot(2 * rank - number - 1, error, dims=1) / (number * (number - 1))
    return error.abs().mean(0) - spread
