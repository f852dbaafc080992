"""The clients' sites in a round: the cavity that each takes as its prior, its pull, and how training changes both."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import lightning as L
import torch
from torch import Tensor

from lightning_fedbayes.clients.context import loss_and_rest
from lightning_fedbayes.clients.model import ResidentModel, Tensors
from lightning_fedbayes.core.errors import FederationError, FusionError
from lightning_fedbayes.core.posterior import GaussianPosterior
from lightning_fedbayes.fusion.sites import Sites
from lightning_fedbayes.layers import set_prior
from lightning_fedbayes.layers.base import BayesianLayer, GaussianParameter
from lightning_fedbayes.layers.posterior_view import gaussian_parameters
from lightning_fedbayes.layers.priors import CavityPrior, NormalPrior, Prior, RenyiCavityPrior

Fields = tuple[Tensor, Tensor, Tensor]
"""Curvature, slope and step of a cavity, see :class:`~lightning_fedbayes.layers.priors.CavityPrior`, shape (P,)."""


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


class RoundSites:
    """The clients' sites in one round.

    A site is {"precision": Λ, "shift": η}, shape (P,) each, float64, where P counts the Gaussian parameters that are
    federated, in the order of the posterior; with a pull also {"dual": v} of the deterministic ones, in that order.

    Args:
        rule: the fusion rule.
        model: the resident network, whose Gaussian parameters hold their own priors.
        base: see :meth:`~lightning_fedbayes.fusion.Sites.base`.
        share: of one client among all, 1 / K.
        round: the round, from 0.
        measures: True if the optimizer takes steps of gradients, by whose squares precisions are measured.
        sees_batches: False if a process sees only a part of each batch; examples then count by batches alone.

    Attributes:
        parameters: the Gaussian parameters of layers that have sites, by name.
        batch_part: of squared gradients, see :meth:`~lightning_fedbayes.fusion.Sites.batch_part`.
        num_entries: their number of entries.
        names: of all parameters that have sites.

    Raises:
        FederationError: the network has no such parameter, or one whose prior is not the rule's.
    """

    def __init__(
        self, rule: Sites, model: ResidentModel, base: GaussianPosterior, share: float, round: int, measures: bool,
        sees_batches: bool = True,
    ) -> None:
        self.rule = rule
        self.share = share
        self.measures = rule.precision == "measured" or (rule.precision == "auto" and measures and rule.renyi is None)
        self.round = round if self.measures else 0
        self.batch_part = rule.batch_part(self.round) if sees_batches else 1.0
        self.module = module = model.module
        found, learned = gaussian_parameters(module), model.learned
        self.parameters = {name: found[name] for name in base.names if name in found and name not in model.local_names}
        self._learned = [] if learned is None else [name for name in base.names if name in learned.variances]
        self.names = [name for name in base.names if name in self.parameters or name in self._learned]
        check_priors(rule, self.parameters, {} if learned is None else {n: learned.prior(n) for n in self._learned})
        self.base = _part(base, self.names)
        self.num_entries = sum(each.mean.numel() for each in self.parameters.values())
        self._natural = rule.natural_of(self.base, self.base.flatten()[0])
        pulled = [] if rule.pull is None else [name for name in base.names if name not in self.names]
        self.centre = {name: base.mean[name].to(torch.promote_types(base.mean[name].dtype, torch.float32))
                       for name in pulled}
        self._start = _part(base, pulled).flatten()[0]
        self._frozen = [name for name, parameter in module.named_parameters() if not parameter.requires_grad]

    def check(self, client: int, site: Tensors) -> None:
        """Raise FederationError if a client's ``site`` is of another network."""
        gaussian = self._natural[0].numel()
        lengths = {"precision": gaussian, "shift": gaussian, "dual": self._start.numel()}
        for name, value in site.items():
            if value.numel() != lengths[name]:
                raise FederationError(
                    f"the site of client {client} is of {value.numel()} parameters ({name}), and the network has "
                    f"{lengths[name]}: go on with the network that it was trained with, or begin anew"
                )

    def fields(self, site: Tensors) -> Fields:
        """Return curvature, slope and step of the cavity of a client with this ``site``."""
        precision, shift = self._natural
        if not site:
            steps = self.rule.steps(self.share, 0.0, precision)
            return steps * precision, torch.zeros_like(shift), steps
        own = {name: value.to(precision.device) for name, value in site.items()}
        steps = self.rule.steps(self.share, own["precision"], precision)
        slope = own["shift"] - own["precision"] * (shift / precision)
        return steps * precision - own["precision"], slope, steps

    def cavities(self, fields: Sequence[Tensor]) -> dict[str, CavityPrior]:
        """Return the prior of each parameter from :meth:`fields`, or a stack of them of shape (clients, P)."""
        lengths = [value.numel() for value in self.base.mean.values()]
        priors = {}
        parts = zip(*(field.split(lengths, -1) for field in fields))
        for (name, mean), each in zip(self.base.mean.items(), parts, strict=True):
            std = self.base.variance[name].sqrt()
            curvature, slope, step = (field.to(mean).reshape((*field.shape[:-1], *mean.shape)) for field in each)
            own = mean, std, curvature, slope, step
            priors[name] = CavityPrior(*own) if self.rule.renyi is None else RenyiCavityPrior(*own, self.rule.renyi)
        return priors

    def pull(self, sites: Sequence[Tensors], *, stacked: bool = False) -> Pull | None:
        """Return the pull of a client with this site, or of a stack of clients; None if nothing is pulled.

        Raises:
            FederationError: a parameter with a dual is frozen: the global value would be pushed on for ever.
        """
        if not self.centre:
            return None
        assert self.rule.pull is not None
        lengths = [value.numel() for value in self.centre.values()]
        zeros = torch.zeros_like(self._start)
        vectors = [site["dual"].to(zeros.device) if "dual" in site else zeros for site in sites]
        whole = torch.stack(vectors) if stacked else vectors[0]
        duals = {
            name: part.to(value).reshape((*whole.shape[:-1], *value.shape))
            for (name, value), part in zip(self.centre.items(), whole.split(lengths, -1), strict=True)
        }
        for name in self._frozen:
            if name in duals and duals[name].any():
                raise FederationError(
                    f"'{name}' has been trained with pull={self.rule.pull:g} and is frozen now, while its dual "
                    "variables still move the global value: keep it trainable, or begin anew"
                )
        return Pull(self.rule.pull, self.centre, duals)

    def priors(self, site: Tensors) -> dict[str, CavityPrior]:
        """Return the cavities of a client with this ``site`` for the parameters outside of Bayesian layers."""
        if not self._learned:
            return {}
        cavities = self.cavities(self.fields(site))
        return {name: cavities[name] for name in self._learned}

    def install(self, site: Tensors, parts: int = 1) -> GradientWatch | None:
        """Make the cavity of a client with this ``site`` the prior of the network's layers.

        Args:
            site: of the client.
            parts: batches between two steps of the optimizer.

        Returns: what measures precisions along the client's training, until it is closed; None if they are trained.
        """
        priors = self.cavities(self.fields(site)) if self.parameters else {}
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

    def sent(
        self, client: int, site: Tensors, posterior: GaussianPosterior, measured: Tensors | None = None
    ) -> tuple[GaussianPosterior, Tensors]:
        """Return what a client sends, and its new site, whose change is that of what is sent, bit by bit.

        Args:
            client: its number.
            site: before its training.
            posterior: after it.
            measured: name → precision of the data, as :meth:`SquaredGradients.precisions` gives it.

        Raises:
            FusionError: training has left the finite numbers.
        """
        kept = {}
        if self.centre:
            assert self.rule.pull is not None
            kept["dual"] = self.rule.pull * (self._start - _part(posterior, self.centre).flatten()[0])
            if "dual" in site:
                kept["dual"] += site["dual"].to(self._start.device)
        if not self.names:
            return posterior, kept
        trained, like = _part(posterior, self.names), self._natural[0]
        found = None if measured is None else torch.cat([
            measured[name].flatten().to(like) if name in measured else like.new_full((value.numel(),), torch.nan)
            for name, value in self.base.mean.items()
        ])
        own = (site["precision"].to(like), site["shift"].to(like)) if "precision" in site else None
        solution = self.rule.natural_of(trained, like)
        large = [(1 / value.square().mean()).expand(value.numel()) for value in trained.mean.values()]
        start = torch.minimum(solution[0], torch.cat(large).to(like))
        precision, shift = self.rule.changed(
            self._natural, own, solution, self.fields(site)[2], self.share, self.round, found, start
        )
        mean = shift / precision
        if not bool(mean.isfinite().all()):
            raise FusionError(
                f"client {client}: training has left the finite numbers; lower the learning rate, or clip gradients "
                "(Trainer(gradient_clip_val=...))"
            )
        proposal = trained.unflatten(mean, 1 / precision)
        whole = GaussianPosterior({**posterior.mean, **proposal.mean}, {**posterior.variance, **proposal.variance})
        for name, before, after in zip(("precision", "shift"), self._natural, self.rule.natural_of(proposal, like)):
            kept[name] = after - before
            if name in site:
                kept[name] += site[name].to(after.device)
        return whole, kept


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
    rule: Sites, parameters: Mapping[str, GaussianParameter], learned: Mapping[str, Prior] | None = None
) -> None:
    """Raise FederationError unless all Gaussian parameters have the prior of ``rule``, and there are some or it pulls.

    Args:
        rule: the fusion rule.
        parameters: of layers.
        learned: the priors of others.
    """
    if not parameters and not learned and rule.pull is None:
        raise FederationError(
            "fusion='sites' federates a posterior, and the module has no Gaussian parameter that is federated: make "
            "layers Bayesian, as by fb.bayesianize(module, last=1), train with fb.IVON, take "
            "fusion='weighted_average', or leave pull= at its default, which is FedDyn"
        )
    priors = dict(learned or {})
    for name, parameter in parameters.items():
        if not isinstance(parameter.layer, BayesianLayer):
            raise FederationError(
                f"fusion='sites': '{name}' is of {type(parameter.layer).__module__}, whose prior must be proper; "
                "a cavity need not be. Use a layer of this package, such as fb.bayesianize makes"
            )
        priors[name] = parameter.layer.priors[parameter.path]
    wanted = NormalPrior(rule.prior_mean, rule.prior_std)
    for name, own in priors.items():
        if not isinstance(own, NormalPrior) or (own.mean, own.std) != (wanted.mean, wanted.std):
            raise FederationError(
                f"fusion='sites': '{name}' has the prior {own}, and the rule counts {wanted}; give the rule the "
                "network's: fb.Sites(prior_mean=..., prior_std=...), one normal prior for all layers"
            )


def _part(posterior: GaussianPosterior, names: Collection[str]) -> GaussianPosterior:
    """Return the posterior of the parameters ``names`` alone."""
    return GaussianPosterior(
        {name: posterior.mean[name] for name in names}, {name: posterior.variance[name] for name in names}
    )
