"""The user's optimizer on stacked parameters, and gradient clipping client by client."""

import copy
from collections import defaultdict
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_fedbayes.clients import states as client_states
from lightning_fedbayes.clients.learned import MOMENTS
from lightning_fedbayes.clients.snapshot import swapped
from lightning_fedbayes.clients.states import OptimizerState, copied, has_own_state, options_of, parameters_of
from lightning_fedbayes.clients.vectorized.schedule import Slots, put_rows, slots_of, take_rows
from lightning_fedbayes.core.errors import CannotVectorize
from lightning_fedbayes.modules.sources.ivon import IVON


class StackedOptimizer:
    """The user's optimizer with stacked parameters of shape (clients, *) in place of its parameters.

    An elementwise optimizer steps many networks as it steps one. The state of a parameter has two parts: tensors of the
    parameter's shape, which are stacked too, and the rest, such as Adam's number of steps, which clients that step
    together must share. Clients are of one *kind* if the rest was equal at every step so far. If clients have kept
    different numbers of steps, these become tensors with one entry per row where the optimizer can compute with such.

    Args:
        optimizer: the user's. Its ``param_groups`` hold the stacked parameters until :meth:`remove`.
        rows: the parameters of all clients, shape (clients, *), in the optimizer's order. Written in place.
        states: optimizer state with which each client starts. Empty for a new optimizer.
        stacked_keys, counts: names of the state that is stacked, see :func:`check_elementwise`, and of the state that
            can have one entry per row, see :func:`counts_by_row`.

    Attributes:
        parameters: the parameters of the selected clients.
        stacked_state: number of the parameter → name → state of all clients, (clients, *). After :meth:`write_back`.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        rows: Sequence[Tensor],
        states: Sequence[OptimizerState],
        stacked_keys: frozenset[str],
        counts: frozenset[str] = frozenset(),
    ) -> None:
        self.optimizer = optimizer
        self.rows = list(rows)
        self._own = parameters_of(optimizer)
        self.parameters: list[Parameter] = []
        optimizer.state.clear()
        self._state = optimizer.state
        self.stacked_state: dict[int, dict[str, Tensor]] = {i: {} for i in range(len(rows))}
        own = IVON.sums if isinstance(optimizer, IVON) else frozenset()
        rests = [_without(state, stacked_keys | own) for state in states]
        self._counts = own if all(_equal(rest, rests[0]) for rest in rests) else counts | own
        self._stacked_keys = stacked_keys | self._counts | {*MOMENTS}
        self._single: dict[str, Tensor] = {}  # name of a count → one as the optimizer makes it for one network
        self._kinds: list[int] = []
        self._shared: list[dict[int, OptimizerState]] = []  # kind → steps taken → state that is not stacked
        for slot, state in enumerate(states):
            self._kinds.append(self._sort(slot, client_states.with_counts(optimizer, state)))
        self._selected: Slots = range(0)
        self._steps = 0

    def remove(self) -> None:
        """Restore the optimizer's parameters."""
        self.optimizer.state.clear()
        set_parameters(self.optimizer, self._own)

    def alike(self, slots: Slots) -> list[Slots]:
        """Split ``slots`` into clients of one kind, which can step together."""
        if slots != self._selected:
            self.write_back()  # may find that kinds differ
        if len(self._shared) == 1:
            return [slots]
        kinds = dict.fromkeys(self._kinds[slot] for slot in slots)
        return [slots_of([slot for slot in slots if self._kinds[slot] == kind]) for kind in kinds]

    def select(self, slots: Slots, steps: int, *, alone: bool) -> None:
        """Take the :attr:`parameters` of ``slots``, of one kind, after ``steps``. ``alone``: no others step now."""
        if slots == self._selected:
            if not alone:
                self._remember(self._rest())
            return
        self.write_back()
        self._selected, self._steps = slots, steps
        rest = self._shared[self._kinds[slots[0]]][steps]
        self.optimizer.state.clear()
        # new objects: an autograd graph of an earlier step that the user keeps still refers to the old shapes
        pairs = zip(self.rows, self._own)
        self.parameters = [Parameter(take_rows(stack, slots), own.requires_grad) for stack, own in pairs]
        set_parameters(self.optimizer, self.parameters)
        for i, parameter in enumerate(self.parameters):
            if i in rest:
                state = {key: take_rows(stack, slots) for key, stack in self.stacked_state[i].items()}
                state.update({key: copied(value) for key, value in rest[i].items()})
                self.optimizer.state[parameter] = state

    def step(self) -> None:
        """Take an optimizer step of the selected clients."""
        self.check_state()
        is_plain = not self._counts or isinstance(self.optimizer, IVON)
        states = [(self.optimizer.state.get(each, {}), each.dim()) for each in (() if is_plain else self.parameters)]
        by_row = any(state[key].dim() == dim for state, dim in states for key in self._counts & state.keys())
        with _counting_by_row(self.optimizer) if by_row else nullcontext():
            self.optimizer.step()
        self._steps += 1

    def check_state(self) -> None:
        """Raise CannotVectorize if ``training_step`` has loaded a state, or has written past the stack's."""
        if self.optimizer.state is not self._state or self._state.keys() - set(self.parameters):
            raise CannotVectorize("training_step writes into the optimizer's state. Take engine='sequential'")

    def skip(self) -> None:
        """Count a step that ``training_step`` has skipped."""
        if isinstance(self.optimizer, IVON):
            self.optimizer.forget()
        self._steps += 1

    def drawn(self) -> AbstractContextManager[Any]:
        """Inside, the parameters of the selected clients are draws, if the optimizer takes gradients there."""
        return self.optimizer.sampled() if isinstance(self.optimizer, IVON) else nullcontext()

    @property
    def draws(self) -> int:
        """Number of draws, and of evaluations of the loss, per step."""
        return self.optimizer.samples if isinstance(self.optimizer, IVON) else 1

    def write_back(self) -> None:
        """Write parameters and state of the selected clients into :attr:`rows` and the stacked state."""
        if not self._selected:
            return
        for i, parameter in enumerate(self.parameters):
            if self.rows[i].stride(0):  # 0: frozen, and one for all clients
                put_rows(self.rows[i], self._selected, parameter.data)
            for key, value in self.optimizer.state.get(parameter, {}).items():
                if key in self._stacked_keys:
                    put_rows(self._stack(i, key, value), self._selected, value)
        rest = self._rest()
        others = self._shared[self._kinds[self._selected[0]]].get(self._steps)
        if others is not None and not _equal(others, rest):  # for example if only some clients skipped a step
            for slot in self._selected:
                self._kinds[slot] = len(self._shared)
            self._shared.append({})
        self._remember(rest)

    def read_state(self, slot: int) -> OptimizerState:
        """Return a copy of the optimizer state of one of the selected clients."""
        row = self._selected.index(slot)
        kept: OptimizerState = {}
        for i, parameter in enumerate(self.parameters):
            if parameter not in self.optimizer.state:
                continue
            kept[i] = {}
            for key, value in sorted(self.optimizer.state[parameter].items()):  # else by the hashes of names
                if key in self._counts:  # as the optimizer makes it for one network
                    count = value[row] if value.dim() else value
                    kept[i][key] = count.detach().reshape(()).clone().to(self._single[key])
                else:
                    kept[i][key] = value[row].clone() if key in self._stacked_keys else copied(value)
        return kept

    def _rest(self) -> OptimizerState:
        """Return the state of the selected clients that is not stacked."""
        states = {i: self.optimizer.state[p] for i, p in enumerate(self.parameters) if p in self.optimizer.state}
        rest = _without(states, self._stacked_keys)
        return {i: {key: copied(value) for key, value in state.items()} for i, state in rest.items()}

    def _remember(self, rest: OptimizerState) -> None:
        """Keep ``rest`` for other clients of this kind at the same step, and drop the rest of earlier steps."""
        by_steps = self._shared[self._kinds[self._selected[0]]]
        for steps in [steps for steps in by_steps if steps < self._steps - 1]:
            del by_steps[steps]
        by_steps[self._steps] = rest

    def _sort(self, slot: int, state: OptimizerState) -> int:
        """Stack the initial state of a client. Returns its kind, by the rest of the state."""
        for i, entries in state.items():
            for key in entries.keys() & self._stacked_keys:
                self._stack(i, key, entries[key])[slot] = entries[key]
                if key in self._counts:
                    self._single[key] = entries[key]
        rest = _without(state, self._stacked_keys)
        for kind, by_steps in enumerate(self._shared):
            if _equal(by_steps[0], rest):
                return kind
        self._shared.append({0: rest})
        return len(self._shared) - 1

    def _stack(self, i: int, key: str, like: Tensor) -> Tensor:
        if key not in self.stacked_state[i]:
            rows = self.rows[i]
            dtype = torch.float64 if key in self._counts else like.dtype  # as precise as Python's numbers
            rows = rows.new_empty(_by_row(rows)) if key in self._counts else rows
            self.stacked_state[i][key] = torch.zeros_like(rows, dtype=dtype)
        return self.stacked_state[i][key]


def _without(state: OptimizerState, keys: Collection[str]) -> OptimizerState:
    return {i: {key: value for key, value in entries.items() if key not in keys} for i, entries in state.items()}


def _by_row(rows: Tensor) -> tuple[int, ...]:
    """Return the shape (clients, 1, ...) of one number per client, which broadcasts with ``rows``."""
    return (len(rows), *[1] * (rows.dim() - 1))


def _counting_by_row(optimizer: Optimizer) -> swapped:
    """Inside, torch's optimizers compute with numbers of steps as tensors, which may have an entry per row."""
    return swapped([((group, "differentiable"), True) for group in optimizer.param_groups])


def _equal(first: OptimizerState, second: OptimizerState) -> bool:
    """Return whether the states of two clients agree in what is not stacked."""
    return first.keys() == second.keys() and all(
        first[i].keys() == second[i].keys() and all(bool(first[i][key] == second[i][key]) for key in first[i])
        for i in first
    )


def set_parameters(optimizer: Optimizer, parameters: Sequence[Tensor]) -> None:
    """Replace the parameters of ``optimizer``, in order."""
    remaining = iter(parameters)
    for group in optimizer.param_groups:
        group["params"] = [next(remaining) for _ in group["params"]]


def clip_norms(gradients: Sequence[Tensor], max_norm: float) -> None:
    r"""Scale each client's gradient to a norm of at most c = ``max_norm`` > 0, in place.

    .. math:: g_k \leftarrow g_k \min\left(1, \frac{c}{\|g_k\| + 10^{-6}}\right)

    The norm is over all parameters of client k, as in ``torch.nn.utils.clip_grad_norm_`` for one network. There is one
    gradient per parameter, of shape (clients, \*).
    """
    norms = torch.stack([torch.linalg.vector_norm(each.reshape(len(each), -1), dim=1) for each in gradients])
    factor = (max_norm / (torch.linalg.vector_norm(norms, dim=0) + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(factor.view(-1, *[1] * (gradient.dim() - 1)).to(gradient.dtype))


def clip_values(gradients: Sequence[Tensor], max_value: float) -> None:
    """Clamp every entry to [−``max_value``, ``max_value``], in place."""
    for gradient in gradients:
        gradient.clamp_(-max_value, max_value)


LARGEST = 8
"""Number of entries of every dimension of a parameter with which an optimizer is tried."""
STEPS = 8
"""Number of steps with which an optimizer is tried: it may do something else every few steps."""


def check_elementwise(optimizer: Optimizer) -> frozenset[str]:
    """Return names of the state that has the parameter's shape. Raise CannotVectorize if a stack steps otherwise."""
    if isinstance(optimizer, IVON):
        return IVON.stacked_keys
    if has_own_state(optimizer):
        name = type(optimizer).__name__
        raise CannotVectorize(f"{name} holds more than a state per parameter, which clients would share")
    random = torch.Generator().manual_seed(0)
    corners = [p.detach()[tuple(slice(LARGEST) for _ in p.shape)].clone() for p in parameters_of(optimizer)]
    # half precision rounds differently in a stack
    corners = [corner if corner.dtype == torch.float64 else corner.float() for corner in corners]
    rows = [torch.stack([corner, corner + 0.1]) for corner in corners]
    together = _copy_of(optimizer, rows)
    alone = [_copy_of(optimizer, [stack[slot] for stack in rows]) for slot in range(2)]
    options = copy.deepcopy(_options(together))
    for step in range(STEPS):
        scale = 0.1 ** (step % 2)
        gradients = [
            torch.stack([scale * torch.randn(p.shape, generator=random), 100 * torch.randn(p.shape, generator=random)])
            for p in corners
        ]
        _step(together, gradients)
        for slot, single in enumerate(alone):
            _step(single, [gradient[slot] for gradient in gradients])
    for i, parameter in enumerate(parameters_of(together)):
        expected = torch.stack([parameters_of(single)[i].detach() for single in alone])
        if not torch.allclose(parameter.detach(), expected, rtol=1e-4, atol=1e-6, equal_nan=True):
            raise CannotVectorize(f"{type(optimizer).__name__} does not treat every entry of a parameter alike")
    if _options(together) != options:
        raise CannotVectorize(f"{type(optimizer).__name__} counts in its options, which clients would share")
    if not type(optimizer).__module__.startswith("torch.optim."):
        _check_closure(optimizer, [row[0] for row in rows])
    entries = [(key, value, parameter) for parameter, state in together.state.items() for key, value in state.items()]
    return frozenset(key for key, value, p in entries if isinstance(value, Tensor) and value.shape == p.shape)


def counts_by_row(optimizer: Optimizer, stacked_keys: frozenset[str]) -> frozenset[str]:
    """Return names of scalar tensors in the state, such as Adam's "step", that can have one entry per row.

    On copies with random gradients, a step of two stacked networks must be the step of each, although the second has
    taken some steps before. Empty if it is not, or if the optimizer lacks torch's ``differentiable``, which makes it
    compute with such a number as a tensor.
    """
    if isinstance(optimizer, IVON):
        return IVON.counts
    if not all(group.get("differentiable") is False for group in optimizer.param_groups):
        return frozenset()
    random = torch.Generator().manual_seed(0)
    own = parameters_of(optimizer)
    start = [torch.zeros([2, *(min(size, LARGEST) for size in p.shape)], device=p.device) for p in own]
    try:
        alone = [_copy_of(optimizer, [rows[row] for rows in start]) for row in range(2)]
        for row, (single, steps) in enumerate(zip(alone, (1, STEPS))):
            for _ in range(steps):
                _step(single, [torch.randn(rows[row].shape, generator=random) for rows in start])
            for rows, p in zip(start, parameters_of(single)):
                rows[row] = p.detach()
        together = _copy_of(optimizer, start)
        firsts, seconds = ([single.state[p] for p in parameters_of(single)] for single in alone)
        scalars = {k for state in firsts for k, value in state.items() if isinstance(value, Tensor) and not value.dim()}
        counts = frozenset(scalars - stacked_keys)
        for parameter, first, second in zip(parameters_of(together), firsts, seconds):
            together.state[parameter] = {
                key: both.reshape(_by_row(parameter)).double() if key in counts else both
                for key, both in ((key, torch.stack([value, second[key]])) for key, value in first.items())
            }
        for _ in range(STEPS):
            gradients = [torch.randn(rows.shape, generator=random) for rows in start]
            with _counting_by_row(together):
                _step(together, gradients)
            for row, single in enumerate(alone):
                _step(single, [gradient[row] for gradient in gradients])
    except Exception:  # an optimizer that cannot: its clients step kind by kind
        return frozenset()
    for rows, moved, *singles in zip(start, *map(parameters_of, (together, *alone))):
        move, expected = moved.detach() - rows, torch.stack([single.detach() for single in singles]) - rows
        if not torch.allclose(move, expected, rtol=1e-3, atol=1e-4 * float(expected.norm())):
            return frozenset()
    return counts


def _step(optimizer: Optimizer, gradients: Sequence[Tensor]) -> None:
    for parameter, gradient in zip(parameters_of(optimizer), gradients):
        parameter.grad = gradient.to(parameter, copy=True)
    optimizer.step()


def _check_closure(optimizer: Optimizer, parameters: Sequence[Tensor]) -> None:
    """Raise CannotVectorize unless ``optimizer`` evaluates the loss once, first of all, and ignores its value."""
    random = torch.Generator().manual_seed(0)
    without, with_closure = _copy_of(optimizer, parameters), _copy_of(optimizer, parameters)
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

        _step(without, gradients)
        with_closure.step(closure)  # pyright: ignore
        pairs = zip(parameters_of(without), parameters_of(with_closure))
        if seen != [True] or not all(torch.equal(a, b) for a, b in pairs):
            raise CannotVectorize(f"{type(optimizer).__name__} uses the closure, which evaluates one client's loss")


def _copy_of(optimizer: Optimizer, parameters: Sequence[Tensor]) -> Optimizer:
    """Return a copy of ``optimizer`` with copies of other ``parameters`` and without state."""
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
    set_parameters(copied, [Parameter(each.clone()) for each in parameters])
    return copied


def _options(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the options of an optimizer's groups, and its attributes that are numbers or text."""
    plain = {name: value for name, value in vars(optimizer).items() if isinstance(value, int | float | str)}
    return [*options_of(optimizer), plain]
