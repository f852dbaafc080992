"""The KL divergence of a whole network, and the exchange of its priors."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function

from lightning_fedbayes.errors import PosteriorError
from lightning_fedbayes.layers.base import sum_kl
from lightning_fedbayes.layers.priors import NormalPrior
from lightning_fedbayes.layers.sites import gaussian_sites
from lightning_fedbayes.posterior import GaussianPosterior


def kl_divergence(module: nn.Module) -> Tensor:
    r"""KL(q‖p) of a network from its priors, **summed** over all Gaussian parameters, in nats.

    The ELBO of n examples is the summed log-likelihood minus this; the loss per example is the mean negative
    log-likelihood plus KL/n. A tied layer counts once; a bayesian-torch layer counts with the sum over its parameters
    and with its ``prior_variance`` as a variance, which its own ``kl_loss`` does not do.

    A ``TorchFunctionMode`` can override it, as torch's own functions.

    Returns: scalar, 0 for a network without Gaussian parameters.

    >>> kl_divergence(nn.Linear(2, 1))
    tensor(0.)
    """
    if has_torch_function((module,)):
        return handle_torch_function(kl_divergence, (module,), module)
    sites = gaussian_sites(module)
    if not sites:
        return torch.zeros((), device=next((p.device for p in module.parameters()), None))
    return sum_kl(sites.values())


@torch.no_grad()
def set_prior(module: nn.Module, posterior: GaussianPosterior | None, exclude: Collection[str] = ()) -> None:
    """Make ``posterior`` the prior of every Gaussian site of ``module``, or bring the layers' own priors back (None).

    The tensors are copied, so ``posterior`` may be a view of the module. bayesian-torch layers get mean and standard
    deviation in their prior buffers, as their own ``kl_loss`` reads them.

    Args:
        module: any network.
        posterior: has every Gaussian site of ``module``, with positive variance; other names are ignored.
        exclude: names of sites that keep the prior they have.

    Raises:
        PosteriorError: a site is missing, has another shape, or has a variance of 0: the KL divergence from a point
            mass is infinite.
    """
    sites = {name: site for name, site in gaussian_sites(module).items() if name not in exclude}
    if posterior is None:
        for site in sites.values():
            site.replace_prior(None)
        return
    priors = {}
    for name, site in sites.items():
        mean, variance = posterior.mean.get(name), posterior.variance.get(name)
        if mean is None or variance is None:
            raise PosteriorError(f"the posterior has no '{name}', so it cannot be its prior; it has "
                                 f"{', '.join(posterior.names)}")
        if mean.shape != site.mean.shape:
            raise PosteriorError(f"'{name}' has shape {tuple(mean.shape)} in the posterior but "
                                 f"{tuple(site.mean.shape)} in the module; a prior must have the site's shape")
        std = variance.to(site.mean).sqrt()
        if not bool((std > 0).all()):
            raise PosteriorError(
                f"'{name}' has variance 0 at {int((std <= 0).sum())} of {std.numel()} entries of the posterior: the KL "
                "divergence from a point mass is infinite; fuse with a rule that keeps a variance, or keep the prior"
            )
        priors[name] = NormalPrior(mean.to(site.mean, copy=True), std)
    for name, site in sites.items():
        site.replace_prior(priors[name])
