"""State of IVON: how a parameter begins, and the unit in which squared gradients are its curvature."""

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_fedbayes.core.posterior import at_least_float32

WIDTH = 0.1
"""First standard deviation relative to the root mean square of a parameter's values. Of zeros its own square."""
START = 30
"""Number of squared gradients that the curvature at the start counts as."""
SHARE = 8
"""The sums behind the unit of squared gradients remember the last 1 / SHARE of the steps."""
PIECE = 2**17
"""Number of entries of a processor's pass: a few vectors of them fit its cache."""
TINY = 1e-30
"""Least sum of squared gradients."""
BELIEF = 10.0
"""Evidence that the curvature of a global posterior counts as, a squared ratio of signal and noise."""


class Sum(NamedTuple):
    """Sums over the draws of a step, for a parameter: of g, with a posterior of g · (θ − m), with more draws of g²."""

    gradient: Tensor
    product: Any
    squares: Tensor | None = None


State = dict[str, Any]
Sums = dict[Tensor, Sum]
Factors = list[Any]
Part = dict[str, list[Tensor]]
"""Kind of tensor → the tensor of each parameter."""


def factors(values: list[Tensor], like: list[Tensor]) -> list[float] | list[Tensor]:
    """Return numbers of parameters as factors of the tensors ``like``: as floats, which are faster, if not stacked."""
    if all(value.dim() == 0 and value.device.type == "cpu" for value in values):
        return [value.item() for value in values]
    return [value.to(each.dtype) for value, each in zip(values, like)]


def pieces(states: list[State], tensors: Part, are_whole: bool = False) -> Iterator[tuple[list[int], Part]]:
    """Yield tensors of small parameters together and of large ones by rows, as many as fit a cache, and whose they are.

    All at once if ``are_whole``, in a stack of networks and on a GPU, where a call costs more than memory.
    """
    is_stack = any(states[0][name].dim() for name in ("step", "examples", "signal") if name in states[0])
    limit = math.inf if are_whole or is_stack or not tensors["precision"][0].is_cpu else PIECE
    groups, size = list[list[int]](), math.inf
    for i, like in enumerate(tensors["precision"]):
        size += like.numel()
        if size > limit or not groups:
            groups, size = [*groups, []], like.numel()
        groups[-1].append(i)
    for group in groups:
        lists, like = [[each[i] for i in group] for each in tensors.values()], tensors["precision"][group[0]]
        if like.numel() > limit:  # alone
            rows = max(1, PIECE * len(like) // like.numel())
            parts = zip(*(each.split(rows) for [each] in lists))
            yield from ((group, {name: [each] for name, each in zip(tensors, part)}) for part in parts)
        else:
            yield group, dict(zip(tensors, lists))


def add(one: Sum, other: Sum) -> Sum:
    """Return the sums over the draws of both."""
    if one.product is None or other.product is None:
        return Sum(one.gradient + other.gradient, None)
    squares = one.gradient.square() if one.squares is None else one.squares
    return Sum(one.gradient + other.gradient, one.product + other.product, squares + other.gradient.square())


def total(values: Tensor, like: Tensor) -> Tensor:
    """Return the sum over a parameter, shaped like its state: for stacked clients one for each."""
    if not like.dim():
        return values.sum()
    return values.flatten(1).sum(1).view_as(like) if values.dim() > 1 else values


def larger(first: Any, second: float) -> Any:
    """Return the larger of a number, or of each client's, and another."""
    return first.clamp_min(second) if isinstance(first, Tensor) else max(first, second)


def begin(state: State, square: Tensor, number: float | Tensor) -> None:
    r"""Bring the first curvature of a parameter into the unit of its squared gradients, at its first step.

    :math:`v = h_0 / c_0` with :math:`c_0 \sum_i \sigma_i^2 g_i^2 = \sum_i \sigma_i^2 h_{0i}`. The sums change unit
    too, and P begins at :math:`-1 / c_0`.
    """
    curvature, precision = state["square"], state["precision"]
    ratio = total(square / precision, state["signal"]) / total(curvature / precision, state["signal"])
    ratio = ratio.clamp_min(TINY)
    first = (torch.as_tensor(number) == 1).to(ratio)
    ratio = first * ratio + (1 - first)
    curvature.mul_(ratio)
    state["signal"] = (state["signal"] - first) * ratio
    state["noise"] = state["noise"] * ratio**2


def unit_of(
    states: list[State], signals: list[Tensor], noises: list[Tensor], memories: Factors, scale: Factors
) -> Factors:
    r"""Add a step to the sums of each parameter, and return :math:`\lambda c`, the unit of its squared gradients.

    With the sums P of :math:`\sum_i g_i (\theta_i - m_i)` and Q of :math:`\sum_i \sigma_i^2 v_i`, P's variance, c is
    the mode over :math:`\log c` of the likelihood :math:`N(P; cQ, Q)` times a prior :math:`\propto e^{-c / c_0}`,
    which is a part of P at first: :math:`Q c^2 - P c - 1 = 0`, so c > 0.
    """
    device, is_stack = signals[0].device, states[0]["signal"].dim() > 0

    def joined(values: Any) -> Tensor:
        return torch.stack([each.flatten().to(device) for each in values] if is_stack else [*values])

    memory = torch.stack([torch.as_tensor(each, device=device).flatten() for each in memories])
    memory = memory if is_stack else memory[:, 0]
    signal, noise = (
        joined(new).addcmul_(joined(state[name] for state in states), memory.to(new[0].dtype))
        for name, new in (("signal", signals), ("noise", noises))
    )
    noise.clamp_min_(TINY)
    unit = _mode(signal, noise)
    for name, values in (("signal", signal), ("noise", noise)):
        for state, value in zip(states, values.unbind()):
            state[name] = value.view_as(state[name]).to(state[name].dtype) if is_stack else value
    if is_stack:
        units: Factors = [each.view_as(state["signal"]) for each, state in zip(unit, states)]
    else:
        units = unit.tolist() if device.type == "cpu" else [*unit.unbind()]
    return [each * factor for each, factor in zip(units, scale)]


def _mode(signal: Tensor, noise: Tensor) -> Tensor:
    root = torch.hypot(signal, 2 * noise.sqrt())
    return torch.where(signal > 0, (signal + root) / (2 * noise), 2 / (root - signal))


def first_state(parameter: Tensor, group: State, num_examples: int) -> dict[str, Tensor]:
    """Return the state with which a parameter of ``group`` begins, for n examples."""
    like = at_least_float32(parameter.detach())
    scale = num_examples / group["temperature"]
    curvature = first_curvature(parameter, group, scale)
    state = {
        "step": torch.zeros(()),
        "examples": torch.tensor(float(scale), dtype=torch.float64),
        "precision": torch.full_like(like, scale * curvature + group["prior_std"] ** -2),
        "momentum": torch.zeros_like(like),
    }
    if group["curvature"] == "squares":
        zero = torch.zeros((), dtype=like.dtype, device=like.device)
        state |= {"square": torch.full_like(like, curvature), "received": torch.zeros(())}
        state |= {"signal": zero, "noise": zero.clone()}
    return state


def first_curvature(parameter: Tensor, group: State, scale: float) -> float:
    r"""Return :math:`h_0`. By default draws are :data:`WIDTH` times the weights' root mean square wide."""
    if group["hessian_init"] is not None:
        return group["hessian_init"]
    size = float(parameter.detach().double().square().mean().sqrt())
    return 1 / (scale * (WIDTH * (size if 0 < size < math.inf else WIDTH)) ** 2)


def believed(precision: Tensor, prior: Tensor | float, scale: Tensor) -> dict[str, Tensor]:
    r"""Return curvature and sums of a parameter that begins at a posterior, such as the global one.

    ``precision`` is its :math:`\rho\Lambda`, of which at least 1 % counts as the data's, ``prior`` A, ``scale`` λ.
    """
    curvature = torch.maximum(precision - prior, 0.01 * precision) / scale.to(precision)
    belief = torch.full((), BELIEF, dtype=precision.dtype, device=precision.device)
    return {"square": curvature, "signal": belief, "noise": belief.clone()}


def precision_of(state: Mapping[str, Any]) -> Tensor:
    r"""Return a parameter's precision. Where the width is fixed, :math:`\lambda c v + A` as measured."""
    if "fixed" not in state:
        return state["precision"]
    like, unit = state["square"], _mode(state["signal"], state["noise"].clamp_min(TINY))
    scale = unit.reshape(-1)[0].to(like) * state["examples"].reshape(-1)[0].to(like)
    return scale * like + state["prior_precision"]
