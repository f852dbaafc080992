"""Inputs and targets of a batch, in whatever form a DataLoader gives it, and how a network takes the inputs."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import lightning as L
import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset

from lightning_fedbayes.core.errors import FederationError, listed, raised_as, sendable, shown
from lightning_fedbayes.core.seeding import derive_seed, seed_host


class FailedBatch:
    """Stand-in for a batch that could not be loaded, with the error that the client's data set raised."""

    def __init__(self, error: Exception) -> None:
        self.error = error


class Parts(Sequence[Dataset]):
    """Subsets of one data set, int64 ``indices`` of each client, made when asked for: a million take no memory."""

    def __init__(self, dataset: Dataset, indices: Sequence[Tensor]) -> None:
        self.dataset = dataset
        self.rows = torch.cat([torch.zeros(0, dtype=torch.int64), *indices])
        self.ends = torch.tensor([0, *map(len, indices)]).cumsum(0)
        self._last: tuple[int, Dataset | None] = (-1, None)

    def __len__(self) -> int:
        return len(self.ends) - 1

    def __getitem__(self, client: Any) -> Any:
        if isinstance(client, slice):
            return tuple(self[each] for each in range(*client.indices(len(self))))
        client = range(len(self))[client]
        if self._last[0] != client:  # a loader asks for one client's examples again and again
            self._last = client, Subset(self.dataset, self.rows_of(client).tolist())
        return self._last[1]

    def rows_of(self, client: int) -> Tensor:
        """Return the examples of a client, int64."""
        start, stop = self.ends[client : client + 2].tolist()
        return self.rows[start:stop]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of examples of each client."""
        return tuple(self.ends.diff().tolist())


class PlannedBatch(list):
    """A batch's example numbers, with the round, client and step that its random transforms are seeded by."""

    def __init__(self, indices: Sequence[int], round: int, client: int, step: int, dataset: int) -> None:
        super().__init__(indices)
        self.round, self.client, self.step, self.dataset = round, client, step, dataset

    def __reduce__(self) -> tuple:
        return PlannedBatch, (list(self), self.round, self.client, self.step, self.dataset)


class ReproducibleDataset(Dataset):
    """All clients' data sets; every batch is loaded and collated under its own random state."""

    def __init__(self, datasets: Sequence[Dataset], collate: Callable, seed: int) -> None:
        self.datasets = datasets
        self.collate = collate
        self.seed = seed

    def __len__(self) -> int:
        return sum(len(dataset) for dataset in self.datasets)  # pyright: ignore[reportArgumentType]

    def __getitems__(self, batch: PlannedBatch) -> Any:
        """Return one collated batch, or a :class:`FailedBatch`."""
        state = random.getstate(), np.random.get_state(), torch.random.get_rng_state()
        seed_host(derive_seed(self.seed, "loading", batch.round, batch.client, batch.step))
        dataset = self.datasets[batch.dataset]
        try:
            return self.collate([dataset[index] for index in batch])
        except Exception as error:
            return FailedBatch(sendable(error))
        finally:
            random.setstate(state[0])
            np.random.set_state(state[1])
            torch.random.set_rng_state(state[2])


def loaded(batch: Any) -> Any:
    """Return a batch that the data set has collated already."""
    return batch


Unpack: TypeAlias = Callable[[Any], tuple[Any, Any]]
"""Batch → (inputs, targets)."""

TARGETS = ("labels", "label", "y", "target", "targets")
"""Names under which a mapping or an object is known to hold its targets."""
REMEDY = "say what is what, unpack=lambda batch: (inputs, targets)"


class Whole:
    """A batch as one value, which code that maps over collections of tensors leaves as it is."""

    def __init__(self, batch: Any) -> None:
        self.batch = batch


def unpacked(
    batch: Any, module: nn.Module | None = None, unpack: Unpack | None = None, *, needs_targets: bool = False
) -> tuple[Any, Any]:
    """Return inputs and targets of a batch; targets are None if it has none.

    ===========================  ==================================  ========================
    a batch is                   inputs                              targets
    ===========================  ==================================  ========================
    a tensor                     the tensor                          none
    a list or tuple              its first element                   its second, if any
    a mapping                    a dict of all keys but the targets  under a key of ``TARGETS``
    another object, as a graph   the object                          an attribute of these names
    ===========================  ==================================  ========================

    Args:
        batch: as a DataLoader gives it.
        module: takes the inputs. One that predicts by ``predict_step`` only (:func:`predicts_batches`) takes the whole
            batch as inputs.
        unpack: the user's rule, in place of this one; None: a method ``unpack`` of ``module``, if it has one.
        needs_targets: a batch without a tensor of targets is an error.

    Raises:
        FederationError: the batch is empty, has several names of targets, or lacks the targets that are needed.
    """
    if isinstance(batch, Whole):
        batch = batch.batch
    own = getattr(module, "unpack", None) if unpack is None else unpack
    if callable(own):
        with raised_as(FederationError, f"unpack cannot take a batch that is {_form(batch)}", "let it take such a one"):
            found: Any = own(batch)
        if not isinstance(found, list | tuple) or len(found) != 2:
            raise FederationError(
                f"unpack makes {shown(found)} of a batch: let it return two values, (inputs, targets)"
            )
        inputs, targets = found
    else:
        inputs, targets = _by_form(batch)
        if module is not None and predicts_batches(module):
            inputs = batch
    if needs_targets and not isinstance(targets, Tensor):
        raise FederationError(
            f"a batch is {_form(batch)}, and not inputs with a tensor of targets: give (inputs, targets), a mapping or "
            f"an object with one of {listed(map(repr, TARGETS))}; or {REMEDY}"
        )
    return inputs, targets


def check_unpack(unpack: Any) -> None:
    """Raise FederationError unless an argument is a function or None."""
    if unpack is not None and not callable(unpack):
        raise FederationError(f"unpack={shown(unpack)}: give a function, lambda batch: (inputs, targets)")


def _by_form(batch: Any) -> tuple[Any, Any]:
    """Return inputs and targets by the form of a batch."""
    if isinstance(batch, Tensor):
        return batch, None
    if isinstance(batch, list | tuple):
        if not batch:
            raise FederationError("a batch is empty: give inputs, or a sequence of inputs and targets")
        return batch[0], batch[1] if len(batch) > 1 else None
    is_mapping = isinstance(batch, Mapping)
    names = [name for name in TARGETS if (name in batch if is_mapping else hasattr(batch, name))]
    if len(names) > 1:
        raise FederationError(
            f"a batch is {_form(batch)}, and {listed(map(repr, names))} may each be its targets: {REMEDY}"
        )
    if not is_mapping:
        return batch, getattr(batch, names[0]) if names else None
    return {key: value for key, value in batch.items() if key not in names}, batch[names[0]] if names else None


def _form(batch: Any) -> str:
    """Return the form of a batch, in words."""
    keys = f" with the keys {listed(map(repr, batch))}" if isinstance(batch, Mapping) else ""
    return f"a {type(batch).__name__}{keys}"


def predicts_batches(module: nn.Module) -> bool:
    """Return True for a LightningModule with ``predict_step`` and no ``forward``."""
    return (
        isinstance(module, L.LightningModule)
        and type(module).forward is L.LightningModule.forward
        and "forward" not in vars(module)
        and type(module).predict_step is not L.LightningModule.predict_step
    )


def output_of(network: nn.Module, inputs: Any, values: Mapping[str, Tensor] | None = None) -> Tensor:
    """Return the network's output, a tensor: its result, the first of a tuple, or ``logits`` of a mapping or
    object.

    A mapping goes to ``forward`` as keywords if that has a parameter for every key (or ``**``) and a key for every
    parameter without a default. It goes as one argument if ``forward`` takes one and no key is a parameter's name.

    Args:
        network: any module; one of :func:`predicts_batches` runs its ``predict_step``.
        inputs: one argument of it, or its keywords.
        values: name → tensor, in place of its parameters and buffers.

    Raises:
        FederationError: ``forward`` takes other keywords, or returns no tensor.
    """
    arguments, keywords = _arguments(network, inputs)
    with _with_forward(network):
        if values is None:
            output: Any = network(*arguments, **keywords)
        else:
            output = torch.func.functional_call(network, dict(values), arguments, keywords)
    named = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    found = named if isinstance(named, Tensor) else output[0] if isinstance(output, tuple) and output else output
    if not isinstance(found, Tensor):
        raise FederationError(
            f"{type(network).__name__} gives a {type(output).__name__}: wrap it into a module whose forward returns "
            "logits or means"
        )
    return found


def _arguments(network: nn.Module, inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return arguments and keywords by which ``forward`` takes the inputs, see :func:`output_of`."""
    if not isinstance(inputs, Mapping) or predicts_batches(network):
        return (inputs,), {}
    try:
        parameters = inspect.signature(network.forward).parameters.values()
    except (TypeError, ValueError):  # compiled code has none
        return (inputs,), {}
    variadic = {each.kind for each in parameters} & {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
    named = {each.name: each for each in parameters if each.kind not in variadic}
    missing = {name for name, each in named.items() if each.default is inspect.Parameter.empty} - inputs.keys()
    others = inputs.keys() - named.keys()
    takes_all = inspect.Parameter.VAR_KEYWORD in variadic and all(isinstance(key, str) for key in others)
    if not missing and (takes_all or not others):
        return (), dict(inputs)
    if len(missing) <= 1 and others == inputs.keys() and (named or variadic):
        return (inputs,), {}
    raise FederationError(
        f"{type(network).__name__}.forward takes {listed(named)}, and the inputs are a mapping with the keys "
        f"{listed(map(repr, inputs))}: let unpack=lambda batch: (inputs, targets) give what it takes, by name"
    )


@contextmanager
def _with_forward(network: nn.Module) -> Iterator[None]:
    """Inside, a module that predicts by ``predict_step`` only has it as ``forward``, so that it can be called."""
    if not predicts_batches(network):
        yield
        return
    step: Any = network.predict_step
    extra = (0,) if len(inspect.signature(step).parameters) > 1 else ()
    network.forward = lambda batch: step(batch, *extra)
    try:
        yield
    finally:
        del network.forward


def number_of_examples(inputs: Any) -> int | None:
    """Return the number of examples of collections of tensors with one first dimension, or None for all other inputs.

    Graphs, for example, cannot be divided into examples by taking rows of tensors.
    """
    lengths = _lengths(inputs)
    return lengths.pop() if len(lengths) == 1 else None


def _lengths(inputs: Any) -> set[int | None]:
    """Return the lengths of all tensors, and None for what may differ between examples and is not a tensor."""
    if isinstance(inputs, Tensor):
        return {len(inputs) if inputs.ndim else None}
    if isinstance(inputs, Mapping):  # plain values hold for all examples
        inputs = [value for value in inputs.values() if not isinstance(value, bool | int | float | str | None)]
    return {n for each in inputs for n in _lengths(each)} if isinstance(inputs, list | tuple) else {None}
