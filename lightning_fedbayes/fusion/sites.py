r"""Sites: each client keeps its factor of the posterior, so that no data are counted twice.

.. math:: q(\theta) \propto p(\theta) \prod_k t_k(\theta), \qquad
          t_k(\theta) = \exp\bigl(\eta_k \theta - \tfrac12 \Lambda_k \theta^2\bigr)

Parameter by parameter; precision :math:`\Lambda_k` and shift :math:`\eta_k` of a *site* :math:`t_k` may be negative. A
client starts a round from the global posterior q and takes the *cavity*, q without its own site, as its prior.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor

from lightning_fedbayes.core.errors import FusionError, check_choice, check_flag, check_number, shown
from lightning_fedbayes.core.exchange.reduction import Statistics
from lightning_fedbayes.core.posterior import PIECE, GaussianPosterior, is_zero, zeros_like
from lightning_fedbayes.fusion.registry import register_fusion
from lightning_fedbayes.fusion.rule import (
    Fused,
    RuleState,
    StatefulSumRule,
    add,
    add_number,
    add_precisions,
    check_part,
)
from lightning_fedbayes.fusion.trend import divergence, followed

Precision = Literal["auto", "measured", "trained"]
"""Source of the precision of a client's site."""
Natural = tuple[Tensor, Tensor]
r"""Precision :math:`\Lambda = 1/\sigma^2` and shift :math:`\eta = \mu/\sigma^2`, shape (P,) each, float64."""

LEAST_SHARE = 0.7
"""Share of the prior's precision that a parameter keeps at least: a client's site takes at most 1/K of the rest away,
so that no posterior is wider than 1.2 priors, whichever clients take part."""
OWN_SHARE = 3.0
"""Factor of a site's share of the precision in the default step of its client. Above 1 the local problem is bounded
where the loss is convex; a change is then damped enough if the damping is below 2 (OWN_SHARE − 1) / OWN_SHARE."""
PROPER = 0.05
"""Excess of that factor over 1 where the step is a small number, so that no cavity is improper."""
SETTLING = 20
"""Rounds after which the damping falls as one over the square root of the round, so that the noise of local training
averages out, and squares of batches give way to squares of single examples."""
LEAST_PART = 0.25
"""Part of the global precision that a client leaves at least in a round, and by which its mean counts at least."""
TOLERANCE = 1e-5
"""Relative rounding of a precision that travels as a variance in single precision."""
MEMORY = 0.7
"""Part of a site's measured precision that comes from its client's earlier rounds, from round ``SETTLING`` on."""
EARLY_MEMORY = 0.5
"""The same before."""
BITS = 34
"""Significant bits of a precision: sums of such numbers are exact as long as they span a factor below 2¹⁹ (5e5)."""


@register_fusion("sites")
class Sites(StatefulSumRule):
    r"""Partitioned variational inference: where clients solve their problems, it ends at the pooled data's posterior.

    A round, for every client k of the cohort, with :math:`\lambda = (\Lambda, \eta)`:

    1. the client minimises :math:`n_k E_q[\ell_k] + \rho_k KL(q \| \text{cavity}_k)`, with the cavity
       :math:`\lambda - \lambda_k / \rho_k`; the result is :math:`q_k`;
    2. it changes its site by :math:`\Delta_k = \delta_r\rho_k\,(\lambda(q_k) - \lambda)`, and sends the posterior
       :math:`\lambda + \Delta_k`: the global one after its change alone;
    3. the server's new posterior is :math:`\alpha\,(\lambda_0 + \sum_k \lambda_k) + (1 - \alpha)\,(\lambda +
       \mathrm{mean}_k\,\Delta_k / \rho)`, with the prior :math:`\lambda_0` and the sites of *all* clients.

    Rounds r count passes over all clients: where a part C of them takes part in each, the r of a round is C times its
    number. In the first round the prior stands in the place of the global posterior. A client that is absent keeps its
    site. The default step is of every client and parameter, :math:`\rho_k = 1/K + 3 \max(0, \Lambda_k) / \Lambda` for K
    clients in all; one that is a number is raised to :math:`1.05\,\Lambda_k / \Lambda` where it is less (towards a step
    of 1, to :math:`\Lambda_k / \Lambda`). So no cavity is improper: a local problem with a convex loss is bounded. From
    round r = 20 on the damping is :math:`\delta_r = \delta \sqrt{20 / r}`, so that the noise of local training averages
    out, unless precisions are trained, below. Clients keep the state of their optimizers, as ``keep`` of
    :class:`~lightning_fedbayes.FederatedBayes` says.

    **Precision.** Short local training moves σ hardly at all. So the precision of a site is *measured*, by the
    gradients :math:`g_i` of single examples' losses, without that of the cavity, by the means at the clients' draws, in
    all steps of the round:

    .. math:: \Lambda_k \leftarrow \Lambda_k + \gamma_r\,\Bigl(\tfrac{n_k}{\tau} F_k - \Lambda_k\Bigr), \qquad
              F_k = w_r B\,\overline{g^2} + (1 - w_r)\,\overline{g_i^2}, \qquad w_r = \min(1, 20 / r)

    with :math:`\gamma_r = 0.5` before round 20 and 0.3 from there on. A client's first site begins at
    :math:`\min(\Lambda(q_k), 1 / \overline{\mu^2}) / K` in the place of :math:`\Lambda_k`, with the mean of the squared
    means of a tensor (from round 20 on at the measured precision): σ is at first as large as the weights, or as the
    layers have it, and then widens from round to round, where wide draws at once would take an untrained network
    apart. :math:`\tau / n_k` is the factor of the KL divergence in the client's loss, and g the gradient of the mean
    loss of a batch of B examples. Both terms estimate the diagonal of the empirical Fisher information; the first
    counts the square of a client's own mean gradient B times. Layers whose single examples cannot be told apart, as
    recurrent ones, keep it, and so does DDP, whose processes see parts of batches. A client's mean counts by at most
    the global precision before the round, once it has a site: one with a burst of gradients does not take the mean
    over. :math:`F_k` is never negative, and settles within tens of rounds, whatever σ the layers begin with. The means
    end where the gradient of the pooled ELBO by the means is 0; the variances are those of the Fisher information
    there, not those of mean-field variational inference: see the page on rules for figures. Where an optimizer solves
    the local problem, as L-BFGS does, the precision is that of its solution, :math:`\Lambda(q_k)`, and so is the fixed
    point: the mean-field posterior of the pooled data.

    **Bounds.** No site takes more than :math:`0.3 / K` of the prior's precision away, a bound that its client applies
    before it sends; so no σ exceeds 1.2 times the prior's, server and clients always count the same, and an entry
    whose curvature turns positive again leaves the bound at once. Natural parameters have 34 significant bits, so that
    their sums are exact: prior + Σ sites is the server's state to the last bit. Figures:
    ``sites/held_back`` counts entries that the server had to keep above the bound, which clients of this package never
    cause; ``sites/change`` is the divergence of the new posterior from the old one, in nats per parameter;
    ``sites/distance``, from round 20 on, estimates how far it still is from where the rounds take it, by how far it has
    come since at most half of them (:func:`~lightning_fedbayes.fusion.trend.followed`).

    Deterministic parameters :math:`\theta` take the form of FedDyn, which is consensus ADMM. The loss of local
    training, a mean over examples, gains :math:`\tfrac{\mu}{2} \|\theta - \theta_g\|^2 - \langle v_k, \theta - \theta_g
    \rangle` with the pull :math:`\mu`; the client's dual variable becomes :math:`v_k + \mu (\theta_g - \theta_k)`; the
    global value is the cohort's weighted mean less :math:`1 / \mu` times the weighted mean of the duals of *all*
    clients that have taken part. Where this stands still, the gradient of the weighted sum of the clients' losses is 0,
    as after pooled training; plain averaging ends elsewhere if clients are unlike. A network without Gaussian
    parameters is trained by FedDyn alone. ``pull=None`` averages by the clients' weights (beside each other:
    ``python -m benchmarks.posterior.run --only digits_hybrid``).

    When to use it: whenever the posterior is to mean something after many rounds, above all with unlike clients. It
    needs layers of this package, whose prior is :math:`N(m, s^2)`, and a loss with their KL divergence over the number
    of the client's examples, or IVON or Laplace. A server bounds each client's site
    (:mod:`lightning_fedbayes.server.site_guard`), and the client keeps what has been counted.

    Args:
        step: "share", the default above, or one :math:`\rho` > 0 for all clients: a smaller one lets them go further
            from the global posterior.
        damping: :math:`\delta` in (0, 1]; "share" is 1/K.
        averaging: :math:`\alpha` in (0, 1]; "pvi" is 1, the sites alone; "admm" is :math:`1 / (1 + K\rho)` for the K
            clients of the round. Below 1 the step must be a number.
        prior_mean, prior_std: m and s of the layers' own prior.
        pull: :math:`\mu` > 0, FedDyn's :math:`\alpha`, for deterministic parameters: a smaller one lets them go further
            from the global ones. None averages them.
        renyi: :math:`\alpha` in (0, 1): the divergence from the cavity is
            :math:`\tfrac{1}{\alpha (\alpha - 1)} \log \int q^\alpha\,\text{cavity}^{1 - \alpha}` in place of the KL,
            which it is for :math:`\alpha \to 1`. The fixed point is no longer the posterior of the pooled data.
            Precisions are trained.
        precision: "auto", the above; "measured", or "trained", :math:`\Lambda(q_k)`, whatever the optimizer.
        half: clients send what has changed in half precision (:mod:`lightning_fedbayes.core.changes`): the bytes of the
            weights alone, in place of twice as many. Each change is rounded by at most 2⁻¹¹ of itself, and the client
            keeps the site that the rounded change gives, so server and clients count the same. What the server sends
            is not rounded.

    Raises:
        FusionError: an argument is out of range.

    Source: Ashman et al. 2022 (:math:`\rho = \alpha = 1`); Möllenhoff et al. 2026 ("admm"); Acar et al. 2021,
    Algorithm 1 (the pull); Mildner et al. 2025 (Rényi); Khan et al. 2018 (squared gradients as curvature).
    """

    keeps_sites: ClassVar[bool] = True

    def __init__(
        self, step: float | str = "share", damping: float | str = 0.4, averaging: float | str = "pvi",
        prior_mean: float = 0.0, prior_std: float = 1.0, pull: float | None = 0.1,
        renyi: float | None = None, precision: Precision = "auto", half: bool = False,
    ) -> None:
        if not isinstance(step, str) or step != "share":
            why = "it scales the divergence from the cavity; 'share' chooses it for every client"
            check_number("step", step, "(0, inf)", error=FusionError, why=why)
        if not isinstance(damping, str) or damping != "share":
            why = "it is the part of a change that is applied; 'share' is 1/K"
            check_number("damping", damping, "(0, 1]", error=FusionError, why=why)
        if not isinstance(averaging, str) or averaging not in ("pvi", "admm"):
            check_number("averaging", averaging, "(0, 1]", error=FusionError, why="'pvi' is 1, 'admm' is 1 / (1 + K ρ)")
        if step == "share" and averaging not in ("pvi", 1):
            raise FusionError(f"averaging={shown(averaging)} needs one step for all clients: give step=0.1, say")
        check_number("prior_mean", prior_mean, "(-1e38, 1e38)", error=FusionError)
        check_number("prior_std", prior_std, "(1e-19, 1e19)", error=FusionError, why="it is a standard deviation")
        if pull is not None:
            why = "it holds deterministic parameters to the global ones; None averages them"
            check_number("pull", pull, "(0, inf)", error=FusionError, why=why)
            pull = float(pull)
        if renyi is not None:
            why = "beyond, the divergence is infinite for wide posteriors; None, the limit 1, is the KL"
            check_number("renyi", renyi, "(0, 1)", error=FusionError, why=why)
        check_choice("precision", precision, get_args(Precision), error=FusionError)
        check_flag("half", half, error=FusionError)
        if renyi is not None and precision == "measured":
            raise FusionError("renyi= with precision='measured': another divergence has other variances; leave one out")
        self.step = step
        self.damping = damping
        self.averaging = averaging
        self.prior_mean = float(prior_mean)
        self.prior_std = float(prior_std)
        self.pull = pull
        self.renyi = renyi
        self.precision: Precision = precision
        self.half = half

    # -- at the clients ------------------------------------------------------------------------------------------------

    def base(self, previous: GaussianPosterior, state: RuleState) -> GaussianPosterior:
        """Return what stands for the global posterior in cavities and changes: in the first round the prior.

        Deterministic parameters have no prior, and stay.

        Args:
            previous: the global posterior that the clients start from.
            state: the rule's state; empty before the first round.
        """
        if state:
            return previous
        mean = {
            name: value if is_zero(previous.variance[name]) else torch.full_like(value, self.prior_mean)
            for name, value in previous.mean.items()
        }
        variance = {
            name: zeros_like(value) if is_zero(value) else torch.full_like(value, self.prior_std**2)
            for name, value in previous.variance.items()
        }
        return GaussianPosterior(mean, variance)

    def steps(self, share: float, site_precision: Tensor | float, precision: Tensor) -> Tensor:
        r"""Return :math:`\rho_k` of every parameter, shape (P,).

        Args:
            share: 1 / K.
            site_precision: of its site.
            precision: of the global posterior.
        """
        own = torch.as_tensor(site_precision).clamp_min(0) / precision
        if isinstance(self.step, str):
            return share + OWN_SHARE * own
        return ((1 + PROPER * max(0.0, 1 - self.step)) * own).clamp_min(self.step)

    def damping_in(self, round: int, share: float) -> float:
        r"""Return :math:`\delta_r` of a round, counted from 0, in a federation of 1 / ``share`` clients."""
        damping = share if isinstance(self.damping, str) else self.damping
        return damping * min(1.0, (SETTLING / (round + 1)) ** 0.5)

    @staticmethod
    def batch_part(round: int) -> float:
        r"""Return :math:`w_r` of a round, counted from 0: how much the squares of whole batches count."""
        return min(1.0, SETTLING / (round + 1))

    def changed(
        self, base: Natural, site: Natural | None, trained: Natural, steps: Tensor, share: float, round: int,
        measured: Tensor | None = None, start: Tensor | None = None,
    ) -> Natural:
        r"""Return :math:`\lambda + \Delta_k`, what a client sends.

        Args:
            base: :math:`\lambda`.
            site: :math:`\lambda_k`; None for a client that has none yet.
            trained: :math:`\lambda(q_k)`.
            steps: :math:`\rho_k`, shape (P,).
            share: 1 / K.
            round: from 0; 0 where local training is without noise, so that the damping stays.
            measured: precision of the data, shape (P,), NaN where it is not known and :math:`\Lambda(q_k)` counts.
            start: K times the precision that a first site begins with, shape (P,); None: :math:`\Lambda(q_k)`.
        """
        scale = steps * self.damping_in(round, share)
        old, own = torch.zeros_like(steps) if site is None else site[0], trained[0]
        wanted = old + scale * (own - base[0])
        if measured is not None:
            early = round < SETTLING
            first = share * (own if start is None else start) if early else measured
            before = first if site is None else old
            known = torch.lerp(measured, before, EARLY_MEMORY if early else MEMORY)
            wanted = torch.where(measured.isnan(), wanted, known)
            counts = (base[0] + (wanted - old) / scale).maximum(LEAST_PART * base[0])
            counts = counts if site is None else counts.minimum(base[0])
            own = own.where(measured.isnan(), counts)
        new = wanted.clamp_min(self.least_site(share))
        new = torch.maximum(new, old - (1 - LEAST_PART) * base[0])
        centre, mean = base[1] / base[0], trained[1] / trained[0]
        return base[0] + (new - old), base[1] + scale * own * (mean - centre) + (new - old) * centre

    def least_site(self, share: float) -> float:
        """Return the least precision of a site in a federation of 1 / ``share`` clients."""
        return (self._least - self.prior_std**-2) * share

    def check_state(self, state: Any, parameters: int) -> None:
        """See :meth:`FusionRule.check_state`."""
        parts = [name for name in ("precision", "shift", "dual") if name in state]
        if state and not {"precision", "dual"} & state.keys():
            parts = ["precision"]
        for name in (*parts, *(["shift"] if "precision" in parts else [])):
            check_part(self, state, name, (parameters,))
        for name in ("weights", "trail"):
            if name in state:
                check_part(self, state, name)

    # -- at the server -------------------------------------------------------------------------------------------------

    def update(self, statistics: Statistics, mean: Tensor, variance: Tensor, weight: float) -> None:
        """See :meth:`SumRule.update`: sums of precisions and shifts; of deterministic parameters, weighted means."""
        add_number(statistics, "count", 1.0, mean)
        if is_zero(variance):
            add_precisions(statistics, mean, variance, 1.0, weight)
            return
        precision, shift = self.natural(mean, variance)
        add(statistics, "precision", precision)
        add(statistics, "precision_mean", shift)
        if variance.numel() and variance.min() == 0:
            atom = (variance == 0).to(mean.dtype)
            add(statistics, "atom_weight", atom, weight)
            add(statistics, "atom_mean", mean * atom, weight)

    def advance(
        self, statistics: Statistics, like: GaussianPosterior, previous: GaussianPosterior | None, state: RuleState,
        weights: Mapping[int, float],
    ) -> Fused:
        """See :meth:`SumRule.advance`; the state holds the natural parameters of prior times all sites, and the duals.

        That is "dual", the sum of all clients' duals times their "weights".

        Raises:
            FusionError: there is a pull, and a client has another weight than in an earlier round.
        """
        atom = statistics["atom_weight"] > 0 if "atom_weight" in statistics else None
        atom_mean = None if atom is None else statistics["atom_mean"] / statistics["atom_weight"]
        duals: RuleState = {}
        if atom is not None and atom_mean is not None and previous is not None and weights and self.pull is not None:
            known, before = known_weights(state, weights), state.get("dual", 0.0)
            heard, total = sum(weights.values()), sum(known.values())
            change = (previous.flatten()[0].to(atom_mean.device) - atom_mean).where(atom, 0.0)
            duals = {"dual": before + self.pull * heard * change, "weights": known}
            atom_mean = atom_mean - heard / total * change - before / (self.pull * total)
        if "precision" not in statistics:
            assert atom_mean is not None
            return Fused(like.unflatten(atom_mean, zeros_like(atom_mean)), state=duals)
        count = float(statistics["count"])
        total = statistics["precision"], statistics["precision_mean"]
        base = self.natural_of(self.base(like if previous is None else previous, state), total[0])
        random = None if atom is None else ~atom.expand_as(total[0])
        before = (state["precision"], state["shift"]) if state else base

        def fused(
            heard: Tensor, heard_shift: Tensor, old: Tensor, old_shift: Tensor, site: Tensor, site_shift: Tensor,
            random: Tensor | None, atom_mean: Tensor | None,
        ) -> tuple[Tensor, ...]:
            changes = heard - count * old, heard_shift - count * old_shift
            sites = site + changes[0], site_shift + changes[1]
            target = self._target((old, old_shift), changes, sites, count)
            if random is not None:
                target = target[0].where(random, 1.0), target[1].where(random, 0.0)
                sites = sites[0].where(random, 0.0), sites[1].where(random, 0.0)
            precision, shift = self._bounded((old, old_shift), target)
            mean, variance = shift / precision, 1 / precision
            moved = divergence(precision, mean, old, old_shift / old)
            if random is not None and atom_mean is not None:
                mean, variance = torch.where(random, mean, atom_mean), torch.where(random, variance, 0.0)
            return *sites, precision, mean, variance, moved

        precision, shift, new, mean, variance, moved = by_pieces(fused, *total, *base, *before, random, atom_mean)
        low = self._is_low(precision)
        followed_mean = mean
        if random is not None:
            low, moved, new, followed_mean = low & random, moved[random], new[random], mean[random]
        trail = followed(state.get("trail", {}), new, followed_mean)
        figures = {"sites/change": float(moved.mean()), "sites/held_back": float(low.sum())}
        if "distance" in trail:
            figures["sites/distance"] = trail["distance"]
        return Fused(
            like.unflatten(mean, variance), state={"precision": precision, "shift": shift, "trail": trail, **duals},
            figures=figures,
        )

    def _target(self, base: Natural, changes: Natural, sites: Natural, count: float) -> Natural:
        """Return the new global posterior, from the sums of all changes and sites of ``count`` clients."""
        if isinstance(self.step, str) or self.averaging in ("pvi", 1):
            return sites
        share = 1 / (1 + count * self.step) if isinstance(self.averaging, str) else self.averaging
        scale = count * self.step
        parts = zip(base, changes, sites)
        precision, shift = (share * kept + (1 - share) * (old + change / scale) for old, change, kept in parts)
        return precision, shift

    @property
    def _least(self) -> float:
        """The bound of precisions."""
        return LEAST_SHARE * self.prior_std**-2

    def _is_low(self, precision: Tensor) -> Tensor:
        """Return where a precision is below the bound by more than rounding."""
        return precision < self._least * (1 - TOLERANCE)

    def _bounded(self, old: Natural, new: Natural) -> Natural:
        """Return ``new`` with its precision raised to the bound, where it is lower; its pull on the mean stays."""
        precision, shift = new
        low = self._is_low(precision)
        if not low.any():
            return precision, shift
        raised = torch.where(low, self._least, precision)
        return raised, torch.where(low, shift + (raised - precision) * (old[1] / old[0]), shift)

    # -- natural parameters --------------------------------------------------------------------------------------------

    def natural(self, mean: Tensor, variance: Tensor) -> Natural:
        """Return precision and shift of flat float64 vectors, rounded so that sums are exact; 0 at point masses."""
        precision, shift = by_pieces(self._natural, mean, variance)
        return precision, shift

    def _natural(self, mean: Tensor, variance: Tensor) -> Natural:
        """Return :meth:`natural` of a piece."""
        precision = torch.where(variance > 0, 1 / variance, 0.0)
        exponent = (precision.view(torch.int64) >> 52).clamp_min_(BITS)  # of a float64 without its sign, plus 1023
        unit = ((exponent + (1 - BITS)) << 52).view(torch.float64)  # 2 to the power of the last bit that is kept
        precision = precision.div_(unit).round_().mul_(unit)
        unit *= 2.0 ** math.floor(math.log2(self.prior_std))
        return precision, (precision * mean).div_(unit).round_().mul_(unit)

    def natural_of(self, posterior: GaussianPosterior, like: Tensor) -> Natural:
        """Return :meth:`natural` of a posterior, on the device of ``like``."""
        mean, variance = (value.to(like.device) for value in posterior.flatten())
        return self.natural(mean, variance)


@register_fusion("pvi")
class PartitionedVI(Sites):
    r"""Sites in the form of partitioned variational inference, damped by 1/K, since K clients train at once.

    That is :math:`\rho = \alpha = 1` in :class:`Sites`.

    When to use it: to compare with the source; the default form of sites is faster (``python -m
    benchmarks.posterior.run --only logistic``).

    Args:
        damping, prior_mean, prior_std: see :class:`Sites`.

    Source: Ashman et al. 2022.
    """

    def __init__(self, damping: float | str = "share", prior_mean: float = 0.0, prior_std: float = 1.0) -> None:
        super().__init__(1.0, damping, "pvi", prior_mean, prior_std)


@register_fusion("bayes_admm")
class BayesADMM(Sites):
    r"""Sites in the form of federated ADMM from Bayesian duality, undamped.

    That is :math:`\alpha = 1 / (1 + K\rho)` in :class:`Sites`.

    When to use it: neural networks.

    Args:
        step, prior_mean, prior_std, pull: see :class:`Sites`.

    Source: Möllenhoff et al. 2026.
    """

    def __init__(
        self, step: float = 0.1, prior_mean: float = 0.0, prior_std: float = 1.0, pull: float | None = 0.1
    ) -> None:
        super().__init__(step, 1.0, "admm", prior_mean, prior_std, pull)


def by_pieces(
    formula: Callable[..., tuple[Tensor, ...]], *vectors: Tensor | None, whole: bool = False
) -> tuple[Tensor, ...]:
    """Return the results of an elementwise ``formula`` of flat vectors, piece by piece on the CPU.

    So what it computes in between stays in the processor's cache; every entry is what it would be at once.

    Args:
        formula: takes as many pieces as there are vectors, and returns vectors of their length.
        vectors: shape (P,); None stays None.
        whole: compute it at once all the same.
    """
    first = next(each for each in vectors if each is not None)
    count = len(first)
    if whole or count <= PIECE or first.device.type != "cpu":
        return formula(*vectors)
    results: tuple[Tensor, ...] = ()
    for start in range(0, count, PIECE):
        parts = formula(*(None if each is None else each[start : start + PIECE] for each in vectors))
        results = results or tuple(part.new_empty(count) for part in parts)
        for result, part in zip(results, parts):
            result[start : start + PIECE] = part
    return results


def known_weights(state: RuleState, weights: Mapping[int, float]) -> dict[int, float]:
    """Return the weights of all clients that have taken part; raise FusionError if one has changed."""
    before = state.get("weights", {})
    for client, weight in weights.items():
        if before.get(client, weight) != weight:
            raise FusionError(
                f"client {client} has weight {weight:g}, but {before[client]:g} in an earlier round, by which its dual "
                "variable counts: keep the numbers of examples, or give weighting='equal', pull=None or a max_influence"
            )
    return {**before, **weights}
