"""Attacks that ignore what was trained: noise, and what is no number."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_fedbayes.adversaries.base import Attackers, Knowledge, UpdateAttack, check_number
from lightning_fedbayes.posterior import GaussianPosterior, is_zero


@dataclass(frozen=True)
class GaussianVector(UpdateAttack):
    r"""Sends noise in place of the parameters, :math:`N(0, s^2 I)`.

    When to use it: adversaries who do not even know the model. With s = 1 those of the experiments of [Untrusted].

    Args:
        clients: see :class:`~lightning_fedbayes.adversaries.Attack`.
        std: s > 0, in units of the parameters.

    Raises:
        FederationError: ``clients`` or ``std`` cannot be used.
    """

    clients: Attackers
    std: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(self, "std", self.std, positive=True)

    def falsify(self, mean: Tensor, knowledge: Knowledge) -> Tensor:
        """A draw of N(0, s²) per parameter."""
        noise = torch.randn(mean.shape, generator=knowledge.generator, dtype=mean.dtype)
        return self.std * noise.to(mean.device)


@dataclass(frozen=True)
class NotANumber(UpdateAttack):
    """Sends NaN as every mean and every variance that is not 0.

    When to use it: to see that a federation survives it. Such an update is refused before any rule sees it.

    Args:
        clients: see :class:`~lightning_fedbayes.adversaries.Attack`.

    Raises:
        FederationError: ``clients`` cannot be used.
    """

    clients: Attackers

    def send(self, posterior: GaussianPosterior, knowledge: Knowledge) -> GaussianPosterior:
        """NaN everywhere but in deterministic variances."""
        means = super().send(posterior, knowledge).mean
        variances = {n: v if is_zero(v) else torch.full_like(v, torch.nan) for n, v in posterior.variance.items()}
        return GaussianPosterior(means, variances)

    def falsify(self, mean: Tensor, knowledge: Knowledge) -> Tensor:
        """NaN."""
        return torch.full_like(mean, torch.nan)
