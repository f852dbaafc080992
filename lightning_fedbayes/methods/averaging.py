"""Averaging of the posteriors of clients that start from the global one, and its variants for unlike clients."""

from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from torch import Tensor

from lightning_fedbayes.core.errors import FederationError, FusionError, check_choice, check_number
from lightning_fedbayes.core.posterior import GaussianPosterior
from lightning_fedbayes.fusion.auto import AutoFusion
from lightning_fedbayes.fusion.registry import rule_name
from lightning_fedbayes.fusion.rule import FusionRule
from lightning_fedbayes.methods import method

MANY = 3
"""Rounds after which a variance that shrinks in each of them has lost its meaning."""
APART = 0.05
"""Part of a client's mean gradient that may differ from its move over a length, by rounding in half precision."""
LATE = 20
"""Rounds after which averages under a fixed prior approach its width (benchmarks/posterior/ROUNDS.md)."""


class Averaging(method.Method):
    """Every client trains from the global posterior, and a fusion rule makes a new one of what they send.

    ``fusion="rklb"``, a rule object and ``fusion="auto"`` mean this method. With ``weighted_average`` and a network of
    point masses it is federated averaging. With ``fedadam`` and its like the server takes an optimizer's step. Raises
    FusionError if there is no such rule or prior.

    Args:
        rule: a fusion rule, or an :class:`~lightning_fedbayes.fusion.AutoFusion`.
        prior: "fixed": the network's in every round. "global": the round's global posterior, as ``dwc`` wants it.

    Source: McMahan et al. 2017; for the rules see there.
    """

    def __init__(
        self, rule: str | FusionRule | AutoFusion = "reverse_kl_barycenter", prior: Literal["fixed", "global"] = "fixed"
    ) -> None:
        super().__init__(rule)
        check_choice("prior", prior, ("fixed", "global"), error=FusionError)
        self._prior = prior

    @property
    def described(self) -> str:
        text = super().described
        return text if self._prior == "fixed" else f"{text}, prior={self._prior}"

    def prior(self, shared: method.Shared) -> GaussianPosterior | None:
        return shared.posterior if self._prior == "global" else None

    def check_late(self, posterior: GaussianPosterior) -> None:
        """See :meth:`Method.check_late`: averages take late messages as :class:`.FedBuff` does."""

    def advice(self, posterior: GaussianPosterior, round: int, clients: int) -> str | None:
        """See :meth:`Method.advice`: where the variances go if a rule repeats what its posteriors have in common."""
        if isinstance(self.rule, AutoFusion) or posterior.is_point_mass:
            return None
        name, narrows = rule_name(self.rule), self.rule.narrows
        if narrows and self._prior == "global" and round == MANY:
            what = f"fusion='{name}' with prior='global' divides the variance by the number of clients in every round"
            return f"{what}: it has lost its meaning. fusion='sites' keeps its meaning."
        if self.rule.keeps_prior and not narrows and self._prior == "fixed" and round == LATE and clients > 1:
            what = f"fusion='{name}' counts the prior of every client in every round: σ goes to the prior's"
            return f"{what}, and further rounds can predict worse. fusion='sites' counts it once."
        return None


class FedProx(Averaging):
    r"""Averaging, with a term in each client's loss that holds what it trains near the global value.

    .. math:: \tfrac\mu2 \|\theta - \theta_g\|^2

    It holds means and ρ of Bayesian layers, not a client's local parameters. Under IVON it adds μ to the curvature.
    Raises FusionError if an argument cannot be used.

    When to use it: clients with unlike data take many steps. Source: Li et al. 2020.

    Args:
        strength: :math:`\mu` > 0; 0.001 to 1 are usual.
        rule: a fusion rule. Of point masses the default is the weighted average.
    """

    registered: ClassVar[str] = "fedprox"

    def __init__(self, strength: float = 0.1, rule: str | FusionRule = "reverse_kl_barycenter") -> None:
        check_number("strength", strength, "(0, inf)", error=FusionError, why="it scales the term of FedProx")
        super().__init__(rule)
        self.strength = strength

    def problem(self, shared: method.Shared, client: method.Participant) -> method.LocalProblem:
        return method.LocalProblem(method.Quadratic(self.strength))


class FedNova(method.Method):
    r"""Averaging of the clients' moves per step, times their mean number of steps.

    A client that has moved by :math:`\theta_k - \theta_g` in :math:`\tau_k` steps sends the posterior moved by
    :math:`(\theta_k - \theta_g) / \tau_k`, and :math:`\tau_k`; the ``rule``'s result is moved on to
    :math:`\theta_g + \bar\tau (\theta - \theta_g)` with the weighted mean :math:`\bar\tau = \sum_k \omega_k \tau_k`.
    Plain averaging ends, for unlike numbers of steps, at another optimum. Only means move so.

    When to use it: clients' numbers of examples, and so of steps, differ much, and they train with SGD without
    momentum.

    Source: Wang et al. 2020, equations (5) and (6) with :math:`a_k = (1, \dots, 1)`.
    """

    registered: ClassVar[str] = "fednova"
    sends: ClassVar[bool] = True
    per_example: ClassVar[tuple[str, ...]] = ("steps",)

    def __init__(self, rule: str | FusionRule = "weighted_average") -> None:
        super().__init__(rule)

    def init(self, posterior: GaussianPosterior) -> method.Tensors:
        """Return a number of steps, which the server sends only for its form."""
        return {"steps": torch.zeros((), device=next(iter(posterior.mean.values())).device)}

    def report(self, shared: method.Shared, client: method.Participant, trained: method.Trained) -> method.Report:
        steps = torch.full_like(shared.tensors["steps"], client.steps)
        return method.Report(moved(shared.posterior, trained.posterior, 1 / client.steps), sent={"steps": steps})

    def doubt(self, shared: method.Shared, posterior: GaussianPosterior, sent: Mapping[str, Tensor]) -> str | None:
        """See :meth:`Method.doubt`: a client has made a step at least."""
        steps = float(sent["steps"])
        return None if steps >= 1 else f"it says that it has made {steps:g} steps; one at least is needed"

    def fuse(
        self, shared: method.Shared, fused: GaussianPosterior, averages: Mapping[str, Tensor], heard: float
    ) -> tuple[GaussianPosterior, Mapping[str, Tensor]]:
        return moved(shared.posterior, fused, float(averages["steps"])), averages


def moved(start: GaussianPosterior, end: GaussianPosterior, times: float) -> GaussianPosterior:
    """Return ``end`` with means ``times`` as far from the means of ``start``."""
    mean = {name: start.mean[name] + times * (mean - start.mean[name]) for name, mean in end.mean.items()}
    return GaussianPosterior(mean, end.variance, end.linearised)


class Scaffold(method.Method):
    r"""Averaging, with each client's mean gradient replaced by the mean gradient of all clients as far as it is known.

    A client's loss gains :math:`\langle c - c_k, \theta - \theta_g \rangle`: its steps follow :math:`g_k - c_k + c`.
    After T steps of rate η it has :math:`c_k^+ = c_k - c + (\theta_g - \theta_k) / (T \eta)`, the mean gradient of its
    loss, and sends :math:`c_k^+ - c_k` with its posterior, for the ``rule``. The server adds the cohort's weighted mean
    of it to c, times the cohort's share of all clients. Control variates, of means, are as large as the network, in
    every message.

    When to use it: unlike clients take many steps of plain SGD. What a client adds to c has the direction of its move.
    The server bounds each :math:`c_k` by the median client's, and the client keeps what is counted of it: c is their
    mean, and lies do not add up. If few clients take part in a round, c lags behind.

    Source: Karimireddy et al. 2020, Algorithm 1, option II, with a global step of 1.
    """

    registered: ClassVar[str] = "scaffold"
    keeps: ClassVar[str] = "its control variate, which the server's mean still counts"
    sends: ClassVar[bool] = True
    sends_changes: ClassVar[bool] = True

    def __init__(self, rule: str | FusionRule = "weighted_average") -> None:
        super().__init__(rule)

    def init(self, posterior: GaussianPosterior) -> method.Tensors:
        """Return c = 0."""
        return {name: torch.zeros_like(mean) for name, mean in posterior.mean.items()}

    def problem(self, shared: method.Shared, client: method.Participant) -> method.LocalProblem:
        """See :meth:`Method.problem`. Raise FederationError unless the optimizer is plain SGD with one rate above 0."""
        if not client.rate:
            why = "fusion='scaffold' needs a client's mean gradient, and gets it from its move for plain SGD only"
            remedy = "torch.optim.SGD(parameters, lr=...) with one rate above 0, without momentum and weight decay"
            raise FederationError(f"{why}: {remedy}")
        return method.LocalProblem(
            method.Quadratic(slope={n: self._own(client, n, c) - c for n, c in shared.tensors.items()})
        )

    def report(self, shared: method.Shared, client: method.Participant, trained: method.Trained) -> method.Report:
        assert client.rate is not None
        length, changes = client.steps * client.rate, {}
        for name, control in shared.tensors.items():
            changes[name] = (shared.posterior.mean[name] - trained.posterior.mean[name]) / length - control
        kept = {name: self._own(client, name, change) + change for name, change in changes.items()}
        return method.Report(trained.posterior, kept, changes)

    def doubt(self, shared: method.Shared, posterior: GaussianPosterior, sent: Mapping[str, Tensor]) -> str | None:
        r"""See :meth:`Method.doubt`: :math:`c_k^+ - c_k + c` is the client's move over a length, downhill."""
        before = shared.posterior.mean
        parts = ((before[n] - posterior.mean[n], sent[n] + c, before[n]) for n, c in shared.tensors.items())
        move, slope, start = (torch.cat([each.double().flatten() for each in found]) for found in zip(*parts))
        rate = torch.dot(move, slope) / torch.dot(move, move).clamp_min(torch.finfo(torch.float64).tiny)
        rounding = 4 * torch.finfo(next(iter(before.values())).dtype).eps * rate.abs() * start.norm()
        if rate >= 0 and (slope - rate * move).norm() <= APART * slope.norm() + rounding:
            return None
        why = "what it adds to the control variate is not its mean gradient, by the way that its means have gone"
        return f"{why}; all clients must train with plain SGD and fusion='scaffold'"

    def fuse(
        self, shared: method.Shared, fused: GaussianPosterior, averages: Mapping[str, Tensor], heard: float
    ) -> tuple[GaussianPosterior, Mapping[str, Tensor]]:
        return fused, {name: control + heard * averages[name] for name, control in shared.tensors.items()}

    @staticmethod
    def _own(client: method.Participant, name: str, like: Tensor) -> Tensor:
        return client.kept[name].to(like) if name in client.kept else torch.zeros_like(like)
