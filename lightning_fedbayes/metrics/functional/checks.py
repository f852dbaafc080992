"""Shapes that the metrics accept."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_fedbayes.errors import FedBayesError


def check_samples(probs: Tensor) -> Tensor:
    """``probs`` of shape (samples, batch, classes ≥ 2), at least in float32."""
    if probs.ndim != 3 or probs.shape[-1] < 2:
        raise FedBayesError(
            f"probs has shape {tuple(probs.shape)}, but one of (samples, batch, classes) with at least 2 classes is "
            "needed; stack the Monte Carlo samples along a new first dimension (one sample: probs.unsqueeze(0))"
        )
    return at_least_float32(probs)


def check_predictive(probs: Tensor, target: Tensor) -> Tensor:
    """Mean predictive ``probs``, shape (batch, classes), at least in float32; ``target`` must be of shape (batch,)."""
    if probs.ndim != 2:
        raise FedBayesError(
            f"probs has shape {tuple(probs.shape)}, but the mean predictive of shape (batch, classes) is needed; "
            "average Monte Carlo samples first: probs.mean(0)"
        )
    if target.shape != probs.shape[:1] or target.is_floating_point():
        raise FedBayesError(
            f"target has shape {tuple(target.shape)} and dtype {target.dtype}, but one integer class for each of the "
            f"{len(probs)} examples is needed, shape ({len(probs)},)"
        )
    return at_least_float32(probs)


def check_same_shape(**tensors: Tensor) -> None:
    """Raise unless all ``tensors`` have one shape: (batch,) against (batch, 1) would broadcast to a table."""
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if len(set(shapes.values())) > 1:
        listed = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise FedBayesError(f"shapes differ: {listed}; they must be equal, so squeeze or expand one of them")


def check_vectors(**tensors: Tensor) -> None:
    """Raise unless all ``tensors`` are vectors of one length."""
    check_same_shape(**tensors)
    for name, tensor in tensors.items():
        if tensor.ndim != 1:
            raise FedBayesError(f"{name} has shape {tuple(tensor.shape)}, but a vector is needed; flatten it")


def check_bins(bins: int) -> None:
    """Raise unless there is at least one bin."""
    if bins < 1:
        raise FedBayesError(f"bins is {bins}; at least 1 is needed")


def at_least_float32(tensor: Tensor) -> Tensor:
    """``tensor`` in float32 if it has fewer bits: entropies and logarithms of half floats are too coarse."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def check_gaussian(mean: Tensor, variance: Tensor, target: Tensor) -> None:
    """Raise FedBayesError unless these are of one shape and no variance is negative."""
    check_same_shape(mean=mean, variance=variance, target=target)
    if bool((variance < 0).any()):
        raise FedBayesError(
            f"variance is negative at {int((variance < 0).sum())} of {variance.numel()} entries "
            f"(minimum {variance.min():.3g}); a variance is at least 0"
        )
