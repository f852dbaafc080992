"""Check, on copies, that an optimizer steps a stack of networks as it steps each of them."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_fedbayes.errors import CannotVectorize
from lightning_fedbayes.training.client import options_of, parameters_of
from lightning_fedbayes.training.optimizers import has_own_state
from lightning_fedbayes.training.vectorized.optimizer import set_parameters

LARGEST = 8
"""Number of entries of every dimension of a parameter with which an optimizer is tried."""

STEPS = 8
"""Number of steps with which an optimizer is tried: it may do something else every few steps."""


def check_elementwise(optimizer: Optimizer) -> frozenset[str]:
    """Check, on copies with random gradients, that a step of two stacked networks is the step of each.

    Returns: names of the state that has the parameter's shape.

    Raises:
        CannotVectorize: it is not, for example because the optimizer takes norms of whole tensors.
    """
    if has_own_state(optimizer):
        name = type(optimizer).__name__
        raise CannotVectorize(f"{name} holds more than a state per parameter, which clients would share")
    random = torch.Generator().manual_seed(0)
    corners = [p.detach()[tuple(slice(LARGEST) for _ in p.shape)].clone() for p in parameters_of(optimizer)]
    # half precision rounds differently in a stack
    corners = [corner if corner.dtype == torch.float64 else corner.float() for corner in corners]
    rows = [torch.stack([corner, corner + 0.1]) for corner in corners]
    together, *alone = (_copy_of(optimizer, corners) for _ in range(3))
    set_parameters(together, [Parameter(stack.clone()) for stack in rows])
    for slot, single in enumerate(alone):
        set_parameters(single, [Parameter(stack[slot].clone()) for stack in rows])
    options = copy.deepcopy(_options(together))
    for step in range(STEPS):
        scale = 0.1 ** (step % 2)
        gradients = [
            torch.stack([scale * torch.randn(p.shape, generator=random), 100 * torch.randn(p.shape, generator=random)])
            for p in corners
        ]
        for parameter, gradient in zip(parameters_of(together), gradients):
            parameter.grad = gradient.to(parameter, copy=True)
        together.step()
        for slot, single in enumerate(alone):
            for parameter, gradient in zip(parameters_of(single), gradients):
                parameter.grad = gradient[slot].to(parameter, copy=True)
            single.step()
    for i, parameter in enumerate(parameters_of(together)):
        expected = torch.stack([parameters_of(single)[i].detach() for single in alone])
        if not torch.allclose(parameter.detach(), expected, rtol=1e-4, atol=1e-6, equal_nan=True):
            raise CannotVectorize(f"{type(optimizer).__name__} does not treat every entry of a parameter alike")
    if _options(together) != options:
        raise CannotVectorize(f"{type(optimizer).__name__} counts in its options, which clients would share")
    if not type(optimizer).__module__.startswith("torch.optim."):
        _check_closure(optimizer, [row[0] for row in rows])
    return frozenset(
        key
        for parameter, state in together.state.items()
        for key, value in state.items()
        if isinstance(value, Tensor) and value.shape == parameter.shape
    )


def _check_closure(optimizer: Optimizer, parameters: Sequence[Tensor]) -> None:
    """Check that ``optimizer`` evaluates the loss once, before it changes anything, and does not look at its value.

    Raises:
        CannotVectorize: it does something else with the closure that Lightning hands over.
    """
    random = torch.Generator().manual_seed(0)
    without, with_closure = (_copy_of(optimizer, parameters) for _ in range(2))
    for each in (without, with_closure):
        set_parameters(each, [Parameter(p.clone()) for p in parameters])
    for _ in range(4 * STEPS):
        gradients = [torch.randn(p.shape, generator=random).to(p) for p in parameters]
        before = [p.detach().clone() for p in parameters_of(with_closure)]
        seen: list[bool] = []

        def closure() -> Tensor:
            parameters = parameters_of(with_closure)
            seen.append(all(torch.equal(p, old) for p, old in zip(parameters, before)))  # noqa: B023
            for p, gradient in zip(parameters, gradients):  # noqa: B023
                p.grad = gradient.clone()
            return torch.rand((), generator=random)

        for p, gradient in zip(parameters_of(without), gradients):
            p.grad = gradient.clone()
        without.step()
        with_closure.step(closure)  # pyright: ignore
        pairs = zip(parameters_of(without), parameters_of(with_closure))
        if seen != [True] or not all(torch.equal(a, b) for a, b in pairs):
            raise CannotVectorize(f"{type(optimizer).__name__} uses the closure, which evaluates one client's loss")


def _copy_of(optimizer: Optimizer, parameters: Sequence[Tensor]) -> Optimizer:
    """Return a copy of ``optimizer`` with other ``parameters`` and without state."""
    own, state = parameters_of(optimizer), optimizer.state
    set_parameters(optimizer, parameters)
    optimizer.state = defaultdict(dict)
    try:
        copied = copy.deepcopy(optimizer)
    finally:
        set_parameters(optimizer, own)
        optimizer.state = state
    # deepcopy leaves out attributes that torch does not know; a learning-rate scheduler's "step" is the original's
    missing = {name: value for name, value in vars(optimizer).items() if name not in vars(copied) and name != "step"}
    vars(copied).update(missing)
    return copied


def _options(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the options of an optimizer's groups, and its own attributes that are numbers or text."""
    plain = {name: value for name, value in vars(optimizer).items() if isinstance(value, int | float | str)}
    return [*options_of(optimizer), plain]
