"""Choice of the fusion rule in every round, by the loss of its posterior on held-out data."""

from collections.abc import Callable, Sequence
from typing import Any

from lightning_fedbayes.core.errors import FusionError, check_kind
from lightning_fedbayes.fusion.registry import get_rule, rule_name
from lightning_fedbayes.fusion.rule import FusionRule

Score = Callable[[Any, Any], Any]
"""Mean loss of a module on a batch, the lower the better: (module, batch) → number or scalar tensor."""

CANDIDATES = (
    "weighted_average",
    "weighted_sum",
    "linear_pool",
    "reverse_kl_barycenter",
    "wasserstein_barycenter",
    "conflation",
    "weighted_conflation",
)
"""Candidates of ``fusion="auto"``."""


class AutoFusion:
    """Choose in every round the rule with the least loss of its posterior on the server's held-out data.

    ::

        FederatedBayes(fusion="auto")  # the rules of CANDIDATES, by negative log-likelihood
        FederatedBayes(fusion=AutoFusion(["rklb", "linear_pool", AlphaBarycenter(0.5)]))

    The held-out data are the Trainer's validation data: test on other data. Rules that cannot fuse a round's clients
    drop out of that round.

    When to use it: the server holds some data, since no rule is best everywhere ([BA-BFL], [FBDL]).

    Args:
        candidates: names or rule objects, at least two.
        score: the mean loss of a module on a batch, the lower the better. None: the negative log-likelihood of
            ``predict_step``, for modules of this package.

    Raises FusionError: fewer than two candidates, one twice, or an unknown name.
    """

    def __init__(self, candidates: Sequence[str | FusionRule] = CANDIDATES, score: Score | None = None) -> None:
        check_kind("candidates", candidates, list | tuple, "give a list of rules", error=FusionError)
        self.rules = tuple(get_rule(candidate) for candidate in candidates)
        self.names = tuple(map(name_of, self.rules))
        self.score = score
        if len(self.rules) < 2:
            raise FusionError(f"AutoFusion chooses between rules, and {list(candidates)} is not two; give two or more")
        if len(set(self.names)) < len(self.names):
            raise FusionError(f"AutoFusion: {list(self.names)} names a rule twice; give each once")


def name_of(rule: FusionRule) -> str:
    """Return a rule's name, with its arguments if it has any."""
    options = {
        key: name_of(value) if isinstance(value, FusionRule) else value
        for key, value in vars(rule).items()
        if isinstance(value, int | float | str | FusionRule) and not hasattr(FusionRule, key)
    }
    described = ", ".join(f"{key}={value}" for key, value in options.items())
    return rule_name(rule) + (f"({described})" if described else "")


def candidates(rule: FusionRule | AutoFusion) -> dict[str, FusionRule]:
    """Return a rule, or all candidates of an ``AutoFusion``, by names with arguments."""
    return dict(zip(rule.names, rule.rules)) if isinstance(rule, AutoFusion) else {name_of(rule): rule}
