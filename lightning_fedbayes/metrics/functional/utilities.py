"""Steps that several metrics share: checks of arguments, and sums over groups of examples."""

import torch
from torch import Tensor

from lightning_fedbayes.core.errors import FedBayesError
from lightning_fedbayes.core.posterior import at_least_float32, check_tensor


def check_numbers(**tensors: Tensor) -> None:
    """Raise FedBayesError unless all ``tensors`` are dense tensors of real numbers."""
    for name, tensor in tensors.items():
        check_tensor(name, tensor, error=FedBayesError)
        if tensor.is_complex():
            raise FedBayesError(f"{name} is of {tensor.dtype}: give real numbers")


def check_samples(probs: Tensor) -> Tensor:
    """Return ``probs`` in at least float32. Raise FedBayesError unless it is of shape (samples, batch, classes ≥ 2)."""
    check_numbers(probs=probs)
    if probs.ndim != 3 or probs.shape[-1] < 2:
        remedy = "give (samples, batch, classes) with at least 2 classes; of one sample probs.unsqueeze(0)"
        raise FedBayesError(f"probs has shape {tuple(probs.shape)}: {remedy}")
    return at_least_float32(probs)


def check_predictive(probs: Tensor, target: Tensor) -> Tensor:
    """Return ``probs`` in at least float32. Raise FedBayesError unless (batch, classes), and ``target`` (batch,)."""
    check_numbers(probs=probs, target=target)
    if probs.ndim != 2:
        remedy = "give the mean predictive, (batch, classes); average Monte Carlo samples by probs.mean(0)"
        raise FedBayesError(f"probs has shape {tuple(probs.shape)}: {remedy}")
    if target.shape != probs.shape[:1] or target.is_floating_point():
        given = f"target has shape {tuple(target.shape)} and dtype {target.dtype}"
        raise FedBayesError(f"{given}: give one integer class for each example, shape ({len(probs)},)")
    return at_least_float32(probs)


def class_indices(probs: Tensor, target: Tensor) -> Tensor:
    """Return ``target``, (batch,), as indices into ``probs``, (batch, 1). Raise FedBayesError if one is no class."""
    indices = target.long().unsqueeze(1)
    if len(indices):
        low, high = (int(each) for each in indices.aminmax())
        if low < 0 or high >= probs.shape[1]:
            given = f"target holds classes from {low} to {high}, and probs have {probs.shape[1]}"
            raise FedBayesError(f"{given}: count classes from 0, and leave out examples without a label")
    return indices


def check_same_shape(**tensors: Tensor) -> None:
    """Raise FedBayesError unless all ``tensors`` have one shape: (batch,) and (batch, 1) would broadcast to a table."""
    check_numbers(**tensors)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if len(set(shapes.values())) > 1:
        listed = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise FedBayesError(f"shapes differ: {listed}; they must be equal, so squeeze or expand one of them")


def check_vectors(**tensors: Tensor) -> None:
    """Raise FedBayesError unless all ``tensors`` are vectors of one length."""
    check_same_shape(**tensors)
    for name, tensor in tensors.items():
        if tensor.ndim != 1:
            raise FedBayesError(f"{name} has shape {tuple(tensor.shape)}, but a vector is needed; flatten it")


def check_gaussian(mean: Tensor, variance: Tensor, target: Tensor) -> None:
    """Raise FedBayesError unless all are of one shape and no variance is negative."""
    check_same_shape(mean=mean, variance=variance, target=target)
    for name, tensor in (("mean", mean), ("variance", variance), ("target", target)):
        if tensor.dtype == torch.bool:
            raise FedBayesError(f"{name} is of torch.bool: give numbers")
    if bool((variance < 0).any()):
        where = f"{int((variance < 0).sum())} of {variance.numel()} entries (minimum {variance.min():.3g})"
        raise FedBayesError(f"variance is negative at {where}; give variances of at least 0")


def sum_by_value(value: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    """Count the examples of each distinct ``value`` and sum their ``weights``, all of shape (examples,).

    Returns: counts and one sum per weight, each of shape (distinct values,), ascending by value, float64, on the CPU.
    """
    value = value.detach().cpu()
    distinct, index = torch.unique(value, return_inverse=True)
    return sum_by_index(index, len(distinct), *(weight.detach().cpu().double() for weight in weights))


def sum_by_index(index: Tensor, groups: int, *weights: Tensor) -> tuple[Tensor, ...]:
    """Count the examples of each group and sum their ``weights``: vectors of shape (groups,) in the weights' dtype.

    (index_add_ has a deterministic form on every device, and bincount with weights has none.)
    """
    ones = torch.ones_like(weights[0])
    return tuple(weight.new_zeros(groups).index_add_(0, index, weight) for weight in (ones, *weights))
