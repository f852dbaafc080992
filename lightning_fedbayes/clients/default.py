"""The fusion rule of a federation that has not been told any."""

from __future__ import annotations

from collections.abc import Iterable

from lightning_fedbayes.clients.model import ResidentModel
from lightning_fedbayes.clients.settings import FederationSettings
from lightning_fedbayes.fusion import Sites
from lightning_fedbayes.layers.base import BayesianLayer
from lightning_fedbayes.layers.posterior_view import gaussian_parameters
from lightning_fedbayes.layers.priors import NormalPrior
from lightning_fedbayes.methods import Averaging, Method, SiteMethod

BYTES_PER_ENTRY = 24
"""That a client keeps by sites for each entry of a posterior: two numbers of a site, and Adam's state of mean and ρ."""

MOST_KEPT = 2**30
"""Bytes of all clients up to which sites are the default."""


def default_fusion(
    settings: FederationSettings, model: ResidentModel, num_clients: int, callbacks: Iterable[object] = ()
) -> tuple[Method, str]:
    """Return what ``fusion=None`` is for a network, and a line that says so.

    Averages count the prior again in every round, and are too wide after many; sites are not, of layers and of IVON. A
    network of point masses has no prior that would bound it by sites (benchmarks/posterior/ROUNDS.md).

    Args:
        settings: of the federation.
        model: the resident one.
        num_clients: of the federation.
        callbacks: of the Trainer.
    """
    found, learned = gaussian_parameters(model.module), model.learned
    federated = model.read_posterior().mean
    layers = [each.layer for name, each in found.items() if name in federated]
    stds = set[float]()
    if learned is not None:
        stds = {learned.prior_std(name) for name in learned.variances if name in federated}
    priors = [prior for layer in layers if isinstance(layer, BayesianLayer) for prior in layer.priors.values()]
    priors += [NormalPrior(0.0, std) for std in stds if std < float("inf")]
    normal = {(each.mean, each.std) for each in priors if isinstance(each, NormalPrior) and each.is_scalar}
    kept = sum(value.numel() for value in federated.values()) * BYTES_PER_ENTRY * num_clients
    conflict = SiteMethod(Sites()).conflict(settings.weighting, settings.privacy is not None)
    obstacle = None if conflict is None else f"{conflict[0]} is given"
    if obstacle is None and num_clients == 1:
        obstacle = "one client is ordinary training"
    elif obstacle is None and any(getattr(each, "takes_single_gradients", False) for each in callbacks):
        obstacle = "a callback takes the gradients of single examples, in which sites' terms have no part"
    elif obstacle is None and learned is not None and not learned.follows_data:
        obstacle = "the posterior is neither of Bayesian layers nor of IVON by squares"
    elif obstacle is None and not layers and not stds:
        obstacle = "no layer is Bayesian"
    elif obstacle is None and (
        len(normal) != 1 or float("inf") in stds or not all(isinstance(layer, BayesianLayer) for layer in layers)
        or not all(isinstance(each, NormalPrior) and each.is_scalar for each in priors)
    ):
        obstacle = "not all parameters share one normal prior, or some layers are of another package"
    elif obstacle is None and kept > MOST_KEPT and settings.kept.folder is None:
        obstacle = f"sites of {num_clients} clients would take {kept / 2**30:.1f} GiB: give keep=fb.Kept(folder=...)"
    if obstacle is not None:
        return Averaging(), f"an average, 'reverse_kl_barycenter', since {obstacle}"
    mean, std = (float(each) for each in next(iter(normal)))
    method = SiteMethod(Sites(prior_mean=mean, prior_std=std))
    return method, "sites, whose posterior keeps its meaning over many rounds"
