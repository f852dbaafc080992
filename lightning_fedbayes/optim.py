"""IVON: an optimizer that learns a Gaussian posterior of any network's parameters, at about the cost of Adam."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_fedbayes.errors import FederationError, check_at_least, check_flag, check_number, shown
from lightning_fedbayes.posterior import GaussianPosterior, zeros_like
from lightning_fedbayes.private_torch import foreach

EPSILON = 1e-8
"""Added to the divisor of a step of parameters without a posterior, as Adam does."""

Sums = dict[Tensor, tuple[Tensor, Any]]
"""Parameter → sum over the draws of its gradient, and of gradient times (draw − mean); None without a posterior."""


class IVON(Optimizer):
    r"""Improved variational online Newton: the posterior of a network without Bayesian layers comes from its optimizer.

    Every parameter has a posterior :math:`N(m, 1/\Lambda)`; the module holds the mean m. A step draws :math:`\theta`
    from it, takes the gradient g of the mean loss per example there, and updates, with :math:`\lambda = n / \tau` and
    the prior :math:`N(0, s^2)`, :math:`\delta = 1 / \lambda s^2`, :math:`\Lambda = \lambda (h + \delta)`,

    .. math:: \bar g \leftarrow \beta_1 \bar g + (1 - \beta_1) g, \qquad
              h \leftarrow h + (1 - \beta_2)(\hat h - h) + \tfrac12 (1 - \beta_2)^2 \frac{(\hat h - h)^2}{h + \delta},
              \qquad \hat h = g\,(\theta - m)\,\Lambda,

    .. math:: m \leftarrow m - \text{lr}\,h_0\,\frac{\bar g / (1 - \beta_1^t) + \delta m}{h + \delta}.

    :math:`h + \delta` stays at least half its old value, so the variance is always positive. The loss must be a mean
    over examples, without weight decay of its own and without a KL divergence: the prior is in the step.

    Alone, in any loop that hands ``step`` a closure, as Lightning's automatic optimization does::

        def configure_optimizers(self):
            return fb.IVON(self.parameters(), lr=0.1, num_examples=50_000)

    Under :class:`~lightning_fedbayes.FederatedBayes` nothing else changes: the posteriors of the clients are fused as
    those of Bayesian layers are, n is each client's number of examples, and the prior is what the rule makes of it (a
    cavity, the global posterior). To predict, use :class:`~lightning_fedbayes.PosteriorPredictive`.

    When to use it: for a network that you will not rewrite. A parameter group with ``posterior=False`` has no
    posterior and takes Adam's steps with the group's ``lr``: for the parameters of Bayesian layers, which have their
    own, or for others that are to be point masses.

    Args:
        params: parameters, or groups of them with options of their own.
        lr: step size; 0.1 is usual, and stands for :math:`h_0` times as much.
        num_examples: n, the number of training examples. None: a federation gives each client's.
        prior_std: s > 0, infinite for no prior. In place of ``weight_decay``, which is :math:`\tau / n s^2`.
        hessian_init: :math:`h_0` > 0, curvature of the loss with which the posterior begins: the standard deviation is
            about :math:`1 / \sqrt{\lambda h_0}` then. Draws that disturb training at its start call for a larger one.
        betas: :math:`\beta_1, \beta_2` in [0, 1): decay of gradient and curvature. The closer :math:`\beta_2` to 1, the
            less noise in the variances, and the more steps until they are right.
        samples: draws per step, each with a gradient of its own.
        temperature: :math:`\tau` > 0; 1 is Bayes, less makes the posterior narrower.

    State of a parameter: "precision" :math:`\Lambda`, "momentum" :math:`\bar g`, "step" t, "examples" :math:`\lambda`;
    in a federation also "prior_precision" A, "prior_shift" b and "prior_weight" :math:`\rho` of a prior that is
    :math:`\exp(b\theta - \tfrac12 A \theta^2)` to the power of :math:`1 / \rho`.

    Raises:
        FederationError: an argument is out of range, or ``step`` has no gradient at a draw.

    Source: Shen et al. 2024, Algorithm 1; Lin et al. 2020 (the curvature stays positive).

    >>> layer = nn.Linear(2, 1)
    >>> optimizer = IVON(layer.parameters(), num_examples=100)
    >>> loss = optimizer.step(lambda: layer(torch.ones(2)).square().sum().backward())
    >>> sorted(optimizer.posterior(layer).names)
    ['bias', 'weight']
    """

    stacked_keys: ClassVar[frozenset[str]] = frozenset(
        ("precision", "momentum", "square", "prior_precision", "prior_shift", "prior_weight")
    )
    """State of the parameter's shape."""
    counts: ClassVar[frozenset[str]] = frozenset(("step", "examples"))
    """State that is one number; in a stack of networks one for each, of a shape that broadcasts with the parameter."""

    def __init__(
        self, params: Iterable[Tensor] | Iterable[dict[str, Any]], lr: float = 0.1, *, num_examples: int | None = None,
        prior_std: float = 1.0, hessian_init: float = 1.0, betas: tuple[float, float] = (0.9, 0.999), samples: int = 1,
        temperature: float = 1.0,
    ) -> None:
        check_at_least("samples", samples, 1)
        self.samples = samples
        self.forget()
        options = {
            "lr": lr, "num_examples": num_examples, "prior_std": prior_std, "hessian_init": hessian_init,
            "betas": betas, "temperature": temperature, "posterior": True,
        }
        super().__init__(params, options)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters with their options; see torch's."""
        super().add_param_group(param_group)
        check_options(self.param_groups[-1])

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "samples": self.samples}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.forget()

    # -- a step --------------------------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Take a step.

        Args:
            closure: evaluates the loss and its gradients; it is called once for each draw. Without it, the gradients
                are those of all :meth:`sampled` blocks since the last step.

        Returns: what the closure has returned last.

        Raises:
            FederationError: there is neither a closure nor a gradient of a draw, or gradients were accumulated before
                the parameters were drawn.
        """
        result = None
        if closure is not None:
            if any(p.grad is not None for group in self.param_groups for p in group["params"]):
                raise FederationError(
                    "IVON: there are gradients from before the draw of the parameters, as of accumulated batches, and "
                    "they were taken at the mean: use accumulate_grad_batches=1 and larger batches, or samples="
                )
            self.forget()
            for _ in range(self.samples):
                with self.sampled(), torch.enable_grad():
                    result = closure()
        elif not self._draws:
            raise FederationError(
                "IVON.step() has no gradient at a draw of the parameters: hand it a closure, as Lightning's automatic "
                "optimization does (not with precision='16-mixed': take 'bf16-mixed'), or take gradients inside "
                "`with optimizer.sampled():`"
            )
        self._update_all()
        return result

    def forget(self) -> None:
        """Forget the gradients of :meth:`sampled` blocks."""
        self._sums: Sums | None = None  # a plain value between steps: a federation drops what clients would share
        self._draws = 0

    @contextmanager
    def sampled(self) -> Iterator[None]:
        """Inside, the parameters are a draw from the posterior; their gradients then count for the next step.

        Afterwards they are the mean again, bit by bit, and have no gradient.
        """
        drawn = [p for group in self.param_groups if group["posterior"] for p in group["params"] if p.requires_grad]
        with torch.no_grad():
            precisions = [self._state_of(p)["precision"] for p in drawn]
            moves = [torch.randn_like(precision) for precision in precisions]
            if moves:
                foreach.div_(moves, foreach.sqrt(precisions))
            means = [p.detach().clone() for p in drawn]
            if moves:
                foreach.add_(drawn, moves)
        is_done = False
        try:
            yield
            is_done = True
        finally:
            with torch.no_grad():
                if drawn:
                    foreach.copy_(drawn, means)
            self._take_gradients(dict(zip(drawn, moves)) if is_done else None)

    @torch.no_grad()
    def _take_gradients(self, moves: dict[Tensor, Tensor] | None) -> None:
        """Add the gradients of a draw to the sums, unless ``moves`` is None, and take them off the parameters."""
        found: Sums = {}
        for group in self.param_groups:
            for p in group["params"]:
                gradient, p.grad = p.grad, None
                if gradient is not None and moves is not None:
                    move = moves.get(p)
                    found[p] = (gradient, None) if move is None else (gradient.to(move.dtype), move)
        drawn = [each for each in found.values() if each[1] is not None]
        if drawn:
            foreach.mul_([move for _, move in drawn], [gradient for gradient, _ in drawn])
        sums = self._sums or {}
        for p, (gradient, product) in found.items():
            if p in sums:
                before = sums[p]
                product = None if product is None or before[1] is None else product + before[1]
                gradient = gradient + before[0]
            sums[p] = gradient, product
        self._sums = sums
        self._draws += bool(found)

    @torch.no_grad()
    def _update_all(self) -> None:
        """Update all parameters from the sums over the draws, and forget those."""
        sums, draws = self._sums or {}, self._draws
        self.forget()
        for group in self.param_groups:
            found = [p for p in group["params"] if p in sums]
            if group["posterior"] and found:
                self._update(group, found, [sums[p] for p in found], draws)
            elif found:
                for p in found:
                    self._update_point(group, p, sums[p][0] / draws)

    def _update(
        self, group: dict[str, Any], parameters: list[Tensor], sums: list[tuple[Tensor, Tensor]], draws: int
    ) -> None:
        """Update parameters of a group from their sums over the draws."""
        states = [self.state[p] for p in parameters]
        precisions, momenta = ([state[name] for state in states] for name in ("precision", "momentum"))
        first, second = group["betas"]
        foreach.add_([state["step"] for state in states], 1)
        steps, scale = (factors([state[name] for state in states], precisions) for name in ("step", "examples"))
        gradients, products = ([each[i] for each in sums] for i in range(2))
        # the change of Λ, relative to Λ: (λ ĥ + A) / ρ Λ - 1, where ĥ / Λ is the mean of gradient times (θ - m)
        change = foreach.mul(products, [each / draws for each in scale])
        weights = [state.get("prior_weight") for state in states]
        own = [state.get("prior_precision") for state in states]
        inverse = foreach.reciprocal(precisions)
        prior = foreach.mul(inverse, self._prior(group) if own[0] is None else own)
        foreach.add_(change, prior)
        if weights[0] is not None:
            foreach.div_(change, weights)
        foreach.sub_(change, 1.0)
        foreach.mul_(change, 1 - second)
        factor = foreach.mul(change, 0.5)
        foreach.add_(factor, 1.0)
        foreach.mul_(factor, change)
        foreach.add_(factor, 1.0)
        foreach.mul_(precisions, factor)
        # the mean: λ g + A m - b over ρ Λ
        if draws > 1:
            gradients = foreach.div(gradients, draws)
        foreach.lerp_(momenta, gradients, 1 - first)
        rates = [each / (1 - first**step) for each, step in zip(scale, steps)]
        move = foreach.mul(momenta, rates)
        means = [p.to(each.dtype) for p, each in zip(parameters, precisions)]
        foreach.add_(move, foreach.mul(means, self._prior(group) if own[0] is None else own))
        if own[0] is not None:
            foreach.sub_(move, [state["prior_shift"] for state in states])
        foreach.div_(move, precisions)
        if weights[0] is not None:
            foreach.div_(move, weights)
        rate = -float(group["lr"]) * group["hessian_init"]
        foreach.add_(parameters, move, alpha=rate)

    def _update_point(self, group: dict[str, Any], parameter: Tensor, gradient: Tensor) -> None:
        """Take Adam's step of a parameter without a posterior."""
        state, (first, second) = self.state[parameter], group["betas"]
        if not state:
            state.update(step=torch.zeros(()), momentum=torch.zeros_like(gradient), square=torch.zeros_like(gradient))
        state["step"] += 1
        state["momentum"].lerp_(gradient, 1 - first)
        state["square"].mul_(second).addcmul_(gradient, gradient, value=1 - second)
        scale = ((state["square"] / (1 - second ** state["step"]).to(gradient)).sqrt_()).add_(EPSILON)
        move = state["momentum"] / (1 - first ** state["step"]).to(gradient)
        parameter.add_(move.div_(scale), alpha=-float(group["lr"]))

    # -- the posterior -------------------------------------------------------------------------------------------------

    def posterior(self, module: nn.Module) -> GaussianPosterior:
        """Return the posterior of ``module``, some or all of whose parameters this optimizer trains.

        Parameters that have none, and such as have not been drawn yet, are point masses. The means are copies.
        """
        mean, variance = {}, {}
        for name, p in module.named_parameters():
            mean[name] = p.detach().clone()
            state = self.state.get(p, {})
            known = "precision" in state
            variance[name] = state["precision"].reciprocal().to(p.dtype) if known else zeros_like(mean[name])
        return GaussianPosterior(mean, variance)

    @staticmethod
    def _prior(group: dict[str, Any]) -> float:
        """Return the precision of the prior."""
        return group["prior_std"] ** -2

    def _state_of(self, parameter: Tensor) -> dict[str, Any]:
        """Return the state of a parameter that has a posterior; a new one, if there is none."""
        state = self.state[parameter]
        if not state:
            group = next(each for each in self.param_groups if any(p is parameter for p in each["params"]))
            if group["num_examples"] is None:
                raise FederationError(
                    "IVON: num_examples is not known: give IVON(..., num_examples=len(training_set)); only under "
                    "FederatedBayes it is each client's own"
                )
            state.update(first_state(parameter, group, group["num_examples"]))
        return state


def factors(values: list[Tensor], like: list[Tensor]) -> list[float] | list[Tensor]:
    """Return numbers of parameters as factors of the tensors ``like``: as floats, but for stacked clients.

    Operations on lists take floats several times faster than scalar tensors.
    """
    if all(value.dim() == 0 and value.device.type == "cpu" for value in values):
        return [value.item() for value in values]
    return [value.to(each.dtype) for value, each in zip(values, like)]


def first_state(parameter: Tensor, group: dict[str, Any], num_examples: int) -> dict[str, Tensor]:
    """Return the state with which a parameter of ``group`` begins, for n examples."""
    like = parameter.detach().to(torch.promote_types(parameter.dtype, torch.float32))
    scale = num_examples / group["temperature"]
    return {
        "step": torch.zeros(()),
        "examples": torch.tensor(float(scale), dtype=torch.float64),
        "precision": torch.full_like(like, scale * group["hessian_init"] + group["prior_std"] ** -2),
        "momentum": torch.zeros_like(like),
    }


def check_options(group: dict[str, Any]) -> None:
    """Raise FederationError unless the options of a parameter group can be used."""
    check_number("lr", group["lr"], "[0, inf)")
    if group["num_examples"] is not None:
        check_at_least("num_examples", group["num_examples"], 1)
    if not isinstance(group["prior_std"], float) or group["prior_std"] != math.inf:
        check_number("prior_std", group["prior_std"], "(0, 1e19)", why="it is a standard deviation")
    check_number("hessian_init", group["hessian_init"], "(0, inf)", why="the first variance is its inverse")
    check_number("temperature", group["temperature"], "(0, inf)")
    check_flag("posterior", group["posterior"])
    if not isinstance(group["betas"], tuple | list) or len(group["betas"]) != 2:
        raise FederationError(f"betas={shown(group['betas'])}: give two numbers, such as (0.9, 0.999)")
    for beta in group["betas"]:
        check_number("betas", beta, "[0, 1)")
    if "weight_decay" in group:
        raise FederationError("IVON has no weight_decay: its prior takes that place; give prior_std")
