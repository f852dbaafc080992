"""Values that ``training_step`` logs when it runs for several clients at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from lightning.pytorch.utilities.data import extract_batch_size
from torch import Tensor

from lightning_fedbayes.clients.context import TrainingContext
from lightning_fedbayes.clients.log import SIGNATURE, TrainingLog, is_epoch_mean
from lightning_fedbayes.clients.vectorized.metrics import BatchValue, MetricCalls, logged_value
from lightning_fedbayes.clients.vectorized.schedule import Slots, add_rows
from lightning_fedbayes.clients.vectorized.swap import with_attributes
from lightning_fedbayes.core.private_torch import tree_map

REDUCTIONS = {"mean": torch.mean, "sum": torch.sum, "max": torch.amax, "min": torch.amin}


class StackedTrainingLog(TrainingLog):
    """Collects the values that a stacked step logs: epoch means client by client, others as means over the clients.

    Attributes:
        metrics: the calls of metrics in a step, which are made when its values are added.
    """

    def __init__(self, context: TrainingContext) -> None:
        super().__init__(context.module, context.in_training_step)
        self.metrics = MetricCalls(context.module)
        self._marks = context.training_step_marks
        self._calls: list[tuple[str, Any, Mapping[str, Any]]] = []
        self._totals: dict[str, Tensor] = {}
        self._examples: dict[str, list[float]] = {}

    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """Replace :meth:`lightning.LightningModule.log`; inside a step it only records the call."""
        if not self.in_training_step():
            self._log(name, value, *args, **kwargs)
            return
        if isinstance(value, Tensor) and value.numel() != 1:
            raise ValueError(f"self.log('{name}', ...) takes one number, not a tensor of shape {tuple(value.shape)}")
        if args:
            given = SIGNATURE.bind(None, name, value, *args, **kwargs).arguments
            kwargs = {key: given[key] for key in list(given)[3:]}
        self._calls.append((name, value, kwargs))

    def begin_step(self) -> None:
        """Drop the calls of the previous step."""
        self._calls = []
        self.metrics.begin_step()

    def tensors(self) -> list[Tensor]:
        """Return the tensors that this step has logged, scalars without gradient, and those that metrics got.

        They are as one client sees them.
        """
        logged = [value.detach().reshape(()) for _, value, _ in self._calls if isinstance(value, Tensor)]
        return [*logged, *self.metrics.tensors()]

    def end_step(self, stacks: Iterator[Tensor]) -> None:
        """Replace these tensors by the next of ``stacks``, each with a first dimension of clients."""
        self._calls = [
            (name, next(stacks) if isinstance(value, Tensor) else value, options)
            for name, value, options in self._calls
        ]
        self.metrics.end_step(stacks)

    def check_metrics(self) -> None:
        """Try whether the metrics of the last step, taken by two clients, can be fed after it.

        Raises:
            CannotVectorize: they cannot.
        """
        self.metrics.check()
        for _, value, _ in self._calls:
            if isinstance(value, BatchValue):
                logged_value(value, 2)

    def begin_chunk(self, clients: int) -> None:
        """Prepare for a stack of ``clients``."""
        self._slots, self._totals, self._examples = clients, {}, {}

    def add(self, slots: Slots, data: Any) -> dict[int, Exception]:
        """Add the values of the last step to the sums of the clients in ``slots``, whose batches are ``data``.

        Returns: the errors of clients with whose values a metric cannot be fed.
        """
        errors = self.metrics.make(slots)
        if len(errors) == len(slots):
            return errors
        for name, value, options in self._calls:
            value = logged_value(value, len(slots))
            weight = options.get("batch_size") or extract_batch_size(tree_map(lambda stack: stack[0], data))
            if is_epoch_mean(value, options):
                if name not in self._totals:
                    like = value if isinstance(value, Tensor) else torch.tensor(0.0)
                    dtype = like.dtype if like.is_floating_point() else torch.float32
                    self._totals[name] = torch.zeros(self._slots, dtype=dtype, device=like.device)
                    self._examples[name] = [0.0] * self._slots
                add_rows(self._totals[name], slots, value * weight)
                examples = self._examples[name]
                for slot in slots:
                    examples[slot] += weight
                self._remember(name, options)
            else:
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
