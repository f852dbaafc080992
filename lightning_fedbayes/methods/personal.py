"""Methods with a model for each client: Ditto, and a learnt population."""

from typing import Any, ClassVar

from lightning_fedbayes.core.errors import FusionError, check_number
from lightning_fedbayes.core.posterior import GaussianPosterior
from lightning_fedbayes.fusion.rule import FusionRule
from lightning_fedbayes.methods.method import LocalProblem, Method, Participant, Quadratic, Report, Shared, Trained


class Ditto(Method):
    r"""Averaging, and for every client a personal network, which is kept and never sent.

    A client of the round solves two problems: its loss from the global model :math:`\theta_g`, for the average, and
    from its personal network :math:`v_k`, at first the first :math:`\theta_g` that it has received, its loss with
    :math:`\tfrac\lambda2 \|v - \theta_g\|^2`. The global model is the same as by averaging, to the bit.
    ``posterior_of(client)`` is the personal one: its means go on, its widths start at the global ones. Raises
    FusionError if an argument cannot be used.

    When to use it: clients differ, and each is scored by its network; λ between 0.01 and 2, chosen on validation data.
    A round takes twice the steps. Source: Li et al. 2021, Algorithm 1.

    Args:
        strength: :math:`\lambda` > 0.
        rule: a fusion rule for the global model.
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
        return LocalProblem(Quadratic(self.strength), start=client.kept) if client.problem else LocalProblem()

    def report(self, shared: Shared, client: Participant, trained: Trained) -> Report:
        return Report(trained.posterior, trained.posterior.mean if client.problem else {})


class Population(Method):
    r"""Clients draw parameters :math:`\theta_k \sim N(\phi, \Sigma)` from a population that the federation learns.

    The global posterior is the population :math:`N(\phi, \Sigma)`. Each client goes on with its last trained posterior,
    with the population as its prior (in the first round the network's), and keeps it. The new population has the mean
    and spread of all clients' posteriors, the moments of their equal mixture ("linear_pool").

    When to use it: clients differ, each is scored by its posterior, and their number or their rounds are not small.
    """

    registered: ClassVar[str] = "population"
    keeps_posteriors: ClassVar[bool] = True
    own_starts: ClassVar[bool] = True
    weighting: ClassVar[str] = "equal"

    def __init__(self) -> None:
        super().__init__("linear_pool")

    def conflict(self, weighting: Any, private: bool) -> tuple[str, str] | None:
        """See :meth:`Method.conflict`: clients count alike."""
        if weighting not in ("train_size", "equal"):
            return f"weighting={weighting!r}", "clients of a population count alike; leave weighting= out"
        return super().conflict(weighting, private)

    def prior(self, shared: Shared) -> GaussianPosterior | None:
        return None if shared.is_new else shared.posterior
