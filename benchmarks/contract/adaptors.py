"""One adaptor per library: how its documentation says that a layer is built, sampled, frozen and converted.

A library is imported where it is used, because each is installed in its own environment only.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn


class NotClaimed(Exception):
    """Raised by an adaptor whose library does not offer the feature that a law is about."""


class Library(ABC):
    """Base of the adaptors: all that the laws need of a library, for layers whose σ is the softplus of ρ.

    Attributes:
        name: of the library.
        package: its name on the package index; ``requirement`` is what pip installs, separated by spaces, None for
            nothing.
        estimators: the library's names are mapped to "reparameterization", "local_reparameterization", "flipout".
        claims: "vmap" and "compile" where its documentation says that they work.
        centred: True if its priors have mean 0.
        parameters: endings of the names of means and of raw spreads.
    """

    name: ClassVar[str]
    package: ClassVar[str]
    requirement: ClassVar[str | None]
    estimators: ClassVar[tuple[str, ...]] = ("reparameterization",)
    claims: ClassVar[tuple[str, ...]] = ()
    centred: ClassVar[bool] = False
    parameters: ClassVar[tuple[tuple[str, str], ...]]

    @abstractmethod
    def layer(self, template: nn.Module, estimator: str, prior_mean: float, prior_std: float) -> nn.Module:
        """Return the library's layer of the geometry of a linear layer or a plain convolution."""

    def network(self, layers: Sequence[nn.Module]) -> nn.Module:
        """Return a network of these layers."""
        return nn.Sequential(*layers)

    def build(self, template: nn.Sequential, estimator: str, prior_mean: float, prior_std: float) -> nn.Module:
        """Return a Bayesian network of the geometry of ``template`` (linear layers and convolutions)."""
        return self.network(
            [
                self.layer(each, estimator, prior_mean, prior_std) if list(each.parameters()) else each
                for each in template
            ]
        )

    def gaussians(self, network: nn.Module) -> Sequence[tuple[Tensor, Tensor]]:
        """Mean and raw spread of each Gaussian parameter, in the order of the template's parameters."""
        return [
            (getattr(module, mean), getattr(module, raw))
            for module in network.modules()
            for mean, raw in self.parameters
            if isinstance(getattr(module, mean, None), Tensor)
        ]

    def raw(self, std: Tensor) -> Tensor:
        """Return the raw spread of a standard deviation: ρ."""
        return std + torch.log(-torch.expm1(-std))

    def output(self, network: nn.Module, x: Tensor) -> Tensor:
        """Return the output at one draw of the weights."""
        return network(x)

    @abstractmethod
    def kl(self, network: nn.Module, x: Tensor) -> Tensor:
        """Return the library's KL divergence of the network, or its estimate at one draw."""

    def mean_output(self, network: nn.Module, x: Tensor) -> Tensor:
        """Return the library's output at the posterior mean; most have none."""
        raise NotClaimed("no prediction at the posterior mean")

    def convert(self, network: nn.Sequential) -> nn.Module:
        """Return the library's conversion of a deterministic network; most have none."""
        raise NotClaimed("no conversion of networks")


def geometry(template: nn.Module) -> dict[str, Any]:
    """Arguments of a linear layer, or of a convolution without stride, dilation and groups."""
    if isinstance(template, nn.Linear):
        return {"in_features": template.in_features, "out_features": template.out_features}
    assert isinstance(template, nn.Conv2d)
    return {
        "in_channels": template.in_channels,
        "out_channels": template.out_channels,
        "kernel_size": template.kernel_size,
        "padding": template.padding,
    }


class Ours(Library):
    """lightning-fedbayes."""

    name, package, requirement = "lightning-fedbayes", "lightning-fedbayes", None
    estimators = ("reparameterization", "local_reparameterization", "flipout")
    claims = ("vmap", "compile")
    parameters = (("mu_weight", "rho_weight"), ("mu_kernel", "rho_kernel"), ("mu_bias", "rho_bias"))

    def layer(self, template: nn.Module, estimator: str, prior_mean: float, prior_std: float) -> nn.Module:
        from lightning_fedbayes import layers

        kind = {
            "reparameterization": "Reparameterization",
            "local_reparameterization": "LocalReparameterization",
            "flipout": "Flipout",
        }[estimator]
        make = getattr(layers, type(template).__name__ + kind)
        return make(**geometry(template), prior_mean=prior_mean, prior_variance=prior_std**2)

    def kl(self, network: nn.Module, x: Tensor) -> Tensor:
        from lightning_fedbayes.layers import kl_divergence

        return kl_divergence(network)

    def mean_output(self, network: nn.Module, x: Tensor) -> Tensor:
        from lightning_fedbayes.layers import mean_only

        with mean_only(network):
            return network(x)

    def convert(self, network: nn.Sequential) -> nn.Module:
        from lightning_fedbayes.layers import bayesianize

        return bayesianize(network, last=1)


class BayesianTorch(Library):
    """bayesian-torch: layers return (output, KL) unless flagged; ``get_kl_loss``, ``dnn_to_bnn``."""

    name, package, requirement = "bayesian-torch", "bayesian-torch", "bayesian-torch==0.5.0"
    estimators = ("reparameterization", "flipout")
    parameters = Ours.parameters

    def layer(self, template: nn.Module, estimator: str, prior_mean: float, prior_std: float) -> nn.Module:
        from bayesian_torch import layers

        make = getattr(layers, type(template).__name__ + estimator.capitalize())
        layer = make(**geometry(template), prior_mean=prior_mean, prior_variance=prior_std**2)
        layer.dnn_to_bnn_flag = True
        return layer

    def kl(self, network: nn.Module, x: Tensor) -> Tensor:
        from bayesian_torch.models.dnn_to_bnn import get_kl_loss

        kl = get_kl_loss(network)
        assert kl is not None
        return kl

    def convert(self, network: nn.Sequential) -> nn.Module:
        from bayesian_torch.models.dnn_to_bnn import dnn_to_bnn

        dnn_to_bnn(
            network,
            {
                "prior_mu": 0.0,
                "prior_sigma": 1.0,
                "posterior_mu_init": 0.0,
                "posterior_rho_init": -3.0,
                "type": "Reparameterization",
                "moped_enable": False,
                "moped_delta": 0.5,
            },
        )
        return network


class TorchBNN(Library):
    """torchbnn: stores log σ; ``BKLLoss(reduction="sum")``; ``freeze`` keeps one draw, not the mean.

    Its conversion functions are deprecated since 1.0 and not exported.
    """

    name, package, requirement = "torchbnn", "torchbnn", "torchbnn==1.2"
    parameters = (("weight_mu", "weight_log_sigma"), ("bias_mu", "bias_log_sigma"))

    def raw(self, std: Tensor) -> Tensor:
        return std.log()

    def layer(self, template: nn.Module, estimator: str, prior_mean: float, prior_std: float) -> nn.Module:
        import torchbnn  # pyright: ignore[reportMissingImports]

        make = getattr(torchbnn, f"Bayes{type(template).__name__}")
        return make(prior_mu=prior_mean, prior_sigma=prior_std, **geometry(template))

    def kl(self, network: nn.Module, x: Tensor) -> Tensor:
        import torchbnn  # pyright: ignore[reportMissingImports]

        return torchbnn.BKLLoss(reduction="sum", last_layer_only=False)(network)


class Blitz(Library):
    """blitz: ``variational_estimator`` adds KL and freezing to a network; ``Flipout`` wraps a layer class."""

    name, package, requirement = "blitz", "blitz-bayesian-pytorch", "blitz-bayesian-pytorch==0.2.8"
    estimators = ("reparameterization", "flipout")
    centred = True
    parameters = (("mu", "rho"),)

    def layer(self, template: nn.Module, estimator: str, prior_mean: float, prior_std: float) -> nn.Module:
        from blitz import modules  # pyright: ignore[reportMissingImports]
        from blitz.utils import Flipout  # pyright: ignore[reportMissingImports]

        make = getattr(modules, f"Bayesian{type(template).__name__}")
        make = Flipout(make) if estimator == "flipout" else make
        return make(**geometry(template), prior_sigma_1=prior_std, prior_pi=1)

    def network(self, layers: Sequence[nn.Module]) -> nn.Module:
        from blitz.utils import variational_estimator  # pyright: ignore[reportMissingImports]

        class Network(nn.Sequential):
            """A class of its own, because the decorator changes the class that it is given."""

        return variational_estimator(Network)(*layers)

    def kl(self, network: Any, x: Tensor) -> Tensor:
        network(x)
        return network.nn_kl_divergence()

    def mean_output(self, network: Any, x: Tensor) -> Tensor:
        network.freeze_()
        return network(x)


class TorchUncertainty(Library):
    """torch-uncertainty: ``KLDiv`` reads what the last forward left in the layers; ``freeze`` predicts at the mean."""

    name, package, requirement = "torch-uncertainty", "torch-uncertainty", "torch-uncertainty[cpu]==0.13.0"
    centred = True
    parameters = (("weight_mu", "weight_sigma"), ("bias_mu", "bias_sigma"))

    def layer(self, template: nn.Module, estimator: str, prior_mean: float, prior_std: float) -> nn.Module:
        from torch_uncertainty.layers import bayesian  # pyright: ignore[reportMissingImports]

        make = getattr(bayesian, f"Bayes{type(template).__name__}")
        return make(**geometry(template), prior_sigma_1=prior_std, prior_pi=1)

    def kl(self, network: nn.Module, x: Tensor) -> Tensor:
        from torch_uncertainty.losses import KLDiv  # pyright: ignore[reportMissingImports]

        network(x)
        return KLDiv(network)()

    def mean_output(self, network: Any, x: Tensor) -> Tensor:
        for layer in network:
            if hasattr(layer, "freeze"):
                layer.freeze()
        return network(x)


class LightningUQBox(Library):
    """lightning-uq-box: ``prior_sigma``, documented as variance; ``get_kl_loss``, ``convert_deterministic_to_bnn``."""

    name, package, requirement = "lightning-uq-box", "lightning-uq-box", "lightning-uq-box==0.2.0"
    estimators = ("reparameterization", "flipout")
    parameters = (("mu_weight", "rho_weight"), ("mu_bias", "rho_bias"))

    def layer(self, template: nn.Module, estimator: str, prior_mean: float, prior_std: float) -> nn.Module:
        from lightning_uq_box.models import bnn_layers  # pyright: ignore[reportMissingImports]

        make = getattr(bnn_layers, f"{type(template).__name__}Variational")
        return make(**geometry(template), prior_mu=prior_mean, prior_sigma=prior_std**2, layer_type=estimator)

    def kl(self, network: nn.Module, x: Tensor) -> Tensor:
        from lightning_uq_box.models.bnn_layers.bnn_utils import get_kl_loss  # pyright: ignore[reportMissingImports]

        return get_kl_loss(network)

    def convert(self, network: nn.Sequential) -> nn.Module:
        from lightning_uq_box.models.bnn_layers.bnn_utils import (  # pyright: ignore[reportMissingImports]
            convert_deterministic_to_bnn,
        )

        convert_deterministic_to_bnn(network, {"prior_mu": 0.0, "prior_sigma": 1.0}, ["0"])
        return network


class TyXe(Library):
    """TyXe: a network as it is, a prior, a guide that stores log σ, and a context per estimator."""

    name, package, requirement = "TyXe", "tyxe", "tyxe==0.0.2 pyro-ppl==1.9.1"
    estimators = ("reparameterization", "local_reparameterization", "flipout")

    def raw(self, std: Tensor) -> Tensor:
        return std.log()

    def layer(self, template: nn.Module, estimator: str, prior_mean: float, prior_std: float) -> nn.Module:
        raise NotClaimed("it has no layers")

    def build(self, template: nn.Sequential, estimator: str, prior_mean: float, prior_std: float) -> nn.Module:
        import pyro  # pyright: ignore[reportMissingImports]
        import tyxe  # pyright: ignore[reportMissingImports]

        pyro.clear_param_store()
        prior = tyxe.priors.IIDPrior(pyro.distributions.Normal(prior_mean, prior_std))
        guide = partial(tyxe.guides.AutoNormal, init_scale=0.1)
        network = tyxe.PytorchBNN(copy.deepcopy(template), prior, guide)
        network.estimator = estimator
        first: Any = template[0]
        shape = (
            (first.in_features,)
            if isinstance(first, nn.Linear)
            else (first.in_channels, *(8,) * len(first.kernel_size))
        )
        list(network.pytorch_parameters(torch.zeros(1, *shape)))  # makes the parameters of the guide
        return network

    def gaussians(self, network: Any) -> Sequence[tuple[Tensor, Tensor]]:
        sites = dict(network.net_guide.named_parameters())
        names = [name.removesuffix(".loc_unconstrained") for name in sites if name.endswith(".loc_unconstrained")]
        return [(sites[f"{name}.loc_unconstrained"], sites[f"{name}.scale_unconstrained"]) for name in names]

    def output(self, network: Any, x: Tensor) -> Tensor:
        import tyxe  # pyright: ignore[reportMissingImports]

        contexts = {"local_reparameterization": tyxe.poutine.local_reparameterization, "flipout": tyxe.poutine.flipout}
        with contexts.get(network.estimator, nullcontext)():
            return network(x)

    def kl(self, network: Any, x: Tensor) -> Tensor:
        self.output(network, x)
        return network.cached_kl_loss

    def mean_output(self, network: Any, x: Tensor) -> Tensor:
        from pyro import poutine  # pyright: ignore[reportMissingImports]

        return poutine.condition(network.net, network.net_guide.median())(x)

    def convert(self, network: nn.Sequential) -> nn.Module:
        return self.build(network, "reparameterization", 0.0, 1.0)


LIBRARIES: dict[str, Library] = {
    each.name: each
    for each in (Ours(), BayesianTorch(), TorchUncertainty(), Blitz(), TorchBNN(), LightningUQBox(), TyXe())
}
"""Every library by name, in the order of the table."""
