"""A whole network: its Gaussian posterior, KL divergence, prior and posterior mean.

This is the only place where (mu, rho) becomes (mean, variance) and back.
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
from bayesian_torch.layers.base_variational_layer import BaseVariationalLayer_
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.overrides import handle_torch_function, has_torch_function

from lightning_fedbayes.core.errors import ConversionError, PosteriorError, check_kind, check_strings, listed, nearest
from lightning_fedbayes.core.posterior import GaussianPosterior, check_posterior, zeros_like
from lightning_fedbayes.layers import base
from lightning_fedbayes.layers.base import BayesianLayer, GaussianParameter
from lightning_fedbayes.layers.convert import MCDropout
from lightning_fedbayes.layers.functional import inverse_softplus_std
from lightning_fedbayes.layers.kl import KLWatch
from lightning_fedbayes.layers.priors import NormalPrior, Prior

T = TypeVar("T")

KEPT = "_replaced"
"""Suffix of the buffers that keep the prior of a bayesian-torch layer while another one is in force."""


@dataclass(frozen=True)
class ForeignGaussianParameter(GaussianParameter):
    """A Gaussian parameter tensor of a bayesian-torch layer, with a prior in two buffers.

    The buffer ``prior_*_sigma`` holds a variance, which bayesian-torch's KL takes for a standard deviation. While a
    replaced prior is in force, it holds the *standard deviation*, so that ``kl_loss`` has the right prior too.
    """

    @property
    def _buffers(self) -> tuple[str, str]:
        stem = "prior_bias" if self.path == "bias" else "prior_weight"
        return f"{stem}_mu", f"{stem}_sigma"

    @property
    def prior(self) -> Prior:
        """The prior in force, read from the buffers."""
        mu, sigma = (self.layer._buffers[name] for name in self._buffers)
        assert mu is not None
        assert sigma is not None
        if f"{self._buffers[0]}{KEPT}" in self.layer._buffers:
            return NormalPrior(mu, sigma)
        if sigma.shape != mu.shape:  # ConvTranspose*Flipout of 0.5.0 allocates it with the channels swapped
            return NormalPrior(mu, float(self.layer.prior_variance) ** 0.5)  # pyright: ignore[reportArgumentType]
        return NormalPrior(mu, sigma.sqrt())

    def replace_prior(self, prior: Prior | None) -> None:
        """Put a :class:`NormalPrior` in force through the buffers. None restores the layer's prior."""
        kept = [f"{name}{KEPT}" for name in self._buffers]
        if prior is None:
            for name, copy in zip(self._buffers, kept):
                if copy in self.layer._buffers:
                    self.layer._buffers[name] = self.layer._buffers.pop(copy)
                    self.layer._non_persistent_buffers_set.discard(copy)
            return
        if not isinstance(prior, NormalPrior):
            raise PosteriorError(f"a bayesian-torch layer takes a NormalPrior only, not {type(prior).__name__}")
        for name, copy, value in zip(self._buffers, kept, (prior.mean, prior.std)):
            if copy not in self.layer._buffers:
                self.layer.register_buffer(copy, self.layer._buffers[name], persistent=False)
                self.layer.register_state_dict_post_hook(store_own_prior)
            self.layer._buffers[name] = torch.as_tensor(value, device=self.mean.device)


def store_own_prior(layer: nn.Module, state: dict, prefix: str, metadata: object) -> None:
    """Store the prior that a bayesian-torch layer had in its ``state_dict`` while another one is in force."""
    for name, value in layer._buffers.items():
        usual = name.removesuffix(KEPT)
        if usual != name and f"{prefix}{usual}" in state:
            state[f"{prefix}{usual}"] = value


def gaussian_parameters_of(layer: BaseVariationalLayer_) -> Iterator[GaussianParameter]:
    """The Gaussian parameters that ``layer`` itself holds, in definition order. Ours or bayesian-torch's."""
    if isinstance(layer, BayesianLayer):
        yield from layer.gaussian_parameters()
        return
    for name, parameter in layer._parameters.items():
        path = name.removeprefix("mu_")
        if path != name and parameter is not None and f"rho_{path}" in layer._parameters:
            yield ForeignGaussianParameter(layer, path, layer, name, f"rho_{path}")


def gaussian_parameters(module: nn.Module) -> dict[str, GaussianParameter]:
    """Every Gaussian parameter of ``module`` by its name in the posterior. A tied one appears once.

    The name is the dotted path of the mean without ``mu_``: "fc1.weight" for the parameter "fc1.mu_weight",
    "lstm.module.weight_ih_l0" inside a :class:`~lightning_fedbayes.layers.Reparameterized`. Two parameters with one
    name raise PosteriorError.
    """
    parameters: dict[str, GaussianParameter] = {}
    seen: set[tuple[int, int]] = set()
    check_kind("module", module, nn.Module, "give a torch.nn.Module", error=PosteriorError)
    for path, layer in module.named_modules():
        if not isinstance(layer, BaseVariationalLayer_):
            continue
        for parameter in gaussian_parameters_of(layer):
            tensors = id(parameter.mean), id(parameter.rho)
            if tensors not in seen:
                seen.add(tensors)
                add(parameters, f"{path}.{parameter.path}" if path else parameter.path, parameter)
    return parameters


class PosteriorView:
    """A module's parameters as one Gaussian posterior. Build it once, read and load it every round.

    Gaussian parameters have their mean and variance. Every other floating-point parameter is a point mass, with
    variance 0. Tied parameters appear once, buffers not at all.

    Args:
        module: any network, with layers of this package, of bayesian-torch and deterministic ones.
        exclude: posterior names to leave out, such as those that stay with the client.
        variances: name → variance of parameters outside of Bayesian layers. :meth:`load` replaces the entries.

    Raises PosteriorError: two parameters would have one name, one is not initialised (``nn.LazyLinear``), or
    ``exclude`` names a parameter that does not exist.

    >>> view = PosteriorView(nn.Linear(2, 1))
    >>> view.read().names
    ('weight', 'bias')
    """

    def __init__(
        self, module: nn.Module, exclude: Collection[str] = (), variances: dict[str, Tensor] | None = None
    ) -> None:
        gaussian = gaussian_parameters(module)
        lazy = [name for name, parameter in module.named_parameters() if is_lazy(parameter)]
        if lazy:
            why = "parameters that are not initialised have no posterior"
            raise PosteriorError(f"{why}: {listed(lazy)}; call the network with a batch first")
        exclude = check_strings("exclude", exclude, "give names of parameters", error=PosteriorError)
        by_mean = {id(each.mean): (name, each) for name, each in gaussian.items()}
        seen = {id(each.rho) for each in gaussian.values()}
        entries: dict[str, GaussianParameter | tuple[nn.Module, str]] = {}
        for path, owner in module.named_modules():
            for attribute, parameter in owner._parameters.items():
                if parameter is None or id(parameter) in seen or not parameter.is_floating_point():
                    continue
                seen.add(id(parameter))
                if id(parameter) in by_mean:
                    add(entries, *by_mean[id(parameter)])
                else:
                    add(entries, f"{path}.{attribute}" if path else attribute, (owner, attribute))
        for name in exclude:
            if name not in entries:
                raise PosteriorError(f"cannot exclude '{name}': no such parameter; {nearest(name, entries)}")
        self._entries = {name: entry for name, entry in entries.items() if name not in exclude}
        plain = {name: entry for name, entry in self._entries.items() if not isinstance(entry, GaussianParameter)}
        self._variances = {} if variances is None else variances
        self._plain = plain if len(plain) == len(self._entries) and not self._variances else None

    def read(self) -> GaussianPosterior:
        """The posterior now: means are detached *views* of the live parameters, variances are new tensors."""
        if self._plain is not None:
            return GaussianPosterior.point_mass({name: parameter_of(at).detach() for name, at in self._plain.items()})
        mean, variance = {}, {}
        for name, entry in self._entries.items():
            mean[name] = parameter_of(entry).detach()
            if isinstance(entry, GaussianParameter):
                with torch.no_grad():
                    variance[name] = entry.variance
            else:
                variance[name] = self._variances[name] if name in self._variances else zeros_like(mean[name])
        return GaussianPosterior(mean, variance)

    @torch.no_grad()
    def load(self, posterior: GaussianPosterior) -> None:
        """Write ``posterior`` into the parameters, in place. Loading an unchanged ``read()`` changes no bit.

        A parameter keeps its dtype. A Gaussian parameter of variance 0 takes the smallest σ that layers represent
        (1e-19 in float32). Names or shapes that differ from the module's raise PosteriorError, but frozen parameters,
        which federations leave out, may be missing, and stay as they are.
        """
        check_posterior(posterior, "posterior")
        own, named = self._entries, posterior.mean
        entries = {name: each for name, each in own.items() if name in named or parameter_of(each).requires_grad}
        if named.keys() != entries.keys():
            missing = [name for name in entries if name not in named]
            extra = [name for name in named if name not in own]
            what = f"it lacks {listed(missing) or 'nothing'} and has {listed(extra) or 'nothing'} that the module lacks"
            remedy = "read it from this network with the same exclude"
            raise PosteriorError(f"the posterior is not of this module: {what}; {remedy}")
        for name, entry in entries.items():
            if posterior.mean[name].shape != (shape := parameter_of(entry).shape):
                shapes = f"{tuple(posterior.mean[name].shape)} in the posterior but {tuple(shape)} in the module"
                raise PosteriorError(f"'{name}' has shape {shapes}; read it from a network of the same sizes")
        for name, entry in entries.items():
            parameter_of(entry).copy_(posterior.mean[name])
            if isinstance(entry, GaussianParameter):
                rho, variance = entry.rho, posterior.variance[name].to(entry.rho)
                # inverting softplus rounds: rho stays where the variance does
                rho.copy_(torch.where(entry.variance == variance, rho, inverse_softplus_std(variance.sqrt())))
            elif name in self._variances:
                self._variances[name] = posterior.variance[name].to(parameter_of(entry), copy=True)


def read_posterior(module: nn.Module, exclude: Collection[str] = ()) -> GaussianPosterior:
    """The posterior of ``module`` now. See :meth:`PosteriorView.read`."""
    return PosteriorView(module, exclude).read()


def load_posterior(module: nn.Module, posterior: GaussianPosterior, exclude: Collection[str] = ()) -> None:
    """Write ``posterior`` into the parameters of ``module``, in place. See :meth:`PosteriorView.load`."""
    PosteriorView(module, exclude).load(posterior)


def parameter_paths(network: nn.Module) -> dict[str, str]:
    """Name in the posterior → path of the parameter that holds the mean."""
    paths = {name: name for name, _ in network.named_parameters()}
    objects = {id(parameter): name for name, parameter in network.named_parameters()}
    for name, parameter in gaussian_parameters(network).items():
        paths[name] = objects[id(parameter.mean)]
    return paths


def parameter_of(entry: GaussianParameter | tuple[nn.Module, str]) -> Tensor:
    """Return the live parameter, or mean, of ``entry``. A tuple is of a module and the name of its attribute."""
    parameter = entry.mean if isinstance(entry, GaussianParameter) else entry[0]._parameters[entry[1]]
    assert parameter is not None
    return parameter


def add(entries: dict[str, T], name: str, entry: T) -> None:
    """Put ``entry`` under ``name``, or raise PosteriorError if that name is taken."""
    if name in entries:
        raise PosteriorError(f"two parameters would both be called '{name}' in the posterior; rename one of them")
    entries[name] = entry


def kl_divergence(module: nn.Module) -> Tensor:
    r"""KL(q‖p) of a network from its priors, **summed** over all Gaussian parameters, in nats.

    The loss per example is the mean negative log-likelihood plus KL/n. A tied layer counts once. A bayesian-torch layer
    counts with the sum over its parameters and with its ``prior_variance`` as a variance, unlike in its ``kl_loss``.
    A ``TorchFunctionMode`` can override it.

    >>> kl_divergence(nn.Linear(2, 1))
    tensor(0.)
    """
    KLWatch.note()
    if has_torch_function((module,)):
        return handle_torch_function(kl_divergence, (module,), module)
    parameters = gaussian_parameters(module)
    if not parameters:
        return torch.zeros((), device=next((p.device for p in module.parameters()), None))
    return base.sum_kl(parameters.values())


@torch.no_grad()
def set_prior(module: nn.Module, posterior: GaussianPosterior | None, exclude: Collection[str] = ()) -> None:
    """Make ``posterior`` the prior of all Gaussian parameters of ``module``. None restores the layers' priors.

    The tensors are copied, so ``posterior`` may be a view of the module.

    Args:
        module: any network.
        posterior: has every Gaussian parameter of ``module``, in its shape, with positive variance, else
            PosteriorError. Other names are ignored.
        exclude: names of Gaussian parameters that keep their prior.
    """
    exclude = check_strings("exclude", exclude, "give names of parameters", error=PosteriorError)
    parameters = {name: each for name, each in gaussian_parameters(module).items() if name not in exclude}
    if posterior is None:
        for parameter in parameters.values():
            parameter.replace_prior(None)
        return
    check_posterior(posterior, "posterior")
    priors = {}
    for name, parameter in parameters.items():
        mean, variance = posterior.mean.get(name), posterior.variance.get(name)
        if mean is None or variance is None:
            raise PosteriorError(f"the posterior has no '{name}' for a prior; it has {listed(posterior.names)}")
        if mean.shape != parameter.mean.shape:
            shapes = f"{tuple(mean.shape)} in the posterior but {tuple(parameter.mean.shape)} in the module"
            raise PosteriorError(f"'{name}' has shape {shapes}; give a prior of the same shape")
        std = variance.to(parameter.mean).sqrt()
        if not bool((std > 0).all()):
            where = f"{int((std <= 0).sum())} of {std.numel()} entries of the posterior"
            remedy = "which makes the KL divergence infinite; fuse with a rule that keeps a variance, or keep the prior"
            raise PosteriorError(f"'{name}' has variance 0 at {where}, {remedy}")
        priors[name] = NormalPrior(mean.to(parameter.mean, copy=True), std)
    for name, parameter in parameters.items():
        parameter.replace_prior(priors[name])


@contextmanager
def evaluation_mode(module: nn.Module) -> Iterator[None]:
    """Inside, ``module`` is in evaluation mode. Afterwards each of its parts is in its earlier mode.

    >>> network = nn.Sequential(nn.Dropout(), nn.BatchNorm1d(2).eval())
    >>> with evaluation_mode(network):
    ...     pass
    >>> network[0].training, network[1].training
    (True, False)
    """
    check_kind("module", module, nn.Module, "give a torch.nn.Module", error=ConversionError)
    training = [each for each in module.modules() if each.training]
    module.eval()
    try:
        yield
    finally:
        for each in training:
            each.training = True


@contextmanager
def mean_only(module: nn.Module) -> Iterator[None]:
    """Run ``module`` at its posterior mean inside the context: no noise, no dropout, the cost of a deterministic one.

    A bayesian-torch layer runs with σ = 0, at its usual cost. Exporting it raises ConversionError.

    >>> layer = MCDropout(0.5)
    >>> with mean_only(layer):
    ...     layer(torch.ones(3))
    tensor([1., 1., 1.])
    """
    check_kind("module", module, nn.Module, "give a torch.nn.Module", error=ConversionError)
    switched = [(m, m.mean_only) for m in module.modules() if isinstance(m, BayesianLayer | MCDropout)]
    others = [m for m in module.modules() if isinstance(m, BaseVariationalLayer_) and not isinstance(m, BayesianLayer)]
    foreign = [each for m in others for each in gaussian_parameters_of(m)]
    if foreign and base.is_exporting():  # torch cannot record σ = 0, which is not a parameter
        remedy = "build the network with torch's layers and load fb.read_posterior(module).mean into it"
        name = type(foreign[0].layer).__name__
        raise ConversionError(f"{name} is a layer of bayesian-torch, which cannot be exported: {remedy}")
    rhos = [each.layer._parameters[each.rho_name] for each in foreign]
    try:
        for each in foreign:
            zero_std = torch.full((), -torch.inf, dtype=each.rho.dtype, device=each.rho.device)
            each.layer._parameters[each.rho_name] = zero_std.expand(each.rho.shape)  # pyright: ignore
        for each, _ in switched:
            each.mean_only = True
        yield
    finally:
        for each, before in switched:
            each.mean_only = before
        for each, rho in zip(foreign, rhos):
            each.layer._parameters[each.rho_name] = rho
