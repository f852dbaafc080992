"""One training step of several clients together, on their tensors in place of the module's."""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.plugins import Precision
from torch import Tensor, nn

from lightning_fedbayes.clients.context import TrainingContext, loss_and_rest, takes_index
from lightning_fedbayes.clients.model import REPLACED, Tensors
from lightning_fedbayes.clients.snapshot import Modes, with_attributes
from lightning_fedbayes.clients.vectorized.gaussians import GaussianParameters, JointDraws, StackedPriors
from lightning_fedbayes.clients.vectorized.metrics import BatchValue, StackedTrainingLog
from lightning_fedbayes.clients.vectorized.operations import StackedOperations
from lightning_fedbayes.clients.vectorized.swap import ParameterSwap
from lightning_fedbayes.core import private_torch
from lightning_fedbayes.core.errors import CannotVectorize, FederationError


@dataclass(frozen=True)
class Attributes:
    """Attributes that a module's ``on_client_start`` has set on it.

    The ``stacked`` ones differ between clients: name → tensor of shape (clients, *), or a container of such.
    """

    stacked: dict[str, Any] = field(default_factory=dict)
    shared: dict[str, Any] = field(default_factory=dict)


class StepModes:
    """The modes of a module's parts, training or evaluation, where a client's first step switches them.

    Every client begins in the modes of the round's start. Its later steps begin in those that its first step left.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._start = self._first = Modes(module)
        self._later: Modes | None = None

    def restore(self) -> None:
        """Put back the modes of the round's start."""
        self._start.restore()

    def begin_clients(self) -> None:
        """Take the present modes, after ``on_client_start``, as those in which the next clients begin."""
        self._first, self._later = Modes(self._module), None

    def enter(self, step: int) -> None:
        """Put the parts into the modes in which each client begins its ``step``."""
        (self._later if step and self._later is not None else self._first).restore()

    def check(self) -> None:
        """Note the modes that a client's first step leaves. Raise CannotVectorize if another step leaves others."""
        if self._later is None:
            self._later = Modes(self._module)
        elif not self._later.is_now():
            raise CannotVectorize(
                "training_step no longer leaves the layers in the modes, train() or eval(), in which the first step "
                "left them, and clients in a stack share these: use engine='sequential'"
            )


StepOutput = tuple[Tensor | None, dict[str, Any], Tensors]
"""The clients' losses with gradient, (clients,), None for a skipped batch; the other entries that ``training_step``
returned; and the buffers that were replaced, not updated in place. Tensors have a first dimension of clients."""
Assemble = Callable[[Sequence[Tensor]], StepOutput]


class StackedStep:
    """``training_step`` under vmap, with the parameters, buffers and noise of every client.

    Raises CannotVectorize if torch lacks a private primitive of vmap (:mod:`~lightning_fedbayes.core.private_torch`).

    Attributes:
        branched: of the last step, see :class:`StackedOperations`.
        shares_batch: the next steps take one batch for all clients, and refuse branches on what differs between them.
        shared_buffers: names of buffers that do not change, so that one copy serves all clients.
    """

    def __init__(self, context: TrainingContext, log: StackedTrainingLog) -> None:
        module, precision = context.module, context.precision
        self.module = module
        self.swap = ParameterSwap(module)
        self.log = log
        self._marks = context.training_step_marks
        self._context = nullcontext if type(precision) is Precision else precision.train_step_context
        self._takes_index = takes_index(module)
        self.gaussians = GaussianParameters(module)
        self.branched, self.shares_batch = False, False
        self.shared_buffers: frozenset[str] = frozenset()
        torch.func.vmap(torch.sin)(torch.zeros(1))  # loads torch's batching rules that are written in Python
        if not private_torch.has_vmap_primitives():
            raise CannotVectorize("torch lacks a private name of vmap, which stacking needs, or it has changed")

    def __call__(
        self,
        parameters: Tensors,
        buffers: Tensors,
        attributes: Attributes,
        batch: Any,
        batch_idx: int,
        local: StackedPriors | None = None,
        shared: Tensors | None = None,
    ) -> StepOutput:
        """Take the forward pass.

        ``parameters``, ``buffers`` and ``batch`` are tensors with a first dimension of clients. ``attributes`` are set
        on the module, ``local`` are priors of the clients, and ``shared`` buffers that all clients share.
        """
        tensors, shared = {**parameters, **buffers}, shared or {}
        count = len(next(iter(tensors.values())))
        self.log.begin_step()
        with self._context(), private_torch.vmap_level(count) as level:
            seen = partial(private_torch.to_client_view, level=level)
            view = partial(private_torch.tree_map_only, Tensor, seen)
            views = {name: seen(stack) for name, stack in tensors.items()}
            held = {**attributes.shared, **{name: view(value) for name, value in attributes.stacked.items()}}
            if not self.shares_batch:
                # of a TensorDataset: faster than through the tree
                is_flat = type(batch) is list and all(isinstance(each, Tensor) for each in batch)
                batch = [seen(each) for each in batch] if is_flat else view(batch)
            joint = JointDraws(self.gaussians, parameters, views, local)
            operations = StackedOperations(level, self.gaussians, joint, not self.shares_batch)
            with nullcontext() if local is None else local.installed(seen):
                of_client = {**views, **shared}, [*buffers, *shared], held, batch, batch_idx, operations
                outputs, assemble = self._of_client(*of_client)
            self.branched = operations.branched
            stacks = [private_torch.to_stack(output, level, count) for output in outputs]
        return assemble(stacks)

    def _of_client(
        self,
        views: Tensors,
        buffers: Collection[str],
        attributes: dict[str, Any],
        batch: Any,
        batch_idx: int,
        operations: StackedOperations,
    ) -> tuple[list[Tensor], Assemble]:
        """Call ``training_step`` on one client's views. Returns its results, and how to use their stacks."""
        held = {**attributes, **self._marks}
        with with_attributes(self.module, held), self.swap.using(views), self.log.noting(), operations:
            output = self.module.training_step(*((batch, batch_idx) if self._takes_index else (batch,)))
            for name in views.keys() - {*buffers}:
                if self.swap[name] is not views[name]:
                    raise FederationError(REPLACED.format(name))
            now = {name: self.swap[name] for name in buffers}
            replaced = {name: after for name, after in now.items() if after is not views[name] and after is not None}
        logged = self.log.tensors()
        loss, rest = (None, {}) if output is None else loss_and_rest(output)
        if loss is not None and loss.numel() != 1:
            raise MisconfigurationException(f"the loss of `training_step` must be one number, not {loss.numel()}")
        leaves, structure = private_torch.tree_flatten(dict(rest)) if rest else ([], None)
        for leaf in leaves:
            if isinstance(leaf, BatchValue):
                bool(leaf)  # which is refused
        outputs = [*logged, *replaced.values(), *[leaf.detach() for leaf in leaves if isinstance(leaf, Tensor)]]
        if loss is not None:
            outputs.append(loss.reshape(()) if loss.dim() else loss)

        def assemble(stacks: Sequence[Tensor]) -> StepOutput:
            remaining: Iterator[Tensor] = iter(stacks)
            self.log.end_step(remaining)
            changed = {name: next(remaining) for name in replaced}
            values = [next(remaining) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            others = private_torch.tree_unflatten(values, structure) if rest else {}
            return None if loss is None else next(remaining), others, changed

        return outputs, assemble
