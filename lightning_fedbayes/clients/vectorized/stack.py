"""The stack: parameters, buffers and optimizer state of several clients, how they start, and what they send."""

import gc
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_fedbayes.clients.context import TrainingContext
from lightning_fedbayes.clients.learned import variance_of
from lightning_fedbayes.clients.model import ResidentModel, Tensors
from lightning_fedbayes.clients.problems import LocalPriors, Measured, Pull, price_weight
from lightning_fedbayes.clients.snapshot import Snapshot, write
from lightning_fedbayes.clients.states import Client, ClientState, OptimizerState, parameters_of
from lightning_fedbayes.clients.vectorized.gaussians import StackedPriors
from lightning_fedbayes.clients.vectorized.optimizer import StackedOptimizer, clip_norms, clip_values
from lightning_fedbayes.clients.vectorized.schedule import Disagreement, Slots, add_rows, put_rows, row_sums, take_rows
from lightning_fedbayes.clients.vectorized.step import Attributes, StackedStep
from lightning_fedbayes.clients.vectorized.swap import ParameterSwap
from lightning_fedbayes.core.errors import CannotVectorize
from lightning_fedbayes.core.posterior import GaussianPosterior
from lightning_fedbayes.core.private_torch import register_pytree_node, tree_leaves, tree_map, version_if_any
from lightning_fedbayes.methods.method import LocalProblem

Clip = Callable[[Sequence[Tensor]], None]
PLAIN = (int, float, str, type(None))


class ClientStack:
    """Parameters, buffers and optimizer state of several clients. The module itself keeps the global model.

    Args:
        model, optimizer, step: the resident network with the global model, the user's optimizer and the stacked step.
        clients, states, starts, problems: of each slot, the client, its kept state, its optimizer's state, its problem.
        stacked_keys, counts: see :class:`~lightning_fedbayes.clients.vectorized.optimizer.StackedOptimizer`.
        local: puts priors of clients into the network, or None where nothing is measured.
        terms: what the clients' losses gain.
    """

    def __init__(
        self,
        model: ResidentModel,
        optimizer: Optimizer,
        step: StackedStep,
        clients: Sequence[Client],
        states: Sequence[ClientState],
        starts: Sequence[OptimizerState],
        stacked_keys: frozenset[str] = frozenset(),
        counts: frozenset[str] = frozenset(),
        local: LocalPriors | None = None,
        problems: Sequence[LocalProblem] = (),
        terms: Sequence[Pull] = (),
    ) -> None:
        self.model, self.step = model, step
        names = {id(parameter): name for name, parameter in model.parameters.items()}
        self.names = [names[id(parameter)] for parameter in parameters_of(optimizer)]
        kept = model.kept_values().keys()  # an earlier run with other settings may have kept more
        locals_ = [{name: value for name, value in state.local.items() if name in kept} for state in states]
        starts_at = [model.parameter_names(each.start) for each in problems]
        locals_ = [{**start, **own} for start, own in zip(starts_at, locals_)] if any(starts_at) else locals_
        rows = [
            model.frozen[name].detach().expand(len(states), *model.frozen[name].shape)
            if name in model.frozen
            else _stack(model.global_parameters[name], name, locals_)
            for name in self.names
        ]
        live = {**dict(model.module.named_buffers()), **model.global_buffers}
        shared = step.shared_buffers.difference(*locals_)
        held = {name: value for name, value in live.items() if name in shared}
        self.shared = {name: (value, version_if_any(value), value.clone()) for name, value in held.items()}
        self.buffers = {name: _stack(value, name, locals_) for name, value in live.items() if name not in shared}
        everything = {**dict(zip(self.names, rows)), **self.buffers}
        # first, because it may fail: nothing has been replaced yet
        optimizer.state.clear()
        mark = optimizer.state[step.swap]  # pyright: ignore[reportArgumentType]
        self.attributes = start_clients(step.module, clients, step.swap, everything)
        if any(optimizer.state.values()) or all(each is not mark for each in optimizer.state.values()):
            raise CannotVectorize("on_client_start changes the optimizer's state. Take engine='sequential'")
        self.optimizer = StackedOptimizer(optimizer, rows, starts, stacked_keys, counts)
        self._variances: Tensors = {}
        self._priors: StackedPriors | None = None
        self._terms = terms
        for term in terms:
            term.lay_out(dict(zip(self.names, rows)))
        self._local, self.measured = local, None
        if local is not None:
            if local.layers:
                own = [each.prior for each in problems if each.prior is not None]
                self._priors = StackedPriors(local, own, step.gaussians)
            self._paths = {**local.paths, **local.others}
            like = {name: everything[path] for name, path in self._paths.items() if path in self.names}
            self.measured = Measured(like, local.layers, len(clients))
            self._rhos = {name: names[id(each.rho)] for name, each in local.layers.items()}
            self._weights = {name: price_weight(each.std.detach()) for name, each in local.layers.items()}

    def forward_backward(
        self, slots: Slots, batch: Any, batch_idx: int, *, clip: Clip | None = None
    ) -> tuple[Tensor | None, dict[str, Any]]:
        """Compute the gradients of the clients in ``slots``, which :meth:`StackedOptimizer.select` has selected.

        ``batch`` has tensors of shape (clients, batch, *). ``clip`` changes the gradients in place. Return the losses,
        shape (clients,), None if ``training_step`` skipped the batch, and its other results.
        """
        try:
            losses, rest, replaced = self._take_step(slots, batch, batch_idx, clip)
            if self._keeps_shared(replaced):
                return losses, rest
        except Exception as error:
            if not self.shared or (isinstance(error, Disagreement) and self._keeps_shared()):
                raise
        for name, (value, version, before) in self.shared.items():  # give every client a copy from before the step
            self.buffers[name] = _stack(before, name, [{}] * len(self.optimizer.rows[0]))
            if version_if_any(value) != version:
                write(value, before)
        self.shared = {}
        losses, rest, _ = self._take_step(slots, batch, batch_idx, clip)
        self.step.shared_buffers = frozenset()
        return losses, rest

    def _keeps_shared(self, replaced: Collection[str] = ()) -> bool:
        kept = all(version_if_any(value) == version for value, version, _ in self.shared.values())
        return kept and not self.shared.keys() & replaced

    def _take_step(
        self, slots: Slots, batch: Any, batch_idx: int, clip: Clip | None
    ) -> tuple[Tensor | None, dict[str, Any], Collection[str]]:
        """As :meth:`forward_backward`. Returns also the names of the buffers that were replaced."""
        optimizer, frozen = self.optimizer, self.model.frozen  # which clients share: they stay in the module
        parameters: Tensors = {name: p for name, p in zip(self.names, optimizer.parameters) if name not in frozen}
        buffers = {name: take_rows(stack, slots) for name, stack in self.buffers.items()}
        before = {name: rows.clone() for name, rows in buffers.items()}
        stacked = self.attributes.stacked
        if stacked:
            stacked = tree_map(lambda value: take_rows(value, slots), stacked)
        local = None if self._priors is None else self._priors.rows(slots)
        try:
            attributes = Attributes(stacked, self.attributes.shared)
            shared = {name: value for name, (value, *_) in self.shared.items()}
            losses, rest, replaced = self.step(parameters, buffers, attributes, batch, batch_idx, local, shared)
            if losses is not None:
                added = [term(parameters, lambda stack: take_rows(stack, slots)).to(losses) for term in self._terms]
                losses = sum(added, losses)
                self.added = sum((each.detach() for each in added), torch.zeros_like(losses))
                for parameter in optimizer.parameters:
                    parameter.grad = None
                losses.backward(torch.ones_like(losses))  # the clients share no parameter
                if self.measured is not None:
                    self._measure(local, self.measured, slots, parameters)
                if clip is not None:
                    clip([p.grad for p in optimizer.parameters if p.grad is not None])
        except Exception:
            for name, rows in before.items():  # the clients will try again one by one
                put_rows(self.buffers[name], slots, rows)
            raise
        for name, buffer in (buffers | replaced).items():
            if name in self.buffers:
                put_rows(self.buffers[name], slots, buffer)
        return None if losses is None else losses.detach(), rest, replaced

    @torch.no_grad()
    def _measure(
        self, local: StackedPriors | None, measured: Measured, slots: Slots, parameters: Mapping[str, Tensor]
    ) -> None:
        """Add what the gradients of the clients in ``slots`` say of their data. Keep widths as they are."""
        found = None if local is None else local.factors()
        factors = None
        if found is not None:
            factors, added = found
            self.added += added
            add_rows(measured.factor, slots, factors.double())
        for name, total in measured.gradients.items():
            path = self._paths[name]
            parameter = parameters.get(path)
            if parameter is None or parameter.grad is None:
                continue
            gradient, trace = parameter.grad, 0.0
            if name not in measured.squares:
                for term in self._terms:
                    added = term.gradient(path, parameter, lambda stack: take_rows(stack, slots))
                    gradient = gradient if added is None else gradient - added.to(gradient)
            elif factors is not None and local is not None:
                scale = factors.view(-1, *[1] * (parameter.dim() - 1))
                slope = local.stacks[name].gradient(parameter).to(gradient)
                gradient = torch.addcmul(gradient, slope, scale, value=-1)
                single = local.squares(name)
                add_rows(measured.squares[name], slots, gradient.square() if single is None else single)
                rho = parameters[self._rhos[name]]
                if rho.grad is not None:
                    trace = row_sums(rho.grad * self._weights[name], torch.float64).unsqueeze(1)
            else:
                continue
            add_rows(total, slots, gradient)
            add_rows(measured.traces[name], slots, trace**measured.powers)
        for path in {} if self._local is None else self._rhos.values():
            parameters[path].grad = None

    def read_posteriors(self, measured: Callable[..., Tensors] | None = None) -> Iterator[GaussianPosterior]:
        """Return the posterior that each client sends, slot by slot: views of the stack.

        ``measured`` gives the variances outside of Bayesian layers of the client in a slot, from its parameters and
        buffers.
        """
        self.optimizer.write_back()
        rows, learned = dict(zip(self.names, self.optimizer.rows)), self.model.learned
        count = len(self.optimizer.rows[0])
        own = self.model.parameters.items()
        everything = {name: rows.get(name, p.detach().expand(count, *p.shape)) for name, p in own}
        if learned is not None and measured is not None:
            each = [
                measured(
                    slot,
                    {name: rows[slot] for name, rows in everything.items()},
                    {name: self._buffer(name, slot) for name in (*self.buffers, *self.shared)},
                )
                for slot in range(count)
            ]
            learned.variances.update({name: torch.stack([one[name] for one in each]) for name in learned.variances})
            self._variances = {variance_of(name): value for name, value in learned.variances.items()}
        with self.step.swap.using(everything):
            stacked = self.model.read_posterior()
        self.model.variances.update(self.model.global_variances)
        return stacked.unbind()

    def read_buffers(self, slot: int) -> Tensors:
        """Return the buffers that a client sends."""
        return {name: self._buffer(name, slot) for name in self.model.federated_buffers}

    def _buffer(self, name: str, slot: int) -> Tensor:
        return self.shared[name][0] if name in self.shared else self.buffers[name][slot]

    def read_local(self, slot: int) -> Tensors:
        """Return what a client keeps for its next round: local parameters and buffers."""
        rows = {**dict(zip(self.names, self.optimizer.rows)), **self.buffers, **self._variances}
        kept = self.model.kept_values()
        return {name: (rows[name][slot] if name in rows else value).clone() for name, value in kept.items()}


def clipping(context: TrainingContext) -> Clip | None:
    """Return the loop's gradient clipping for stacked gradients, or None if it does not clip."""
    limit, clip = context.clip_value, clip_norms if context.clips_norm else clip_values
    return None if limit is None else lambda gradients: clip(gradients, limit)


def _stack(value: Tensor, name: str, local: Sequence[Tensors]) -> Tensor:
    """Stack ``value`` once for each client, or what the client has kept under ``name``. Shape (clients, *).

    Matrices lie transposed in memory, as their gradients do, which come out of batched products: otherwise autograd
    would copy every gradient.
    """
    if value.dim() == 2:
        stack = value.new_empty((len(local), *value.shape[::-1])).transpose(1, 2)
    else:
        stack = value.new_empty((len(local), *value.shape))
    stack.copy_(value)
    for slot, kept in enumerate(local):
        if name in kept:
            stack[slot] = kept[name]
    return stack


class StackedClient(Client):
    """Several clients in one, with a tensor inside :func:`torch.func.vmap` for each value that differs."""

    def __init__(self, values: Sequence[Tensor], like: Client) -> None:
        own = zip(("number", "num_examples", "position"), values)
        vars(self).update(own, round=like.round, cohort=like.cohort)

    @property
    def name(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Raise RuntimeError: a tensor cannot hold names."""
        raise RuntimeError("on_client_start reads the client's name, and clients that train at once have several")


register_pytree_node(StackedClient, lambda c: ([c.number, c.num_examples, c.position], c), StackedClient)


def start_clients(
    module: L.LightningModule, clients: Sequence[Client], swap: ParameterSwap, tensors: Tensors
) -> Attributes:
    """Return attributes that ``on_client_start`` sets, if it is there. Raise CannotVectorize if it does more."""
    hook = getattr(module, "on_client_start", None)
    if hook is None:
        return Attributes()
    shared: dict[str, Any] = {}
    given: list[weakref.ref[Any]] = []

    def start(values: list[Tensor], tensors: Tensors) -> dict[str, Any]:
        client = StackedClient(values, clients[0])
        given.extend(weakref.ref(each) for each in (client, *values))
        before = Snapshot(module)
        try:
            with swap.using(tensors):
                hook(client)
            changed = before.changes()
        finally:
            before.restore()
        if not changed:
            raise CannotVectorize("on_client_start does something else than to set attributes of the module")
        stacked = {}
        for name, value in changed.items():
            if isinstance(value, PLAIN):
                shared[name] = value
            elif (leaves := tree_leaves(value)) and all(isinstance(leaf, Tensor) for leaf in leaves):
                stacked[name] = value
            else:
                raise CannotVectorize(f"on_client_start sets self.{name} to a {type(value).__name__}")
        return stacked

    names = "number", "num_examples", "position"
    values = [torch.tensor([getattr(c, name) for c in clients]).to(module.device) for name in names]
    stacked = torch.func.vmap(start, randomness="different")(values, tensors)
    if any(each() is not None for each in given):
        gc.collect()
        if any(each() is not None for each in given):
            raise CannotVectorize("on_client_start keeps the client outside of the module's attributes")
    return Attributes(stacked, shared)


def attributes_of(attributes: Attributes, client: Client) -> dict[str, Any]:
    """Return the attributes of the last client in the stack, which the module has after a round."""
    stacked = {
        name: client if isinstance(value, StackedClient) else tree_map(lambda stack: stack[-1], value)
        for name, value in attributes.stacked.items()
    }
    return {**attributes.shared, **stacked}
