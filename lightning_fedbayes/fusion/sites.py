r"""Sites: each client keeps its factor of the posterior, so that rounds converge to the posterior of the pooled data.

.. math:: q(\theta) \propto p(\theta) \prod_k t_k(\theta), \qquad
          t_k(\theta) = \exp\bigl(\eta_k \theta - \tfrac12 \Lambda_k \theta^2\bigr)

Parameter by parameter; precision :math:`\Lambda_k` and shift :math:`\eta_k` of a *site* :math:`t_k` may be negative. A
client starts a round from the global posterior q and takes the *cavity*, q without its own site, as its prior.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from lightning_fedbayes.errors import FusionError, check_number, shown
from lightning_fedbayes.exchange.reduction import Statistics
from lightning_fedbayes.fusion.registry import register_fusion
from lightning_fedbayes.fusion.rule import Fused, FusionRule, Moments, RuleState, SumRule, add, add_product, of_zeros
from lightning_fedbayes.posterior import GaussianPosterior, is_zero, zeros_like

Natural = tuple[Tensor, Tensor]
r"""Precision :math:`\Lambda = 1/\sigma^2` and shift :math:`\eta = \mu/\sigma^2`, shape (P,) each, float64."""

LEAST_SHARE = 0.25
"""Share of its precision that a parameter keeps at least in a round; what would take more is held back."""


@register_fusion("sites")
class Sites(SumRule):
    r"""Partitioned variational inference: the rule whose fixed point is the posterior of the pooled data.

    A round, for every client k of the cohort, with :math:`\lambda = (\Lambda, \eta)`:

    1. the client minimises :math:`n_k E_q[\ell_k] + \rho\, KL(q \| \text{cavity}_k)`, with the cavity
       :math:`\lambda - \lambda_k / \rho`, and sends the result :math:`q_k`;
    2. client and server change its site by :math:`\delta\rho\,(\lambda(q_k) - \lambda)`;
    3. the server's new posterior is :math:`(1 - \alpha)\,\mathrm{mean}_k\,\lambda(q_k)
       + \alpha\,(\lambda_0 + \sum_k \lambda_k)`, with the prior :math:`\lambda_0` and the sites of *all* clients.

    In the first round the prior stands in the place of the global posterior. A client that is absent keeps its site.
    No entry of the precision falls below a quarter of its value in one round: what would take it lower is held back
    for that entry (``sites/held_back`` counts them; ``sites/change`` is the divergence of the new posterior from the
    old one, in nats per parameter, and goes to 0). Deterministic parameters are averaged by the clients' weights.

    When to use it: whenever the posterior is to mean something after many rounds, above all with unlike clients. It
    needs layers of this package, whose prior is :math:`N(m, s^2)`, and a loss with their KL divergence over the number
    of the client's examples. It trusts its clients: none of them is clipped, since each keeps what it has sent.

    Args:
        step: :math:`\rho` > 0: a smaller one lets clients go further from the global posterior.
        damping: :math:`\delta` in (0, 1]: the part of a change that is applied.
        averaging: :math:`\alpha` in (0, 1]; "pvi" is 1, the sites alone; "admm" is :math:`1 / (1 + K\rho)` for the K
            clients of the round, which is stable on neural networks.
        prior_mean, prior_std: m and s of the layers' own prior.

    Raises:
        FusionError: an argument is out of range.

    Source: Ashman et al. 2022 (:math:`\rho = \alpha = 1`); Möllenhoff et al. 2026 ("admm").
    """

    keeps_sites: ClassVar[bool] = True
    resists: ClassVar[bool] = True  # no update is clipped: the client would keep another site than the server counts

    def __init__(
        self, step: float = 0.1, damping: float = 1.0, averaging: float | str = "admm", prior_mean: float = 0.0,
        prior_std: float = 1.0,
    ) -> None:
        check_number("step", step, "(0, inf)", error=FusionError, why="it scales the divergence from the cavity")
        check_number("damping", damping, "(0, 1]", error=FusionError, why="it is the part of a change that is applied")
        if averaging not in ("pvi", "admm"):
            if isinstance(averaging, str):
                raise FusionError(f"averaging={shown(averaging)}: give 'pvi', 'admm' or a number in (0, 1]")
            check_number("averaging", averaging, "(0, 1]", error=FusionError, why="'pvi' is 1, 'admm' is 1 / (1 + K ρ)")
        check_number("prior_mean", prior_mean, "(-1e38, 1e38)", error=FusionError)
        check_number("prior_std", prior_std, "(0, 1e19)", error=FusionError, why="it is a standard deviation")
        self.step = step
        self.damping = damping
        self.averaging = averaging
        self.prior_mean = prior_mean
        self.prior_std = prior_std

    # -- at the clients ------------------------------------------------------------------------------------------------

    def base(self, previous: GaussianPosterior, state: RuleState) -> GaussianPosterior:
        """Return what stands for the global posterior in cavities and changes: in the first round the prior.

        Args:
            previous: the global posterior that the clients start from.
            state: the rule's state; empty before the first round.
        """
        if state:
            return previous
        mean = {name: torch.full_like(value, self.prior_mean) for name, value in previous.mean.items()}
        variance = {
            name: zeros_like(value) if is_zero(value) else torch.full_like(value, self.prior_std**2)
            for name, value in previous.variance.items()
        }
        return GaussianPosterior(mean, variance)

    def change(self, base: Natural, trained: Natural) -> Natural:
        r"""Return the change :math:`\delta\rho\,(\lambda(q_k) - \lambda)` of a client's site."""
        scale = self.step * self.damping
        return (trained[0] - base[0]) * scale, (trained[1] - base[1]) * scale

    # -- at the server -------------------------------------------------------------------------------------------------

    def update(self, statistics: Statistics, mean: Tensor, variance: Tensor, weight: float) -> None:
        """See :meth:`SumRule.update`: sums of precisions and shifts; of deterministic parameters, weighted means."""
        add(statistics, "count", mean.new_ones(()))
        if is_zero(variance):
            add(statistics, "atom_weight", of_zeros(variance) + 1, weight)
            add(statistics, "atom_mean", mean, weight)
            return
        precision = torch.reciprocal(variance)
        if variance.numel() and variance.min() == 0:
            atom = variance == 0
            precision.masked_fill_(atom, 0)
            add(statistics, "atom_weight", atom.to(mean.dtype), weight)
            add(statistics, "atom_mean", mean * atom, weight)
        add_product(statistics, "shift", precision, mean)
        add(statistics, "precision", precision)

    def compute(self, statistics: Statistics, like: GaussianPosterior, previous: GaussianPosterior | None) -> Moments:
        """See :meth:`SumRule.compute`: the result of a first round."""
        return self.advance(statistics, like, previous, {}).posterior.flatten()

    def advance(
        self, statistics: Statistics, like: GaussianPosterior, previous: GaussianPosterior | None, state: RuleState
    ) -> Fused:
        """See :meth:`SumRule.advance`; the state holds the natural parameters of prior times all sites."""
        atom = statistics["atom_weight"] > 0 if "atom_weight" in statistics else None
        atom_mean = None if atom is None else statistics["atom_mean"] / statistics["atom_weight"]
        if "precision" not in statistics:
            assert atom_mean is not None
            return Fused(like.unflatten(atom_mean, zeros_like(atom_mean)), state=state)
        count = float(statistics["count"])
        total = statistics["precision"], statistics["shift"]
        base = natural_of(self.base(like if previous is None else previous, state), total[0])
        sites = (state["precision"], state["shift"]) if state else base
        changes = self.change((base[0] * count, base[1] * count), total)
        sites = sites[0] + changes[0], sites[1] + changes[1]
        share = {"pvi": 1.0, "admm": 1 / (1 + count * self.step)}.get(str(self.averaging), self.averaging)
        assert isinstance(share, float | int)
        target = [share * kept + (1 - share) * sent / count for kept, sent in zip(sites, total)]
        random = torch.ones_like(total[0], dtype=torch.bool) if atom is None else ~atom.expand_as(total[0])
        (precision, shift), held = held_back(base, (target[0], target[1]), random)
        mean, variance = shift / precision, 1 / precision
        if atom_mean is not None:
            mean, variance = torch.where(random, mean, atom_mean), torch.where(random, variance, 0.0)
        moved = divergence(precision, shift, *base)[random].mean()
        return Fused(
            like.unflatten(mean, variance),
            state={"precision": sites[0].where(random, 0.0), "shift": sites[1].where(random, 0.0)},
            figures={"sites/change": float(moved), "sites/held_back": float(held)},
        )


@register_fusion("pvi")
class PartitionedVI(Sites):
    r""":class:`Sites` as partitioned variational inference, :math:`\rho = \alpha = 1`.

    It is damped, since clients train at once.

    When to use it: linear models and other convex losses, whose local problems are solved well.

    Args:
        damping, prior_mean, prior_std: see :class:`Sites`.

    Source: Ashman et al. 2022.
    """

    def __init__(self, damping: float = 0.3, prior_mean: float = 0.0, prior_std: float = 1.0) -> None:
        super().__init__(1.0, damping, "pvi", prior_mean, prior_std)


@register_fusion("bayes_admm")
class BayesADMM(Sites):
    r""":class:`Sites` as federated ADMM from Bayesian duality: :math:`\alpha = 1 / (1 + K\rho)`, undamped.

    When to use it: neural networks.

    Args:
        step, prior_mean, prior_std: see :class:`Sites`.

    Source: Möllenhoff et al. 2026.
    """

    def __init__(self, step: float = 0.1, prior_mean: float = 0.0, prior_std: float = 1.0) -> None:
        super().__init__(step, 1.0, "admm", prior_mean, prior_std)


def sites_of(rule: FusionRule) -> str:
    """Return the options of sites that clients and server must have in common, in words; "" for other rules."""
    if not isinstance(rule, Sites):
        return ""
    return f"step={rule.step}, damping={rule.damping}, prior=N({rule.prior_mean}, {rule.prior_std}²)"


def natural_of(posterior: GaussianPosterior, like: Tensor) -> Natural:
    """Return the natural parameters of a posterior beside ``like``; those of point masses are 0."""
    mean, variance = (value.to(like.device) for value in posterior.flatten())
    precision = torch.where(variance > 0, 1 / variance, 0.0)
    return precision, precision * mean


def held_back(old: Natural, new: Natural, random: Tensor) -> tuple[Natural, int]:
    """Return ``new``, or the point on the way to it from ``old`` where the precision would fall too low.

    Args:
        old, new: natural parameters.
        random: which entries are no point masses, shape (P,), bool.

    Returns: natural parameters of positive precision (1 at point masses), and the number of entries held back.
    """
    low = random & (new[0] < LEAST_SHARE * old[0])
    precision, shift = new[0].where(random, 1.0), new[1].where(random, 0.0)
    held = int(low.sum())
    if held:
        part = torch.where(low, (1 - LEAST_SHARE) * old[0] / (old[0] - new[0]), 1.0)
        precision = torch.where(low, LEAST_SHARE * old[0], precision)
        shift = torch.where(low, old[1] + part * (new[1] - old[1]), shift)
    return (precision, shift), held


def divergence(precision: Tensor, shift: Tensor, old_precision: Tensor, old_shift: Tensor) -> Tensor:
    """Return KL(new‖old) of each entry from natural parameters, shape (P,)."""
    ratio = old_precision / precision
    move = shift / precision - old_shift / old_precision
    return (ratio - 1 - ratio.log() + old_precision * move.square()) / 2
