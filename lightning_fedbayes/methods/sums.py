"""Sums: clients' statistics add up to the statistics of the pooled data, in any rounds."""

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from lightning_fedbayes.core.errors import FederationError, listed
from lightning_fedbayes.core.posterior import GaussianPosterior
from lightning_fedbayes.methods.late import Late, moved
from lightning_fedbayes.methods.method import LocalProblem, Method, Participant, Report, Shared, Trained

CUMULATIVE = "sums."
"""Prefix of sums that a client keeps: a later round adds the change since. Other sums are over one round."""
COUNT = "sums.gram"
"""Name of the Gram matrix, with a client's number of examples as its last entry."""


class Sums(Method):
    r"""The global values are the sums of the clients' values, not their averages.

    A client's training starts at 0 and ends at its sums :math:`s_k`, as for a :class:`~lightning_fedbayes.HeadModule`.
    It sends the change since its last round, and the server adds it:

    .. math:: S^+ = S + \sum_{k \in \text{cohort}} (s_k - s_k^{\text{kept}})

    So a client counts once however often it takes part, one that joins late is added, changed data are corrected, and
    :func:`~lightning_fedbayes.remove_client` takes a client out. Values with names that do not begin with "sums." are
    sums over one round's cohort. Under :class:`~lightning_fedbayes.UpdatePrivacy` take one round: messages get noise.

    When to use it: for a module with parameters that are sums. The server leaves out a head's sums that no examples
    have, or that stand out (:mod:`lightning_fedbayes.server.sums_guard`). Other sums have no bound.
    """

    registered: ClassVar[str] = "sums"
    keeps: ClassVar[str] = "its sums, which the server's still contain"
    weighting: ClassVar[str] = "equal"
    totals: ClassVar[bool] = True

    def __init__(self) -> None:
        super().__init__("weighted_average")

    def problem(self, shared: Shared, client: Participant) -> LocalProblem:
        """See :meth:`Method.problem`: a start at 0, of all that trains."""
        moves = {name: mean for name, mean in shared.posterior.mean.items() if name not in client.frozen}
        return LocalProblem(start={name: torch.zeros_like(mean) for name, mean in moves.items()})

    def report(self, shared: Shared, client: Participant, trained: Trained) -> Report:
        """See :meth:`Method.report`. Raise FederationError unless the sums count each example once."""
        sums = {name: value for name, value in trained.posterior.mean.items() if name not in client.frozen}
        if COUNT in sums and not torch.isclose(sums[COUNT][-1, -1], sums[COUNT].new_tensor(client.num_examples)):
            what = f"the sums of a client with {client.num_examples} examples count {float(sums[COUNT][-1, -1]):g}"
            remedy = "local_epochs=1, accumulate_grad_batches=1, no gradient clipping, every batch, and SGD of rate 1"
            raise FederationError(f"{what}: take {remedy} as the module configures it")
        kept = {name: value for name, value in client.kept.items() if name in client.frozen}
        kept |= {name: value.clone() for name, value in sums.items() if name.startswith(CUMULATIVE)}
        mean = dict(shared.posterior.mean)
        for name, value in sums.items():
            mean[name] = mean[name] + value - client.kept.get(name, torch.zeros(())).to(value)
        return Report(GaussianPosterior.point_mass(mean), kept)

    def fuse(
        self, shared: Shared, fused: GaussianPosterior, averages: Mapping[str, Tensor], heard: float
    ) -> tuple[GaussianPosterior, Mapping[str, Tensor]]:
        clients, mean = round(heard / shared.share), {}
        for name, value in fused.mean.items():
            change = clients * (value - shared.posterior.mean[name])
            adds = name.startswith(CUMULATIVE) and not shared.is_new  # what a module had before is of no client
            mean[name] = shared.posterior.mean[name] + change if adds else change
        return GaussianPosterior.point_mass(mean), averages

    def check_late(self, posterior: GaussianPosterior) -> None:
        """See :meth:`Method.check_late`: a client's change of sums is the same whenever it comes."""
        others = [name for name in posterior.names if not name.startswith(CUMULATIVE)]
        if others:
            what = f"{listed(others)} are sums over one round's clients at the present solution, as the slopes of a"
            remedy = "take a head that sums determine (one_hot, gaussian), or leave schedule= out"
            raise FederationError(f"schedule= with fusion='sums': {what} softmax head are: {remedy}")

    def late(
        self, sent: GaussianPosterior, started: Shared, now: Shared, staleness: int, how: Late
    ) -> GaussianPosterior:
        """See :meth:`Method.late`: the present sums with the client's change added."""
        return moved(sent, started.posterior, now.posterior) if staleness else sent

    @staticmethod
    def without(posterior: GaussianPosterior, kept: Mapping[str, Tensor]) -> GaussianPosterior | None:
        """See :meth:`Method.without`. A client keeps its sums."""
        own = {name: value for name, value in kept.items() if name.startswith(CUMULATIVE)}
        if not own or not own.keys() <= posterior.mean.keys():
            return None
        sums = posterior.mean.items()
        return GaussianPosterior.point_mass({n: value - own[n].to(value) if n in own else value for n, value in sums})
