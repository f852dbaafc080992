"""Sites at the clients: the cavity that each takes as its prior, its pull, and how training changes both."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from lightning_fedbayes.core.changes import coded, decoded
from lightning_fedbayes.core.errors import FederationError, FusionError, shown
from lightning_fedbayes.core.posterior import GaussianPosterior
from lightning_fedbayes.fusion.rule import RuleState
from lightning_fedbayes.fusion.sites import Natural, Sites, by_pieces
from lightning_fedbayes.methods.late import Late
from lightning_fedbayes.methods.method import (
    Cavity,
    LocalProblem,
    Method,
    Participant,
    Quadratic,
    Report,
    Shared,
    Trained,
)


class _Round(NamedTuple):
    """Values that all clients of a round have in common: the base of the cavities, the centre of the pulls, and the
    moments that changes in half precision are about, none where whole posteriors travel."""

    base: GaussianPosterior
    natural: Natural
    names: tuple[str, ...]
    pulled: tuple[str, ...]
    start: Tensor
    about: tuple[Tensor, ...]


class SiteMethod(Method):
    r"""The clients' half of :class:`~lightning_fedbayes.Sites`, which says what happens in a round.

    A client keeps {"precision": Λ, "shift": η}, shape (P,) each, float64, where P counts the Gaussian parameters, in
    the order of the posterior; with a pull also {"dual": v} of the deterministic ones, in that order.

    Args:
        rule: sites in any of their forms.
    """

    keeps: ClassVar[str] = "its site, which the posterior still counts, and would count its data twice"
    keeps_optimizer: ClassVar[bool] = True
    takes_sites: ClassVar[bool] = True

    rule: Sites

    @staticmethod
    def without(
        posterior: GaussianPosterior, state: RuleState, kept: Mapping[str, Tensor]
    ) -> GaussianPosterior | None:
        """See :meth:`Method.without`; what a client keeps is its site."""
        return without_site(posterior, state, (kept["precision"], kept["shift"])) if "precision" in kept else None

    def agreement(self) -> str:
        """See :meth:`Method.agreement`."""
        names = ("step", "damping", "pull", "renyi", "precision", "half")
        prior = f"prior=N({self.rule.prior_mean}, {self.rule.prior_std}²)"
        return ", ".join([prior, *(f"{name}={getattr(self.rule, name)}" for name in names)])

    def conflict(self, weighting: Any, private: bool) -> tuple[str, str] | None:
        """See :meth:`Method.conflict`."""
        if private:
            return "privacy=", (
                "a client would keep another site than the one that noise leaves at the server. Take another rule, or "
                "train with ExamplePrivacy"
            )
        if weighting not in ("train_size", "equal"):
            return f"weighting={shown(weighting)}", (
                "sites count as they are, and the weights are those of deterministic parameters alone; give "
                "'train_size' or 'equal'"
            )
        return None

    def check_late(self, posterior: GaussianPosterior) -> None:
        """See :meth:`Method.check_late`: a site is about a client's data, whatever model it started from."""
        if self.rule.averaging not in ("pvi", 1):
            raise FederationError(
                f"schedule= with {self.described}: this form moves by what a whole cohort changes in one round. Take "
                "fusion='sites', whose posterior is prior times sites whenever they come"
            )

    def late(
        self, sent: GaussianPosterior, started: Shared, now: Shared, staleness: int, how: Late
    ) -> GaussianPosterior:
        r"""Return :math:`\lambda + \Delta_k` with the present :math:`\lambda` in place of that which it started from.

        Deterministic parameters move as far from the present value as they have moved from where they started.

        Raises:
            FusionError: a precision is not positive, which no client of this package causes.
        """
        if not staleness:
            return sent
        rule, (mean, variance) = self.rule, sent.flatten()
        before, after = (
            rule.base(each.posterior, {} if each.is_new else {"begun": True}).flatten() for each in (started, now)
        )

        def moved(*flat: Tensor) -> tuple[Tensor, ...]:
            own, old, new = (rule.natural(*flat[i : i + 2]) for i in (0, 2, 4))
            precision, shift = (sent - base + present for sent, base, present in zip(own, old, new))
            random = flat[1] > 0
            mean = torch.where(random, shift / precision, flat[0] - flat[2] + flat[4])
            return mean, torch.where(random, 1 / precision, 0.0)

        mean, variance = by_pieces(moved, mean, variance, *before, *after)
        if not bool((variance >= 0).all()):
            raise FusionError("a site that takes more of a precision away than there is")
        return sent.unflatten(mean, variance)

    def counted(self, posterior: GaussianPosterior) -> GaussianPosterior | None:
        """See :meth:`Method.counted`: the prior, counted once."""
        return None if posterior.is_point_mass else self.rule.base(posterior, {})

    def problem(self, shared: Shared, client: Participant) -> LocalProblem:
        """Return the client's cavity and its pull.

        Raises:
            FederationError: there is nothing to have a site, or a parameter with a dual is frozen: the global value
                would be pushed on for ever.
        """
        common, rule, kept = self._common(shared, client), self.rule, client.kept
        cavity = quadratic = None
        if not common.names and rule.pull is None:
            raise FederationError(
                "fusion='sites' federates a posterior, and the module has no Gaussian parameter that is federated: "
                "make layers Bayesian, as by fb.bayesianize(module, last=1), train with fb.IVON, take "
                "fusion='weighted_average', or leave pull= at its default, which is FedDyn"
            )
        if common.names:
            part = rule.batch_part(self._round(shared, client)) if client.sees_batches else 1.0
            cavity = Cavity(
                common.base, *self._fields(common, shared.share, kept), (rule.prior_mean, rule.prior_std), rule.renyi,
                part if self._measures(client) else None,
            )
        if rule.pull is not None and common.pulled:
            quadratic = Quadratic(rule.pull, self._duals(shared, common, client), frozenset(common.pulled))
        return LocalProblem(quadratic, cavity)

    def report(self, shared: Shared, client: Participant, trained: Trained) -> Report:
        """Return what a client sends, and its new site, whose change is that of what is sent, bit by bit.

        Raises:
            FusionError: training has left the finite numbers.
        """
        common, site, rule, posterior = self._common(shared, client), client.kept, self.rule, trained.posterior
        kept = {}
        if rule.pull is not None and common.pulled:
            kept["dual"] = rule.pull * (common.start - _part(posterior, common.pulled).flatten()[0])
            if "dual" in site:
                kept["dual"] += site["dual"].to(common.start.device)
        if not common.names:
            return Report(posterior, kept)
        mine, like, measured = _part(posterior, common.names), common.natural[0], trained.precisions
        found = None if measured is None else torch.cat([
            measured[name].flatten().to(like) if name in measured else like.new_full((value.numel(),), torch.nan)
            for name, value in common.base.mean.items()
        ])
        own = (site["precision"].to(like), site["shift"].to(like)) if "precision" in site else (None, None)
        large = None if found is None else torch.cat(
            [(1 / value.square().mean()).expand(value.numel()) for value in mine.mean.values()]
        ).to(like)
        share, round = shared.share, self._round(shared, client)

        dtypes = {value.dtype for value in mine.mean.values()}

        def sent(mean: Tensor, variance: Tensor) -> Natural:
            """Return both as the server has them, in the precision of the network."""
            if len(dtypes) > 1:
                return mine.unflatten(mean, variance).flatten()
            (dtype,) = dtypes
            return mean.to(dtype).to(like), variance.to(dtype).to(like)

        def halved(mean: Tensor, variance: Tensor, about: Natural, least: Tensor | float) -> Natural:
            """Return the code of what travels, which leaves at least the precision ``least``."""
            change, growth = coded((mean, variance), about)
            beyond = 1 / sent(*decoded((change, growth), about))[1] < least
            return change, torch.where(beyond, growth - 2.0**-10 * growth.abs(), growth)

        def changed(
            precision: Tensor, shift: Tensor, old: Tensor | None, old_shift: Tensor | None, mean: Tensor,
            variance: Tensor, found: Tensor | None, large: Tensor | None, *about: Tensor,
        ) -> tuple[Tensor, ...]:
            solution, base = rule.natural(mean, variance), (precision, shift)
            before = None if old is None or old_shift is None else (old, old_shift)
            steps = rule.steps(share, 0.0 if old is None else old, precision)
            start = None if large is None else torch.minimum(solution[0], large)
            new = rule.changed(base, before, solution, steps, share, round, found, start)
            moments, code = (new[1] / new[0], 1 / new[0]), ()
            if rule.half:
                least = precision - (0.0 if old is None else old) + rule.least_site(share)
                code = halved(*moments, (about[0], about[1]), least)
                moments = decoded(code, (about[0], about[1]))
            mean, variance = sent(*moments)
            site = [after - start for start, after in zip(base, rule.natural(mean, variance))]
            return mean, variance, *(site if before is None else [part + own for part, own in zip(site, before)]), *code

        flat = [vector.to(like.device) for vector in mine.flatten()]
        vectors = *common.natural, *own, *flat, found, large, *common.about
        mean, variance, *new = by_pieces(changed, *vectors, whole=len(dtypes) > 1)
        if not bool(mean.isfinite().all()):
            raise FusionError(
                f"client {client.number}: training has left the finite numbers; lower the learning rate, or clip "
                "gradients (Trainer(gradient_clip_val=...))"
            )
        proposal = mine.unflatten(mean, variance)
        whole = GaussianPosterior({**posterior.mean, **proposal.mean}, {**posterior.variance, **proposal.variance})
        kept |= zip(("precision", "shift"), new[:2], strict=True)
        if rule.half:
            codes = zip(*(code.split([value.numel() for value in mine.mean.values()]) for code in new[2:]))
            whole = whole.travelling({
                name: (change.view(like.shape), growth.view(like.shape))
                for (name, like), (change, growth) in zip(mine.mean.items(), codes)
            })
        return Report(whole, kept)

    def _common(self, shared: Shared, client: Participant) -> _Round:
        """Return what all clients of the round have in common, computed for the first of them."""
        if "sites" not in shared.notes:
            base = self.rule.base(shared.posterior, {} if shared.is_new else {"begun": True})
            names = tuple(name for name in base.names if name in client.gaussian)
            pulled = () if self.rule.pull is None else tuple(name for name in base.names if name not in client.gaussian)
            own = _part(base, names)
            natural = self.rule.natural_of(own, own.flatten()[0])
            about = _part(shared.posterior, names).flatten() if self.rule.half else ()
            about = tuple(value.to(natural[0].device) for value in about)
            shared.notes["sites"] = _Round(own, natural, names, pulled, _part(base, pulled).flatten()[0], about)
        return shared.notes["sites"]

    def _measures(self, client: Participant) -> bool:
        """Return True if the precision of a client's site is measured along its training."""
        rule = self.rule
        return rule.precision == "measured" or (
            rule.precision == "auto" and client.takes_gradients and rule.renyi is None
        )

    def _round(self, shared: Shared, client: Participant) -> int:
        """Return the round; 0 where local training is without noise, so that the damping stays."""
        return shared.round if self._measures(client) else 0

    def check(self, shared: Shared, client: Participant) -> None:
        """See :meth:`Method.check`."""
        common = self._common(shared, client)
        gaussian = common.natural[0].numel()
        lengths = {"precision": gaussian, "shift": gaussian, "dual": common.start.numel()}
        for name, value in client.kept.items():
            if value.numel() != lengths.get(name, 0):
                raise FederationError(
                    f"the site of client {client.number} is of {value.numel()} parameters ({name}), and the network "
                    f"has {lengths.get(name, 0)}: go on with the network that it was trained with, or begin anew"
                )

    def _fields(self, common: _Round, share: float, site: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Return curvature, slope and step of the cavity of a client with this ``site``."""
        own = [site[name].to(common.natural[0].device) if name in site else None for name in ("precision", "shift")]

        def fields(
            precision: Tensor, shift: Tensor, old: Tensor | None, old_shift: Tensor | None
        ) -> tuple[Tensor, Tensor, Tensor]:
            if old is None or old_shift is None:
                steps = self.rule.steps(share, 0.0, precision)
                return steps * precision, torch.zeros_like(shift), steps
            steps = self.rule.steps(share, old, precision)
            return steps * precision - old, old_shift - old * (shift / precision), steps

        curvature, slope, step = by_pieces(fields, *common.natural, *own)
        return curvature, slope, step

    def _duals(self, shared: Shared, common: _Round, client: Participant) -> dict[str, Tensor]:
        """Return a client's dual variables by name."""
        if "dual" not in client.kept:
            return {}
        means = [shared.posterior.mean[name] for name in common.pulled]
        parts = client.kept["dual"].to(common.start.device).split([mean.numel() for mean in means])
        duals = {name: part.reshape(mean.shape) for name, part, mean in zip(common.pulled, parts, means, strict=True)}
        for name in client.frozen & duals.keys():
            if duals[name].any():
                raise FederationError(
                    f"'{name}' has been trained with pull={self.rule.pull:g} and is frozen now, while its dual "
                    "variables still move the global value: keep it trainable, or begin anew"
                )
        return duals


def _part(posterior: GaussianPosterior, names: Collection[str]) -> GaussianPosterior:
    """Return the posterior of the parameters ``names`` alone."""
    return GaussianPosterior(
        {name: posterior.mean[name] for name in names}, {name: posterior.variance[name] for name in names}
    )


def without_site(posterior: GaussianPosterior, state: RuleState, site: Natural) -> GaussianPosterior:
    r"""Return the posterior without a client's site, :math:`\lambda_0 + \sum_{j \ne k} \lambda_j`.

    Exact where the model is conjugate; elsewhere the others' sites have been fitted beside the one that goes.

    Args:
        posterior: the global one.
        state: the rule's.
        site: of the client, shape (parameters that are no point masses,).

    Raises:
        FusionError: the other sites give a parameter no positive precision.
    """
    random = posterior.flatten()[1].to(state["precision"].device) > 0
    precision, shift = (state[name].clone() for name in ("precision", "shift"))
    if len(site[0]) != int(random.sum()):
        raise FusionError(f"a site of {len(site[0])} parameters, but the posterior has {int(random.sum())}")
    precision[random] -= site[0].to(precision.device)
    shift[random] -= site[1].to(shift.device)
    wrong = int((precision[random] <= 0).sum())
    if wrong:
        raise FusionError(
            f"without that client {wrong} of {len(site[0])} parameters have no positive precision; train some rounds "
            "of the others from the posterior as it is"
        )
    mean, variance = posterior.flatten()
    precision = precision.where(random, 1.0)
    return posterior.unflatten((shift / precision).where(random, mean), (1 / precision).where(random, variance))
