"""Local problems in a network: the default method, terms in the loss, priors, and measurements along training."""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import lightning as L
import torch
from torch import Tensor

from lightning_fedbayes.clients.context import TrainingContext, loss_and_rest
from lightning_fedbayes.clients.model import ResidentModel, Tensors
from lightning_fedbayes.clients.settings import FederationSettings
from lightning_fedbayes.core.errors import FederationError
from lightning_fedbayes.core.posterior import at_least_float32
from lightning_fedbayes.layers import set_prior
from lightning_fedbayes.layers.base import BayesianLayer
from lightning_fedbayes.layers.posterior_view import gaussian_parameters
from lightning_fedbayes.layers.priors import LocalPrior, NormalPrior
from lightning_fedbayes.methods import Averaging, Sites
from lightning_fedbayes.methods.method import LocalProblem, Method, Quadratic


class Pull:
    r"""The term of FedDyn, without duals of FedProx, in the loss of a client, or of each client in a stack.

    .. math:: \tfrac{\mu}{2} \|\theta - \theta_g\|^2 - \langle v, \theta - \theta_g \rangle

    It is a part of the loss, not a change of gradients. So it counts once for accumulated batches, is scaled with the
    loss and clipped with the gradient, and optimizers that evaluate the loss see it. ``value`` is the last one.

    Args:
        strength: :math:`\mu`, or name → a value for every entry, as in a Gaussian prior.
        centre: name → global value of a deterministic parameter.
        duals: name → v, of the parameter's shape. In a stack (clients, *). None: :math:`v = 0`.
    """

    def __init__(self, strength: float | Tensors, centre: Tensors, duals: Tensors | None = None) -> None:
        self.strength = dict(strength) if isinstance(strength, dict) else strength
        self.centre = dict(centre)
        self.duals = {} if duals is None else duals
        self.value = torch.zeros(())

    def __call__(self, parameters: Mapping[str, Tensor], stack: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """Return the term, a scalar. With ``stack``, which selects a step's clients, of shape (clients,)."""
        term = torch.zeros((), device=next(iter(self.centre.values())).device)
        for name, centre in self.centre.items():
            if name in parameters:
                move, dual = parameters[name].to(centre.dtype) - centre, self.duals.get(name)
                strength: Any = self.strength if isinstance(self.strength, float | int) else self.strength[name]
                if stack is not None:
                    dual, strength = (stack(v) if isinstance(v, Tensor) else v for v in (dual, strength))
                slope = strength / 2 * move
                each = move * (slope if dual is None else slope - dual)
                term = term + (each.sum() if stack is None else each.reshape(len(each), -1).sum(1))
        return term

    def gradient(
        self, name: str, value: Tensor, stack: Callable[[Tensor], Tensor] = lambda whole: whole
    ) -> Tensor | None:
        """Return the gradient of the term by a parameter at its ``value``. None if the term does not depend on it."""
        if name not in self.centre:
            return None
        strength: Any = self.strength if isinstance(self.strength, float | int) else self.strength[name]
        strength = stack(strength) if isinstance(strength, Tensor) else strength
        found = strength * (value.to(self.centre[name].dtype) - self.centre[name])
        return found if name not in self.duals else found - stack(self.duals[name])

    def lay_out(self, stacks: Mapping[str, Tensor]) -> None:
        """Lay the values out in memory as the parameters ``stacks``: operations on unlike layouts are slower."""
        for name in self.centre.keys() & stacks.keys():
            like, centre = stacks[name], self.centre[name]
            self.centre[name] = torch.empty_like(like[0], dtype=centre.dtype).copy_(centre)
            for values in (self.duals, self.strength):
                if isinstance(values, dict) and name in values:
                    values[name] = torch.empty_like(like, dtype=values[name].dtype).copy_(values[name])

    @contextmanager
    def added(self, module: L.LightningModule, parameters: Mapping[str, Tensor]) -> Iterator[None]:
        """Inside, ``module.training_step`` returns the loss with the term at ``parameters``."""
        own, mine = vars(module), "training_step" in vars(module)
        step = module.training_step

        def training_step(*args: Any, **kwargs: Any) -> Any:
            output = step(*args, **kwargs)
            loss, rest = (None, {}) if output is None else loss_and_rest(output)
            if loss is None or not loss.requires_grad:
                self.value = torch.zeros(())
                return output
            term = self(parameters).to(loss)
            self.value, loss = term.detach(), loss + term
            return {"loss": loss, **rest} if rest else loss

        own["training_step"] = training_step
        try:
            yield
        finally:
            own.pop("training_step")
            if mine:
                own["training_step"] = step


def pull_of(quadratics: Sequence[Quadratic | None], model: ResidentModel, *, stacked: bool = False) -> Pull:
    """Return the term of one client's loss, or, ``stacked``, of each client in a stack, about the global values."""
    given = [one or Quadratic(names=frozenset()) for one in quadratics]
    slopes = [model.parameter_names(one.slope) for one in given]
    strengths: list[Any] = [one.strength for one in given]
    named = {name for slope in slopes for name in slope}
    anchor = model.anchor()
    for one in given:
        moves = not isinstance(one.strength, float | int) or bool(one.strength)
        named |= {name for name in anchor if moves and (one.names is None or name in one.names)}
    centre = {name: value for name, value in anchor.items() if name in named}
    duals: Tensors = {}
    for name, like in ((name, centre[name]) for name in {name for slope in slopes for name in slope}):
        rows = [slope[name].to(like) if name in slope else torch.zeros_like(like) for slope in slopes]
        duals[name] = torch.stack(rows) if stacked else rows[0]
    if all(isinstance(each, float | int) and each == strengths[0] for each in strengths):
        return Pull(strengths[0], centre, duals)
    by_name = [
        model.parameter_names(each) if isinstance(each, Mapping) else dict.fromkeys(centre, each) for each in strengths
    ]
    rows = {
        name: torch.stack([torch.as_tensor(each.get(name, 0.0)).to(like).expand_as(like) for each in by_name])
        for name, like in centre.items()
    }
    return Pull(rows if stacked else {name: row[0] for name, row in rows.items()}, centre, duals)


class LocalPriors:
    """Puts the clients' quadratics of one round into the network, as priors of its Gaussian parameters.

    ``like`` is the problem of any client of the round: all have quadratics of the same ``names``.

    Attributes:
        layers: the Gaussian parameters of layers, by name, with ``num_entries`` entries.
        others: name in the posterior → name in the module, of all other parameters that train.
        learned: the names of Gaussian parameters outside of layers.
    """

    def __init__(self, like: LocalProblem, names: Collection[str], model: ResidentModel) -> None:
        self.module = module = model.module
        found, learned = gaussian_parameters(module), model.learned
        self._source = learned
        own = () if like.prior is None or like.prior.names is None else like.prior.names
        self.layers = {name: found[name] for name in names if name in found and name in own}
        self.learned = [name for name in names if name in model.variances and name in own]
        self.others = {name: name for name in names if name not in found and name in model.parameters}
        self.num_entries = sum(each.mean.numel() for each in self.layers.values())
        anchor = model.anchor()
        paths = model.parameter_names({name: torch.empty(0) for name in self.layers})
        self.paths = dict(zip(self.layers, paths))
        self._centre = {name: anchor[path] for name, path in (*self.paths.items(), *((n, n) for n in self.learned))}

    def check(self, method: Method, context: TrainingContext) -> None:
        """Raise FederationError if gradients cannot be read, or a prior differs from the one that the method counts."""
        if not context.takes_gradient_steps:
            raise FederationError(
                f"precision='16-mixed' with fusion='{method.name}', which reads clients' gradients: they are scaled "
                "there. Use 'bf16-mixed'"
            )
        priors: dict[str, Any] = {} if self._source is None else {n: self._source.prior(n) for n in self.learned}
        for name, parameter in self.layers.items():
            if not isinstance(parameter.layer, BayesianLayer):
                raise FederationError(
                    f"fusion='sites': '{name}' is of {type(parameter.layer).__module__}, which takes proper priors "
                    "alone. Use a layer of this package, such as fb.bayesianize makes"
                )
            priors[name] = parameter.layer.priors[parameter.path]
        for name, own in priors.items():
            counted = method.prior_of(name)
            if counted is None:
                continue
            wanted = NormalPrior(*counted)
            if not isinstance(own, NormalPrior) or (own.mean, own.std) != (wanted.mean, wanted.std):
                raise FederationError(
                    f"fusion='sites': '{name}' has the prior {own}, and the rule counts {wanted}; give the rule the "
                    "network's: fb.Sites(prior_mean=..., prior_std=...), a number, or one for each tensor by name"
                )

    def priors(self, own: Sequence[Quadratic], *, stacked: bool = False) -> dict[str, LocalPrior]:
        """Return the prior of each Gaussian parameter, of one client, or of a stack of them, fields (clients, *)."""
        found = {}
        for name, centre in self._centre.items():
            strengths: list[Mapping[str, Tensor]] = [one.strength for one in own]  # pyright: ignore
            fields = [
                torch.stack([field.to(centre) for field in each]) if stacked else next(iter(each)).to(centre)
                for each in ([strength[name] for strength in strengths], [-one.slope[name] for one in own])
            ]
            found[name] = LocalPrior(centre, *fields)
        return found

    def remove(self) -> None:
        """Restore the priors of the layers."""
        set_prior(self.module, None)


class Measured:
    r"""Sums along local training, of one client or of each client in a stack: gradients, their squares, Price's traces.

    The factor :math:`\tau / n` of the divergence is the gradient of a zero that is added to it, the ``tally``, so it is
    right for losses with any KL weight or warm-up.

    Args:
        like: name → tensor of a parameter's shape, in a stack (clients, \*).
        layers: names of Gaussian parameters of layers.
        clients: in the stack. None: one.
        parts: micro-batches per step. Each loss is divided by it.
    """

    def __init__(self, like: Tensors, layers: Collection[str], clients: int | None = None, parts: int = 1) -> None:
        shape = () if clients is None else (clients,)
        device = next(iter(like.values())).device
        self.gradients = {name: torch.zeros_like(each) for name, each in like.items()}
        self.squares = {name: torch.zeros_like(like[name]) for name in layers}
        self.powers = torch.arange(3.0, device=device, dtype=torch.float64)
        # sums over steps of Price's trace to these powers: steps, traces, squared traces
        self.traces = {name: self.powers.new_zeros((*shape, 3)) for name in like}
        self.factor = torch.zeros(shape, device=device, dtype=torch.float64)
        self.parts = parts

    def found(
        self,
        num_examples: float,
        local_epochs: int,
        variances: Mapping[str, Tensor],
        scales: Mapping[str, float],
        slot: int | None = None,
    ) -> tuple[Tensors, Tensors]:
        """Return gradients and curvatures of a client's data, except for parameters without a gradient.

        ``variances`` are of the draws of layers, ``scales`` the factors of the loss per example of other parameters. In
        a stack the client has a ``slot``.
        """
        row = (lambda value: value) if slot is None else (lambda value: value[slot])
        gradients, precisions = {}, {}
        factor = float(row(self.factor))
        for name, total in self.gradients.items():
            steps, trace, scatter = row(self.traces[name]).tolist()
            if not steps or (name in self.squares and factor <= 0):
                continue
            if name not in self.squares:
                gradients[name] = row(total) * (scales[name] * self.parts / steps)
                continue
            gradients[name] = row(total) / factor
            batch = num_examples * local_epochs / steps
            shape = row(self.squares[name]).double() * (self.parts * batch / factor)
            unit = factor * float((shape * variances[name].to(shape)).sum())
            precisions[name] = shape * (factor_of(trace / unit, scatter / unit**2, steps) if unit > 0 else 1.0)
        return gradients, precisions


def factor_of(ratio: float, scatter: float, steps: float) -> float:
    r"""Return the factor r between the curvature and the squared gradients of a tensor.

    .. math:: r^2 - (\hat r - v)\,r - v = 0

    It is the mode over :math:`\log r` under the likelihood :math:`N(\hat r; r, v)` and the prior :math:`e^{-r}` of mean
    1, the factor of a true model. It is positive, near a ratio that is well known, and near 1 otherwise. The ``ratio``
    :math:`\hat r` is Price's trace over the trace of the squares, a sum over m ``steps``, and ``scatter`` the sum of
    the squares of its terms. The variance :math:`v` of the sum is estimated from it, times (m + 1) / (m − 1) for that.

    >>> factor_of(1.5, 1.5**2 / 100, 100), round(factor_of(-3.0, 1e6, 100), 2)
    (1.5, 1.0)
    """
    if steps < 2:
        return 1.0
    variance = max(scatter - ratio**2 / steps, 0.0) * steps * (steps + 1) / (steps - 1) ** 2
    pull = ratio - variance
    return (pull + math.hypot(pull, 2 * math.sqrt(variance))) / 2


def price_weight(std: Tensor) -> Tensor:
    r"""Return :math:`\sigma / (d\sigma / d\rho)`, which turns gradients by ρ into terms of Price's trace.

    .. math:: \sum \frac{H}{\Lambda} = \sum \sigma \frac{\partial \ell}{\partial \sigma}
    """
    std = at_least_float32(std)
    return std / -torch.expm1(-std)


class Watch:
    """Measures along the local training of one client in the module itself, and keeps widths fixed.

    It reads gradients before they are clipped, and removes gradients by ρ, so that no optimizer moves it, not even by
    weight decay. If an optimizer evaluates the loss several times in a step, the last time counts. ``parts`` batches
    make one step. ``value`` is the part of the last loss that is the client's prior.
    """

    def __init__(
        self,
        local: LocalPriors,
        own: Quadratic | None,
        terms: Sequence[Pull],
        parameters: Mapping[str, Tensor],
        parts: int,
    ) -> None:
        self._local, self._terms, self._parts = local, terms, parts
        self._priors = {} if own is None else local.priors([own])
        self._seen: dict[str, tuple[Tensor, Tensor | None]] = {}
        self.value: Tensor | float = 0.0
        self._squares: Tensors = {}
        self._tally: Tensor | None = None
        self._handles = []
        like = {name: each.mean.detach() for name, each in local.layers.items()}
        like |= {name: parameters[path].detach() for name, path in local.others.items()}
        self.measured = Measured(like, local.layers, parts=parts)
        tally = None
        if local.layers:
            tally = next(iter(like.values())).new_zeros(2, requires_grad=True)
            self._handles.append(tally.register_hook(partial(setattr, self, "_tally")))
        for name, each in local.layers.items():
            squares = torch.zeros_like(each.mean, requires_grad=True)
            squares.register_hook(partial(self._squares.__setitem__, name))
            prior = replace(self._priors[name], tally=tally, squares=squares)
            each.replace_prior(prior)
            self._take(name, each.mean, lambda mean, prior=prior: prior.gradient(mean))
            if each.rho.requires_grad:
                weight = price_weight(each.std.detach())
                self._handles.append(each.rho.register_post_accumulate_grad_hook(partial(self._hold, name, weight)))
        for name, path in local.others.items():
            self._take(name, parameters[path], partial(self._of_terms, path))
        self._traces: Tensors = {}

    def _take(self, name: str, parameter: Tensor, term: Callable[[Tensor], Tensor | None]) -> None:
        if parameter.requires_grad:
            self._handles.append(parameter.register_hook(partial(self._note, name, parameter, term)))

    def _note(self, name: str, parameter: Tensor, term: Callable[[Tensor], Tensor | None], gradient: Tensor) -> None:
        with torch.no_grad():
            self._seen[name] = gradient.detach().clone(), term(parameter.detach())

    def _of_terms(self, path: str, value: Tensor) -> Tensor | None:
        found = [each for term in self._terms if (each := term.gradient(path, value)) is not None]
        return sum(found[1:], found[0]) if found else None

    def _hold(self, name: str, weight: Tensor, rho: Tensor) -> None:
        """Add the gradient by ρ to Price's trace, and remove it."""
        assert rho.grad is not None
        self._traces[name] = (rho.grad * weight).sum(dtype=torch.float64)
        rho.grad = None

    @torch.no_grad()
    def observe(self) -> None:
        """Add the results of the last backward pass."""
        measured = self.measured
        factor, self.value = None, 0.0
        if self._tally is not None:
            factor, self.value = self._tally[0] / self._local.num_entries, self._tally[1] * self._parts
            measured.factor += factor
        for name, (gradient, term) in self._seen.items():
            is_layer = name in self._local.layers
            scale = factor if is_layer else 1 / self._parts
            if scale is None:
                continue
            own = gradient if term is None else gradient - term.to(gradient) * scale
            measured.gradients[name] += own
            measured.traces[name] += self._traces.get(name, 0.0) ** measured.powers
            if is_layer:
                measured.squares[name] += self._squares.get(name, own * own)
        self._seen, self._tally, self._traces = {}, None, {}
        self._squares.clear()

    def close(self) -> None:
        """Stop reading gradients."""
        for handle in self._handles:
            handle.remove()


BYTES_PER_ENTRY = 24
"""Bytes per entry of a posterior that a client keeps by sites: two numbers of a site, and Adam's state of the mean."""
MOST_KEPT = 2**30
"""Bytes of all clients up to which sites are the default."""


def default_fusion(
    settings: FederationSettings, model: ResidentModel, num_clients: int, callbacks: Iterable[object] = ()
) -> tuple[Method, str]:
    """Return the method for ``fusion=None``, and a line that says why.

    Averages count the prior again in every round and are too wide after many. Sites of layers, IVON and Laplace are not
    (benchmarks/posterior/ROUNDS.md).
    """
    found, learned = gaussian_parameters(model.module), model.learned
    federated = model.read_posterior().mean
    layers = {name: each for name, each in found.items() if name in federated}
    priors = {
        name: each.layer.priors[each.path] if isinstance(each.layer, BayesianLayer) else None
        for name, each in layers.items()
    }
    sourced = [name for name in model.variances if name in federated]
    for name in sourced:
        if learned is not None and learned.prior_std(name) < float("inf"):
            priors[name] = NormalPrior(0.0, learned.prior_std(name))
    scalar = {name: each for name, each in priors.items() if isinstance(each, NormalPrior) and each.is_scalar}
    normal = {name: (float(each.mean), float(each.std)) for name, each in scalar.items()}
    kept = sum(value.numel() for value in federated.values()) * BYTES_PER_ENTRY * num_clients
    conflict = Sites().conflict(settings.weighting, settings.privacy is not None)
    obstacle = None
    if conflict is not None:
        obstacle = f"{conflict[0]} is given"
    elif num_clients == 1:
        obstacle = "one client is ordinary training"
    elif any(getattr(each, "takes_single_gradients", False) for each in callbacks):
        obstacle = "a callback takes the gradients of single examples, in which sites' terms have no part"
    elif learned is not None and not learned.follows_data:
        obstacle = f"{learned.described} has no width that follows the data"
    elif not layers and not sourced:
        obstacle = "no parameter has a posterior; fusion='sites' costs a client's state, and needs fewer rounds"
    elif normal.keys() != {*layers, *sourced}:
        obstacle = "a parameter has no normal prior, or a layer is of another package"
    elif kept > MOST_KEPT and settings.kept.folder is None:
        obstacle = f"sites of {num_clients} clients would take {kept / 2**30:.1f} GiB: give keep=fb.Kept(folder=...)"
    if obstacle is not None:
        average = "an average" if layers or sourced else "federated averaging"
        return Averaging(), f"{average}, 'reverse_kl_barycenter', since {obstacle}"
    means, stds = ({name: prior[i] for name, prior in normal.items()} for i in range(2))
    of_all = [next(iter(each.values())) if len({*each.values()}) == 1 else each for each in (means, stds)]
    return Sites(*of_all), "sites, which count every client's data once"
