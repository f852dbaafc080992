"""Snapshots of what a module holds besides parameters and federated buffers, to compare with and to restore."""

import copy
import functools
import itertools
import pickle
import random
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import lightning as L
import numpy as np
import torch
from bayesian_torch.layers.base_variational_layer import BaseVariationalLayer_
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_fedbayes.core.private_torch import version_if_any

UNCHANGING = (int, float, complex, str, bytes, type(None), bool)
ABSENT = object()
CONTAINERS = (list, dict, set, deque)
GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
VALUES = (int, float, complex, str, bytes, type(None), Tensor, np.ndarray, *GENERATORS)
"""Types of attributes that can be restored."""
LARGE, LONG = 2**24, 1000
"""Bytes up to which tensors and arrays are copied; and number of entries up to which containers are looked into."""
LIBRARIES = ("torch", "lightning", "lightning_fedbayes", "lightning_fabric", "torchmetrics", "bayesian_torch")
"""Objects of these packages are compared by identity. Modules are compared one by one."""
Location = tuple[dict[str, Any], str]
"""A dict of a module, and the key there."""
Swap = tuple[Location, Any]
"""A location, and its value for a while."""


class Snapshot:
    """The attributes of one module at one time, with their contents, except the names in ``skip``."""

    def __init__(self, module: nn.Module, skip: Collection[str] = ()) -> None:
        self._attributes, self._skip = vars(module), skip
        self._values = {name: value for name, value in self._attributes.items() if name not in skip}
        self._all = set(self._attributes)
        self._generators = [(each, _state_of(each)) for each in _generators(self._values)]
        self._contents, self._prints, self._arrays = {}, {}, {}
        for name, value in self._values.items():
            self._prints[name] = fingerprint(value)
            is_array = isinstance(value, Tensor | np.ndarray) and not isinstance(value, nn.Parameter)
            if isinstance(value, CONTAINERS):
                self._contents[name] = copy.copy(value)
            elif is_array and value.nbytes <= LARGE:
                self._arrays[name] = value.detach().clone() if isinstance(value, Tensor) else value.copy()

    def changes(self) -> dict[str, Any]:
        """Return the attributes that were replaced, added or written into: name → present value."""
        present, changed = self._attributes, {}
        for name in self._values if present.keys() == self._all else present:
            value = present[name]
            if name in self._skip:
                continue
            if value is not self._values.get(name, ABSENT) or (
                type(value) not in UNCHANGING and fingerprint(value) != self._prints[name]
            ):
                changed[name] = value
        return changed

    def restore(self) -> None:
        """Restore all attributes, the contents of containers and arrays, and the states of generators."""
        for name in [name for name in self._attributes if name not in self._values and name not in self._skip]:
            del self._attributes[name]
        self._attributes.update(self._values)
        for name, content in self._contents.items():
            value = self._values[name]
            if fingerprint(value) != self._prints[name]:
                value.clear()
                (value.extend if isinstance(value, list | deque) else value.update)(content)
        for name in self._arrays:
            self._restore_array(name)
        for generator, state in self._generators:
            _set_state(generator, state)

    def restore_values(self, names: Collection[str]) -> None:
        """Restore the attributes ``names``, which have or had values of :data:`VALUES`, and no others."""
        for name in names:
            if name not in self._values:
                del self._attributes[name]
                continue
            self._attributes[name] = value = self._values[name]
            if name in self._arrays:
                self._restore_array(name)
            elif isinstance(value, GENERATORS):
                _set_state(value, next(state for each, state in self._generators if each is value))

    def can_restore(self, name: str) -> bool:
        """Return True if :meth:`restore_values` can restore the attribute ``name``, which may be new."""
        before, now = self._values.get(name), self._attributes.get(name)
        is_large = isinstance(before, Tensor | np.ndarray) and before is now and name not in self._arrays
        return isinstance(before, VALUES) and isinstance(now, VALUES) and not is_large

    def _restore_array(self, name: str) -> None:
        value = self._values[name]
        if fingerprint(value) != self._prints[name]:
            with torch.no_grad():
                value[...] = self._arrays[name]
            self._prints[name] = fingerprint(value)


class Modes:
    """The modes of a module and its parts, training or evaluation, at one time."""

    def __init__(self, module: nn.Module) -> None:
        self._flags = [(each, each.training) for each in module.modules()]

    def is_now(self) -> bool:
        """Return whether all modes are what they were."""
        return all(each.training is training for each, training in self._flags)

    def restore(self) -> None:
        """Restore all modes."""
        for each, training in self._flags:
            if each.training is not training:  # nn.Module's own setattr costs 1 µs
                each.training = training


class ModuleState:
    """Attributes and modes of a module and its parts, by path, even in lists, and the contents of ``tensors``."""

    def __init__(self, module: nn.Module, tensors: Iterable[tuple[str, Tensor]]) -> None:
        parts = dict(module.named_modules())
        for path, owner in module.named_modules():
            for name, value in vars(owner).items():
                if isinstance(value, list | tuple | dict) and not name.startswith("_") and len(value) <= LONG:
                    for each in value.values() if isinstance(value, dict) else value:
                        if isinstance(each, nn.Module):
                            parts[f"{path}.{name}" if path else name] = each
        self.snapshots = {path: Snapshot(each, ("training",)) for path, each in parts.items()}
        self.tensors = {name: (each, version_if_any(each), each.detach().clone()) for name, each in tensors}
        self._modes = Modes(module)

    def written(self) -> list[str]:
        """Return the names of the tensors that have been written into."""
        return [name for name, (tensor, version, _) in self.tensors.items() if version_if_any(tensor) != version]

    def restore(self) -> None:
        """Restore everything."""
        for snapshot in self.snapshots.values():
            snapshot.restore()
        self._modes.restore()
        for name in self.written():
            tensor, _, values = self.tensors[name]
            write(tensor, values)


class swapped:
    """Inside, each location holds its value. A class, because every step enters one."""

    __slots__ = ("_before", "_swaps")

    def __init__(self, swaps: list[Swap]) -> None:
        self._swaps = swaps

    def __enter__(self) -> None:
        self._before = [holder.get(name, ABSENT) for (holder, name), _ in self._swaps]
        for (holder, name), value in self._swaps:
            holder[name] = value

    def __exit__(self, *_: object) -> None:
        for ((holder, name), _value), before in zip(self._swaps, self._before):
            if before is ABSENT:
                holder.pop(name, None)
            else:
                holder[name] = before


def with_attributes(module: nn.Module, attributes: Mapping[str, Any]) -> swapped:
    """Inside, ``module`` has these ``attributes``, set without the 1 µs that each costs through ``nn.Module``."""
    return swapped([((vars(module), name), value) for name, value in attributes.items()])


class RoundState:
    """State of a module at the start of a round, besides parameters and federated buffers, as every client finds it.

    For each client it restores attributes of the user's modules that are numbers, text, tensors, arrays or random
    generators, buffers that are not ``federated``, every module's mode and every parameter's ``requires_grad``. Clients
    share other attributes, such as lists, and torchmetrics, which collect over all clients of a round.

    Of ``watchers``, such as callbacks, changed attributes are noted and not restored. ``dropped`` names what was
    undone, ``shared`` what clients have changed and cannot be restored.
    """

    def __init__(self, module: nn.Module, federated: Collection[str], watchers: Sequence[object] = ()) -> None:
        self._watchers = [(each, {name: fingerprint(value) for name, value in vars(each).items()}) for each in watchers]
        self._modes = Modes(module)
        self._flags = [(parameter, parameter.requires_grad) for parameter in module.parameters()]
        self._snapshots = {
            path: Snapshot(each, own_attributes())
            for path, each in module.named_modules()
            if type(each).__module__.split(".")[0] not in LIBRARIES and not isinstance(each, Metric)
        }
        self._module, live = module, dict(module.named_buffers())
        self._buffers = {}
        for name in noted_buffers(module, federated):
            self._buffers[name] = (live[name], version_if_any(live[name]), live[name].clone())
        self._by_hook: set[tuple[str, str]] = set()
        self.dropped: set[str] = set()
        self.shared: set[str] = set()

    def note_hook(self) -> None:
        """Take the changes since the start as made by ``on_client_start``, which are not reported."""
        self._by_hook |= {(path, name) for path, snapshot in self._snapshots.items() for name in snapshot.changes()}

    def restore(self, *, keep_hooks: bool = False) -> None:
        """Restore everything that can be. ``keep_hooks`` leaves what ``on_client_start`` has set."""
        for each, prints in self._watchers:
            changed = [name for name, value in vars(each).items() if fingerprint(value) != prints.get(name, ABSENT)]
            self.shared |= {f"{type(each).__name__}.{name}" for name in changed}
        self._modes.restore()
        for parameter, flag in self._flags:
            if parameter.requires_grad is not flag:
                parameter.requires_grad_(flag)
        for path, snapshot in self._snapshots.items():
            names = []
            for name in snapshot.changes():
                restorable, by_hook = snapshot.can_restore(name), (path, name) in self._by_hook
                if not by_hook:
                    where = self.dropped if restorable else self.shared
                    where.add(f"self.{path}.{name}" if path else f"self.{name}")
                if restorable and not (keep_hooks and by_hook):
                    names.append(name)
            if names:
                snapshot.restore_values(names)
        live = dict(self._module.named_buffers()) if self._buffers else {}
        for name, (buffer, version, values) in self._buffers.items():
            if live.get(name) is not buffer or version_if_any(buffer) != version:
                owner = type(self._module.get_submodule(name.rpartition(".")[0]))
                if owner.__module__.split(".")[0] not in LIBRARIES:
                    self.dropped.add(f"self.{name}")
                write(live[name], values)


def noted_buffers(module: nn.Module, federated: Collection[str]) -> list[str]:
    """Return the names of buffers that are not ``federated``, except noise of bayesian-torch and torchmetrics."""
    kinds = (BaseVariationalLayer_, Metric)
    others = {id(buffer) for each in module.modules() if isinstance(each, kinds) for buffer in each.buffers()}
    return [n for n, buffer in module.named_buffers() if n not in federated and id(buffer) not in others]


def write(tensor: Tensor, values: Tensor) -> None:
    """Copy ``values`` into a tensor. Only ``inference_mode`` writes into one that was made under it."""
    with torch.inference_mode() if tensor.is_inference() else torch.no_grad():
        tensor.copy_(values)


@functools.cache
def own_attributes() -> frozenset[str]:
    """Names of the attributes that torch and Lightning themselves keep on a module."""
    recurrent = {"_flat_weights", "_flat_weight_refs"}  # made again from the parameters
    return frozenset(vars(L.LightningModule())) | {"log", "on_save_checkpoint"} | recurrent


def fingerprint(value: Any, depth: int = 4) -> Any:
    """Return a fingerprint that changes when ``value`` is replaced or written into. Of unknown objects the identity."""
    if isinstance(value, UNCHANGING):
        return value
    if isinstance(value, Tensor):
        return id(value), version_if_any(value)
    if isinstance(value, np.ndarray):
        return id(value), value.tobytes() if value.nbytes <= LARGE else value.shape
    if isinstance(value, GENERATORS):
        state = _state_of(value)
        return id(value), state.numpy().tobytes() if isinstance(state, Tensor) else pickle.dumps(state)
    if isinstance(value, itertools.count):
        return repr(value)
    if depth == 0:
        return id(value)
    if isinstance(value, CONTAINERS) and len(value) > LONG:
        return id(value), len(value)
    if isinstance(value, dict):
        return id(value), [(id(key), fingerprint(each, depth - 1)) for key, each in value.items()]
    if isinstance(value, list | tuple | set | frozenset | deque):
        return id(value), [fingerprint(each, depth - 1) for each in value]
    if _is_opaque(value) or not hasattr(value, "__dict__"):
        return id(value)
    return id(value), fingerprint(vars(value), depth - 1)


def _is_opaque(value: Any) -> bool:
    return isinstance(value, type | nn.Module) or type(value).__module__.split(".")[0] in LIBRARIES


def holds_generators(value: Any) -> bool:
    """Return True if a value holds a random generator, at most four levels down."""
    return next(_generators(value), None) is not None


def _generators(value: Any, depth: int = 4) -> Iterator[Any]:
    if type(value) in UNCHANGING or isinstance(value, Tensor):
        return
    if isinstance(value, GENERATORS):
        yield value
    elif depth and isinstance(value, dict):
        for each in value.values():
            yield from _generators(each, depth - 1)
    elif depth and isinstance(value, list | tuple | set | frozenset | deque) and len(value) <= LONG:
        for each in value:
            yield from _generators(each, depth - 1)
    elif depth and hasattr(value, "__dict__") and not _is_opaque(value):
        yield from _generators(vars(value), depth - 1)


def _state_of(generator: Any) -> Any:
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.getstate() if isinstance(generator, random.Random) else generator.get_state()


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.set_state(state)
