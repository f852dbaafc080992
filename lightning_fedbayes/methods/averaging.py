"""Averaging: clients start from the global posterior, and a fusion rule makes a new one of theirs."""

from __future__ import annotations

from typing import Literal

from lightning_fedbayes.core.errors import FusionError, check_choice
from lightning_fedbayes.core.posterior import GaussianPosterior
from lightning_fedbayes.fusion.auto import AutoFusion
from lightning_fedbayes.fusion.registry import rule_name
from lightning_fedbayes.fusion.rule import FusionRule
from lightning_fedbayes.methods.method import Method, Shared

MANY = 3
"""Rounds after which a variance that shrinks in each of them has lost its meaning."""
LATE = 20
"""Rounds after which averages under a fixed prior approach its width (benchmarks/posterior/ROUNDS.md)."""


class Averaging(Method):
    """Every client trains from the global posterior, and a fusion rule makes a new one of what they send.

    ``fusion="rklb"``, a rule object and ``fusion="auto"`` mean this method. With ``weighted_average`` and a network of
    point masses it is federated averaging; with ``fedadam`` and its like the server takes an optimizer's step.

    Args:
        rule: a fusion rule, or an :class:`~lightning_fedbayes.fusion.AutoFusion`.
        prior: "fixed": the network's in every round. "global": the round's global posterior, as ``dwc`` wants it.

    Raises:
        FusionError: there is no such rule or prior.

    Source: McMahan et al. 2017; for the rules see there.
    """

    def __init__(
        self, rule: str | FusionRule | AutoFusion = "reverse_kl_barycenter", prior: Literal["fixed", "global"] = "fixed"
    ) -> None:
        super().__init__(rule)
        check_choice("prior", prior, ("fixed", "global"), error=FusionError)
        self._prior = prior

    @property
    def described(self) -> str:
        """See :meth:`Method.described`."""
        text = super().described
        return text if self._prior == "fixed" else f"{text}, prior={self._prior}"

    def prior(self, shared: Shared) -> GaussianPosterior | None:
        """See :meth:`Method.prior`."""
        return shared.posterior if self._prior == "global" else None

    def check_late(self, posterior: GaussianPosterior) -> None:
        """See :meth:`Method.check_late`: averages take late messages as :class:`.FedBuff` does."""

    def advice(self, posterior: GaussianPosterior, round: int, clients: int) -> str | None:
        """See :meth:`Method.advice`: where the variances go if a rule repeats what its posteriors have in common."""
        if isinstance(self.rule, AutoFusion) or posterior.is_point_mass:
            return None
        name, narrows = rule_name(self.rule), self.rule.narrows
        if narrows and self._prior == "global" and round == MANY:
            return (
                f"fusion='{name}' with prior='global' divides the variance by the number of clients in every round: it "
                "has lost its meaning. fusion='sites' keeps its meaning."
            )
        if self.rule.keeps_prior and not narrows and self._prior == "fixed" and round == LATE and clients > 1:
            return (
                f"fusion='{name}' counts the prior of every client in every round: σ goes to the prior's, and further "
                "rounds can predict worse. fusion='sites' counts it once."
            )
        return None
