"""Attacks by clients that know nothing of each other: poisoned labels, falsified updates, noise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lightning_fedbayes.clients.adversaries.base import Attack, Attackers, Knowledge, UpdateAttack
from lightning_fedbayes.core.errors import LARGEST, FederationError, check_at_least, check_kind
from lightning_fedbayes.core.posterior import GaussianPosterior, check_tensor, is_zero


@dataclass(frozen=True)
class LabelFlip(Attack):
    """Trains on reversed labels, y → C − 1 − y.

    The C classes are those of the whole federation, in ascending order: label c_i becomes c_{C−1−i}. When to use it: to
    poison data, which leaves updates well formed. Examples must be tuples whose last entry is the label. The data set
    itself does not change, and the class counts that are logged are of the true labels.

    Args:
        clients: see :class:`~lightning_fedbayes.clients.adversaries.Attack`.

    Raises:
        FederationError: ``clients`` cannot be used; at the start of training, if the data have no integer labels.
    """

    clients: Attackers


def flip_labels(labels: Tensor, classes: Sequence[int]) -> Tensor:
    """Replace each label by its mirror image among ``classes``.

    Args:
        labels: integers, any shape; those that are not among ``classes`` stay as they are.
        classes: whole numbers, ascending.

    Raises:
        FederationError: labels that are no integers, or no classes.

    Returns: shape and dtype of ``labels``.

    >>> flip_labels(torch.tensor([2, 5, 9, 2]), classes=(2, 5, 9))
    tensor([9, 5, 2, 9])
    """
    check_tensor("labels", labels, error=FederationError)
    if labels.is_floating_point() or labels.is_complex():
        raise FederationError(f"labels are of {labels.dtype}: give integers")
    check_kind("classes", classes, list | tuple | range, "give the classes, ascending")
    for each in classes:
        check_at_least("a class", each, -LARGEST)
    if not classes:
        return labels
    ascending = torch.tensor(classes, dtype=torch.int64, device=labels.device)
    given = labels.to(torch.int64)
    place = torch.searchsorted(ascending, given).clamp_max(len(ascending) - 1)
    return torch.where(ascending[place] == given, ascending.flip(0)[place], given).to(labels.dtype)


@dataclass(frozen=True)
class SignFlip(UpdateAttack):
    r"""Sends the update with the opposite sign, :math:`\mu_o - s\,(\mu - \mu_o)`.

    When to use it: as the simplest test of robustness. With m of K clients flipped by s = 1, an average moves about
    1 − 2m/K as far as without them: backwards once they are the majority.

    Args:
        clients: see :class:`~lightning_fedbayes.clients.adversaries.Attack`.
        scale: s > 0.

    Raises:
        FederationError: ``clients`` or ``scale`` cannot be used.
    """

    clients: Attackers
    scale: float = 1.0

    ranges: ClassVar[Mapping[str, str]] = {"scale": "(0, inf)"}

    def falsify(self, mean: Tensor, knowledge: Knowledge) -> Tensor:
        """Return μ_o − s (μ − μ_o)."""
        return knowledge.previous - self.scale * (mean - knowledge.previous)


@dataclass(frozen=True)
class ScaledUpdate(UpdateAttack):
    r"""Sends a multiple of the update, :math:`\mu_o + f\,(\mu - \mu_o)`.

    When to use it: for a client that takes more influence than its weight gives it, as model replacement does with
    f = K; rules that bound a client's distance resist it. With f = 0 a free rider sends the global model back.

    Args:
        clients: see :class:`~lightning_fedbayes.clients.adversaries.Attack`.
        factor: f, any finite number.

    Raises:
        FederationError: ``clients`` or ``factor`` cannot be used.
    """

    clients: Attackers
    factor: float = 10.0

    ranges: ClassVar[Mapping[str, str]] = {"factor": "(-inf, inf)"}

    def falsify(self, mean: Tensor, knowledge: Knowledge) -> Tensor:
        """Return μ_o + f (μ − μ_o)."""
        return knowledge.previous + self.factor * (mean - knowledge.previous)


@dataclass(frozen=True)
class RandomUpdate(UpdateAttack):
    r"""Sends an update of the honest length in a random direction, :math:`\mu_o + \|\mu - \mu_o\|\,g / \|g\|`.

    g is standard normal, drawn anew for every client and round. When to use it: for noise that no rule can recognise by
    its length.

    Args:
        clients: see :class:`~lightning_fedbayes.clients.adversaries.Attack`.

    Raises:
        FederationError: ``clients`` cannot be used.
    """

    clients: Attackers

    def falsify(self, mean: Tensor, knowledge: Knowledge) -> Tensor:
        """Return μ_o + ‖μ − μ_o‖ g/‖g‖."""
        noise = torch.randn(mean.shape, generator=knowledge.generator, dtype=mean.dtype).to(mean.device)
        return knowledge.previous + (mean - knowledge.previous).norm() * noise / noise.norm()


@dataclass(frozen=True)
class GaussianVector(UpdateAttack):
    r"""Sends noise in place of the parameters, :math:`N(0, s^2 I)`.

    When to use it: for adversaries who do not know the model. [Untrusted] uses s = 1.

    Args:
        clients: see :class:`~lightning_fedbayes.clients.adversaries.Attack`.
        std: s > 0, in units of the parameters.

    Raises:
        FederationError: ``clients`` or ``std`` cannot be used.
    """

    clients: Attackers
    std: float = 1.0

    ranges: ClassVar[Mapping[str, str]] = {"std": "(0, inf)"}

    def falsify(self, mean: Tensor, knowledge: Knowledge) -> Tensor:
        """Return a draw of N(0, s²) per parameter."""
        noise = torch.randn(mean.shape, generator=knowledge.generator, dtype=mean.dtype)
        return self.std * noise.to(mean.device)


@dataclass(frozen=True)
class NotANumber(UpdateAttack):
    """Sends NaN as every mean and every variance that is not 0.

    When to use it: to test that a federation survives; the server refuses such an update before the fusion rule.

    Args:
        clients: see :class:`~lightning_fedbayes.clients.adversaries.Attack`.

    Raises:
        FederationError: ``clients`` cannot be used.
    """

    clients: Attackers

    def send(self, posterior: GaussianPosterior, knowledge: Knowledge) -> GaussianPosterior:
        """Return NaN everywhere except variances of 0."""
        means = super().send(posterior, knowledge).mean
        variances = {n: v if is_zero(v) else torch.full_like(v, torch.nan) for n, v in posterior.variance.items()}
        return GaussianPosterior(means, variances)

    def falsify(self, mean: Tensor, knowledge: Knowledge) -> Tensor:
        """Return NaN."""
        return torch.full_like(mean, torch.nan)


@dataclass(frozen=True)
class FalseVariance(UpdateAttack):
    r"""Sends honest means with false variances, :math:`f \sigma^2`.

    When to use it: a client that claims to be sure (f < 1) owns a product of densities, and one that claims to know
    nothing (f > 1) spoils an average of variances. After another attack of the same client, for false means too. Point
    masses stay as they are. Under sites the change of the precision is divided by f.

    Args:
        clients: see :class:`~lightning_fedbayes.clients.adversaries.Attack`.
        factor: f, at least 0. With 0 Gaussians become point masses.

    Raises:
        FederationError: ``clients`` or ``factor`` cannot be used.
    """

    clients: Attackers
    factor: float = 0.0

    ranges: ClassVar[Mapping[str, str]] = {"factor": "[0, inf)"}

    def send(self, posterior: GaussianPosterior, knowledge: Knowledge) -> GaussianPosterior:
        """Return the means as they are, with f σ² in place of σ²."""
        variances = {n: v if is_zero(v) else v * self.factor for n, v in posterior.variance.items()}
        return GaussianPosterior(posterior.mean, variances)

    def send_beside(self, tensors: Mapping[str, Tensor], knowledge: Knowledge) -> dict[str, Tensor]:
        """Return false precisions where a method sends such; by a factor of 0 infinite ones."""
        return {name: value / self.factor if name == "precision" else value for name, value in tensors.items()}

    def falsify(self, mean: Tensor, knowledge: Knowledge) -> Tensor:
        """Return the means as they are."""
        return mean
