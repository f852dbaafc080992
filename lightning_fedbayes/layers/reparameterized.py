"""Wrapper that gives any module Gaussian parameters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from bayesian_torch.layers.base_variational_layer import BaseVariationalLayer_
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import Parameter

from lightning_fedbayes.core.errors import ConversionError, check_kind
from lightning_fedbayes.layers.base import RELATIVE_STD, BayesianLayer, GaussianParameter, draw, refuse_export
from lightning_fedbayes.layers.functional import inverse_softplus_std
from lightning_fedbayes.layers.priors import Prior, check_std, choose_prior


class Reparameterized(BayesianLayer):
    r"""Wraps a module so that every call samples its parameters, :math:`w = \mu + \sigma \odot \epsilon`.

    When to use it: for a module without a Bayesian layer of its kind (LSTM, embedding, attention, normalisation, a
    whole block). The parameters of ``module`` are the means, so its pretrained ``state_dict`` loads into ``.module``.
    Parameters that are frozen when it is wrapped stay deterministic, buffers stay buffers. The estimator is
    reparameterisation: the batch shares one weight sample, and an LSTM keeps it for a whole sequence. It works under
    ``torch.func.vmap`` if the module does; ``nn.LSTM``, ``nn.GRU`` and ``nn.RNN`` do not.

    Args:
        module: the module to wrap; it is kept, not copied.
        prior_mean, prior_variance, prior_std, prior: as in
            :class:`~lightning_fedbayes.layers.LinearReparameterization`.
        posterior_std: initial σ. None: for each parameter 0.1 × the root mean square of its values (of all the
            module's values where it is all zero).

    Raises:
        ConversionError: no parameter to sample, a Bayesian layer inside, lazy parameters, or an impossible prior or σ.

    >>> lstm = Reparameterized(nn.LSTM(3, 4, batch_first=True))
    >>> output, (hidden, cell) = lstm(torch.zeros(2, 5, 3))
    >>> output.shape
    torch.Size([2, 5, 4])
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        prior_mean: float = 0.0,
        prior_variance: float | None = None,
        prior_std: float | None = None,
        prior: Prior | None = None,
        posterior_std: float | None = None,
    ) -> None:
        super().__init__()
        prior = choose_prior(prior_mean, prior_variance, prior_std, prior)
        check_kind("module", module, nn.Module, "give a torch.nn.Module", error=ConversionError)
        if any(isinstance(p, nn.parameter.UninitializedParameter) for p in module.parameters()):
            raise ConversionError(f"{type(module).__name__} is lazy: run it on one batch before it is wrapped")
        if any(isinstance(inner, BaseVariationalLayer_) for inner in module.modules()):
            raise ConversionError(f"{type(module).__name__} is or contains a Bayesian layer: it would be sampled twice")
        means = {name: p for name, p in module.named_parameters() if p.requires_grad and p.is_floating_point()}
        if not means:
            raise ConversionError(f"{type(module).__name__} has no trainable floating-point parameter to sample")
        if posterior_std is not None:
            check_std("posterior_std", posterior_std)
        self.module = module
        fallback = root_mean_square(torch.cat([mean.detach().flatten() for mean in means.values()])) or 1.0
        for name, mean in means.items():
            std = posterior_std or RELATIVE_STD * (root_mean_square(mean) or fallback)
            rho = inverse_softplus_std(torch.full_like(mean, std, requires_grad=False))
            self.register_parameter(rho_name(name), Parameter(rho))
            self.priors[f"module.{name}"] = prior

    def gaussian_parameters(self) -> Iterator[GaussianParameter]:
        """Every sampled parameter of the module."""
        for path in self.priors:
            name = path.removeprefix("module.")
            owner, _, attribute = name.rpartition(".")
            yield GaussianParameter(self, path, self.module.get_submodule(owner), attribute, rho_name(name))

    def mean_layer(self) -> nn.Module:
        """The wrapped module, whose parameters are the means."""
        return self.module

    def forward(self, *args: Any, return_kl: bool = False, **kwargs: Any) -> Any:
        """Return the module's output at sampled parameters, or at their means where the layer is mean-only."""
        if self.mean_only:
            output = self.module(*args, **kwargs)
        else:
            refuse_export(self)
            parameters = list(self.gaussian_parameters())
            draws = draw([each.mean for each in parameters], [each.rho for each in parameters])
            names = [each.path.removeprefix("module.") for each in parameters]
            output = functional_call(self.module, dict(zip(names, draws)), args, kwargs)
        return (output, self.kl_loss()) if return_kl else output


def rho_name(name: str) -> str:
    """Attribute that holds the ρ of the inner parameter ``name``; an attribute name has no dots."""
    return f"rho_{name.replace('.', '/')}"


def root_mean_square(values: Tensor) -> float:
    """Square root of the mean of the squares; 0 for no values."""
    return float(values.detach().float().square().mean().sqrt()) if values.numel() else 0.0
