"""The attributes of a module besides its parameters: set for a while, compared, put back."""

from __future__ import annotations

import copy
import itertools
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor  # pyright: ignore[reportMissingImports]

ABSENT = object()
"""The value of an attribute that is not there."""

CONTAINERS = (list, dict, set, deque)


class holding_attributes:
    """Inside, ``module`` has these ``attributes``, set without the 1 µs that each costs through ``nn.Module``."""

    __slots__ = ("_attributes", "_before", "_state")

    def __init__(self, module: nn.Module, attributes: Mapping[str, Any]) -> None:
        self._state = module.__dict__
        self._attributes = attributes

    def __enter__(self) -> None:
        self._before = {name: self._state.get(name, ABSENT) for name in self._attributes}
        self._state.update(self._attributes)

    def __exit__(self, *_: object) -> None:
        for name, value in self._before.items():
            if value is ABSENT:
                self._state.pop(name, None)
            else:
                self._state[name] = value


class Snapshot:
    """The attributes of one module at one time, with what they contain.

    Args:
        module: any module, without its submodules.
    """

    def __init__(self, module: nn.Module) -> None:
        self._attributes = vars(module)
        self._values = dict(self._attributes)
        self._contents = {n: copy.copy(value) for n, value in self._values.items() if isinstance(value, CONTAINERS)}
        self._prints = {name: fingerprint(value) for name, value in self._values.items()}

    def changes(self) -> dict[str, Any]:
        """Attributes that are others now, or contain something else: name → present value."""
        return {
            name: value
            for name, value in self._attributes.items()
            if value is not self._values.get(name, ABSENT) or fingerprint(value) != self._prints[name]
        }

    def restore(self) -> None:
        """Put all attributes back as they were, and into containers what they held."""
        for name in self._attributes.keys() - self._values.keys():
            del self._attributes[name]
        self._attributes.update(self._values)
        for name, content in self._contents.items():
            value = self._values[name]
            if fingerprint(value) != self._prints[name]:
                value.clear()
                (value.extend if isinstance(value, list | deque) else value.update)(content)


def fingerprint(value: Any, depth: int = 4) -> Any:
    """Something that is another when ``value`` is, or has been written into; objects of other makers by identity."""
    if isinstance(value, Tensor):
        # the tensors of a functional transform have no version
        return id(value), None if is_functorch_wrapped_tensor(value) else value._version
    if isinstance(value, int | float | complex | str | bytes | type(None)):
        return value
    if isinstance(value, np.ndarray):
        return id(value), value.tobytes()
    if isinstance(value, torch.Generator):
        return id(value), value.get_state().numpy().tobytes()
    if isinstance(value, itertools.count):
        return repr(value)
    if depth == 0:
        return id(value)
    if isinstance(value, dict):
        return id(value), [(id(key), fingerprint(each, depth - 1)) for key, each in value.items()]
    if isinstance(value, list | tuple | set | frozenset | deque):
        return id(value), [fingerprint(each, depth - 1) for each in value]
    opaque = isinstance(value, type) or type(value).__module__.split(".")[0] in LIBRARIES
    return id(value) if opaque or not hasattr(value, "__dict__") else (id(value), fingerprint(vars(value), depth - 1))


LIBRARIES = ("torch", "lightning", "lightning_fedbayes", "lightning_fabric", "torchmetrics")
"""Whose objects are not looked into; modules are looked at one by one."""
