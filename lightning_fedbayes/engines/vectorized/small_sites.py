"""The small Gaussian parameters of a network in a stacked step: drawn together, and their divergence with them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lightning_fedbayes.engines.state import Tensors
from lightning_fedbayes.layers.base import BayesianLayer, Site
from lightning_fedbayes.layers.functional import SMALL
from lightning_fedbayes.layers.joint_draw import JointDraw
from lightning_fedbayes.layers.priors import NormalPrior
from lightning_fedbayes.layers.sites import gaussian_sites


@dataclass(frozen=True)
class Part:
    """What the divergence of a module, or of a part of it, consists of.

    Args:
        sites: its Gaussian sites.
        others: those that are not drawn together; None unless all that are drawn together belong to this part.
    """

    sites: Sequence[Site]
    others: Sequence[Site] | None


class Sites:
    """The Gaussian sites of a module, looked up once: it must not be rebuilt while this is in use.

    Args:
        module: any network.

    Attributes:
        small: those that are drawn together: of our own layers, of few entries, and of one dtype and device.
        names: of their means and ρ among the module's parameters.
    """

    def __init__(self, module: nn.Module) -> None:
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        found = gaussian_sites(module).values()
        self.small = _alike([site for site in found if id(site.mean) in names and id(site.rho) in names])
        self.names = [(names[id(site.mean)], names[id(site.rho)]) for site in self.small]
        self._modules = {id(part): part for part in module.modules()}
        self._parts: dict[int, Part] = {}

    def of(self, module: nn.Module) -> Part:
        """The sites of the module or of a part of it."""
        part = self._parts.get(id(module))
        if part is None:
            sites = list(gaussian_sites(module).values())
            others = [site for site in sites if site not in self.small]
            whole = len(self.small) == len(sites) - len(others) > 0
            part = Part(sites, others if whole else None)
            if id(module) in self._modules:
                self._parts[id(module)] = part
        return part


class SmallSites:
    """The small sites of one step; nothing is drawn before the first of them is asked for.

    A site that is asked for again in the same step is not drawn here a second time, for its noise must be new.

    Args:
        sites: of the module.
        parameters: name → tensor of shape (clients, \\*).
        entered: name → what a client sees of it.
    """

    def __init__(self, sites: Sites, parameters: Tensors, entered: Mapping[str, Tensor]) -> None:
        self._sites = sites
        self._places: dict[tuple[int, int], int] = {}
        self._stacks: list[Tensor] = []
        if len(sites.small) > 1 and all(mean in parameters and rho in parameters for mean, rho in sites.names):
            self._places = {(id(entered[mean]), id(entered[rho])): i for i, (mean, rho) in enumerate(sites.names)}
            self._stacks = [parameters[mean] for mean, _ in sites.names] + [parameters[rho] for _, rho in sites.names]
        self._asked: set[int] = set()
        self._joint: tuple[Tensor, ...] = ()

    def draw(self, mean: Tensor, rho: Tensor) -> Tensor | None:
        """A draw of every client, shape (clients, \\*); None if this is no small site, or if it was drawn before.

        Args:
            mean, rho: what a client sees of them.
        """
        place = self._places.get((id(mean), id(rho)))
        if place is None or place in self._asked or not torch.is_grad_enabled():
            return None
        if not self._joint:
            # nothing that an earlier step has shown: a resumed run must round as one that was not stopped
            self._prior = shared_prior(self._sites.small)
            self._versions = [stack._version for stack in self._stacks]
            self._joint = JointDraw.apply(self._prior, *self._stacks)  # pyright: ignore[reportAssignmentType]
        elif self._changed():
            return None
        self._asked.add(place)
        return self._joint[place]

    def divergence(self) -> Tensor | None:
        """KL(q‖p) of all small sites, shape (clients,); None if it has not been computed with the draws."""
        if not self._joint or self._prior is None or not torch.is_grad_enabled() or self._changed():
            return None
        live = [(id(s.owner._parameters.get(s.mean_name)), id(s.layer._parameters.get(s.rho_name)))
                for s in self._sites.small]
        same = shared_prior(self._sites.small) == self._prior and all(pair in self._places for pair in live)
        return self._joint[-1] if same else None

    def _changed(self) -> bool:
        """Whether a parameter has been written to since the draw."""
        return [stack._version for stack in self._stacks] != self._versions


def shared_prior(sites: Sequence[Site]) -> tuple[float, float] | None:
    """Mean and standard deviation of the one N(m, s²) in force for all ``sites``; None if there is no such prior."""
    priors = [site.prior for site in sites]
    first = priors[0]
    if not isinstance(first, NormalPrior) or isinstance(first.mean, Tensor) or isinstance(first.std, Tensor):
        return None
    for prior in priors:
        if prior is not first and not (
            isinstance(prior, NormalPrior) and prior.is_scalar and (prior.mean, prior.std) == (first.mean, first.std)
        ):
            return None
    return first.mean, first.std


def _alike(sites: Iterable[Site]) -> list[Site]:
    """The small ones of ``sites`` that have the dtype and device of the first one, in single or double precision."""
    kinds = [
        (site, {(tensor.dtype, tensor.device) for tensor in (site.mean, site.rho)})
        for site in sites
        if isinstance(site.layer, BayesianLayer) and site.mean.numel() < SMALL
        and site.mean.dtype in (torch.float32, torch.float64)
    ]
    return [site for site, kind in kinds if len(kind) == 1 and kind == kinds[0][1]]
