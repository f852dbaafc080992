"""Dry run: a module's step without consequences, refused if it changes something that clients would share."""

from __future__ import annotations

import copy
import itertools
import random
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_fedbayes.errors import CannotVectorize
from lightning_fedbayes.private_torch import version_if_any, version_of
from lightning_fedbayes.training.client import options_of, parameters_of
from lightning_fedbayes.training.vectorized.swap import ABSENT

CONTAINERS = (list, dict, set, deque)

LIBRARIES = ("torch", "lightning", "lightning_fedbayes", "lightning_fabric", "torchmetrics")
"""Objects of these packages are compared by identity; modules are compared one by one."""


@contextmanager
def dry_run(module: nn.Module, optimizer: Optimizer) -> Iterator[None]:
    """Inside, ``module`` runs without consequences for itself and for random number generators.

    Raises:
        CannotVectorize: it changed something that all clients would share.
    """
    snapshots = {path: Snapshot(each) for path, each in module.named_modules()}
    named = (*module.named_parameters(), *module.named_buffers())
    tensors = {name: (tensor, version_of(tensor), tensor.detach().clone()) for name, tensor in named}
    gradients = {name: parameter.grad for name, parameter in module.named_parameters()}
    options = options_of(optimizer)
    host = random.getstate(), np.random.get_state()
    devices = {p.device for p in module.parameters() if p.device.type == "cuda"}
    for parameter in module.parameters():
        parameter.grad = None
    try:
        with torch.random.fork_rng(devices):
            yield
        changed = [f"{path}.{name}" if path else name for path, each in snapshots.items() for name in each.changes()]
        changed += [name for name, (tensor, version, _) in tensors.items() if version_of(tensor) != version]
        if changed:
            raise CannotVectorize(f"training_step changes self.{changed[0]}, which clients would share")
        held = {id(parameter) for parameter in parameters_of(optimizer)}
        reached = [name for name, p in module.named_parameters() if p.grad is not None and id(p) in held]
        if reached:
            raise CannotVectorize(f"training_step keeps the parameter {reached[0]} elsewhere than in its module")
        if options_of(optimizer) != options:
            raise CannotVectorize("training_step changes the optimizer's options, which clients would share")
        numpy_state = zip(np.random.get_state(), host[1], strict=True)
        if random.getstate() != host[0] or not all(np.array_equal(now, before) for now, before in numpy_state):
            raise CannotVectorize(
                "training_step draws from Python's or NumPy's generator, and clients would share the draw; use torch's"
            )
    finally:
        random.setstate(host[0])
        np.random.set_state(host[1])
        for snapshot in snapshots.values():
            snapshot.restore()
        with torch.no_grad():
            for tensor, version, values in tensors.values():
                if version_of(tensor) != version:
                    tensor.copy_(values)
        for name, parameter in module.named_parameters():
            parameter.grad = gradients[name]
        for group, before in zip(optimizer.param_groups, options, strict=True):
            group.update(before)


class Snapshot:
    """The attributes of one module at one time, with their contents.

    Args:
        module: any module, without its submodules.
    """

    def __init__(self, module: nn.Module) -> None:
        self._attributes = vars(module)
        self._values = dict(self._attributes)
        self._contents = {n: copy.copy(value) for n, value in self._values.items() if isinstance(value, CONTAINERS)}
        self._prints = {name: fingerprint(value) for name, value in self._values.items()}

    def changes(self) -> dict[str, Any]:
        """Return the attributes that were replaced, added or written into: name → present value."""
        return {
            name: value
            for name, value in self._attributes.items()
            if value is not self._values.get(name, ABSENT) or fingerprint(value) != self._prints[name]
        }

    def restore(self) -> None:
        """Restore all attributes, and the contents of containers."""
        for name in self._attributes.keys() - self._values.keys():
            del self._attributes[name]
        self._attributes.update(self._values)
        for name, content in self._contents.items():
            value = self._values[name]
            if fingerprint(value) != self._prints[name]:
                value.clear()
                (value.extend if isinstance(value, list | deque) else value.update)(content)


def fingerprint(value: Any, depth: int = 4) -> Any:
    """Return something that changes when ``value`` is replaced or written into; of unknown objects the identity."""
    if isinstance(value, Tensor):
        return id(value), version_if_any(value)
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
