"""Server optimizers: rules that take an optimizer's step towards what another rule fuses."""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_fedbayes.core.errors import FusionError, check_number
from lightning_fedbayes.core.posterior import GaussianPosterior
from lightning_fedbayes.fusion.registry import get_rule, register_fusion
from lightning_fedbayes.fusion.rule import Fused, Moments, RuleState, Statistics, SumRule, check_part


class ServerOptimizer(SumRule):
    r"""The global mean takes a step towards the clients. The variances come from the rule that fuses.

    .. math:: \Delta = \mu_\text{fused} - \mu_\text{previous}, \qquad \mu = \mu_\text{previous} + \eta\, s(\Delta)

    Args:
        lr: :math:`\eta` > 0.
        then: the rule that fuses, a :class:`SumRule`: a name, an alias or a rule object.

    Raises FusionError: an argument is out of range, or ``then`` is no :class:`SumRule`.
    Source: Reddi et al. 2021, Algorithm 1.
    """

    needs_previous: ClassVar[bool] = True

    def __init__(self, lr: float, then: str | SumRule) -> None:
        check_number("lr", lr, "(0, inf)", error=FusionError)
        rule, who = get_rule(then), f"{type(self).__name__}(then=...)"
        if not isinstance(rule, SumRule) or isinstance(rule, ServerOptimizer):
            raise FusionError(f"{who}: {type(rule).__name__} is no plain sum over clients: take weighted_average")
        self.lr, self.then = lr, rule
        # of this object, not of its class: they follow from the rule that fuses
        vars(self).update(uses_weights=rule.uses_weights, narrows=rule.narrows, keeps_prior=rule.keeps_prior)

    def compute(self, statistics: Statistics, like: GaussianPosterior, previous: GaussianPosterior | None) -> Moments:
        """See :meth:`SumRule.compute`: the result of a first round."""
        return self.advance(statistics, like, previous, self.init(), {}).posterior.flatten()

    @abstractmethod
    def step(self, state: RuleState, change: Tensor) -> tuple[Tensor, RuleState]:
        """Return the step s, (P,), for the change Δ, (P,), float64, and the optimizer's new state, at first empty."""

    def update(self, statistics: Statistics, mean: Tensor, variance: Tensor, weight: float) -> None:
        self.then.update(statistics, mean, variance, weight)

    def merge(self, statistics: Statistics, other: Statistics) -> None:
        self.then.merge(statistics, other)

    def average(self, statistics: Statistics) -> tuple[Tensor, Tensor] | None:
        return self.then.average(statistics)

    def advance(
        self,
        statistics: Statistics,
        like: GaussianPosterior,
        previous: GaussianPosterior | None,
        state: RuleState,
        weights: Mapping[int, float],
    ) -> Fused:
        """See :meth:`SumRule.advance`. Raise FusionError if there is no previous posterior."""
        if previous is None:
            raise FusionError(f"{type(self).__name__} takes a step from the previous posterior: give previous=")
        fused = self.then.advance(statistics, like, previous, state.get("then", self.then.init()), weights)
        (target, variance), start = fused.posterior.flatten(), previous.flatten()[0].to(like.flatten()[0].device)
        step, kept = self.step(state.get("optimizer", {}), target - start)
        posterior = like.unflatten(start + self.lr * step, variance)
        return replace(fused, posterior=posterior, state={"optimizer": kept, "then": fused.state})

    def check_state(self, state: Any, parameters: int) -> None:
        if not state:
            return
        self.then.check_state(check_part(self, state, "then"), parameters)
        kept = check_part(self, state, "optimizer")
        for name, like in self.step({}, torch.zeros(parameters))[1].items():
            check_part(self, kept, name, tuple(like.shape))


@register_fusion("fedavgm")
class FedAvgM(ServerOptimizer):
    r"""Momentum at the server.

    .. math:: m \leftarrow \beta m + \Delta, \qquad s = m

    When to use it: clients' data differ and few clients take part in a round, so that rounds pull to and fro.

    Args:
        lr: :math:`\eta` > 0; 1 with ``momentum=0`` is the rule that fuses.
        momentum: :math:`\beta` in [0, 1).
        then: see :class:`ServerOptimizer`.

    Source: Hsu, Qi and Brown 2019.
    """

    def __init__(self, lr: float = 0.1, momentum: float = 0.9, then: str | SumRule = "weighted_average") -> None:
        super().__init__(lr, then)
        check_number("momentum", momentum, "[0, 1)", error=FusionError)
        self.momentum = momentum

    def step(self, state: RuleState, change: Tensor) -> tuple[Tensor, RuleState]:
        m = change + self.momentum * state["momentum"].to(change) if state else change
        return m, {"momentum": m}


class AdaptiveServerOptimizer(ServerOptimizer):
    r"""An adaptive step for every entry.

    .. math:: m \leftarrow \beta_1 m + (1 - \beta_1) \Delta, \qquad s = \frac{m}{\sqrt{v} + \tau}

    with m from 0 and v from :math:`\tau^2`. As in the source, no bias is corrected.

    Args:
        lr: :math:`\eta` > 0, about the length of a step of one entry.
        beta1: :math:`\beta_1` in [0, 1).
        epsilon: :math:`\tau` > 0: far smaller changes of an entry are noise.
        then: see :class:`ServerOptimizer`.

    Source: Reddi et al. 2021, Algorithm 2.
    """

    def __init__(
        self, lr: float = 0.01, beta1: float = 0.9, epsilon: float = 1e-3, then: str | SumRule = "weighted_average"
    ) -> None:
        super().__init__(lr, then)
        check_number("beta1", beta1, "[0, 1)", error=FusionError)
        check_number("epsilon", epsilon, "(0, inf)", error=FusionError)
        self.beta1, self.epsilon = beta1, epsilon

    @abstractmethod
    def second_moment(self, v: Tensor, squared: Tensor) -> Tensor:
        """Return the new v from the old one and Δ²."""

    def step(self, state: RuleState, change: Tensor) -> tuple[Tensor, RuleState]:
        m = (1 - self.beta1) * change + (self.beta1 * state["momentum"].to(change) if state else 0)
        v = state["square"].to(change) if state else torch.full_like(change, self.epsilon * self.epsilon)
        v = self.second_moment(v, change.square())
        return m / (v.sqrt() + self.epsilon), {"momentum": m, "square": v}


@register_fusion("fedadagrad")
class FedAdagrad(AdaptiveServerOptimizer):
    r"""Adagrad at the server.

    .. math:: v \leftarrow v + \Delta^2

    When to use it: changes are sparse, as of embeddings: each entry's steps shrink with its history.

    Args: see :class:`AdaptiveServerOptimizer`. Since v only grows, ``lr`` is ten times the rate of ``fedadam``.

    Source: Reddi et al. 2021, Algorithm 2.
    """

    def __init__(
        self, lr: float = 0.1, beta1: float = 0.0, epsilon: float = 1e-3, then: str | SumRule = "weighted_average"
    ) -> None:
        super().__init__(lr, beta1, epsilon, then)

    def second_moment(self, v: Tensor, squared: Tensor) -> Tensor:
        return v + squared


@register_fusion("fedadam")
class FedAdam(AdaptiveServerOptimizer):
    r"""Adam at the server.

    .. math:: v \leftarrow \beta_2 v + (1 - \beta_2) \Delta^2

    When to use it: clients' data differ, and changes differ in size from layer to layer.

    Args: see :class:`AdaptiveServerOptimizer`, and ``beta2`` in [0, 1).

    Source: Reddi et al. 2021, Algorithm 2.
    """

    def __init__(
        self,
        lr: float = 0.01,
        beta1: float = 0.9,
        beta2: float = 0.99,
        epsilon: float = 1e-3,
        then: str | SumRule = "weighted_average",
    ) -> None:
        super().__init__(lr, beta1, epsilon, then)
        check_number("beta2", beta2, "[0, 1)", error=FusionError)
        self.beta2 = beta2

    def second_moment(self, v: Tensor, squared: Tensor) -> Tensor:
        return self.beta2 * v + (1 - self.beta2) * squared


@register_fusion("fedyogi")
class FedYogi(FedAdam):
    r"""Yogi at the server.

    .. math:: v \leftarrow v - (1 - \beta_2) \Delta^2 \operatorname{sign}(v - \Delta^2)

    When to use it: as ``fedadam``, where its steps grow too fast after quiet rounds.

    Args: see :class:`FedAdam`.

    Source: Reddi et al. 2021, Algorithm 2.
    """

    def second_moment(self, v: Tensor, squared: Tensor) -> Tensor:
        return v - (1 - self.beta2) * squared * (v - squared).sign()
