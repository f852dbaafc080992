"""The user's optimizer stepping groups of clients of a stack at once."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_fedbayes.engines.client import parameters_of
from lightning_fedbayes.engines.vectorized.rows import put_rows, take_rows
from lightning_fedbayes.engines.vectorized.schedule import Slots, slots_of

Kept = dict[int, dict[str, Any]]
"""What an optimizer keeps of each of its parameters, by the parameter's number."""


class StackedOptimizer:
    """Holds stacked parameters of shape (clients, *) in place of the optimizer's own, and the state of each client.

    An optimizer that treats every entry alike steps many networks as it would one. Its state is of two kinds: tensors
    of the parameter's shape, which are stacked, too; and the rest, such as Adam's number of steps, which must be the
    same for all clients that step together. Clients for which it differs from the start are of different kinds.

    Args:
        optimizer: the user's; its ``param_groups`` hold the stacked parameters until :meth:`remove`.
        rows: the parameters of all clients, shape (clients, *), in the optimizer's order; they are written into.
        kept: what each client has kept of the optimizer; an empty dict for one that starts anew.
        stacked_keys: names of the state that is stacked; see :mod:`~lightning_fedbayes.engines.vectorized.entrywise`.

    Attributes:
        parameters: the parameters of the selected clients.
    """

    def __init__(
        self, optimizer: Optimizer, rows: Sequence[Tensor], kept: Sequence[Kept], stacked_keys: Collection[str]
    ) -> None:
        self.optimizer = optimizer
        self.rows = list(rows)
        self._own = parameters_of(optimizer)
        self.parameters: list[Parameter] = []
        optimizer.state.clear()
        self._stacks: dict[int, dict[str, Tensor]] = {i: {} for i in range(len(rows))}
        self._stacked_keys = stacked_keys
        self._kinds: list[int] = []
        self._shared: list[dict[int, Kept]] = []  # of every kind: what is not stacked, by the number of steps taken
        for slot, state in enumerate(kept):
            self._kinds.append(self._sort(slot, state))
        self._selected: Slots = range(0)
        self._steps = 0

    def remove(self) -> None:
        """Give the optimizer its own parameters back."""
        self.optimizer.state.clear()
        set_parameters(self.optimizer, self._own)

    def alike(self, slots: Slots) -> list[Slots]:
        """``slots``, split into clients of one kind, which can step together."""
        if slots != self._selected:
            self.write_back()  # which may find out that kinds differ
        if len(self._shared) == 1:
            return [slots]
        kinds = dict.fromkeys(self._kinds[slot] for slot in slots)
        return [slots_of([slot for slot in slots if self._kinds[slot] == kind]) for kind in kinds]

    def select(self, slots: Slots, steps: int, *, alone: bool) -> None:
        """Let :attr:`parameters` be those of ``slots``.

        Args:
            slots: clients of one kind.
            steps: how many steps each of them has taken.
            alone: whether no other clients take their next step from the same number of steps.
        """
        if slots != self._selected:
            self.write_back()
            self._load(slots, steps)
        elif not alone:
            self._remember(self._rest())

    def step(self) -> None:
        """Let the optimizer step the selected clients."""
        self.optimizer.step()
        self._steps += 1

    def skip(self) -> None:
        """Count a step that ``training_step`` has skipped."""
        self._steps += 1

    def write_back(self) -> None:
        """Bring :attr:`rows` and the stacked state up to date with the selected clients."""
        if not self._selected:
            return
        for i, parameter in enumerate(self.parameters):
            put_rows(self.rows[i], self._selected, parameter.data)
            for key, value in self.optimizer.state.get(parameter, {}).items():
                if key in self._stacked_keys:
                    put_rows(self._stack(i, key, value), self._selected, value)
        rest = self._rest()
        others = self._shared[self._kinds[self._selected[0]]].get(self._steps)
        if others is not None and not _equal(others, rest):  # as when only some have skipped a step
            for slot in self._selected:
                self._kinds[slot] = len(self._shared)
            self._shared.append({})
        self._remember(rest)

    def keep(self, slot: int) -> Kept:
        """What the optimizer keeps of one of the selected clients."""
        place = self._selected.index(slot)
        kept: Kept = {}
        for i, parameter in enumerate(self.parameters):
            if parameter in self.optimizer.state:
                kept[i] = {
                    key: value[place].clone() if key in self._stacked_keys else _copy(value)
                    for key, value in self.optimizer.state[parameter].items()
                }
        return kept

    def _load(self, slots: Slots, steps: int) -> None:
        self._selected, self._steps = slots, steps
        rest = self._shared[self._kinds[slots[0]]][steps]
        self.optimizer.state.clear()
        # new objects: a graph that somebody keeps of an earlier step would hold on to the old ones' shapes
        self.parameters = [
            Parameter(take_rows(stack, slots), own.requires_grad) for stack, own in zip(self.rows, self._own)
        ]
        set_parameters(self.optimizer, self.parameters)
        for i, parameter in enumerate(self.parameters):
            if i in rest:
                state = {key: take_rows(stack, slots) for key, stack in self._stacks[i].items()}
                state.update({key: _copy(value) for key, value in rest[i].items()})
                self.optimizer.state[parameter] = state

    def _rest(self) -> Kept:
        """The state of the selected clients that is not stacked."""
        return {
            i: {
                key: _copy(value)
                for key, value in self.optimizer.state[parameter].items()
                if key not in self._stacked_keys
            }
            for i, parameter in enumerate(self.parameters)
            if parameter in self.optimizer.state
        }

    def _remember(self, rest: Kept) -> None:
        """Keep ``rest`` for clients of the same kind that have taken as many steps, and forget what is over."""
        by_steps = self._shared[self._kinds[self._selected[0]]]
        for steps in [steps for steps in by_steps if steps < self._steps - 1]:
            del by_steps[steps]
        by_steps[self._steps] = rest

    def _sort(self, slot: int, state: Kept) -> int:
        """Stack the tensors of what a client has kept. Returns its kind, by the rest."""
        rest: Kept = {}
        for i, entries in state.items():
            rest[i] = {}
            for key, value in entries.items():
                if key in self._stacked_keys:
                    self._stack(i, key, value)[slot] = value
                else:
                    rest[i][key] = value
        for kind, by_steps in enumerate(self._shared):
            if _equal(by_steps[0], rest):
                return kind
        self._shared.append({0: rest})
        return len(self._shared) - 1

    def _stack(self, i: int, key: str, like: Tensor) -> Tensor:
        """The stacked state ``key`` of a parameter."""
        if key not in self._stacks[i]:
            self._stacks[i][key] = torch.zeros_like(self.rows[i], dtype=like.dtype)
        return self._stacks[i][key]


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _equal(first: Kept, second: Kept) -> bool:
    """Whether two clients' states agree in what is not stacked."""
    return first.keys() == second.keys() and all(
        first[i].keys() == second[i].keys() and all(bool(first[i][key] == second[i][key]) for key in first[i])
        for i in first
    )


def set_parameters(optimizer: Optimizer, parameters: Sequence[Tensor]) -> None:
    """Let ``optimizer`` hold other parameters in place of its own."""
    remaining = iter(parameters)
    for group in optimizer.param_groups:
        group["params"] = [next(remaining) for _ in group["params"]]
