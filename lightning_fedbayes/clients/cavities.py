"""Local problems in a network: terms in the loss, cavities as priors, and precisions that are measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import lightning as L
import torch
from torch import Tensor

from lightning_fedbayes.clients.context import loss_and_rest
from lightning_fedbayes.clients.model import ResidentModel, Tensors
from lightning_fedbayes.core.errors import FederationError
from lightning_fedbayes.layers import set_prior
from lightning_fedbayes.layers.base import BayesianLayer, GaussianParameter
from lightning_fedbayes.layers.posterior_view import gaussian_parameters
from lightning_fedbayes.layers.priors import CavityPrior, NormalPrior, Prior, RenyiCavityPrior
from lightning_fedbayes.methods.method import Cavity, Quadratic


class Pull:
    r"""The term of FedDyn, without duals of FedProx, in the loss of a client, or of each client in a stack.

    .. math:: \tfrac{\mu}{2} \|\theta - \theta_g\|^2 - \langle v, \theta - \theta_g \rangle

    It is a part of the loss, not a change of gradients, so it is counted once however many batches are accumulated,
    scaled with the loss, clipped with the gradient, and seen by an optimizer that evaluates the loss itself. The figure
    "train_loss" contains it, as it contains the divergence from the cavity.

    Args:
        strength: :math:`\mu`, or name → a value for every entry, as of a Gaussian prior.
        centre: name → global value of a deterministic parameter.
        duals: name → v, of the parameter's shape; in a stack (clients, *). None: :math:`v = 0`.
    """

    def __init__(self, strength: float | Tensors, centre: Tensors, duals: Tensors | None = None) -> None:
        self.strength = dict(strength) if isinstance(strength, dict) else strength
        self.centre = dict(centre)
        self.duals = {} if duals is None else duals

    def __call__(self, parameters: Mapping[str, Tensor], stack: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """Return the term.

        Args:
            parameters: name → parameter; those that are missing do not train.
            stack: takes the rows of the clients of a step out of a stack; None: there is one client.

        Returns: a scalar; in a stack of shape (clients,).
        """
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

    def lay_out(self, stacks: Mapping[str, Tensor]) -> None:
        """Lay the values out in memory as the parameters ``stacks``; operations on unlike layouts take much longer."""
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
                return output
            loss = loss + self(parameters).to(loss)
            return {"loss": loss, **rest} if rest else loss

        own["training_step"] = training_step
        try:
            yield
        finally:
            own.pop("training_step")
            if mine:
                own["training_step"] = step


def pull_of(quadratics: Sequence[Quadratic | None], model: ResidentModel, *, stacked: bool = False) -> Pull:
    """Return the term of one client's loss, or of each client in a stack, about the global values.

    Args:
        quadratics: of the clients; None for one that has none.
        model: the resident network.
        stacked: True for a stack, also of one client.
    """
    given = [one or Quadratic(names=frozenset()) for one in quadratics]
    slopes = [model.parameter_names(one.slope) for one in given]
    strengths, named = [one.strength for one in given], {name for slope in slopes for name in slope}
    anchor = model.anchor()
    for one in given:
        named |= {name for name in anchor if one.strength and (one.names is None or name in one.names)}
    centre = {name: value for name, value in anchor.items() if name in named}
    duals: Tensors = {}
    for name, like in ((name, centre[name]) for name in {name for slope in slopes for name in slope}):
        rows = [slope[name].to(like) if name in slope else torch.zeros_like(like) for slope in slopes]
        duals[name] = torch.stack(rows) if stacked else rows[0]
    if len(set(strengths)) == 1:
        return Pull(strengths[0], centre, duals)
    each = {name: value.new_tensor(strengths).reshape(-1, *[1] * value.dim()) for name, value in centre.items()}
    return Pull({name: row.expand(-1, *centre[name].shape) for name, row in each.items()}, centre, duals)


class RoundCavities:
    """Puts the clients' cavities of one round into the network as priors of its Gaussian parameters.

    Args:
        like: the cavity of any client of the round; all have one base, and one way of measuring.
        model: the resident network, whose Gaussian parameters hold their own priors.

    Attributes:
        parameters: the Gaussian parameters of layers that have cavities, by name.
        measures: True if precisions are measured along training.
        batch_part: of squared gradients, see :class:`SquaredGradients`.
        num_entries: their number of entries.

    Raises:
        FederationError: a parameter's own prior is not the one that the method counts.
    """

    def __init__(self, like: Cavity, model: ResidentModel) -> None:
        self._like = like
        self.measures = like.batch_part is not None
        self.batch_part = 1.0 if like.batch_part is None else like.batch_part
        self.module = module = model.module
        found, learned, names = gaussian_parameters(module), model.learned, like.base.names
        self.parameters = {name: found[name] for name in names if name in found and name not in model.local_names}
        self._learned = [] if learned is None else [name for name in names if name in learned.variances]
        check_priors(
            like.counts, self.parameters, {} if learned is None else {n: learned.prior(n) for n in self._learned}
        )
        self.num_entries = sum(each.mean.numel() for each in self.parameters.values())

    def priors(self, fields: Sequence[Tensor]) -> dict[str, CavityPrior]:
        """Return the prior of each parameter from curvature, slope and step, or stacks of them, (clients, P)."""
        base, renyi = self._like.base, self._like.renyi
        lengths = [value.numel() for value in base.mean.values()]
        priors = {}
        parts = zip(*(field.split(lengths, -1) for field in fields))
        for (name, mean), each in zip(base.mean.items(), parts, strict=True):
            std = base.variance[name].sqrt()
            curvature, slope, step = (field.to(mean).reshape((*field.shape[:-1], *mean.shape)) for field in each)
            own = mean, std, curvature, slope, step
            priors[name] = CavityPrior(*own) if renyi is None else RenyiCavityPrior(*own, renyi)
        return priors

    def of_learned(self, cavity: Cavity) -> dict[str, CavityPrior]:
        """Return a client's priors of the parameters outside of Bayesian layers."""
        if not self._learned:
            return {}
        priors = self.priors((cavity.curvature, cavity.slope, cavity.step))
        return {name: priors[name] for name in self._learned}

    def install(self, cavity: Cavity, parts: int = 1) -> GradientWatch | None:
        """Make a client's ``cavity`` the prior of the network's layers.

        Args:
            cavity: of the client.
            parts: batches between two steps of the optimizer.

        Returns: what measures precisions along the client's training, until it is closed; None if nothing does.
        """
        priors = self.priors((cavity.curvature, cavity.slope, cavity.step)) if self.parameters else {}
        tally = None
        if self.parameters and self.measures:
            tally = next(iter(priors.values())).curvature.new_zeros((), requires_grad=True)
        for name, parameter in self.parameters.items():
            squares = None
            if tally is not None and self.batch_part < 1:
                squares = torch.zeros_like(parameter.mean, requires_grad=True)
            priors[name] = replace(priors[name], tally=tally, squares=squares)
            parameter.replace_prior(priors[name])
        return None if tally is None else GradientWatch(self.parameters, priors, tally, parts, self.batch_part)

    def remove(self) -> None:
        """Give the layers their own priors back."""
        set_prior(self.module, None)


class SquaredGradients:
    r"""Measures precisions of the data along local training, of one client or of each client in a stack.

    .. math:: \Lambda = \frac{n}{\tau} B\,\overline{g^2}, \qquad
              g = \frac{\partial L}{\partial \mu} - \frac\tau n (A d + c)

    with the loss L, a mean over B examples plus :math:`\tau / n` times the divergence from the cavity, whose gradient
    by the mean is :math:`A d + c`. The factor :math:`\tau / n` is seen in training, as the gradient of a zero that
    stands beside the divergence, the ``tally``: losses with any KL weight or warm-up are measured right. A part of
    :math:`g^2` gives way to :math:`\sum_i g_i^2`, the squares of the B examples' shares in g.

    Args:
        stacks: name → zeros of the shape of the parameter; in a stack (clients, *).
        clients: in the stack; None: one.
        parts: micro-batches that make one step; each loss is divided by it.
        batch_part: of :math:`g^2` that stays.
    """

    def __init__(
        self, stacks: Tensors, clients: int | None = None, parts: int = 1, batch_part: float = 1.0
    ) -> None:
        self.squares = stacks
        self.parts = parts
        self.batch_part = batch_part
        shape = () if clients is None else (clients,)
        device = next(iter(stacks.values())).device
        self.steps = {name: torch.zeros(shape) for name in stacks}
        self.factor = torch.zeros(shape, device=device)

    def of_batch(self, gradient: Tensor, single: Tensor | None) -> Tensor:
        r"""Return what a batch adds to the squares.

        Args:
            gradient: g; it is squared in place.
            single: :math:`\sum_i g_i^2`, None where it is not known.
        """
        whole = gradient.square_()
        return whole if single is None else torch.lerp(single.to(whole), whole, self.batch_part)

    def precisions(self, num_examples: float, local_epochs: int, slot: int | None = None) -> Tensors:
        """Return name → precision of the data of a client; nothing of a parameter without a gradient.

        Args:
            num_examples: of the client.
            local_epochs: passes over its examples.
            slot: of the client in the stack.
        """
        found = {}
        for name, squares in self.squares.items():
            steps = float(self.steps[name] if slot is None else self.steps[name][slot])
            factor = float(self.factor if slot is None else self.factor[slot])
            if steps and factor > 0:  # the factors are summed over the steps, too
                batch = num_examples * local_epochs / steps
                found[name] = (squares if slot is None else squares[slot]).double() * (self.parts * batch / factor)
        return found


def take_gradient(tally: Tensor | None) -> Tensor | None:
    """Return the gradient of a tally, which has none then; None if there is none."""
    if tally is None or tally.grad is None:
        return None
    gradient, tally.grad = tally.grad, None
    return gradient


class GradientWatch:
    """Measures precisions along the local training of one client in the module itself.

    Gradients are read when they have been computed, before they are clipped.

    Args:
        parameters: the Gaussian parameters of layers, by name.
        priors: their cavities.
        tally: of all of them.
        parts: batches between two steps of the optimizer, whose gradients add up.
        batch_part: see :class:`SquaredGradients`.
    """

    def __init__(
        self, parameters: Mapping[str, GaussianParameter], priors: Mapping[str, CavityPrior], tally: Tensor, parts: int,
        batch_part: float,
    ) -> None:
        self._priors, self._tally = priors, tally
        self._seen: dict[str, tuple[Tensor, Tensor]] = {}
        self._before: Tensors = {}
        self._entries = sum(each.mean.numel() for each in parameters.values())
        self.measured = SquaredGradients(
            {name: torch.zeros_like(each.mean) for name, each in parameters.items()}, parts=parts, batch_part=batch_part
        )
        self._handles = [
            each.mean.register_post_accumulate_grad_hook(partial(self._note, name))
            for name, each in parameters.items() if each.mean.requires_grad
        ]

    def _note(self, name: str, parameter: Tensor) -> None:
        """Note a parameter's gradient, and where it was taken."""
        assert parameter.grad is not None
        self._seen[name] = parameter.grad.detach().clone(), parameter.detach().clone()

    @torch.no_grad()
    def observe(self, *, first: bool) -> None:
        """Add what the last batch's gradients say.

        Args:
            first: True unless gradients are added to those of the batch before.
        """
        if self._tally.grad is not None:
            factor, self._tally.grad = self._tally.grad / self._entries, None
            self.measured.factor += factor
            for name, (gradient, mean) in self._seen.items():
                cavity, before = self._priors[name], None if first else self._before.get(name)
                own = gradient if before is None else gradient - before
                own = own - factor * torch.addcmul(cavity.slope, mean - cavity.mean, cavity.curvature)
                self.measured.squares[name] += self.measured.of_batch(own, take_gradient(cavity.squares))
                self.measured.steps[name] += 1
        self._before = {name: gradient for name, (gradient, _) in self._seen.items()}
        self._seen = {}

    def close(self) -> None:
        """Stop reading gradients."""
        for handle in self._handles:
            handle.remove()


def check_priors(
    counts: tuple[float, float], parameters: Mapping[str, GaussianParameter], learned: Mapping[str, Prior]
) -> None:
    """Raise FederationError unless all Gaussian parameters have the normal prior that the method counts once.

    Args:
        counts: its mean and standard deviation.
        parameters: of layers.
        learned: the priors of others.
    """
    priors = dict(learned)
    for name, parameter in parameters.items():
        if not isinstance(parameter.layer, BayesianLayer):
            raise FederationError(
                f"fusion='sites': '{name}' is of {type(parameter.layer).__module__}, whose prior must be proper; "
                "a cavity need not be. Use a layer of this package, such as fb.bayesianize makes"
            )
        priors[name] = parameter.layer.priors[parameter.path]
    wanted = NormalPrior(*counts)
    for name, own in priors.items():
        if not isinstance(own, NormalPrior) or (own.mean, own.std) != (wanted.mean, wanted.std):
            raise FederationError(
                f"fusion='sites': '{name}' has the prior {own}, and the rule counts {wanted}; give the rule the "
                "network's: fb.Sites(prior_mean=..., prior_std=...), one normal prior for all layers"
            )
