"""Inputs and targets of a batch, in whatever form a DataLoader gives it, and how a network takes the inputs."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeAlias

import lightning as L
import torch
from torch import Tensor, nn

from lightning_fedbayes.core.errors import FederationError, listed, raised_as, shown

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
    """Return inputs and targets of a batch. Targets are None if it has none.

    ===========================  ==================================  ========================
    a batch is                   inputs                              targets
    ===========================  ==================================  ========================
    a tensor                     the tensor                          none
    a list or tuple              its first element                   its second, if any
    a mapping                    a dict of all keys but the targets  under a key of ``TARGETS``
    another object, as a graph   the object                          an attribute of these names
    ===========================  ==================================  ========================

    A ``module`` that predicts by ``predict_step`` only (:func:`predicts_batches`) takes the whole batch as inputs. A
    rule of the user, ``unpack``, or a method of this name of the module, takes the place of these. Raise
    FederationError if the batch is empty, has several names of targets, or lacks targets where it ``needs_targets``.
    """
    if isinstance(batch, Whole):
        batch = batch.batch
    own = getattr(module, "unpack", None) if unpack is None else unpack
    if callable(own):
        with raised_as(FederationError, f"unpack cannot take a batch that is {_form(batch)}", "let it take such a one"):
            found: Any = own(batch)
        if not isinstance(found, list | tuple) or len(found) != 2:
            why = "let it return two values, (inputs, targets)"
            raise FederationError(f"unpack makes {shown(found)} of a batch: {why}")
        inputs, targets = found
    else:
        inputs, targets = _by_form(batch)
        if module is not None and predicts_batches(module):
            inputs = batch
    if needs_targets and not isinstance(targets, Tensor):
        why = f"give (inputs, targets), a mapping or an object with one of {listed(map(repr, TARGETS))}; or {REMEDY}"
        raise FederationError(f"a batch is {_form(batch)}, and not inputs with a tensor of targets: {why}")
    return inputs, targets


def check_unpack(unpack: Any) -> None:
    """Raise FederationError unless an argument is a function or None."""
    if unpack is not None and not callable(unpack):
        raise FederationError(f"unpack={shown(unpack)}: give a function, lambda batch: (inputs, targets)")


def _by_form(batch: Any) -> tuple[Any, Any]:
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
    """Return the network's output, a tensor: its result, the first of a tuple, or ``logits`` of a mapping or object.

    A mapping goes to ``forward`` as keywords if that has a parameter for every key (or ``**``) and a key for every
    parameter without a default. It goes as one argument if ``forward`` takes one and no key is a parameter's name. A
    network of :func:`predicts_batches` runs its ``predict_step``. ``values``, name → tensor, take the place of its
    parameters and buffers. Raise FederationError if ``forward`` takes other keywords, or returns no tensor.
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
        why = "wrap it into a module whose forward returns logits or means"
        raise FederationError(f"{type(network).__name__} gives a {type(output).__name__}: {why}")
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
    """Return the number of examples of tensors with one first dimension. None for other inputs, such as graphs."""
    lengths = _lengths(inputs)
    return lengths.pop() if len(lengths) == 1 else None


def _lengths(inputs: Any) -> set[int | None]:
    """Return the lengths of all tensors, and None for what may differ between examples and is not a tensor."""
    if isinstance(inputs, Tensor):
        return {len(inputs) if inputs.ndim else None}
    if isinstance(inputs, Mapping):  # plain values hold for all examples
        inputs = [value for value in inputs.values() if not isinstance(value, bool | int | float | str | None)]
    return {n for each in inputs for n in _lengths(each)} if isinstance(inputs, list | tuple) else {None}
