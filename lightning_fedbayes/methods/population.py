"""Population: clients' parameters are draws from one Gaussian, which the federation learns."""

from __future__ import annotations

from typing import Any, ClassVar

from lightning_fedbayes.core.posterior import GaussianPosterior
from lightning_fedbayes.methods.method import Method, Shared


class Population(Method):
    r"""Every client has parameters of its own, :math:`\theta_k \sim N(\phi, \Sigma)`; the population is learnt.

    The global posterior is the population :math:`N(\phi, \Sigma)`. Each client goes on with the posterior that it has
    trained last, with the population as its prior, and keeps it; the new population has the mean and the spread of all
    clients' posteriors together, the moments of their equal mixture ("linear_pool"). In the first round the prior is
    the network's own.

    When to use it: clients differ, each is scored by its own posterior, and their number or their rounds are not small.
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
        """See :meth:`Method.prior`."""
        return None if shared.is_new else shared.posterior
