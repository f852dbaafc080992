"""The resident network of a federation: loaded for a client and read after it, all in place."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from hashlib import sha256
from typing import Any

import torch
from bayesian_torch.layers.base_variational_layer import BaseVariationalLayer_
from torch import Tensor, nn

from lightning_fedbayes.clients.learned import LearnedPosterior, variance_of
from lightning_fedbayes.clients.settings import BufferPolicy
from lightning_fedbayes.clients.snapshot import write
from lightning_fedbayes.core.errors import FederationError, listed, nearest, shown
from lightning_fedbayes.core.posterior import GaussianPosterior, at_least_float32
from lightning_fedbayes.layers import set_prior
from lightning_fedbayes.layers.functional import softplus_std
from lightning_fedbayes.layers.posterior_view import PosteriorView, gaussian_parameters
from lightning_fedbayes.layers.scaler import FederatedScaler, load_scale

Tensors = dict[str, Tensor]

REPLACED = (
    "training replaces the parameter {}, which the optimizer and the other clients do not follow: write into it, as "
    "with torch.no_grad(): parameter.copy_(...), or replace it between two fits"
)
"""Refusal of a module that gets other parameters during a fit."""


class ResidentModel:
    """One module that holds the global model between rounds and every client's in turn.

    Raises FederationError if a pattern matches nothing, every parameter is local, or a parameter is complex.

    Args:
        module: the network. Its parameter objects stay the same for the whole fit, so optimizers keep theirs.
        local_parameters: patterns (``fnmatch``) of parameters and buffers that never leave a client, in addition to
            the module's attribute ``local_parameters``.
        learned: the posterior of parameters outside of Bayesian layers, with ``variances``. None: point masses.
        buffers: treatment of buffers, such as BatchNorm's statistics: "average", "local" (every client keeps its own,
            the global model gets their average) or "frozen" (they never change).
        own_starts: a client starts a round with the posterior that it has trained last, not with the global one.
        frozen: posterior names of parameters that do not train: they are not read, sent, fused, noised, copied or kept.

    Attributes:
        local_names, frozen_names: posterior names of parameters that never leave a client, and of frozen ones.
        frozen: frozen parameters, by their names in the module.
    """

    def __init__(
        self,
        module: nn.Module,
        local_parameters: Sequence[str] = (),
        buffers: BufferPolicy = "average",
        learned: LearnedPosterior | None = None,
        own_starts: bool = False,
        frozen: Collection[str] = (),
    ) -> None:
        self.module, self.learned, self.policy = module, learned, buffers
        self.variances = {} if learned is None else learned.variances
        parameters = dict(module.named_parameters())
        wrong = [name for name, parameter in parameters.items() if parameter.is_complex()]
        if wrong:
            remedy = "keep real and imaginary parts (torch.view_as_real) as the parameters instead"
            raise FederationError(f"complex parameters cannot be fused: {listed(wrong)}; {remedy}")
        buffer_names = federated_buffer_names(module)
        gaussians = gaussian_parameters(module)
        posterior_names = {id(p): name for name, each in gaussians.items() for p in (each.mean, each.rho)}
        aliases = {name: posterior_names.get(id(p), name) for name, p in parameters.items()}
        local_parameters = (*local_parameters, *getattr(module, "local_parameters", ()))
        self.local_parameters = _matches(local_parameters, parameters, aliases, buffer_names)
        local = set(self.local_parameters)
        self.local_names = {aliases[name] for name in local if name in aliases}
        self.frozen_names: set[str] = set()
        self._aliases, self.parameters = aliases, parameters
        gaussian = {name for name, p in parameters.items() if id(p) in posterior_names or name in self.variances}
        own = local | gaussian if own_starts else local
        self._own = {name: p for name, p in parameters.items() if name in own}
        self._look()
        if not self.view.read().names:
            raise FederationError(
                f"local_parameters={shown(list(local_parameters))} keeps every parameter on the clients; nothing is "
                "left to federate. Match fewer"
            )
        if not set(frozen).issuperset(self.view.read().names):
            self.frozen_names = set(frozen)
            self._look()
        self._local_parameters = {name: parameters[name] for name in self.local_parameters if name in parameters}
        self.buffer_names = [name for name in buffer_names if name not in local]
        self._local_buffers = [name for name in buffer_names if name in local]
        self._kept_buffers = self._local_buffers + (self.buffer_names if buffers == "local" else [])
        self.remember_global()

    def _look(self) -> None:
        """Sort the parameters: federated, kept by clients, frozen."""
        self.view = PosteriorView(self.module, self.local_names | self.frozen_names, self.variances)
        self.frozen = {name: p for name, p in self.parameters.items() if self._aliases[name] in self.frozen_names}
        self._kept_parameters = {name: p for name, p in self._own.items() if name not in self.frozen}

    def join(self, names: Collection[str] = ()) -> bool:
        """Take in frozen parameters that train now or are among ``names``. Return True if any of them is federated."""
        joined = {self._aliases[name] for name, p in self.frozen.items() if p.requires_grad}
        joined |= self.frozen_names.intersection(names)
        if joined:
            self.frozen_names -= joined
            self._look()
            self.remember_global()
        return bool(joined - self.local_names)

    def check_frozen(self) -> None:
        """Raise FederationError if a client has changed what is frozen."""
        for name, p in self.frozen.items():
            if bits(p) != self._prints[name]:
                raise FederationError(
                    f"'{name}' was frozen when the round began, and training changes it. What is frozen stays with the "
                    "module and is not sent: let it require gradients (requires_grad_(True)) and write to it under "
                    "torch.no_grad(), or make it a buffer"
                )

    def digest(self) -> str:
        """Return a digest of the frozen parameters. Empty if none is frozen."""
        shared = {name: bits(p)[1] for name, p in self.frozen.items() if self._aliases[name] not in self.local_names}
        return sha256(repr(sorted(shared.items())).encode()).hexdigest() if shared else ""

    def whole(self, posterior: GaussianPosterior) -> GaussianPosterior:
        """Return ``posterior`` with the frozen parameters."""
        return with_rest(posterior, self.module, self.frozen_names - self.local_names)

    def remember_global(self) -> None:
        """Take the module's present parameters and buffers as the global model."""
        held: Tensors = {name: p.detach() for name, p in self.parameters.items()}
        self.global_parameters = {name: p if name in self.frozen else p.clone() for name, p in held.items()}
        self._prints = {name: bits(p) for name, p in self.frozen.items()}
        self.global_buffers = self._read_buffers([*self.buffer_names, *self._local_buffers])
        self.global_variances = dict(self.variances)

    def has_changed(self) -> bool:
        """Return True if the module does not hold the global model, bit by bit."""
        if any(bits(p) != self._prints[name] for name, p in self.frozen.items()):
            return True
        live = dict(self.module.named_buffers()) if self.global_buffers else {}
        for held, present in ((self.global_parameters, self.parameters), (self.global_buffers, live)):
            for name, tensor in held.items():
                if name not in self.frozen and not torch.equal(tensor, present[name]):
                    return True
        return False

    def load_global(self) -> None:
        """Copy the global model into the module."""
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                if parameter.shape != self.global_parameters[name].shape:  # a client's code has changed it
                    parameter.grad, parameter.data = None, self.global_parameters[name].clone()
                if name not in self.frozen:
                    parameter.copy_(self.global_parameters[name])
        self._write_buffers(self.global_buffers)
        self.variances.update(self.global_variances)

    def load_variances(self, posterior: GaussianPosterior) -> None:
        """Take the variances of ``posterior`` as the module's and the global model's."""
        own = {name: posterior.variance[name] for name in self.variances if name in posterior.variance}
        self.variances.update(own)
        self.global_variances.update(own)

    def set_prior(self, posterior: GaussianPosterior | None) -> None:
        """Make ``posterior`` the prior of the federated parameters. None restores the network's priors."""
        exclude = () if posterior is None else self.local_names | self.frozen_names
        set_prior(self.module, posterior, exclude)
        if self.learned is not None:
            self.learned.set_prior(posterior, exclude)

    def load_posterior(self, posterior: GaussianPosterior, buffers: Mapping[str, Tensor]) -> None:
        """Make ``posterior`` and ``buffers`` the global model, and load it. What is local stays."""
        self.load_global()  # a variance that does not change stays, to the bit; the last client's must not stay
        self.view.load(posterior)
        with torch.no_grad():
            for name in self._local_parameters:
                self.parameters[name].copy_(self.global_parameters[name])
        self._write_buffers({**self.global_buffers, **(load_scale(self.module, buffers) if buffers else {})})
        self.remember_global()

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Inside, other posteriors may be loaded. Afterwards the global model is what it was, bit by bit."""
        before = self.global_parameters, self.global_buffers, self.global_variances
        try:
            yield
        finally:
            self.global_parameters, self.global_buffers, self.global_variances = before
            self.load_global()

    @torch.no_grad()
    def load_client(self, local: Tensors, start: Mapping[str, Tensor] | None = None) -> None:
        """Load the global model, then the means in ``start``, then what the client has kept (:meth:`read_local`)."""
        self.load_global()
        for name, value in self.parameter_names(start).items() if start else ():
            self.parameters[name].copy_(value)
        if local:
            for name, parameter in self._kept_parameters.items():
                if name in local:  # not if an earlier run with other settings has kept less
                    parameter.copy_(local[name])
            self._write_buffers({name: local[name] for name in self._kept_buffers})

    def parameter_names(self, means: Mapping[str, Tensor]) -> Tensors:
        """Return ``means`` of the posterior by the names of the parameters that hold them."""
        if not means:
            return {}
        paths = {id(parameter): path for path, parameter in self.parameters.items()}
        own = {name: paths[id(each.mean)] for name, each in gaussian_parameters(self.module).items()}
        return {own.get(name, name): value for name, value in means.items()}

    def received(self, local: Tensors) -> Tensors:
        """Return the parameters and buffers, not copied, with which a client begins that has kept ``local``."""
        kept = {name: local[name] for name in (*self._kept_parameters, *self._kept_buffers) if name in local}
        return {**self.global_parameters, **self.global_buffers, **kept}

    def with_local(self, posterior: GaussianPosterior, local: Tensors) -> GaussianPosterior:
        """Return a client's ``posterior`` with frozen and ``local`` parameters, of the global model if missing."""
        values, gaussians = {**self.global_parameters, **local}, gaussian_parameters(self.module)
        paths = {id(parameter): path for path, parameter in self.parameters.items()}
        posterior = self.whole(posterior)
        mean, variance = dict(posterior.mean), dict(posterior.variance)
        for name in self.local_names:
            entry = gaussians.get(name)
            mean[name] = values[name if entry is None else paths[id(entry.mean)]]
            variance[name] = torch.zeros_like(mean[name])
            if entry is not None:
                variance[name] = softplus_std(values[paths[id(entry.rho)]]).square()
            elif name in self.variances:
                variance[name] = local.get(variance_of(name), self.global_variances[name])
        whole = GaussianPosterior(mean, variance, posterior.linearised)
        return whole.ordered(PosteriorView(self.module).read().names).clone()

    def anchor(self) -> Tensors:
        """Return the global values of the parameters that are federated, in at least single precision."""
        others = self._local_parameters.keys() | self.frozen.keys()
        return {name: at_least_float32(value) for name, value in self.global_parameters.items() if name not in others}

    def read_posterior(self) -> GaussianPosterior:
        """Return the client's posterior: views of the module's parameters, valid until they change."""
        posterior = self.view.read()
        return posterior if self.learned is None else posterior.marked(self.learned.linearised)

    @property
    def federated_buffers(self) -> Tensors:
        """Global values of the buffers that clients send."""
        return {} if self.policy == "frozen" else {name: self.global_buffers[name] for name in self.buffer_names}

    def read_buffers(self) -> Tensors:
        """Return the buffers that the client sends. None if they are frozen."""
        return {} if self.policy == "frozen" else self._read_buffers(self.buffer_names)

    def read_local(self) -> Tensors:
        """Return what the client keeps for its next round: copies of :meth:`kept_values`."""
        return {name: value.detach().clone() for name, value in self.kept_values().items()}

    def kept_values(self) -> Tensors:
        """Return the parameters, buffers and variances, not copied, that a client starts its next round with."""
        kept: Tensors = {**self._kept_parameters}
        if self._kept_buffers:
            live = dict(self.module.named_buffers())
            kept.update((name, live[name]) for name in self._kept_buffers)
        if self.variances:
            kept |= {variance_of(n): self.variances[n] for n in self._kept_parameters if n in self.variances}
        return kept

    def _read_buffers(self, names: Sequence[str]) -> Tensors:
        live = dict(self.module.named_buffers()) if names else {}
        return {name: live[name].detach().clone() for name in names}

    def _write_buffers(self, values: Mapping[str, Tensor]) -> None:
        """Copy ``values`` into the module's buffers, which keep their dtypes."""
        live = dict(self.module.named_buffers()) if values else {}
        for name, value in values.items():
            write(live[name], value)


def frozen_names(module: nn.Module) -> set[str]:
    """Return the posterior names of parameters of ``module`` that have no tensor which requires gradients."""
    gaussians = gaussian_parameters(module)
    aliases = {id(p): name for name, each in gaussians.items() for p in (each.mean, each.rho)}
    trained = {aliases.get(id(p), name) for name, p in module.named_parameters() if p.requires_grad}
    return set(PosteriorView(module).read().names) - trained


def with_rest(posterior: GaussianPosterior, module: nn.Module, names: Collection[str]) -> GaussianPosterior:
    """Return ``posterior`` with the parameters ``names`` of ``module``, in the module's order."""
    if posterior.mean.keys() >= set(names):
        return posterior
    now = PosteriorView(module).read()
    order = [name for name in now.names if name in names or name in posterior.mean]
    mean = {**{name: now.mean[name] for name in names}, **posterior.mean}
    variance = {**{name: now.variance[name] for name in names}, **posterior.variance}
    return GaussianPosterior(mean, variance, posterior.linearised).ordered(order)


def call_hook(module: object, name: str, *given: Any) -> None:
    """Call the hook ``name`` of a user's module, if it has one, with what is ``given``."""
    hook = getattr(module, name, None)
    if hook is not None:
        hook(*given)


def bits(tensor: Tensor) -> tuple[int, int]:
    """Return a tensor's address and the sum of its bits, a fingerprint of its values that costs one read."""
    size, flat = tensor.element_size(), tensor.detach().reshape(-1)
    is_whole = flat.numel() * size % 8 == 0 == flat.storage_offset() * size % 8
    # only sums of these are as fast as memory
    words = torch.int64 if is_whole else {1: torch.int8, 2: torch.int16, 4: torch.int32}[size]
    return tensor.data_ptr(), int(flat.view(words).sum())


def federated_buffer_names(module: nn.Module) -> list[str]:
    """Return the names of persistent buffers, but for noise and priors of bayesian-torch, and for scales."""
    persistent = module.state_dict(keep_vars=True)
    kinds = BaseVariationalLayer_ | FederatedScaler
    layers = [(path, layer) for path, layer in module.named_modules() if isinstance(layer, kinds)]
    own = {f"{path}.{name}" if path else name for path, layer in layers for name in layer._buffers}
    return [name for name, _ in module.named_buffers() if name in persistent and name not in own]


def _matches(
    patterns: Sequence[str], parameters: Mapping[str, Tensor], aliases: Mapping[str, str], buffers: Sequence[str]
) -> list[str]:
    """Return the names of parameters and buffers that match a pattern by their name or posterior name."""
    found: list[str] = []
    for pattern in patterns:
        every = [*parameters, *buffers]
        names = [n for n in every if fnmatchcase(n, pattern) or fnmatchcase(aliases.get(n, n), pattern)]
        if not names:
            why = nearest(pattern, every)
            raise FederationError(f"local_parameters pattern '{pattern}' matches no parameter or buffer: {why}")
        found += [name for name in names if name not in found]
    return found
