"""Attacks on a client's own update μ − μ_o: turned round, blown up, or in a random direction."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_fedbayes.adversaries.base import Attackers, Knowledge, UpdateAttack, check_number


@dataclass(frozen=True)
class SignFlip(UpdateAttack):
    r"""Sends the update with the opposite sign, :math:`\mu_o - s\,(\mu - \mu_o)`.

    When to use it: the plain test of robustness. An average of K clients, m of them flipped with s = 1, moves about
    1 − 2m/K as far as an honest one, and backwards once they are the majority.

    Args:
        clients: see :class:`~lightning_fedbayes.adversaries.Attack`.
        scale: s > 0.

    Raises:
        FederationError: ``clients`` or ``scale`` cannot be used.
    """

    clients: Attackers
    scale: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(self, "scale", self.scale, positive=True)

    def falsify(self, mean: Tensor, knowledge: Knowledge) -> Tensor:
        """μ_o − s (μ − μ_o)."""
        return knowledge.previous - self.scale * (mean - knowledge.previous)


@dataclass(frozen=True)
class ScaledUpdate(UpdateAttack):
    r"""Sends a multiple of the update, :math:`\mu_o + f\,(\mu - \mu_o)`.

    When to use it: a client that wants more say than its weight gives it, as model replacement does with f = K; rules
    that bound a client's distance resist it. f = 0 is a free rider, who sends the global model back.

    Args:
        clients: see :class:`~lightning_fedbayes.adversaries.Attack`.
        factor: f, any finite number.

    Raises:
        FederationError: ``clients`` or ``factor`` cannot be used.
    """

    clients: Attackers
    factor: float = 10.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(self, "factor", self.factor)

    def falsify(self, mean: Tensor, knowledge: Knowledge) -> Tensor:
        """μ_o + f (μ − μ_o)."""
        return knowledge.previous + self.factor * (mean - knowledge.previous)


@dataclass(frozen=True)
class RandomUpdate(UpdateAttack):
    r"""Sends an update of honest length in a random direction, :math:`\mu_o + \|\mu - \mu_o\|\,g / \|g\|`.

    g is standard normal. When to use it: noise that no rule can tell by its length. It differs from client to client
    and from round to round.

    Args:
        clients: see :class:`~lightning_fedbayes.adversaries.Attack`.

    Raises:
        FederationError: ``clients`` cannot be used.
    """

    clients: Attackers

    def falsify(self, mean: Tensor, knowledge: Knowledge) -> Tensor:
        """μ_o + ‖μ − μ_o‖ g/‖g‖."""
        noise = torch.randn(mean.shape, generator=knowledge.generator, dtype=mean.dtype).to(mean.device)
        return knowledge.previous + (mean - knowledge.previous).norm() * noise / noise.norm()
