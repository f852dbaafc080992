"""FedNova: clients that take more steps do not pull the average towards their own optimum."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from lightning_fedbayes.core.posterior import GaussianPosterior
from lightning_fedbayes.fusion.rule import FusionRule
from lightning_fedbayes.methods.method import Method, Participant, Report, Shared, Tensors, Trained


class FedNova(Method):
    r"""Averaging of the clients' moves per step, times their mean number of steps.

    A client that has moved by :math:`\theta_k - \theta_g` in :math:`\tau_k` steps sends the posterior moved by
    :math:`(\theta_k - \theta_g) / \tau_k`, and :math:`\tau_k`; the rule's result is moved on to
    :math:`\theta_g + \bar\tau (\theta - \theta_g)` with the weighted mean :math:`\bar\tau = \sum_k \omega_k \tau_k`.
    Plain averaging ends, for clients with unlike numbers of steps, at the optimum of another objective. Of Gaussian
    parameters the means move so; variances are fused as they are.

    When to use it: clients' numbers of examples, and so of steps, differ much, and they train with SGD; a normalisation
    by steps is the published one for SGD without momentum. It trusts the clients' numbers of steps.

    Args:
        rule: a fusion rule.

    Source: Wang et al. 2020, equations (5) and (6) with :math:`a_k = (1, \dots, 1)`.
    """

    registered: ClassVar[str] = "fednova"
    sends: ClassVar[bool] = True

    def __init__(self, rule: str | FusionRule = "weighted_average") -> None:
        super().__init__(rule)

    def init(self, posterior: GaussianPosterior) -> Tensors:
        """Return a number of steps, which the server sends for its form alone."""
        return {"steps": torch.zeros((), device=next(iter(posterior.mean.values())).device)}

    def report(self, shared: Shared, client: Participant, trained: Trained) -> Report:
        """See :meth:`Method.report`."""
        steps = torch.full_like(shared.tensors["steps"], client.steps)
        return Report(moved(shared.posterior, trained.posterior, 1 / client.steps), sent={"steps": steps})

    def fuse(
        self, shared: Shared, fused: GaussianPosterior, averages: Mapping[str, Tensor], heard: float
    ) -> tuple[GaussianPosterior, Mapping[str, Tensor]]:
        """See :meth:`Method.fuse`."""
        return moved(shared.posterior, fused, float(averages["steps"])), averages


def moved(start: GaussianPosterior, end: GaussianPosterior, times: float) -> GaussianPosterior:
    """Return ``end`` with means that have come ``times`` as far from those of ``start``."""
    mean = {name: start.mean[name] + times * (mean - start.mean[name]) for name, mean in end.mean.items()}
    return GaussianPosterior(mean, end.variance, end.linearised)
