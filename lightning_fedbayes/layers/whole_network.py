"""Operations on a whole network: its KL divergence, another prior, the posterior mean, another estimator."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager

import torch
from bayesian_torch.layers.base_variational_layer import BaseVariationalLayer_
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function

from lightning_fedbayes.core.errors import ConversionError, PosteriorError, check_kind, check_strings, listed
from lightning_fedbayes.core.posterior import GaussianPosterior, check_posterior
from lightning_fedbayes.layers.base import BayesianAffine, BayesianLayer, check_estimator, is_exporting, sum_kl
from lightning_fedbayes.layers.dropout import MCDropout
from lightning_fedbayes.layers.functional import Estimator
from lightning_fedbayes.layers.kl import KLWatch
from lightning_fedbayes.layers.posterior_view import gaussian_parameters, gaussian_parameters_of
from lightning_fedbayes.layers.priors import NormalPrior


def kl_divergence(module: nn.Module) -> Tensor:
    r"""KL(q‖p) of a network from its priors, **summed** over all Gaussian parameters, in nats.

    The ELBO of n examples is the summed log-likelihood minus this; the loss per example is the mean negative
    log-likelihood plus KL/n. A tied layer counts once; a bayesian-torch layer counts with the sum over its parameters
    and with its ``prior_variance`` as a variance, which its own ``kl_loss`` does not do.

    A ``TorchFunctionMode`` can override it, as it can torch's own functions.

    Returns: scalar, 0 for a network without Gaussian parameters.

    >>> kl_divergence(nn.Linear(2, 1))
    tensor(0.)
    """
    KLWatch.note()
    if has_torch_function((module,)):
        return handle_torch_function(kl_divergence, (module,), module)
    parameters = gaussian_parameters(module)
    if not parameters:
        return torch.zeros((), device=next((p.device for p in module.parameters()), None))
    return sum_kl(parameters.values())


@torch.no_grad()
def set_prior(module: nn.Module, posterior: GaussianPosterior | None, exclude: Collection[str] = ()) -> None:
    """Make ``posterior`` the prior of all Gaussian parameters of ``module``; None brings the layers' own priors back.

    The tensors are copied, so ``posterior`` may be a view of the module. bayesian-torch layers get mean and standard
    deviation in their prior buffers, as their own ``kl_loss`` reads them.

    Args:
        module: any network.
        posterior: has every Gaussian parameter of ``module``, with positive variance; other names are ignored.
        exclude: names of Gaussian parameters that keep the prior they have.

    Raises:
        PosteriorError: a Gaussian parameter is missing, has another shape, or has a variance of 0: the KL divergence
            from a point mass is infinite.
    """
    exclude = check_strings("exclude", exclude, "give names of parameters", error=PosteriorError)
    parameters = {name: each for name, each in gaussian_parameters(module).items() if name not in exclude}
    if posterior is not None:
        check_posterior(posterior, "posterior")
    if posterior is None:
        for parameter in parameters.values():
            parameter.replace_prior(None)
        return
    priors = {}
    for name, parameter in parameters.items():
        mean, variance = posterior.mean.get(name), posterior.variance.get(name)
        if mean is None or variance is None:
            raise PosteriorError(
                f"the posterior has no '{name}', so it cannot be its prior; it has {listed(posterior.names)}"
            )
        if mean.shape != parameter.mean.shape:
            raise PosteriorError(
                f"'{name}' has shape {tuple(mean.shape)} in the posterior but "
                f"{tuple(parameter.mean.shape)} in the module; give a prior of the same shape"
            )
        std = variance.to(parameter.mean).sqrt()
        if not bool((std > 0).all()):
            raise PosteriorError(
                f"'{name}' has variance 0 at {int((std <= 0).sum())} of {std.numel()} entries of the posterior: the KL "
                "divergence from a point mass is infinite; fuse with a rule that keeps a variance, or keep the prior"
            )
        priors[name] = NormalPrior(mean.to(parameter.mean, copy=True), std)
    for name, parameter in parameters.items():
        parameter.replace_prior(priors[name])


@contextmanager
def evaluation_mode(module: nn.Module) -> Iterator[None]:
    """Inside, ``module`` is in evaluation mode; afterwards each of its parts is in the mode that it was in.

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

    A bayesian-torch layer has no such mode; it runs with σ = 0, which gives the same output at its usual cost.

    Raises:
        ConversionError: a network with bayesian-torch layers is exported or traced.

    >>> layer = MCDropout(0.5)
    >>> with mean_only(layer):
    ...     layer(torch.ones(3))
    tensor([1., 1., 1.])
    """
    check_kind("module", module, nn.Module, "give a torch.nn.Module", error=ConversionError)
    switched = [m for m in module.modules() if isinstance(m, BayesianLayer | MCDropout)]
    before = [m.mean_only for m in switched]
    foreign = [
        each
        for m in module.modules()
        if isinstance(m, BaseVariationalLayer_) and not isinstance(m, BayesianLayer)
        for each in gaussian_parameters_of(m)
    ]
    if foreign and is_exporting():  # σ = 0 is put beside their parameters, where torch cannot record it
        raise ConversionError(
            f"{type(foreign[0].layer).__name__} is a layer of bayesian-torch, which cannot be exported: build the "
            "network with torch's own layers and load fb.read_posterior(module).mean into it"
        )
    rhos = [each.layer._parameters[each.rho_name] for each in foreign]
    try:
        for m in switched:
            m.mean_only = True
        for each in foreign:
            zero_std = torch.full((), -torch.inf, dtype=each.rho.dtype, device=each.rho.device)
            each.layer._parameters[each.rho_name] = zero_std.expand(each.rho.shape)  # pyright: ignore
        yield
    finally:
        for m, value in zip(switched, before):
            m.mean_only = value
        for each, rho in zip(foreign, rhos):
            each.layer._parameters[each.rho_name] = rho


@contextmanager
def use_estimator(module: nn.Module, name: Estimator) -> Iterator[None]:
    """Let the linear and convolutional layers of ``module`` use the estimator ``name`` inside the context.

    :class:`~lightning_fedbayes.layers.Reparameterized` modules and bayesian-torch layers have only one estimator and
    keep it.

    Args:
        module: any network.
        name: "reparameterization", "local_reparameterization" or "flipout".

    Raises:
        ConversionError: ``name`` is no estimator.
    """
    name = check_estimator(name)
    check_kind("module", module, nn.Module, "give a torch.nn.Module", error=ConversionError)
    switched = [m for m in module.modules() if isinstance(m, BayesianAffine)]
    before: list[Estimator] = [m.estimator for m in switched]
    try:
        for m in switched:
            m.estimator = name
        yield
    finally:
        for m, value in zip(switched, before):
            m.estimator = value
