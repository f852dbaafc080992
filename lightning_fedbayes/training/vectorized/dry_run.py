"""Dry run: a module's step without consequences, refused if it changes something that clients would share."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from lightning_fedbayes.errors import CannotVectorize
from lightning_fedbayes.private_torch import version_of
from lightning_fedbayes.training.client import options_of, parameters_of
from lightning_fedbayes.training.snapshot import LONG, Snapshot


def in_containers(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield modules, such as metrics, that ``module`` and its layers keep in lists and dicts: name and module."""
    for path, owner in module.named_modules():
        for name, value in vars(owner).items():
            if isinstance(value, list | tuple | dict) and not name.startswith("_") and len(value) <= LONG:
                for each in value.values() if isinstance(value, dict) else value:
                    if isinstance(each, nn.Module):
                        yield f"{path}.{name}" if path else name, each


@contextmanager
def dry_run(module: nn.Module, optimizer: Optimizer) -> Iterator[Callable[[], None]]:
    """Inside, ``module`` runs without consequences for itself and for random number generators.

    Gives a function that raises CannotVectorize if the module has changed something that all clients would share.
    """
    snapshots = {path: Snapshot(each) for path, each in (*module.named_modules(), *in_containers(module))}
    named = (*module.named_parameters(), *module.named_buffers())
    tensors = {name: (tensor, version_of(tensor), tensor.detach().clone()) for name, tensor in named}
    gradients = {name: parameter.grad for name, parameter in module.named_parameters()}
    options = options_of(optimizer)
    host = random.getstate(), np.random.get_state()
    devices = {p.device for p in module.parameters() if p.device.type == "cuda"}
    def check() -> None:
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

    for parameter in module.parameters():
        parameter.grad = None
    try:
        with torch.random.fork_rng(devices):
            yield check
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
