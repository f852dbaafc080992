"""Whether an optimizer can step a stack of networks as it would step each of them."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_fedbayes.engines.client import options_of, parameters_of
from lightning_fedbayes.engines.vectorized.optimizer import set_parameters
from lightning_fedbayes.engines.vectorized.reasons import CannotVectorize

LARGEST = 8
"""Of every dimension of a parameter so many entries are tried."""

STEPS = 8
"""So many steps: an optimizer may do something else every few steps."""


def check_entrywise(optimizer: Optimizer) -> frozenset[str]:
    """See that a step of two stacked networks is the step of each, on copies with random gradients.

    Returns: names of the state that has the parameter's shape.

    Raises:
        CannotVectorize: it is not, as for norms or factors over a whole tensor.
    """
    random = torch.Generator().manual_seed(0)
    corners = [p.detach()[tuple(slice(LARGEST) for _ in p.shape)].clone() for p in parameters_of(optimizer)]
    corners = [corner if corner.dtype == torch.float64 else corner.float() for corner in corners]  # halves round apart
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
    return frozenset(
        key
        for parameter, state in together.state.items()
        for key, value in state.items()
        if isinstance(value, Tensor) and value.shape == parameter.shape
    )


def _copy_of(optimizer: Optimizer, parameters: Sequence[Tensor]) -> Optimizer:
    """A copy of ``optimizer`` for other ``parameters``, to step without consequences."""
    own, state = parameters_of(optimizer), optimizer.state
    set_parameters(optimizer, parameters)
    optimizer.state = defaultdict(dict)
    try:
        copied = copy.deepcopy(optimizer)
    finally:
        set_parameters(optimizer, own)
        optimizer.state = state
    # deepcopy leaves out attributes that torch does not know of; a scheduler's "step" would step the original
    missing = {name: value for name, value in vars(optimizer).items() if name not in vars(copied) and name != "step"}
    vars(copied).update(missing)
    return copied


def _options(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The options of an optimizer's groups, and its own plain attributes."""
    plain = {name: value for name, value in vars(optimizer).items() if isinstance(value, int | float | str)}
    return [*options_of(optimizer), plain]
