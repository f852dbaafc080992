"""Composition of two rules: the first infers the clients' reliabilities, the second fuses with them as weights."""

from __future__ import annotations

from dataclasses import replace

import torch

from lightning_fedbayes.errors import FusionError
from lightning_fedbayes.fusion.registry import get_rule, rule_name
from lightning_fedbayes.fusion.rule import Cohort, Fused, FusionRule, ReliabilityRule, RuleState, check_no_sites


class Reliability(ReliabilityRule):
    """Weights inferred by one rule, posteriors fused by another.

    ::

        FederatedBayes(fusion=Reliability("ivar_vb", then="reverse_kl_barycenter"))

    When to use it: Bayesian networks whose clients cannot be trusted. ``by`` uses the means only, since a client
    can claim any variance; ``then`` fuses means and variances with the reliability as the clients' weights.

    Args:
        by: a rule that infers reliabilities: a name (``ivar_vb``, ``icov_vb``, ``geometric_median``, ``multi_krum``, …)
            or a rule object.
        then: a rule that takes weights: a name or a rule object.

    Raises:
        FusionError: ``by`` infers no reliabilities, or ``then`` takes no weights.
    """

    def __init__(self, by: str | FusionRule = "ivar_vb", then: str | FusionRule = "reverse_kl_barycenter") -> None:
        self.by, self.then = get_rule(by), get_rule(then)
        check_no_sites(self.then, "Reliability(then=...)")
        if not isinstance(self.by, ReliabilityRule):
            raise FusionError(
                f"Reliability(by='{rule_name(self.by)}'): that rule infers no reliability of clients; give one that "
                "does, such as 'ivar_vb', 'icov_vb', 'geometric_median' or 'multi_krum'"
            )
        if not self.then.uses_weights:
            raise FusionError(
                f"Reliability(then='{rule_name(self.then)}'): that rule takes no weights; give one that does, such as "
                "'reverse_kl_barycenter' or 'weighted_average'"
            )
        # attributes of this object, not of its class: they follow from the two rules
        vars(self).update(uses_weights=self.by.uses_weights, resists=self.then.resists,
                          by_columns=self.by.by_columns and self.then.by_columns,
                          needs_previous=self.by.needs_previous or self.then.needs_previous)

    def init(self) -> RuleState:
        """See :meth:`FusionRule.init`."""
        return {"by": self.by.init(), "then": self.then.init()}

    def apply(self, cohort: Cohort, state: RuleState) -> Fused:
        """See :meth:`FusionRule.apply`."""
        inferred = self.by.apply(cohort, state["by"])
        shares = torch.tensor([inferred.reliability[client] for client in cohort.clients], dtype=torch.float64)
        trusted = [position for position, share in enumerate(shares.tolist()) if share > 0]
        fused = self.then.apply(
            replace(
                cohort,
                posteriors=[cohort.posteriors[position] for position in trusted],
                weights=shares[trusted] / shares[trusted].sum(),
                clients=tuple(cohort.clients[position] for position in trusted),
            ),
            state["then"],
        )
        return replace(inferred, posterior=fused.posterior, state={"by": inferred.state, "then": fused.state})
