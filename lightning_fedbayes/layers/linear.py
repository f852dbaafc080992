"""Bayesian linear layers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_fedbayes.layers.base import BayesianAffine, check_template
from lightning_fedbayes.layers.priors import Prior, choose_prior


class LinearReparameterization(BayesianAffine):
    r"""Linear layer with Gaussian weights, :math:`y = x W^T + b`, :math:`W = \mu + \sigma \odot \epsilon`.

    One weight sample per call, shared by the batch: a sample of the *function*. Cheapest (one product), but the
    gradient noise does not fall with the batch size. Names, arguments and checkpoints are bayesian-torch's.

    Args:
        in_features, out_features: sizes of the last dimension of input and output.
        prior_mean, prior_variance: the prior N(mean, variance), not N(mean, std); variance 1 by default.
        posterior_mu_init: added to torch's default initialisation of the mean.
        posterior_rho_init: constant initial ρ, σ = log(1 + e^ρ). None: σ = 0.1 × the standard deviation of the
            deterministic layer's initialisation, so that outputs start at the deterministic layer's scale.
        bias: False leaves the bias out.
        prior_std: standard deviation of the prior, in place of ``prior_variance``.
        prior: any :class:`~lightning_fedbayes.layers.priors.Prior`, in place of all three.
        bayesian_bias: False makes the bias an ordinary deterministic parameter named ``bias``.
        device, dtype: as in ``nn.Linear``.

    Shapes: input (batch, *, in_features), output (batch, *, out_features).

    Raises:
        ConversionError: more than one prior is described, or a prior without positive spread.

    >>> layer = LinearReparameterization(3, 2)
    >>> layer(torch.ones(5, 3)).shape, layer.kl_loss().shape
    (torch.Size([5, 2]), torch.Size([]))
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        prior_mean: float = 0.0,
        prior_variance: float | None = None,
        posterior_mu_init: float = 0.0,
        posterior_rho_init: float | None = None,
        bias: bool = True,
        *,
        prior_std: float | None = None,
        prior: Prior | None = None,
        bayesian_bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_template(bias, device, dtype, in_features=in_features, out_features=out_features)
        super().__init__(
            nn.Linear(in_features, out_features, bias, device, dtype),
            "weight",
            choose_prior(prior_mean, prior_variance, prior_std, prior),
            posterior_mu_init,
            posterior_rho_init,
            bayesian_bias,
        )
        self.in_features = in_features
        self.out_features = out_features

    def template(self, bias: bool) -> nn.Module:
        """``nn.Linear`` of these sizes."""
        return nn.Linear(self.in_features, self.out_features, bias, device="meta")

    def op(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """``F.linear``."""
        return F.linear(x, weight, bias)

    def sign_shapes(self, x: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Signs per example (dimension 0) and feature; dimensions between, such as time, share them."""
        lead = (x.shape[0], *(1,) * (x.dim() - 2)) if x.dim() > 1 else ()
        return (*lead, self.in_features), (*lead, self.out_features)


class LinearLocalReparameterization(LinearReparameterization, estimator="local_reparameterization"):
    r"""Linear layer that samples its outputs, :math:`y \sim N(x\mu^T, x^2 (\sigma^2)^T)` (Kingma et al. 2015).

    Independent noise for every example and output, and every time step of inputs (batch, time, features): the least
    gradient noise, at the cost of two products. Arguments as in :class:`LinearReparameterization`.
    """


class LinearFlipout(LinearReparameterization, estimator="flipout"):
    """Linear layer with Flipout (Wen et al. 2018): one perturbation, decorrelated between examples by random signs.

    All time steps of one example see one weight, so it suits sequences; two products. Dimension 0 of the input counts
    the examples. Arguments as in :class:`LinearReparameterization`.
    """
