"""A network at its posterior mean, without layers of this package, for export by any tool."""

import copy
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from bayesian_torch.layers.base_variational_layer import BaseVariationalLayer_
from torch import Tensor, nn

from lightning_fedbayes.core.errors import ConversionError, PosteriorError, check_kind, nearest
from lightning_fedbayes.core.posterior import GaussianPosterior
from lightning_fedbayes.core.private_torch import has_forward_hook
from lightning_fedbayes.layers import BayesianLayer, MCDropout
from lightning_fedbayes.layers.convert import remove_mc_dropout
from lightning_fedbayes.layers.posterior_view import parameter_paths
from lightning_fedbayes.metrics.likelihoods import Gaussian, said_by
from lightning_fedbayes.modules.bayesian_module import BayesianModule, LikelihoodModule
from lightning_fedbayes.modules.head import HeadModule
from lightning_fedbayes.modules.posterior_predictive import PosteriorPredictive
from lightning_fedbayes.modules.sources.curvature import KroneckerPosterior


def mean_network(module: nn.Module, posterior: GaussianPosterior | KroneckerPosterior | None = None) -> nn.Module:
    r"""Return a copy of ``module`` at its posterior mean without layers of this package, in evaluation mode.

    .. math:: x \mapsto f(x; \mathrm E_q[\theta])

    Bayesian layers become torch's, a :class:`~lightning_fedbayes.layers.Reparameterized` the module that it wraps, and
    Monte Carlo dropout goes. So the ``state_dict`` has the names of the network before conversion, and loads where this
    package is not installed. Tied means stay tied.

    When to use it: to export a network (ONNX, ``torch.export``, another framework) or its weights. A forward hook
    converts outputs to the units of the targets. A ``state_dict`` gives the units of training.

    Args:
        module: a network. A :class:`BayesianModule` or a :class:`PosteriorPredictive`, for its network. A
            :class:`HeadModule`, for backbone and head, or any other module, copied whole.
        posterior: of the parameters of ``module``, such as ``federation.posterior_of(client)``. Parameters that it does
            not name keep their value. None: the module's values, or the posterior of a :class:`PosteriorPredictive`.

    Raises:
        ConversionError: a layer of bayesian-torch, which outputs a pair. A Bayesian layer with hooks, which would be
            lost, or a layer of your own without ``mean_layer``.
        PosteriorError: the posterior is of another module.

    >>> from lightning_fedbayes import bayesianize
    >>> mean_network(bayesianize(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), last=1))
    Sequential(
      (0): Linear(in_features=4, out_features=8, bias=True)
      (1): ReLU()
      (2): Linear(in_features=8, out_features=2, bias=True)
    )
    """
    check_kind("module", module, nn.Module, "give a torch.nn.Module", error=ConversionError)
    kinds = GaussianPosterior | KroneckerPosterior | None
    check_kind("posterior", posterior, kinds, "give the posterior of this module", error=PosteriorError)
    if isinstance(module, HeadModule):
        module = nn.Sequential(module.network, module.fitted.linear())
    elif isinstance(module, PosteriorPredictive):
        module, posterior = module.network, module.posterior if posterior is None else posterior
    copied = copy.deepcopy(module)
    if posterior is not None:
        _load_means(copied, posterior.mean)
        if isinstance(posterior, KroneckerPosterior):
            copied.load_state_dict(posterior.buffers, strict=False)
    known = said_by(copied) if isinstance(copied, LikelihoodModule) else None
    if isinstance(copied, BayesianModule) and type(copied).forward is BayesianModule.forward:
        copied = copied.network
    replaced = {id(layer): _deterministic(name, layer) for name, layer in copied.named_modules()}
    for parent in list(copied.modules()):
        for attribute, child in parent._modules.items():
            if child is not None:
                parent._modules[attribute] = replaced[id(child)]
    made = replaced[id(copied)].eval()
    if isinstance(known, Gaussian) and known.units is not None and not known.in_outputs:
        made.register_forward_hook(partial(_in_units, known))
    return made


def _in_units(likelihood: Gaussian, network: nn.Module, inputs: Any, outputs: Tensor) -> Tensor:
    """Convert a network's outputs to the units of the targets, as a forward hook."""
    return likelihood.means(outputs)


def _deterministic(name: str, layer: nn.Module) -> nn.Module:
    """Return the replacement of ``layer``: the layer, unless it draws."""
    if isinstance(layer, MCDropout):
        return nn.Identity()
    remove_mc_dropout(layer)
    if not isinstance(layer, BaseVariationalLayer_):
        return layer
    kind = type(layer).__name__
    if not isinstance(layer, BayesianLayer):
        what = f"'{name}' is a {kind} of bayesian-torch, which outputs a pair with the KL divergence"
        remedy = "build the network with torch's own layers and load fb.read_posterior(module).mean into it"
        raise ConversionError(f"{what}: {remedy}")
    if has_forward_hook(layer):
        raise ConversionError(f"'{name}' ({kind}) has hooks, which would be lost: remove them, and register them again")
    return layer.mean_layer()


@torch.no_grad()
def _load_means(module: nn.Module, means: Mapping[str, Tensor]) -> None:
    paths, parameters = parameter_paths(module), dict(module.named_parameters())
    for name, mean in means.items():
        if name not in paths:
            raise PosteriorError(f"the module has no parameter '{name}' of the posterior; {nearest(name, paths)}")
        parameter = parameters[paths[name]]
        if parameter.shape != mean.shape:
            what = f"'{name}' has shape {tuple(mean.shape)} in the posterior but {tuple(parameter.shape)} in the module"
            raise PosteriorError(f"{what}; give the posterior of this module")
        parameter.copy_(mean)
