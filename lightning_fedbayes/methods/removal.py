"""A client leaves: the global posterior without its part."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_fedbayes.core.errors import FederationError, check_at_least, raised_as, shown
from lightning_fedbayes.core.posterior import GaussianPosterior
from lightning_fedbayes.core.store import Store
from lightning_fedbayes.methods.registry import every_method


def remove_client(federation: Any, client: int) -> GaussianPosterior:
    """Return the global posterior without what a client has contributed to it, as the server has counted it.

    When to use it: a client leaves ``fusion="sites"`` and takes its data with it, or has lied. The result is exact for
    conjugate models; for others train some rounds of the remaining clients from it (``fb.load_posterior(module,
    posterior)``). Deterministic parameters, which have no factors, stay as they are; the sums of a
    :class:`~lightning_fedbayes.HeadModule` are those of the others, exactly.

    Args:
        federation: a :class:`~lightning_fedbayes.FederatedBayes` that has trained, or the content of a checkpoint
            (``torch.load(path, weights_only=False)``); a :class:`~lightning_fedbayes.Server`, or the checkpoint of
            Flower's (:func:`~lightning_fedbayes.flower.load_checkpoint`).
        client: its number.

    Raises:
        FederationError: there is no such federation, it is damaged, or it has no site of that client.
        FusionError: the other clients' sites alone give no posterior.
    """
    check_at_least("client", client, 0)
    with raised_as(FederationError, "the state of the federation cannot be read", "give that of another checkpoint"):
        state = _state_of(federation)
        kept = state["sites"].get(client) or Store.state_in(state.get("clients", {}), client).get("kept", {})
        posterior = GaussianPosterior.from_state_dict(state["posterior"])
        for method in every_method():
            without = method.without(posterior, kept)
            if without is not None:
                return without
        raise FederationError(
            f"client {shown(client)} has no part of the posterior: it has trained in no federation by fusion='sites' "
            "or 'sums', whose parts can be told from the others'"
        )


def _state_of(federation: Any) -> Mapping[str, Any]:
    """Return a federation's state; raise FederationError if it is none."""
    stored = getattr(federation, "server", None)  # of Flower's checkpoint
    if isinstance(federation, Mapping):
        callbacks = federation.get("callbacks")
        states = list(callbacks.values()) if isinstance(callbacks, Mapping) else [federation]
    elif isinstance(stored, Mapping):
        states = [stored]
    else:
        states = [federation.state_dict()] if hasattr(federation, "state_dict") else []
    for state in states:
        if isinstance(state, Mapping) and {"rule_states", "sites", "posterior"} <= state.keys():
            return state
    raise FederationError(f"{shown(federation)}: give a FederatedBayes that has trained, or a checkpoint's content")
