"""IVON: an optimizer that learns a Gaussian posterior of any network's parameters, at about the cost of Adam."""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_fedbayes.core.errors import FederationError, check_at_least, check_flag, check_kind, check_number, shown
from lightning_fedbayes.core.posterior import GaussianPosterior, zeros_like
from lightning_fedbayes.core.private_torch import foreach
from lightning_fedbayes.modules.sources import ivon_state
from lightning_fedbayes.modules.sources.ivon_state import Factors, Part, State, Sum, Sums, factors, pieces, total

EPSILON = 1e-8
"""Added to the divisor of a step of parameters without a posterior, as in Adam."""

RATES = {"squares": 1e-2, "ivon": 0.1}
"""Usual learning rate of each kind of curvature."""
LONGEST = 0.1
"""Longest step of a mean, in steps of Newton's method."""
FALL = 0.02
"""Largest relative loss of a precision in a step, so that training begins before draws are wide."""
EARLY = 0.5
"""In step k of a client's round a precision may lose this over k: rounds can be shorter than 20 steps."""
LEAST = 1e-3
"""Least curvature that limits a step, relative to the precision."""


class IVON(Optimizer):
    r"""Improved variational online Newton: an optimizer that learns the posterior of a network without Bayesian layers.

    Every parameter has a posterior :math:`N(m, 1/\Lambda)`. The module holds the mean m. A step draws :math:`\theta`
    from it and takes the gradient g of the mean loss per example there. With :math:`\lambda = n / \tau` and the prior
    :math:`N(0, s^2)`, :math:`A = 1/s^2`, the best :math:`\Lambda` is :math:`\lambda h + A`, where h is the curvature
    of the loss. Squares of gradients give its shape over the entries of a tensor. The unbiased and noisy estimate
    :math:`\hat h = g (\theta - m) \Lambda / \lambda`, summed over the tensor and over steps, gives their unit c:

    .. math:: v \leftarrow v + \max\left(\tfrac{1}{t + 30}, 1 - \beta_2\right) (g^2 - v), \qquad
              P = \sum_t w_t \sum_i g_i (\theta_i - m_i), \qquad Q = \sum_t w_t \sum_i v_i / \Lambda_i,

    .. math:: c = \frac{P + \sqrt{P^2 + 4 Q}}{2 Q}, \qquad
              \Lambda \leftarrow \max\left(\lambda c v + A,\; (1 - \max(\tfrac{1}{50}, \tfrac{1}{2 k})) \Lambda\right),

    .. math:: m \leftarrow m - \frac{\lambda \bar g + A m}{\lambda \sqrt v / \text{lr} + 10 (\lambda c v + A)}

    with Adam's mean of gradients :math:`\bar g`. c is the mode over :math:`\log c` of the likelihood N(P; cQ, Q) under
    the prior density :math:`e^{-c/c_0} / c_0`, where :math:`c_0` belongs to the curvature at the start: it is positive
    for any gradients. The weights :math:`w_t` remember the last eighth of the steps. k counts the steps since the
    optimizer, or a client's round, began. At a fixed point the evidence lower bound has the same unit, and the shape is
    an approximation. A step of the mean is at most Adam's with this ``lr``, and at most a tenth of Newton's.

    ``curvature="ivon"`` is the published algorithm, where every entry follows its estimate,

    .. math:: h \leftarrow h + (1 - \beta_2)(\hat h - h)
              + \tfrac12 (1 - \beta_2)^2 \frac{(\hat h - h)^2}{h + \delta}, \qquad
              m \leftarrow m - \text{lr}\,(h_0 + \delta)\,\frac{\bar g / (1 - \beta_1^t) + \delta m}{h + \delta},

    :math:`\delta = A / \lambda`. With :math:`\beta_2 = 0.999` the variances follow the noise, and with 0.99999 they
    stay at :math:`h_0` (``python -m benchmarks.layers.width`` compares them). Squares reach the width of the evidence
    lower bound, as mean-field variational inference does. For a deep network on few examples under the prior N(0, 1)
    that can be too wide: give ``temperature=0.1``.

    The loss must be a mean over examples, without weight decay and KL divergence: the step has the prior. Outside of a
    federation, use it in any loop that gives ``step`` a closure, as Lightning's automatic optimization does::

        def configure_optimizers(self):
            return fb.IVON(self.parameters(), num_examples=50_000)

    Under :class:`~lightning_fedbayes.FederatedBayes` the clients' posteriors are fused like those of Bayesian layers,
    n is each client's number of examples, and the method sets the prior. A client begins at the curvature of the global
    posterior. To predict, use :class:`~lightning_fedbayes.PosteriorPredictive`.

    When to use it: for a network that you will not rewrite. A parameter group with ``posterior=False`` has no posterior
    and takes Adam's steps with the group's ``lr``: for the parameters of Bayesian layers, or for point masses.

    Args:
        params: parameters, or groups of them with their options.
        lr: learning rate, as Adam's. None: 0.01. With ``curvature="ivon"`` 0.1, times :math:`h_0 + \delta`.
        num_examples: n, the number of training examples. None: a federation gives each client's.
        prior_std: s > 0, infinite for no prior. It replaces ``weight_decay``, which is :math:`\tau / n s^2`.
        hessian_init: :math:`h_0` > 0, curvature of the loss with which the posterior begins. None: draws are a tenth of
            the root mean square of a tensor's values wide. With ``curvature="ivon"`` 1.
        betas: :math:`\beta_1, \beta_2` in [0, 1): decay of gradients and of their squares, with ``curvature="ivon"`` of
            the curvature.
        samples: draws per step, each with its gradient.
        temperature: :math:`\tau` > 0; 1 is Bayes, less makes the posterior narrower.
        curvature: "squares" or "ivon".

    State of a parameter: "precision" :math:`\Lambda`, "momentum" :math:`\bar g`, "square" v, "signal" P, "noise" Q,
    "step" t, "received" its value t − k at the start of a client's round, "examples" :math:`\lambda`. In a federation
    also "prior_precision" A and "prior_shift" b of a prior :math:`\exp(b\theta - \tfrac12 A \theta^2)`, where
    :math:`A m - b` stands for A m, and "fixed" where :math:`\Lambda` is constant.

    Raises: FederationError if an argument is out of range, or ``step`` has no gradient at a draw.
    Source: Shen et al. 2024, Algorithm 1 (``curvature="ivon"``, and the estimate of the curvature from draws); Lin et
    al. 2020 (the curvature stays positive there). The unit from sums is this package's.

    >>> layer = nn.Linear(2, 1)
    >>> optimizer = IVON(layer.parameters(), num_examples=100)
    >>> loss = optimizer.step(lambda: layer(torch.ones(2)).square().sum().backward())
    >>> sorted(optimizer.posterior(layer).names)
    ['bias', 'weight']
    """

    stacked_keys: ClassVar = frozenset(("precision", "momentum", "square", "prior_precision", "prior_shift"))
    """State of the parameter's shape."""
    sums: ClassVar = frozenset(("signal", "noise"))
    """State that is one number. In a stack of networks always one for each, shaped like ``counts``."""
    counts: ClassVar = frozenset(("step", "examples", "received", "fixed"))
    """State that is one number. In a stack of networks one for each, of a shape that broadcasts with the parameter."""

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float | None = None,
        *,
        num_examples: int | None = None,
        prior_std: float = 1.0,
        hessian_init: float | None = None,
        betas: tuple[float, float] = (0.9, 0.999),
        samples: int = 1,
        temperature: float = 1.0,
        curvature: str = "squares",
    ) -> None:
        check_at_least("samples", samples, 1)
        self.samples = samples
        self.forget()
        options = {
            "lr": lr,
            "num_examples": num_examples,
            "prior_std": prior_std,
            "hessian_init": hessian_init,
            "betas": betas,
            "temperature": temperature,
            "curvature": curvature,
            "posterior": True,
        }
        try:
            super().__init__(params, options)
        except FederationError:
            raise
        except (TypeError, AttributeError, IndexError, ValueError) as error:  # torch's, for other values
            remedy = "give module.parameters(), or dicts of them"
            raise FederationError(f"params={shown(params)}: {error}; {remedy}") from error

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        if group["curvature"] == "ivon" and group["hessian_init"] is None:
            group["hessian_init"] = 1.0
        if group["lr"] is None:
            group["lr"] = RATES.get(group["curvature"], RATES["squares"])
        check_number("lr", group["lr"], "[0, inf)")
        if group["num_examples"] is not None:
            check_at_least("num_examples", group["num_examples"], 1)
        if not isinstance(group["prior_std"], float) or group["prior_std"] != math.inf:
            check_number("prior_std", group["prior_std"], "(0, 1e19)", why="it is a standard deviation")
        if group["curvature"] not in RATES:
            raise FederationError(f"curvature={shown(group['curvature'])}: give 'squares' or 'ivon'")
        if group["hessian_init"] is not None or group["curvature"] == "ivon":
            check_number("hessian_init", group["hessian_init"], "(0, inf)", why="the first variance is its inverse")
        check_number("temperature", group["temperature"], "(0, inf)")
        check_flag("posterior", group["posterior"])
        if not isinstance(group["betas"], tuple | list) or len(group["betas"]) != 2:
            raise FederationError(f"betas={shown(group['betas'])}: give two numbers, such as (0.9, 0.999)")
        for beta in group["betas"]:
            check_number("betas", beta, "[0, 1)")
        if "weight_decay" in group:
            raise FederationError("IVON has no weight_decay: its prior takes that place; give prior_std")
        group["prior_std"] = float(group["prior_std"])  # NumPy has no negative powers of integers

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "samples": self.samples}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.forget()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Take a step, and return the last value of the closure.

        Args:
            closure: evaluates the loss and its gradients, once for each draw. None: the step uses the gradients of all
                :meth:`sampled` blocks since the last step.

        Raises FederationError: there is neither a closure nor a gradient at a draw, or one from before the draw.
        """
        result = None
        if closure is not None:
            if not callable(closure):
                raise FederationError(f"closure={shown(closure)}: give a function that evaluates the loss")
            if any(p.grad is not None for group in self.param_groups for p in group["params"]):
                what = "there are gradients at the mean, from before the draw of the parameters"
                remedy = "use accumulate_grad_batches=1 and larger batches, or samples="
                raise FederationError(f"IVON: {what}, as of accumulated batches: {remedy}")
            self.forget()
            for _ in range(self.samples):
                with self.sampled(), torch.enable_grad():
                    result = closure()
        elif not self._draws:
            closure_of = "as Lightning's automatic optimization does (not with precision='16-mixed': take 'bf16-mixed')"
            remedy = f"hand it a closure, {closure_of}, or take gradients inside `with optimizer.sampled():`"
            raise FederationError(f"IVON.step() has no gradient at a draw of the parameters: {remedy}")
        sums, draws = self._sums or {}, self._draws
        self.forget()
        for group in self.param_groups:
            found = [p for p in group["params"] if p in sums]
            with torch.no_grad():
                if group["posterior"] and found:
                    self._update(group, found, [sums[p] for p in found], draws)
                elif found:
                    for p in found:
                        self._update_point(group, p, sums[p].gradient / draws)
        return result

    def forget(self) -> None:
        """Forget the gradients of :meth:`sampled` blocks."""
        self._sums: Sums | None = None  # a plain value between steps: a federation drops what clients would share
        self._draws = 0

    @contextmanager
    def sampled(self) -> Iterator[None]:
        """Inside, the parameters are a draw from the posterior. Afterwards the mean, and gradients count for a step."""
        drawn = [p for group in self.param_groups if group["posterior"] for p in group["params"] if p.requires_grad]
        with torch.no_grad():
            precisions = [self._state_of(p)["precision"] for p in drawn]
            moves = [torch.randn_like(precision) for precision in precisions]
            means = [p.detach().clone() for p in drawn]
            if drawn:
                foreach.div_(moves, foreach.sqrt(precisions))
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
        """Move the gradients of a draw from the parameters to the sums. Drop them if ``moves`` is None."""
        found: Sums = {}
        for group in self.param_groups:
            for p in group["params"]:
                gradient, p.grad = p.grad, None
                if gradient is not None and moves is not None:
                    move = moves.get(p)
                    found[p] = (
                        Sum(gradient, None) if move is None else Sum(gradient.to(move.dtype), move.mul_(gradient))
                    )
        sums = self._sums or {}
        for p, new in found.items():
            sums[p] = new if p not in sums else ivon_state.add(sums[p], new)
        self._sums = sums or None
        self._draws += bool(found)

    def _update(self, group: State, parameters: list[Tensor], sums: list[Sum], draws: int) -> None:
        states = [self.state[p] for p in parameters]
        foreach.add_([state["step"] for state in states], 1)
        tensors = {name: [state[name] for state in states] for name in self.stacked_keys if name in states[0]}
        tensors |= {name: [getattr(each, name) for each in sums] for name in ("gradient", "product")}
        tensors["mean"], like = parameters, tensors["precision"]
        if draws > 1:
            tensors["squares"] = [each.gradient.square() if each.squares is None else each.squares for each in sums]
        steps, scale = (factors([state[name] for state in states], like) for name in ("step", "examples"))
        shares = [each / (1 - group["betas"][0] ** step) for each, step in zip(scale, steps)]
        rate, newton, default = float(group["lr"]), None, group["prior_std"] ** -2
        units = self._measure(group, states, tensors, draws, steps, scale) if group["curvature"] == "squares" else None
        for chosen, part in pieces(states, tensors):
            momenta, precisions, scales = part["momentum"], part["precision"], [scale[i] for i in chosen]
            prior = part.get("prior_precision", default)
            if units is None:
                self._follow(group, part, draws, scales, prior)
            else:
                newton = self._narrow(states, chosen, part, units, steps, prior)
            # the mean: λ g + A m - b
            gradients = part["gradient"] if draws == 1 else foreach.div(part["gradient"], draws)
            foreach.lerp_(momenta, gradients, 1 - group["betas"][0])
            move = foreach.mul(momenta, [shares[i] for i in chosen])
            means = [p.to(each.dtype) for p, each in zip(part["mean"], precisions)]
            if isinstance(prior, float):
                foreach.add_(move, means, alpha=prior)
            else:
                foreach.add_(move, foreach.mul(means, prior))
                foreach.sub_(move, part["prior_shift"])
            if newton is None:  # over ρ Λ
                foreach.div_(move, precisions)
                foreach.mul_(move, [group["hessian_init"] + default / each for each in scales])
                foreach.add_(part["mean"], move, alpha=-rate)
            elif rate:  # over λ √v / lr + (λ c v + A) / LONGEST
                divisors = foreach.sqrt(part["square"])
                foreach.mul_(divisors, [each / rate for each in scales])
                foreach.add_(divisors, newton, alpha=1 / LONGEST)
                if means[0].dtype == part["mean"][0].dtype:
                    foreach.addcdiv_(part["mean"], move, divisors, value=-1.0)
                else:
                    foreach.add_(part["mean"], foreach.div(move, divisors), alpha=-1.0)

    def _follow(self, group: State, part: Part, draws: int, scale: Factors, prior: Any) -> None:
        """Update the precisions as Shen et al. do: every entry follows its estimate."""
        # the change of Λ, relative to Λ: (λ ĥ + A) / Λ - 1, where ĥ / Λ is the mean of gradient times (θ - m)
        change = foreach.mul(part["product"], [each / draws for each in scale])
        foreach.add_(change, foreach.mul(foreach.reciprocal(part["precision"]), prior))
        foreach.sub_(change, 1.0)
        foreach.mul_(change, 1 - group["betas"][1])
        factor = foreach.mul(change, 0.5)
        foreach.add_(factor, 1.0)
        foreach.mul_(factor, change)
        foreach.add_(factor, 1.0)
        foreach.mul_(part["precision"], factor)

    def _measure(
        self, group: State, states: list[State], tensors: Part, draws: int, steps: Factors, scale: Factors
    ) -> Factors:
        """Update the squares of gradients. Return their units λ c."""
        is_first = any(bool((each == 1).any()) if isinstance(each, Tensor) else each == 1 for each in steps)
        rates = [ivon_state.larger(1 / (each + ivon_state.START), 1 - group["betas"][1]) for each in steps]
        signals, noises = ([torch.zeros_like(state["signal"]) for state in states] for _ in range(2))
        for chosen, part in pieces(states, tensors, is_first):
            several, gradients = part.get("squares"), part["gradient"]
            new = foreach.mul(gradients, gradients) if several is None else foreach.div(several, draws)
            for i, square in zip(chosen, new) if is_first else ():
                ivon_state.begin(states[i], square, steps[i])
            foreach.lerp_(part["square"], new, [rates[i] for i in chosen])
            for i, product, noise in zip(chosen, part["product"], foreach.div(part["square"], part["precision"])):
                signals[i] += total(product, signals[i]) / draws
                noises[i] += total(noise, noises[i])
        memories = [1 - ivon_state.SHARE / (each + ivon_state.START + ivon_state.SHARE) for each in steps]
        return ivon_state.unit_of(states, signals, noises, memories, scale)

    def _narrow(
        self, states: list[State], chosen: list[int], part: Part, units: Factors, steps: Factors, prior: Any
    ) -> list[Tensor]:
        """Update the precisions. Return λ c v + A, at least :data:`LEAST` of them."""
        wanted, precisions = foreach.mul(part["square"], [units[i] for i in chosen]), part["precision"]
        foreach.add_(wanted, prior)
        moving = [(i, *each) for i, *each in zip(chosen, precisions, wanted) if "fixed" not in states[i]]
        if moving:
            places, moved, lowest = zip(*moving)
            begun = factors([states[i]["received"] for i in places], [*moved])
            kept = [1 - ivon_state.larger(EARLY / (steps[i] - start), FALL) for i, start in zip(places, begun)]
            foreach.mul_(moved, kept)
            foreach.maximum_(moved, lowest)
        if not isinstance(prior, float) or not prior:  # wanted may be negative, or 0 without gradients
            foreach.maximum_(wanted, foreach.mul(precisions, LEAST))
        return wanted

    def _update_point(self, group: State, parameter: Tensor, gradient: Tensor) -> None:
        state, (first, second) = self.state[parameter], group["betas"]
        if not state:
            state.update(step=torch.zeros(()), momentum=torch.zeros_like(gradient), square=torch.zeros_like(gradient))
        state["step"] += 1
        state["momentum"].lerp_(gradient, 1 - first)
        state["square"].mul_(second).addcmul_(gradient, gradient, value=1 - second)
        scale = ((state["square"] / (1 - second ** state["step"]).to(gradient)).sqrt_()).add_(EPSILON)
        move = state["momentum"] / (1 - first ** state["step"]).to(gradient)
        parameter.add_(move.div_(scale), alpha=-float(group["lr"]))

    def posterior(self, module: nn.Module) -> GaussianPosterior:
        """Return the posterior of ``module``. FederationError if this optimizer trains no parameter of it.

        Parameters without a posterior, or without a draw so far, are point masses. The means are copies.
        """
        check_kind("module", module, nn.Module, "give the network that this optimizer trains")
        trained = {id(p) for group in self.param_groups for p in group["params"]}
        if trained.isdisjoint(map(id, module.parameters())):
            raise FederationError(f"this IVON trains no parameter of the {type(module).__name__}: give its network")
        mean, variance = {}, {}
        for name, p in module.named_parameters():
            mean[name] = p.detach().clone()
            state = self.state.get(p, {})
            known = "precision" in state
            variance[name] = state["precision"].reciprocal().to(p.dtype) if known else zeros_like(mean[name])
        return GaussianPosterior(mean, variance)

    def _state_of(self, parameter: Tensor) -> State:
        state = self.state[parameter]
        if not state:
            group = next(each for each in self.param_groups if any(p is parameter for p in each["params"]))
            if group["num_examples"] is None:
                remedy = "give IVON(..., num_examples=len(training_set)); only FederatedBayes sets it for each client"
                raise FederationError(f"IVON: num_examples is not known: {remedy}")
            state.update(ivon_state.first_state(parameter, group, group["num_examples"]))
        return state
