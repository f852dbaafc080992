"""How concentrated a predictive distribution is, right or wrong."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_fedbayes.errors import FedBayesError
from lightning_fedbayes.metrics.functional.checks import at_least_float32


def determinant_sharpness(covariance: Tensor) -> Tensor:
    r"""Determinant sharpness :math:`\det(\Sigma)^{1/2d}`: the geometric mean of the predictive standard deviations.

    For one target (d = 1) it is the standard deviation, ``variance[..., None, None]`` is the covariance. Compare it
    only among calibrated predictions.

    Args:
        covariance: predictive covariance Σ of d targets, shape (*, d, d), positive semidefinite.

    Returns: shape (*), in the units of the targets; its mean is the score.

    Raises:
        FedBayesError: not square matrices, or a negative determinant.

    Source: FedAG (2021) eq. (8).

    >>> determinant_sharpness(torch.tensor([[4.0, 0.0], [0.0, 9.0]]))  # √(2 · 3)
    tensor(2.4495)
    """
    if covariance.ndim < 2 or covariance.shape[-1] != covariance.shape[-2]:
        raise FedBayesError(
            f"covariance has shape {tuple(covariance.shape)}, but (*, d, d) is needed; "
            "for variances of independent targets pass variance.diag_embed()"
        )
    sign, logarithm = torch.linalg.slogdet(at_least_float32(covariance))
    if (sign < 0).any():
        raise FedBayesError(
            f"{int((sign < 0).sum())} of {sign.numel()} covariances have a negative determinant; a covariance is "
            "positive semidefinite"
        )
    return (logarithm / (2 * covariance.shape[-1])).exp()
