"""Metrics that ``training_step`` feeds: in a stack their calls are noted, and made client by client after the step."""

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch.utilities.data import extract_batch_size
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection
from torchmetrics.utilities import dim_zero_cat, dim_zero_max, dim_zero_min, dim_zero_sum

from lightning_fedbayes.clients.context import LOGGED, SIGNATURE, TrainingContext, TrainingLog, is_epoch_mean
from lightning_fedbayes.clients.snapshot import Snapshot, Swap, swapped, with_attributes
from lightning_fedbayes.clients.vectorized.schedule import Slots, add_rows
from lightning_fedbayes.core.errors import CannotVectorize
from lightning_fedbayes.core.private_torch import has_forward_hook, tree_flatten, tree_map, tree_unflatten

MERGED = (dim_zero_sum, dim_zero_cat, dim_zero_min, dim_zero_max)
"""Reductions of a metric's states over processes for which it does not matter which client comes first."""


@dataclass
class Call:
    """A "forward" or "update" of a metric or collection at ``path``, with its arguments and its values row by row."""

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
        """Return the values of the metric or of a collection's ``key``, (rows,). Where it failed, their mean."""
        values = {row: value if key is None else value[key] for row, value in self.values.items()}
        known = torch.stack([value.reshape(()) for value in values.values()])
        if len(known) == rows:
            return known
        mean = known.float().mean()
        return torch.stack([values[row].reshape(()) if row in values else mean for row in range(rows)])


class StandIn(nn.Module):
    """Stands in the place of a metric or a collection while a stack trains: notes calls, refuses everything else."""

    def __init__(self, metric: Metric | MetricCollection, path: str, calls: list[Call]) -> None:
        vars(self).update(_metric=metric, _path=path, _calls=calls, _is_checked=False)  # it is no submodule
        vars(self).update(_enable_compute_groups=False)  # self.log_dict asks collections for it
        super().__init__()

    @property
    def __class__(self) -> type:  # pyright: ignore[reportIncompatibleMethodOverride]
        return type(self._metric)

    def forward(self, *args: Any, **kwargs: Any) -> "BatchValue | dict[str, BatchValue]":
        """Note a call. Returns values that can be logged only."""
        call = self._note("forward", args, kwargs)
        values = {key: BatchValue(call, key) for key, _ in named(self._metric)}
        return values if isinstance(self._metric, MetricCollection) else values[None]  # pyright: ignore

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Note a call."""
        self._note("update", args, kwargs)

    def items(self, keep_base: bool = False, copy_state: bool = True) -> "list[tuple[str, Member]]":
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
    """Result of a metric for a batch, known after the step: it can be logged, and refuses everything else."""

    def __init__(self, call: Call, key: str | None) -> None:
        self.call, self.key = call, key

    def __getattr__(self, name: str) -> Any:
        remedy = "metrics of a stack are fed after the step. Log it by self.log, or use torchmetrics.functional"
        raise CannotVectorize(f"training_step computes with what {self.call.path} returns of a batch; {remedy}")


for _name in (
    *("bool", "int", "float", "index", "len", "iter", "getitem", "str", "format", "eq", "ne", "lt", "le", "gt", "ge"),
    *("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "pow", "rpow", "neg", "abs", "round"),
):
    setattr(BatchValue, f"__{_name}__", lambda self, *args, name=_name: self.__getattr__(name))


def logged_value(value: Any, rows: int) -> Any:
    """Return what ``self.log`` gets in place of ``value``: the metric, or the values of ``rows`` clients."""
    if isinstance(value, BatchValue):
        return value.call.stack(value.key, rows)
    if isinstance(value, StandIn):
        return value._metric
    return dict(value.collection.items(copy_state=False))[value.key] if isinstance(value, Member) else value


def named(metric: Metric | MetricCollection) -> list[tuple[str | None, Metric]]:
    """Return the metrics of a collection with the keys of its values. Of a metric, itself under None."""
    if isinstance(metric, MetricCollection):
        return list(zip(metric.keys(), metric._modules.values()))  # pyright: ignore[reportReturnType]
    return [(None, metric)]


def check_metric(metric: Metric | MetricCollection, path: str) -> None:
    """Raise CannotVectorize if the order in which clients feed a metric may matter."""
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
    """Names of the attributes that torchmetrics keeps on every metric."""

    class Empty(Metric):
        def update(self) -> None:
            pass

        def compute(self) -> None:
            pass

    return frozenset(vars(Empty()))


REDUCTIONS = {"mean": torch.mean, "sum": torch.sum, "max": torch.amax, "min": torch.amin}


class StackedTrainingLog(TrainingLog):
    """Collects what a stacked step logs, client by client, and the calls of metrics, made after the step."""

    def __init__(self, context: TrainingContext) -> None:
        super().__init__(context.module, context.in_training_step)
        self._marks = context.training_step_marks
        self._logged: list[tuple[str, Any, Mapping[str, Any]]] = []
        self._calls: list[Call] = []
        self._swaps: list[Swap] = []
        self._find(context.module, "self")
        self._totals: dict[str, Tensor] = {}
        self._examples: dict[str, list[float]] = {}

    def _find(self, module: nn.Module, path: str) -> None:
        """Make a stand-in for every metric below ``module``, but not for a metric inside another."""
        for name, child in module.named_children():
            if isinstance(child, Metric | MetricCollection):
                self._swaps.append(((vars(module)["_modules"], name), StandIn(child, f"{path}.{name}", self._calls)))
            else:
                self._find(child, f"{path}.{name}")

    def noting(self) -> swapped:
        """Inside, the metrics only note how they are called."""
        return swapped(self._swaps)

    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """Replace :meth:`lightning.LightningModule.log`. Inside a step it only records the call."""
        if not self.in_training_step():
            self._log(name, value, *args, **kwargs)
            return
        if isinstance(value, Tensor) and value.numel() != 1:
            raise ValueError(f"self.log('{name}', ...) takes one number, not a tensor of shape {tuple(value.shape)}")
        if args:
            given = SIGNATURE.bind(None, name, value, *args, **kwargs).arguments
            kwargs = {key: given[key] for key in list(given)[3:]}
        self._logged.append((name, value, kwargs))

    def begin_step(self) -> None:
        """Drop the calls of the previous step."""
        self._logged = []
        self._calls.clear()

    def tensors(self) -> list[Tensor]:
        """Return one client's tensors that this step has logged, as scalars without gradient, or given to metrics."""
        logged = [value.detach().reshape(()) for _, value, _ in self._logged if isinstance(value, Tensor)]
        return [*logged, *(leaf for call in self._calls for leaf in call.leaves if isinstance(leaf, Tensor))]

    def end_step(self, stacks: Iterator[Tensor]) -> None:
        """Replace these tensors by the next of ``stacks``, each with a first dimension of clients."""
        self._logged = [
            (name, next(stacks) if isinstance(value, Tensor) else value, options)
            for name, value, options in self._logged
        ]
        for call in self._calls:
            call.leaves = [next(stacks) if isinstance(leaf, Tensor) else leaf for leaf in call.leaves]

    def check_metrics(self) -> None:
        """Feed copies with a step of two clients. Raise CannotVectorize if a metric changes more than its states."""
        copies = {id(call.metric): call.metric.clone() for call in self._calls}
        for call in self._calls:
            copy = copies[id(call.metric)]
            snapshots = [Snapshot(each, {*own_names(), *each.metric_state}) for _, each in named(copy)]
            call.values = {row: call.make(copy, row) for row in range(2)}
            changed = [name for snapshot in snapshots for name in snapshot.changes()]
            if changed:
                raise CannotVectorize(f"the metric {call.path} changes its attribute {changed[0]}, which is no state")
        for _, value, _ in self._logged:
            if isinstance(value, BatchValue):
                logged_value(value, 2)

    def begin_chunk(self, clients: int) -> None:
        """Prepare for a stack of ``clients``."""
        self._slots, self._totals, self._examples = clients, {}, {}

    def _feed(self, slots: Slots) -> dict[int, Exception]:
        """Make the calls of the clients in ``slots``. Returns the errors of those for which a metric raises one."""
        errors: dict[int, Exception] = {}
        for row, slot in enumerate(slots if self._calls else ()):
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

    def add(self, slots: Slots, data: Any) -> dict[int, Exception]:
        """Add the values of the last step to the sums of the clients in ``slots``. Return errors of metrics by slot."""
        errors = self._feed(slots)
        if len(errors) == len(slots):
            return errors
        for name, value, options in self._logged:
            value = logged_value(value, len(slots))
            weight = options.get("batch_size") or extract_batch_size(tree_map(lambda stack: stack[0], data))
            if is_epoch_mean(value, options):
                if name not in self._totals:
                    like = value if isinstance(value, Tensor) else torch.tensor(0.0)
                    dtype = like.dtype if like.is_floating_point() else torch.float32
                    self._totals[name] = torch.zeros(self._slots, dtype=dtype, device=like.device)
                    self._examples[name] = [0.0] * self._slots
                add_rows(self._totals[name], slots, value * weight)
                for slot in slots:
                    self._examples[name][slot] += weight
                self._options[name] = {key: options[key] for key in LOGGED if key in options}
                continue
            if self.is_shared:
                self.check_local(name, options)
            if isinstance(value, Tensor) and value.dim():  # one value of all clients of the step
                reduce = options.get("reduce_fx", "mean")
                value = REDUCTIONS.get(reduce, reduce)(value.float() if reduce == "mean" else value)
            with with_attributes(self.module, self._marks):
                self._log(name, value, **{**options, "batch_size": weight * len(slots)})
        return errors

    def end_chunk(self, clients: tuple[int, ...]) -> list[dict[str, float]]:
        """Return the means of the clients in the stack, slot by slot, and keep them for the means of the round."""
        totals = {name: total.tolist() for name, total in self._totals.items()}
        means = []
        for slot, client in enumerate(clients):
            sums = {name: (totals[name][slot], n[slot]) for name, n in self._examples.items() if n[slot]}
            self._clients[client] = dict(sums)
            means.append({name: total / examples for name, (total, examples) in sums.items()})
        return means
