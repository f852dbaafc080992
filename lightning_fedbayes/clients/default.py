"""The method of a federation that has not been told any."""

from __future__ import annotations

from collections.abc import Iterable

from lightning_fedbayes.clients.model import ResidentModel
from lightning_fedbayes.clients.settings import FederationSettings
from lightning_fedbayes.layers.base import BayesianLayer
from lightning_fedbayes.layers.posterior_view import gaussian_parameters
from lightning_fedbayes.layers.priors import NormalPrior
from lightning_fedbayes.methods import Averaging, Method, Sites

BYTES_PER_ENTRY = 24
"""That a client keeps by sites for each entry of a posterior: two numbers of a site, and Adam's state of the mean."""

MOST_KEPT = 2**30
"""Bytes of all clients up to which sites are the default."""


def default_fusion(
    settings: FederationSettings, model: ResidentModel, num_clients: int, callbacks: Iterable[object] = ()
) -> tuple[Method, str]:
    """Return what ``fusion=None`` is for a network, and a line that says so.

    Averages count the prior again in every round, and are too wide after many; sites are not, of layers, of IVON and of
    Laplace (benchmarks/posterior/ROUNDS.md).
    """
    found, learned = gaussian_parameters(model.module), model.learned
    federated = model.read_posterior().mean
    layers = {name: each for name, each in found.items() if name in federated}
    priors = {
        name: each.layer.priors[each.path] if isinstance(each.layer, BayesianLayer) else None
        for name, each in layers.items()
    }
    sourced = [] if learned is None else [name for name in learned.variances if name in federated]
    if learned is not None:
        priors |= {
            name: NormalPrior(0.0, learned.prior_std(name))
            for name in sourced
            if learned.prior_std(name) < float("inf")
        }
    normal = {
        name: (float(each.mean), float(each.std))
        for name, each in priors.items()
        if isinstance(each, NormalPrior) and each.is_scalar
    }
    kept = sum(value.numel() for value in federated.values()) * BYTES_PER_ENTRY * num_clients
    conflict = Sites().conflict(settings.weighting, settings.privacy is not None)
    obstacle = None if conflict is None else f"{conflict[0]} is given"
    if obstacle is None and num_clients == 1:
        obstacle = "one client is ordinary training"
    elif obstacle is None and any(getattr(each, "takes_single_gradients", False) for each in callbacks):
        obstacle = "a callback takes the gradients of single examples, in which sites' terms have no part"
    elif obstacle is None and learned is not None and not learned.follows_data:
        obstacle = f"{learned.described} has no width that follows the data"
    elif obstacle is None and not layers and not sourced:
        obstacle = "no parameter has a posterior; fusion='sites' costs a client's state, and needs fewer rounds"
    elif obstacle is None and normal.keys() != {*layers, *sourced}:
        obstacle = "a parameter has no normal prior, or a layer is of another package"
    elif obstacle is None and kept > MOST_KEPT and settings.kept.folder is None:
        obstacle = f"sites of {num_clients} clients would take {kept / 2**30:.1f} GiB: give keep=fb.Kept(folder=...)"
    if obstacle is not None:
        return Averaging(), f"an average, 'reverse_kl_barycenter', since {obstacle}"
    means, stds = ({name: prior[i] for name, prior in normal.items()} for i in range(2))
    of_all = [next(iter(each.values())) if len({*each.values()}) == 1 else each for each in (means, stds)]
    return Sites(*of_all), "sites, which count every client's data once"
