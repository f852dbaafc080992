"""SCAFFOLD: control variates that take each client's drift out of its steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from lightning_fedbayes.core.errors import FederationError
from lightning_fedbayes.core.posterior import GaussianPosterior
from lightning_fedbayes.fusion.rule import FusionRule
from lightning_fedbayes.methods.method import (
    LocalProblem,
    Method,
    Participant,
    Quadratic,
    Report,
    Shared,
    Tensors,
    Trained,
)


class Scaffold(Method):
    r"""Averaging, with each client's mean gradient replaced by that of all clients as far as it is known.

    A client's loss gains :math:`\langle c - c_k, \theta - \theta_g \rangle`: its steps follow
    :math:`g_k - c_k + c`. After T steps of rate η it has :math:`c_k^+ = c_k - c + (\theta_g - \theta_k) / (T \eta)`,
    the mean gradient of its own loss, and sends :math:`c_k^+ - c_k` beside its posterior; the server adds the cohort's
    weighted mean of it to c, times the cohort's share of all clients. Of Gaussian parameters the means have control
    variates. They are as large as the network, in every message in both directions.

    When to use it: unlike clients take many steps of plain SGD. It trusts its clients: nothing bounds what one of them
    does to c. With a part of the clients in every round, c lags behind.

    Args:
        rule: a fusion rule.

    Source: Karimireddy et al. 2020, Algorithm 1, option II, with a global step of 1.
    """

    registered: ClassVar[str] = "scaffold"
    keeps: ClassVar[str] = "its control variate, which the server's mean still counts"
    sends: ClassVar[bool] = True

    def __init__(self, rule: str | FusionRule = "weighted_average") -> None:
        super().__init__(rule)

    def init(self, posterior: GaussianPosterior) -> Tensors:
        """Return c = 0."""
        return {name: torch.zeros_like(mean) for name, mean in posterior.mean.items()}

    def problem(self, shared: Shared, client: Participant) -> LocalProblem:
        """See :meth:`Method.problem`.

        Raises:
            FederationError: the optimizer is not plain SGD with one rate above 0.
        """
        if not client.rate:
            raise FederationError(
                "fusion='scaffold' needs the mean gradient of a client, which its move tells for plain SGD alone: "
                "torch.optim.SGD(parameters, lr=...) with one rate above 0, without momentum and weight decay"
            )
        return LocalProblem(Quadratic(slope={n: self._own(client, n, c) - c for n, c in shared.tensors.items()}))

    def report(self, shared: Shared, client: Participant, trained: Trained) -> Report:
        """See :meth:`Method.report`."""
        assert client.rate is not None
        length, changes = client.steps * client.rate, {}
        for name, control in shared.tensors.items():
            changes[name] = (shared.posterior.mean[name] - trained.posterior.mean[name]) / length - control
        kept = {name: self._own(client, name, change) + change for name, change in changes.items()}
        return Report(trained.posterior, kept, changes)

    def fuse(
        self, shared: Shared, fused: GaussianPosterior, averages: Mapping[str, Tensor], heard: float
    ) -> tuple[GaussianPosterior, Mapping[str, Tensor]]:
        """See :meth:`Method.fuse`."""
        return fused, {name: control + heard * averages[name] for name, control in shared.tensors.items()}

    @staticmethod
    def _own(client: Participant, name: str, like: Tensor) -> Tensor:
        """Return the client's control variate, 0 before its first round."""
        return client.kept[name].to(like) if name in client.kept else torch.zeros_like(like)
