"""Checks of a stored server: its parts, and that it is of this network."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from lightning_fedbayes.core.errors import PosteriorError, check_at_least, check_kind, listed
from lightning_fedbayes.core.messages import check_mapping
from lightning_fedbayes.core.posterior import GaussianPosterior


def check_state(state: Any) -> None:
    """Raise FederationError unless ``state`` has the parts of :meth:`Server.state_dict`."""
    check_kind("state", state, Mapping, "give what Server.state_dict() returned")
    maps = ("posterior", "buffers", "accepted", "rule_states", "sites", "guard", "begun")
    kinds: dict[str, type] = {"history": list, "untold": list, **dict.fromkeys(maps, Mapping)}
    for name, kind in kinds.items():
        check_kind(f"state['{name}']", state.get(name), kind, "give what Server.state_dict() returned")
    for name in ("rounds", "failed_rounds"):
        check_at_least(f"state['{name}']", state.get(name), 0)
    check_mapping("state['buffers']", state["buffers"], Tensor)
    check_mapping("state['rule_states']", state["rule_states"], Mapping)
    check_mapping("state['guard']", state["guard"], Tensor)
    for client, kept in state["sites"].items():
        check_at_least("state['sites']: client", client, 0)
        check_mapping(f"state['sites'][{client}]", kept, Tensor)
    for client in state["untold"]:
        check_at_least("state['untold']: client", client, 0)


def check_network(stored: GaussianPosterior, own: GaussianPosterior) -> None:
    """Raise PosteriorError unless a stored posterior has parameters of this network, which may have more by now."""
    before, now = ({name: tuple(value.shape) for name, value in each.mean.items()} for each in (stored, own))
    others = [name for name in before.keys() & now.keys() if before[name] != now[name]]
    if others or before.keys().isdisjoint(now):
        then, here = (listed(f"'{name}' {each[name]}" for name in others or each) for each in (before, now))
        raise PosteriorError(
            f"the stored posterior is of another network: it has {then}, and this one {here}; build the network as it "
            "was, or start anew"
        )
