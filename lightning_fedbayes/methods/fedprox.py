"""FedProx: clients are held near the global model while they train."""

from __future__ import annotations

from typing import ClassVar

from lightning_fedbayes.core.errors import FusionError, check_number
from lightning_fedbayes.fusion.rule import FusionRule
from lightning_fedbayes.methods.averaging import Averaging
from lightning_fedbayes.methods.method import LocalProblem, Participant, Quadratic, Shared


class FedProx(Averaging):
    r"""Averaging, with a term in each client's loss that holds what it trains near the global value.

    .. math:: \tfrac\mu2 \|\theta - \theta_g\|^2

    Means and ρ of Bayesian layers alike, not a client's local parameters; under IVON it adds μ to the curvature. When
    to use it: clients with unlike data take many steps.

    Args:
        strength: :math:`\mu` > 0; 0.001 to 1 are usual.
        rule: a fusion rule; of point masses the default is the weighted average.

    Raises:
        FusionError: an argument cannot be used.

    Source: Li et al. 2020.
    """

    registered: ClassVar[str] = "fedprox"

    def __init__(self, strength: float = 0.1, rule: str | FusionRule = "reverse_kl_barycenter") -> None:
        check_number("strength", strength, "(0, inf)", error=FusionError, why="it scales the term of FedProx")
        super().__init__(rule)
        self.strength = strength

    def problem(self, shared: Shared, client: Participant) -> LocalProblem:
        """See :meth:`Method.problem`."""
        return LocalProblem(Quadratic(self.strength))
