"""The clients' sites in a round: the cavity that each takes as its prior, and how training changes its site."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor, nn

from lightning_fedbayes.errors import FederationError
from lightning_fedbayes.fusion.sites import Sites, natural_of
from lightning_fedbayes.layers import set_prior
from lightning_fedbayes.layers.base import BayesianLayer, GaussianParameter
from lightning_fedbayes.layers.posterior_view import gaussian_parameters
from lightning_fedbayes.layers.priors import CavityPrior, NormalPrior
from lightning_fedbayes.posterior import GaussianPosterior
from lightning_fedbayes.training.model import Tensors

Fields = tuple[Tensor, Tensor, Tensor]
"""Curvature, slope and step of a cavity, see :class:`~lightning_fedbayes.layers.priors.CavityPrior`, shape (P,)."""


class RoundSites:
    """The clients' sites in one round. A site is {"precision": Λ, "shift": η}, shape (P,) each, float64.

    P counts the Gaussian parameters that are federated, in the order of the posterior.

    Args:
        rule: the fusion rule.
        module: the resident network, whose layers hold their own priors.
        base: see :meth:`~lightning_fedbayes.fusion.Sites.base`.
        shares: client → its share of all examples.
        local: names of Gaussian parameters that never leave a client.

    Raises:
        FederationError: the network has no such parameter, or one whose prior is not the rule's.
    """

    def __init__(
        self, rule: Sites, module: nn.Module, base: GaussianPosterior, shares: Mapping[int, float],
        local: Collection[str] = (),
    ) -> None:
        self.rule = rule
        self.shares = shares
        self.module = module
        found = gaussian_parameters(module)
        self.parameters = {name: found[name] for name in base.names if name in found and name not in local}
        check_priors(rule, self.parameters)
        self.base = _part(base, self.parameters)
        self._natural = natural_of(self.base, self.base.flatten()[0])

    def fields(self, client: int, site: Tensors) -> Fields:
        """Return curvature, slope and step of the cavity of a client with this ``site``."""
        precision, shift = self._natural
        if not site:
            steps = self.rule.steps(self.shares[client], 0.0, precision)
            return steps * precision, torch.zeros_like(shift), steps
        own = {name: value.to(precision.device) for name, value in site.items()}
        steps = self.rule.steps(self.shares[client], own["precision"], precision)
        slope = own["shift"] - own["precision"] * (shift / precision)
        return steps * precision - own["precision"], slope, steps

    def cavities(self, fields: Sequence[Tensor]) -> dict[str, CavityPrior]:
        """Return the prior of each parameter from :meth:`fields`, or a stack of them of shape (clients, P)."""
        lengths = [value.numel() for value in self.base.mean.values()]
        priors = {}
        parts = zip(*(field.split(lengths, -1) for field in fields))
        for (name, parameter), each in zip(self.parameters.items(), parts, strict=True):
            like, shape = parameter.mean, self.base.mean[name].shape
            mean, std = self.base.mean[name].to(like), self.base.variance[name].to(like).sqrt()
            curvature, slope, step = (field.to(like).reshape(*field.shape[:-1], *shape) for field in each)
            priors[name] = CavityPrior(mean, std, curvature, slope, step)
        return priors

    def install(self, client: int, site: Tensors) -> None:
        """Make the cavity of a client with this ``site`` the prior of the network."""
        priors = self.cavities(self.fields(client, site))
        for name, parameter in self.parameters.items():
            parameter.replace_prior(priors[name])

    def remove(self) -> None:
        """Give the layers their own priors back."""
        set_prior(self.module, None)

    def sent(self, client: int, site: Tensors, posterior: GaussianPosterior) -> tuple[GaussianPosterior, Tensors]:
        """Return what a client sends, and its new site, whose change is that of what is sent, bit by bit.

        Args:
            client: its number.
            site: before its training.
            posterior: after it.
        """
        trained = _part(posterior, self.parameters)
        steps = self.fields(client, site)[2]
        precision, shift = self.rule.sent(self._natural, natural_of(trained, self._natural[0]), steps)
        proposal = trained.unflatten(shift / precision, 1 / precision)
        whole = GaussianPosterior({**posterior.mean, **proposal.mean}, {**posterior.variance, **proposal.variance})
        kept = {}
        for name, before, after in zip(("precision", "shift"), self._natural, natural_of(proposal, self._natural[0])):
            kept[name] = after - before
            if site:
                kept[name] += site[name].to(after.device)
        return whole, kept


def check_priors(rule: Sites, parameters: dict[str, GaussianParameter]) -> None:
    """Raise FederationError unless all ``parameters``, of which there are some, have the prior of ``rule``."""
    if not parameters:
        raise FederationError(
            "fusion='sites' federates a posterior, and the module has no Gaussian parameter that is federated: make "
            "layers Bayesian, as by fb.bayesianize(module, last=1), or take fusion='weighted_average'"
        )
    for name, parameter in parameters.items():
        if not isinstance(parameter.layer, BayesianLayer):
            raise FederationError(
                f"fusion='sites': '{name}' is of {type(parameter.layer).__module__}, whose prior must be proper; "
                "a cavity need not be. Use a layer of this package, such as fb.bayesianize makes"
            )
        own = parameter.layer.priors[parameter.path]
        wanted = NormalPrior(rule.prior_mean, rule.prior_std)
        if not isinstance(own, NormalPrior) or (own.mean, own.std) != (wanted.mean, wanted.std):
            raise FederationError(
                f"fusion='sites': '{name}' has the prior {own}, and the rule counts {wanted}; give the rule the "
                "network's: fb.Sites(prior_mean=..., prior_std=...), one normal prior for all layers"
            )


def _part(posterior: GaussianPosterior, names: Collection[str]) -> GaussianPosterior:
    """Return the posterior of the parameters ``names`` alone."""
    return GaussianPosterior(
        {name: posterior.mean[name] for name in names}, {name: posterior.variance[name] for name in names}
    )
