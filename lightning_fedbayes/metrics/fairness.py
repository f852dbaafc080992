"""Accuracy of every client."""

from __future__ import annotations

from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor
from torchmetrics import Metric

from lightning_fedbayes.core import plots
from lightning_fedbayes.core.errors import FedBayesError, check_at_least, is_whole
from lightning_fedbayes.core.posterior import check_tensor
from lightning_fedbayes.metrics.functional.utilities import check_predictive, sum_by_index


def as_owner(client: Any, like: Tensor) -> Tensor:
    """Return the client of each example as a vector like ``like``; raise FedBayesError if it is no whole number."""
    if is_whole(client):
        check_at_least("client", client, 0, error=FedBayesError)
        return torch.full_like(like, int(client), dtype=torch.int64)
    check_tensor("client", client, error=FedBayesError)
    if client.dtype not in (torch.int64, torch.int32) or client.shape not in ((), like.shape):
        raise FedBayesError(
            f"client has shape {tuple(client.shape)} and dtype {client.dtype}; give one whole number per example, "
            f"shape {tuple(like.shape)}, or one for all"
        )
    return client.to(like.device).expand_as(like)


class ClientAccuracy(Metric):
    """Accuracy of each client on its own data.

    For fairness, pass ``compute()`` to :func:`~lightning_fedbayes.metrics.functional.weighted_accuracy` and
    :func:`~lightning_fedbayes.metrics.functional.worst_fraction_accuracy`.

    Args:
        clients: number of clients.
        kwargs: arguments of :class:`torchmetrics.Metric`.

    Source: [BA-BFL] §4.

    >>> metric = ClientAccuracy(clients=2)
    >>> metric(torch.tensor([[0.9, 0.1], [0.8, 0.2]]), torch.tensor([0, 1]), torch.tensor([0, 1]))
    tensor([1., 0.])
    """

    full_state_update = False
    is_differentiable = False
    higher_is_better = True

    counts: Tensor
    hits: Tensor

    def __init__(self, clients: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        check_at_least("clients", clients, 1, error=FedBayesError)
        self.clients = clients
        self.add_state("counts", torch.zeros(clients, dtype=torch.int64), dist_reduce_fx="sum")
        self.add_state("hits", torch.zeros(clients, dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, probs: Tensor, target: Tensor, client: Tensor | int) -> None:
        """Add examples.

        Args:
            probs: mean predictive, shape (batch, classes).
            target: classes, shape (batch,).
            client: number of the client that each example belongs to, shape (batch,), or one for all.
        """
        hit = check_predictive(probs, target).argmax(1) == target
        owner = as_owner(client, hit)
        if hit.numel() and not 0 <= int(owner.min()) <= int(owner.max()) < self.clients:
            raise FedBayesError(
                f"client ranges from {owner.min()} to {owner.max()}, but there are {self.clients} clients, "
                f"numbered from 0; create ClientAccuracy with more clients"
            )
        counts, hits = sum_by_index(owner, self.clients, hit.long())
        self.counts = self.counts + counts
        self.hits = self.hits + hits

    def compute(self) -> Tensor:
        """Return the accuracy of each client so far, shape (clients,); NaN for a client without examples."""
        return self.hits / self.counts

    def plot(self, val: Tensor | None = None) -> tuple[Figure, Axes]:
        """Draw the accuracy of every client so far, or ``val`` of shape (clients,), as bars: (figure, axes)."""
        figure = plots.client_accuracy(self.compute() if val is None else val)
        return figure, figure.axes[0]
