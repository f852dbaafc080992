"""One rule judges the clients, another fuses them with what it found."""

from __future__ import annotations

from dataclasses import replace

import torch

from lightning_fedbayes.errors import FusionError
from lightning_fedbayes.fusion.cohort import Cohort, Fused, Memory
from lightning_fedbayes.fusion.registry import get_rule, rule_name
from lightning_fedbayes.fusion.rule import FusionRule, JudgingRule


class Reliability(JudgingRule):
    """Weights inferred by one rule, posteriors fused by another.

    ::

        FederatedBayes(fusion=Reliability("ivar_vb", then="reverse_kl_barycenter"))

    When to use it: Bayesian networks whose clients cannot be trusted. ``by`` looks at the means only, since a client
    can claim any variance; ``then`` fuses means and variances with the reliability as the clients' weights.

    Args:
        by: a rule that judges clients: a name (``ivar_vb``, ``icov_vb``, ``geometric_median``, ``multi_krum``, …) or a
            rule object.
        then: a rule that takes weights: a name or a rule object.

    Raises:
        FusionError: ``by`` does not judge, or ``then`` takes no weights.
    """

    def __init__(
        self, by: str | FusionRule = "ivar_vb", then: str | FusionRule = "reverse_kl_barycenter"
    ) -> None:
        self.by, self.then = get_rule(by), get_rule(then)
        if not isinstance(self.by, JudgingRule):
            raise FusionError(
                f"Reliability(by='{rule_name(self.by)}'): that rule does not judge clients; give one that does, such "
                "as 'ivar_vb', 'icov_vb', 'geometric_median' or 'multi_krum'"
            )
        if not self.then.uses_weights:
            raise FusionError(
                f"Reliability(then='{rule_name(self.then)}'): that rule takes no weights; give one that does, such as "
                "'reverse_kl_barycenter' or 'weighted_average'"
            )
        # of this object, not of its class: they are those of the rules inside
        vars(self).update(uses_weights=self.by.uses_weights,
                          by_columns=self.by.by_columns and self.then.by_columns,
                          needs_previous=self.by.needs_previous or self.then.needs_previous)

    def init(self) -> Memory:
        """See :meth:`FusionRule.init`."""
        return {"by": self.by.init(), "then": self.then.init()}

    def apply(self, cohort: Cohort, memory: Memory) -> Fused:
        """See :meth:`FusionRule.apply`."""
        judged = self.by.apply(cohort, memory["by"])
        shares = torch.tensor([judged.reliability[client] for client in cohort.clients], dtype=torch.float64)
        trusted = [position for position, share in enumerate(shares.tolist()) if share > 0]
        fused = self.then.apply(
            replace(
                cohort,
                posteriors=[cohort.posteriors[position] for position in trusted],
                weights=shares[trusted] / shares[trusted].sum(),
                clients=tuple(cohort.clients[position] for position in trusted),
            ),
            memory["then"],
        )
        return replace(judged, posterior=fused.posterior, memory={"by": judged.memory, "then": fused.memory})
