"""Versions of the global model that clients work on, and checks of a server's stored state."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from lightning_fedbayes.core.errors import FusionError, PosteriorError, check_at_least, check_kind, listed
from lightning_fedbayes.core.messages import ClientUpdate, check_mapping
from lightning_fedbayes.core.posterior import GaussianPosterior
from lightning_fedbayes.fusion.accumulator import check_finite, check_structure
from lightning_fedbayes.methods.late import Late
from lightning_fedbayes.methods.method import Method, Shared, joined, split


class Versions:
    """Record of what clients started from in each round, ``begun``, as long as messages about it may come.

    Raises FederationError if the method takes no late messages.
    """

    def __init__(self, method: Method, late: Late, posterior: GaussianPosterior) -> None:
        method.check_late(posterior)
        self.method, self.late = method, late
        self.begun: dict[int, Shared] = {}

    def taken(
        self, update: ClientUpdate, started: int, now: Shared, round: int, buffers: Mapping[str, Tensor]
    ) -> ClientUpdate:
        """Return the update that a client would have sent if it had started from the present global model.

        Clients that begin at present start from ``now``, with the global ``buffers``. Raise FusionError if the client's
        version is forgotten, or its message is of another network, not finite, or too late for the method.
        """
        before, who, present = self.begun.get(started), f"client {update.client}", now.posterior
        if before is None:
            raise FusionError(f"{who}: its message is about round {started + 1}, which nobody waits for any more")
        check_structure(update.posterior, present, who)
        check_structure(before.posterior, present, f"round {started + 1}")
        check_finite(update.posterior, who)
        sent, staleness = update.posterior.ordered(present.names), round - started
        posterior = self.method.late(sent, before, now, staleness, self.late)
        if posterior is sent:
            return update
        own, others = split(update.buffers)
        moved = self.late.buffers(own, buffers, staleness)
        return replace(update, posterior=posterior, buffers=joined(moved, others), kept=None)

    def forget(self, needed: Collection[int]) -> None:
        """Forget all rounds but those ``needed``."""
        self.begun = {round: shared for round, shared in self.begun.items() if round in needed}

    def state_dict(self) -> dict[int, dict[str, Any]]:
        """Return the rounds."""
        state = dict[int, dict[str, Any]]()
        for round, each in self.begun.items():
            state[round] = {"posterior": each.posterior.state_dict(), "tensors": dict(each.tensors)}
            state[round] |= {"share": each.share, "is_new": each.is_new}
        return state

    def load_state_dict(self, state: Mapping[int, Mapping[str, Any]], device: torch.device) -> None:
        """Restore what :meth:`state_dict` gave."""
        self.begun = {}
        for round, each in state.items():
            posterior = GaussianPosterior.from_state_dict(each["posterior"]).to(device)
            self.begun[round] = Shared(posterior, moved(dict(each["tensors"]), device), each["share"], each["is_new"])


def moved(state: Any, device: torch.device) -> Any:
    """Return dicts, lists and tuples with their tensors on ``device``: a checkpoint may be read onto the CPU."""
    return apply_to_collection(state, Tensor, lambda tensor: tensor.to(device))


def check_state(state: Any) -> None:
    """Raise FederationError unless ``state`` has the parts of :meth:`Server.state_dict`."""
    remedy = "give what Server.state_dict() returned"
    check_kind("state", state, Mapping, remedy)
    for name in ("history", "untold"):
        check_kind(f"state['{name}']", state.get(name), list, remedy)
    for name in ("posterior", "buffers", "accepted", "rule_states", "sites", "guard", "begun"):
        check_kind(f"state['{name}']", state.get(name), Mapping, remedy)
    for name in ("rounds", "failed_rounds"):
        check_at_least(f"state['{name}']", state.get(name), 0)
    for name, kind in (("buffers", Tensor), ("rule_states", Mapping), ("guard", Tensor)):
        check_mapping(f"state['{name}']", state[name], kind)
    for client, kept in state["sites"].items():
        check_at_least("state['sites']: client", client, 0)
        check_mapping(f"state['sites'][{client}]", kept, Tensor)
    for client in state["untold"]:
        check_at_least("state['untold']: client", client, 0)


def check_network(stored: GaussianPosterior, own: GaussianPosterior) -> None:
    """Raise PosteriorError unless a stored posterior has parameters of this network, which may have gained others."""
    before, now = ({name: tuple(value.shape) for name, value in each.mean.items()} for each in (stored, own))
    others = [name for name in before.keys() & now.keys() if before[name] != now[name]]
    if others or before.keys().isdisjoint(now):
        then, here = (listed(f"'{name}' {each[name]}" for name in others or each) for each in (before, now))
        why = f"it has {then}, and this one {here}; build the network as it was, or start a new federation"
        raise PosteriorError(f"the stored posterior is of another network: {why}")
