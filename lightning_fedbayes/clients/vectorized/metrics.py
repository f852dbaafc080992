"""Metrics that ``training_step`` feeds: in a stack their calls are noted, and made client by client after the step."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection
from torchmetrics.utilities import dim_zero_cat, dim_zero_max, dim_zero_min, dim_zero_sum

from lightning_fedbayes.clients.snapshot import Snapshot
from lightning_fedbayes.clients.vectorized.schedule import Slots
from lightning_fedbayes.clients.vectorized.swap import Swap, swapped
from lightning_fedbayes.core.errors import CannotVectorize
from lightning_fedbayes.core.private_torch import has_forward_hook, tree_flatten, tree_unflatten

MERGED = (dim_zero_sum, dim_zero_cat, dim_zero_min, dim_zero_max)
"""Reductions of a metric's states over processes for which it does not matter which client comes first."""


class MetricCalls:
    """The calls of metrics in one step, those that the user's ``module`` and its layers hold."""

    def __init__(self, module: nn.Module) -> None:
        self._calls: list[Call] = []
        self._swaps: list[Swap] = []
        self._find(module, "self")

    def _find(self, module: nn.Module, path: str) -> None:
        """Make a stand-in for every metric below ``module``, but for those inside of another."""
        for name, child in module.named_children():
            if isinstance(child, Metric | MetricCollection):
                self._swaps.append(((vars(module)["_modules"], name), StandIn(child, f"{path}.{name}", self._calls)))
            else:
                self._find(child, f"{path}.{name}")

    def noting(self) -> swapped:
        """Inside, the metrics only note how they are called."""
        return swapped(self._swaps)

    def begin_step(self) -> None:
        """Drop the calls of the step before."""
        self._calls.clear()

    def tensors(self) -> list[Tensor]:
        """Return the tensors of all calls, as one client sees them."""
        return [leaf for call in self._calls for leaf in call.leaves if isinstance(leaf, Tensor)]

    def end_step(self, stacks: Iterator[Tensor]) -> None:
        """Replace these tensors by the next of ``stacks``, each of shape (clients, \\*)."""
        for call in self._calls:
            call.leaves = [next(stacks) if isinstance(leaf, Tensor) else leaf for leaf in call.leaves]

    def make(self, slots: Slots) -> dict[int, Exception]:
        """Make the calls of the clients in ``slots``. Returns the errors of those for which a metric raises one."""
        errors: dict[int, Exception] = {}
        if not self._calls:
            return errors
        for row, slot in enumerate(slots):
            try:
                for call in self._calls:
                    call.values[row] = call.make(call.metric, row)
            except Exception as error:
                errors[slot] = error
        for call in self._calls:
            for key, metric in named(call.metric) if call.method == "forward" else ():
                values = [value if key is None else value.get(key) for value in call.values.values()]
                if values and all(isinstance(value, Tensor) and value.numel() == 1 for value in values):
                    # the metric's value of this step, which self.log(..., metric) shows: the mean over the clients
                    metric._forward_cache = call.stack(key, len(values)).float().mean()
        return errors

    def check(self) -> None:
        """Make the calls of two clients on copies; raise CannotVectorize if a metric changes more than its states."""
        copies = {id(call.metric): call.metric.clone() for call in self._calls}
        for call in self._calls:
            copy = copies[id(call.metric)]
            snapshots = [Snapshot(each, {*own_names(), *each.metric_state}) for _, each in named(copy)]
            call.values = {row: call.make(copy, row) for row in range(2)}
            changed = [name for snapshot in snapshots for name in snapshot.changes()]
            if changed:
                raise CannotVectorize(f"the metric {call.path} changes its attribute {changed[0]}, which is no state")


@dataclass
class Call:
    """One call of a metric.

    Args:
        metric: a metric or a collection.
        path: where the module holds it.
        method: "forward" or "update".
        leaves, structure: the arguments.

    Attributes:
        values: what it returned, row by row.
    """

    metric: Any
    path: str
    method: str
    leaves: Sequence[Any]
    structure: Any
    values: dict[int, Any] = field(default_factory=dict)

    def make(self, metric: Any, row: int) -> Any:
        """Call ``metric`` with the arguments of one client."""
        leaves = [leaf[row] if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        args, kwargs = tree_unflatten(leaves, self.structure)
        return getattr(metric, self.method)(*args, **kwargs)

    def stack(self, key: str | None, rows: int) -> Tensor:
        """Return what the metric, or that under ``key`` of a collection, returned; shape (rows,).

        A client for which it raised an error gets the mean of the others.
        """
        values = {row: value if key is None else value[key] for row, value in self.values.items()}
        known = torch.stack([value.reshape(()) for value in values.values()])
        if len(known) == rows:
            return known
        mean = known.float().mean()
        return torch.stack([values[row].reshape(()) if row in values else mean for row in range(rows)])


class StandIn(nn.Module):
    """Stands in the place of a metric or a collection while a stack trains: notes calls, and refuses everything else.

    ``isinstance`` takes it for what it stands for.
    """

    def __init__(self, metric: Metric | MetricCollection, path: str, calls: list[Call]) -> None:
        vars(self).update(_metric=metric, _path=path, _calls=calls, _is_checked=False)  # it is no submodule
        vars(self).update(_enable_compute_groups=False)  # self.log_dict asks collections for it
        super().__init__()

    @property
    def __class__(self) -> type:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The class of the metric."""
        return type(self._metric)

    def forward(self, *args: Any, **kwargs: Any) -> BatchValue | dict[str, BatchValue]:
        """Note a call. Returns what can be logged, and nothing else."""
        call = self._note("forward", args, kwargs)
        values = {key: BatchValue(call, key) for key, _ in named(self._metric)}
        return values if isinstance(self._metric, MetricCollection) else values[None]  # pyright: ignore

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Note a call."""
        self._note("update", args, kwargs)

    def items(self, keep_base: bool = False, copy_state: bool = True) -> list[tuple[str, Member]]:
        """Return the metrics of a collection, to be logged."""
        if not isinstance(self._metric, MetricCollection):
            return self.__getattr__("items")
        keys = self._metric.keys(keep_base)
        return [(str(shown), Member(self._metric, str(key))) for shown, (key, _) in zip(keys, named(self._metric))]

    def _note(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        if not self._is_checked:
            check_metric(self._metric, self._path)
            vars(self)["_is_checked"] = True
        leaves, structure = tree_flatten((args, kwargs))
        # copies: training_step may write into its own
        leaves = [leaf.detach().clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._calls.append(Call(self._metric, self._path, method, leaves, structure))
        return self._calls[-1]

    def __getattr__(self, name: str) -> Any:
        """Raise CannotVectorize."""
        raise CannotVectorize(
            f"training_step uses {self._path}.{name}; metrics of a stack can be called, updated and logged there. "
            "Compute and reset them in on_train_epoch_end"
        )


@dataclass(frozen=True)
class Member:
    """A metric of a collection, to be logged."""

    collection: MetricCollection
    key: str


class BatchValue:
    """Result of a metric for a batch, known after the step: it can be logged, and everything else is refused."""

    def __init__(self, call: Call, key: str | None) -> None:
        self.call, self.key = call, key

    def __getattr__(self, name: str) -> Any:
        """Raise CannotVectorize."""
        raise CannotVectorize(
            f"training_step computes with what {self.call.path} returns of a batch; metrics of a stack are fed after "
            "the step. Log it by self.log, or use torchmetrics.functional"
        )


def _refusing(name: str) -> Any:
    return lambda self, *args: self.__getattr__(name)


for _name in (
    *("bool", "int", "float", "index", "len", "iter", "getitem", "str", "format", "eq", "ne", "lt", "le", "gt", "ge"),
    *("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "pow", "rpow", "neg", "abs", "round"),
):
    setattr(BatchValue, f"__{_name}__", _refusing(_name))


def logged_value(value: Any, rows: int) -> Any:
    """Return what ``self.log`` gets in place of ``value``: the metric, or the values of ``rows`` clients."""
    if isinstance(value, BatchValue):
        return value.call.stack(value.key, rows)
    if isinstance(value, StandIn):
        return value._metric
    if isinstance(value, Member):
        return dict(value.collection.items(copy_state=False))[value.key]
    return value


def named(metric: Metric | MetricCollection) -> list[tuple[str | None, Metric]]:
    """Return the metrics of a collection with the keys of its values; of a metric, itself under None."""
    if isinstance(metric, MetricCollection):
        return list(zip(metric.keys(), metric._modules.values()))  # pyright: ignore[reportReturnType]
    return [(None, metric)]


def check_metric(metric: Metric | MetricCollection, path: str) -> None:
    """Raise CannotVectorize if it may matter in which order clients feed a metric."""
    for _, each in named(metric):
        if next(each.children(), None) is not None or next(each.parameters(), None) is not None:
            raise CannotVectorize(f"the metric {path} is made of other modules, and clients would feed it in turns")
        if has_forward_hook(each):
            raise CannotVectorize(f"the metric {path} has a hook, which would be called after the step")
        if not each._reductions or any(reduction not in MERGED for reduction in each._reductions.values()):
            raise CannotVectorize(
                f"the metric {path} may depend on the order of the clients, who would feed it in turns: it has states "
                "with another dist_reduce_fx than 'sum', 'cat', 'min' and 'max'"
            )


@functools.cache
def own_names() -> frozenset[str]:
    """Names of the attributes that torchmetrics itself keeps on a metric."""

    class Empty(Metric):
        def update(self) -> None:
            pass

        def compute(self) -> None:
            pass

    return frozenset(vars(Empty()))
