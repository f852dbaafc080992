"""Safeguards of a round: when it counts, and how much one client may do in it."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_fedbayes.core.errors import check_at_least, check_number


@dataclass(frozen=True)
class Safeguards:
    """Bounds of a server: when a round counts, and how much one client may do in it.

    Args:
        min_clients: quorum: fewer valid updates than this leave the global posterior as it was, and so do updates that
            the rule cannot fuse.
        max_failed_rounds: after this many such rounds in a row the run stops with an error.
        max_influence: a client's update, tensor by tensor, counts as at most this multiple of the median client's, in
            its length and in how sure or vague it is; what is beyond is clipped, and impossible variances are refused.
            Of sites it is the whole site, and its change. None: nothing of it. See "Clients that cannot be trusted" in
            the documentation.

    Raises:
        FederationError: an argument is out of range.
    """

    min_clients: int = 1
    max_failed_rounds: int = 3
    max_influence: float | None = 2.0

    def __post_init__(self) -> None:
        """Check every argument."""
        check_at_least("min_clients", self.min_clients, 1)
        check_at_least("max_failed_rounds", self.max_failed_rounds, 1)
        if self.max_influence is not None:
            why = "a client may count as this multiple of the median client; None turns the guard off"
            check_number("max_influence", self.max_influence, "[1, inf)", why=why)


USUAL = Safeguards()
"""Safeguards of a federation that says nothing."""
