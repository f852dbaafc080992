"""Running a module's step without consequences, and finding out what it would have changed for all clients."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_fedbayes.engines.client import options_of, parameters_of
from lightning_fedbayes.engines.vectorized.attributes import Snapshot
from lightning_fedbayes.engines.vectorized.reasons import CannotVectorize


@contextmanager
def undisturbed(module: nn.Module, optimizer: Optimizer) -> Iterator[None]:
    """Inside, ``module`` runs without consequences for itself and the generators of random numbers.

    Raises:
        CannotVectorize: it changed something that all clients would share.
    """
    snapshots = {path: Snapshot(each) for path, each in module.named_modules()}
    tensors = {n: (t, t._version, t.detach().clone()) for n, t in (*module.named_parameters(), *module.named_buffers())}
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
        changed += [name for name, (tensor, version, _) in tensors.items() if tensor._version != version]
        if changed:
            raise CannotVectorize(f"training_step changes self.{changed[0]}, which clients would share")
        reached = [n for n, p in module.named_parameters() if p.grad is not None and _holds(optimizer, p)]
        if reached:
            raise CannotVectorize(f"training_step keeps the parameter {reached[0]} elsewhere than in its module")
        if options_of(optimizer) != options:
            raise CannotVectorize("training_step changes the optimizer's options, which clients would share")
        if random.getstate() != host[0] or not _equal(np.random.get_state(), host[1]):
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
                if tensor._version != version:
                    tensor.copy_(values)
        for name, parameter in module.named_parameters():
            parameter.grad = gradients[name]
        for group, before in zip(optimizer.param_groups, options, strict=True):
            group.update(before)


def _holds(optimizer: Optimizer, parameter: Tensor) -> bool:
    """Whether ``parameter`` is one of the optimizer's."""
    return any(parameter is each for each in parameters_of(optimizer))


def _equal(first: Any, second: Any) -> bool:
    """Whether two states of NumPy's generator are the same."""
    return all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))
