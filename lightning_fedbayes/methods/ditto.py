"""Ditto: beside the global model every client trains a network of its own, held near it."""

from __future__ import annotations

from typing import ClassVar

from lightning_fedbayes.core.errors import FusionError, check_number
from lightning_fedbayes.fusion.rule import FusionRule
from lightning_fedbayes.methods.method import LocalProblem, Method, Participant, Quadratic, Report, Shared, Trained


class Ditto(Method):
    r"""Averaging, and for every client a personal network, which is kept and never sent.

    A client of the round solves two problems: its own loss from the global model :math:`\theta_g`, for the average; and
    from its personal network :math:`v_k`, which starts at the first :math:`\theta_g` that it has received, its loss
    with :math:`\tfrac\lambda2 \|v - \theta_g\|^2`. The global model is that of averaging alone, to the bit.
    ``posterior_of(client)`` is the personal one. Of Bayesian layers the means go on from round to round; their widths
    start anew at the global ones.

    When to use it: clients differ, and each is scored by its own network; λ between 0.01 and 2, chosen on validation
    data. A round takes twice the steps.

    Args:
        strength: :math:`\lambda` > 0.
        rule: a fusion rule for the global model.

    Raises:
        FusionError: an argument cannot be used.

    Source: Li et al. 2021, Algorithm 1.
    """

    registered: ClassVar[str] = "ditto"
    keeps: ClassVar[str] = "its personal network"
    keeps_posteriors: ClassVar[bool] = True
    problems: ClassVar[int] = 2

    def __init__(self, strength: float = 0.1, rule: str | FusionRule = "weighted_average") -> None:
        check_number("strength", strength, "(0, inf)", error=FusionError, why="it holds networks to the global one")
        super().__init__(rule)
        self.strength = strength

    def problem(self, shared: Shared, client: Participant) -> LocalProblem:
        """See :meth:`Method.problem`."""
        return LocalProblem(Quadratic(self.strength), start=client.kept) if client.problem else LocalProblem()

    def report(self, shared: Shared, client: Participant, trained: Trained) -> Report:
        """See :meth:`Method.report`."""
        return Report(trained.posterior, trained.posterior.mean if client.problem else {})
