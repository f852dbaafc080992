"""The door of a client: which message may leave it exactly, which with noise, and which not at all."""

from __future__ import annotations

import secrets
from collections.abc import Collection
from dataclasses import dataclass
from typing import get_args

from lightning_fedbayes.clients.privacy.update import UpdatePrivacy
from lightning_fedbayes.core.errors import FederationError, NotSent, check_flag, check_number, check_strings, nearest
from lightning_fedbayes.core.messages import ClientUpdate, Kind
from lightning_fedbayes.core.posterior import GaussianPosterior

EXACT: dict[Kind, str] = {
    "scores": "the figures of a validation",
    "temperature": "sums over its examples, for a temperature",
    "counts": "a histogram of its scores",
    "statistics": "sums over its examples, for a linear model",
    "curvature": "its weights and their curvature",
    "scale": "sums over its examples, for a scale. Give scaler=FederatedScaler(targets=(mean, std)) what is known "
    "without data, or let a regressor go without, scaler=False; otherwise",
}
"""Kinds of messages that no noise of :class:`UpdatePrivacy` protects, and what is in them."""


@dataclass(frozen=True)
class Door:
    """The one place where it is decided what leaves a client.

    Without ``privacy`` everything may that a client of these settings can be asked for. With it, an update leaves with
    noise, counts of scores with theirs, and of the other kinds those alone that ``exact`` names; so it is, but for the
    updates themselves, where single examples are protected. What a failure says does not depend on either: its class
    and stage, never its text, unless errors are shared.

    Args:
        privacy: protects updates.
        conformal_epsilon: ε of the noise on counts of scores; None: none is added.
        exact: kinds that may leave as they are, in spite of ``privacy``: "scores", "temperature", "counts",
            "statistics", "curvature" or "scale".
        share_errors: the texts of exceptions may leave, too, which can hold anything: names of files, rows of tables.
        examples: single examples are protected, by :class:`~lightning_fedbayes.ExamplePrivacy`.

    Raises:
        FederationError: an argument cannot be used.
    """

    privacy: UpdatePrivacy | None = None
    conformal_epsilon: float | None = None
    exact: Collection[str] = ()
    share_errors: bool = False
    examples: bool = False

    def __post_init__(self) -> None:
        if self.conformal_epsilon is not None:
            why = "the smaller, the more private"
            check_number("conformal_epsilon", self.conformal_epsilon, "[1e-6, inf)", why=why)
        for kind in check_strings("exact", self.exact, f"give some of {', '.join(EXACT)}"):
            if kind not in get_args(Kind) or kind not in EXACT:
                raise FederationError(f"exact='{kind}': {nearest(kind, EXACT)}")
        check_flag("share_errors", self.share_errors)
        check_flag("examples", self.examples)

    def check(self, kind: Kind, epsilon: float | None = None) -> None:
        """Raise NotSent if a message may not leave.

        Args:
            kind: of the message.
            epsilon: ε of the noise that the server asks for; None for none.
        """
        if kind == "counts" and epsilon != self.conformal_epsilon:
            raise NotSent(
                f"the server asks for counts with epsilon={epsilon}, and this client's is {self.conformal_epsilon}: "
                "give FederatedConformal(epsilon=...) and the client's conformal_epsilon=... the same"
            )
        is_noisy = kind == "counts" and epsilon is not None
        protects = self.privacy is not None or self.examples
        protects = protects or (self.conformal_epsilon is not None and kind == "temperature")
        if kind in EXACT and protects and not is_noisy and kind not in self.exact:
            remedy = "conformal_epsilon=..." if kind == "counts" else f"exact=['{kind}']"
            raise NotSent(
                f"this client's data are private, and the server asks for {EXACT[kind]}, exactly: it sends none. "
                f"{remedy} at the client would allow it"
            )

    def protected(self, update: ClientUpdate, previous: GaussianPosterior, round: int) -> ClientUpdate:
        """Return what leaves in place of an update: itself, or with the noise of a fresh seed, without its figures."""
        if self.privacy is None:
            return update
        return self.privacy.send(update, previous, secrets.randbits(63), round)

    def failure(self, error: Exception, stage: str) -> dict[str, str]:
        """Return what may leave of an exception: its class and the stage that it has ended; its text if shared."""
        text = {"text": str(error)} if self.share_errors else {}
        return {"error": type(error).__name__, "stage": stage, **text}
