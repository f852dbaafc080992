"""Privacy of clients: updates are clipped and noised, and a door decides what else leaves a client."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

import torch
from torch import Tensor

from lightning_fedbayes.clients.privacy.accountant import check_clip, check_delta, check_noise, check_opacus, epsilon_of
from lightning_fedbayes.core import errors
from lightning_fedbayes.core.errors import FederationError, FusionError, NotSent
from lightning_fedbayes.core.messages import EPSILONS, ClientUpdate, Kind
from lightning_fedbayes.core.posterior import GaussianPosterior, check_posterior, is_random
from lightning_fedbayes.core.seeding import private_normal
from lightning_fedbayes.fusion.accumulator import check_structure

SMALLEST_VARIANCE = torch.finfo(torch.float32).tiny
"""Variances are kept between this and its inverse: none becomes 0, which would mean deterministic, or infinite."""


def privatised(
    posterior: GaussianPosterior,
    previous: GaussianPosterior,
    *,
    clip: float,
    noise_multiplier: float,
    key: int | str,
    about: tuple[object, ...] = (),
    widen: bool = False,
) -> GaussianPosterior:
    r"""Return a client's posterior as the Gaussian mechanism releases it.

    The update is the step from the ``previous`` global posterior (μ_o, σ_o²), which the client started from, in the
    coordinates (μ, log σ), all parameters in one vector. It is clipped to the L2 norm C and gets independent Gaussian
    noise, drawn by the ``key`` (:func:`~lightning_fedbayes.core.seeding.private_uniform`) for what it is ``about``:

    .. math:: u = (\mu - \mu_o,\ \log\sigma - \log\sigma_o), \qquad
              \tilde u = u \min(1, C / \lVert u \rVert) + z C \epsilon, \qquad \epsilon \sim N(0, I)

    The result is the global posterior moved by ũ, or by noise only if u is not finite. σ enters by its ratio to σ_o, so
    that the L2 sensitivity of the whole message is C (2C if the data of one client are *replaced* by others).
    Deterministic parameters have a mean only. With ``widen`` the variance of the noise, which everybody knows, is added
    to the variances that are not 0; the loss by clipping is not covered. Parameters are in the order of ``previous``.

    Source: Gaussian mechanism, Dwork & Roth 2014, Appendix A; clipped client updates, McMahan et al. 2018.
    """
    posterior = posterior.ordered(previous.names)
    mean, variance = posterior.flatten()
    mean_before, variance_before = previous.flatten()
    # a tensor is Gaussian as a whole, by the global posterior, which everybody knows: the client's would tell something
    random = [torch.full((like.numel(),), is_random(previous.variance[name])) for name, like in previous.mean.items()]
    gaussian = torch.cat(random).to(mean.device)
    log_variance, log_before = (
        each[gaussian].clamp_min(SMALLEST_VARIANCE).log() for each in (variance, variance_before)
    )
    step = torch.cat([mean - mean_before, (log_variance - log_before) / 2])
    if not step.isfinite().all():  # that it has diverged is as private as what it has learnt
        step = torch.zeros_like(step)
    step = clipped(step, clip)
    noise = private_normal(key, step, *about, protects=step)
    mean_step, log_std_step = (step + noise_multiplier * clip * noise).split([len(mean), len(log_before)])
    sent = (log_before + 2 * log_std_step).exp()
    if widen:
        sent = sent + (noise_multiplier * clip) ** 2
    variances = torch.zeros_like(mean)
    variances[gaussian] = sent.clamp(SMALLEST_VARIANCE, 1 / SMALLEST_VARIANCE)
    return posterior.unflatten(mean_before + mean_step, variances)


def clipped(vector: Tensor, clip: float) -> Tensor:
    """``vector``, or the vector of L2 norm ``clip`` in its direction if that is shorter. Shape (P,).

    >>> clipped(torch.tensor([3.0, 4.0]), 1.0)
    tensor([0.6000, 0.8000])
    """
    return vector * (clip / vector.norm().clamp_min(clip))


@dataclass(frozen=True)
class UpdatePrivacy:
    r"""(ε, δ)-differential privacy for every client as a whole, against the server too.

    Each client clips what it has learnt in a round to the L2 norm C and adds Gaussian noise of standard deviation zC to
    every coordinate (see :func:`privatised`) before anything leaves it. Neighbouring federations differ in one client:
    it takes part with its data, or without data and sends only noise. That changes the probability of whatever the
    server does by at most a factor :math:`e^\varepsilon`, except with probability δ. (Where its data may be *replaced*
    by others, use the ε of ``noise_multiplier / 2``.) Raises FederationError if an argument is outside its range, or
    Opacus, which counts ε, is not installed.

    When to use it: many clients that need not trust the server. The noise of the average of n clients is zC/√n per
    parameter, so it takes hundreds of them, or few parameters.

    The noise protects the posterior only, so the client sends nothing else: its metrics are dropped, and buffers are
    refused. Its number of examples, which weights it, counts as public.

    The noise comes from a secret of 256 bits: of the federation in one process, whose checkpoint keeps it, or of each
    client on a machine of its own, in its folder. A run that goes on sends what it would have sent.

    Args:
        clip: C > 0.
        noise_multiplier: z ≥ 0. :func:`~lightning_fedbayes.noise_multiplier_for` finds it. 0 clips only.
        delta: δ in (0, 1), well below one over the number of clients.
        widen_posterior: add the noise's variance z²C² to the variances that are sent, so that they say how uncertain
            the noisy mean is.
        seed: of a simulation that repeats. Whoever knows it can subtract the noise, so the figure is then
            ``privacy/simulated_epsilon``. None: the noise stays unknown.

    >>> privacy = UpdatePrivacy(clip=0.5, noise_multiplier=2.0)
    >>> after_one, after_ten = privacy.figures(rounds=1), privacy.figures(rounds=10)
    >>> round(after_one["privacy/epsilon"], 2), round(after_ten["privacy/epsilon"], 2)
    (2.17, 8.08)
    """

    clip: float = 1.0
    noise_multiplier: float = 1.0
    delta: float = 1e-5
    widen_posterior: bool = False
    seed: int | None = None

    def __post_init__(self) -> None:
        check_clip(self.clip)
        check_noise(self.noise_multiplier)
        check_delta(self.delta)
        errors.check_flag("widen_posterior", self.widen_posterior)
        if self.seed is not None:
            errors.check_at_least("seed", self.seed, -errors.LARGEST)
        check_opacus()

    def send(self, update: ClientUpdate, previous: GaussianPosterior, secret: str, round: int) -> ClientUpdate:
        """Return the private update that a client sends in place of ``update``.

        Raise FusionError if names or shapes differ from the ``previous`` global posterior, which the client started
        from, and FederationError if the update has buffers. The noise depends on the ``secret``, the ``round`` from 0,
        the client and the update; with a ``seed`` only on the seed, the round and the client.
        """
        errors.check_kind("update", update, ClientUpdate, "give a ClientUpdate")
        check_posterior(previous, "the previous posterior", error=FusionError)
        errors.check_kind("secret", secret, str, "give secrets.token_hex(32)")
        errors.check_at_least("round", round, 0)
        check_structure(update.posterior, previous, f"client {update.client}")
        check_no_buffers(update.buffers)
        key, about = secret if self.seed is None else self.seed, ("update", round, update.client)
        noise: dict[str, Any] = {"noise_multiplier": self.noise_multiplier, "widen": self.widen_posterior}
        posterior = privatised(update.posterior, previous, clip=self.clip, key=key, about=about, **noise)
        return replace(update, posterior=posterior, metrics={})

    @property
    def figure(self) -> str:
        """Name of the ε in logs."""
        return EPSILONS[self.seed is not None]

    def figures(self, rounds: int) -> dict[str, float]:
        """Return the ε spent so far, as it is logged.

        ``rounds`` is the number of messages that the client has sent, whether they counted or not. For a federation,
        take the busiest client. ``privacy/epsilon`` is for ``delta``, against the server, which sees every message, and
        so against everybody else. Who takes part is drawn without a look at the data and may be known. A secret cohort
        would not lower ε here: cohorts have a fixed size, and the usual formula is for Poisson samples.
        """
        return {self.figure: epsilon_of(self.noise_multiplier, self.delta, rounds)}


def check_no_buffers(buffers: Mapping[str, Tensor] | Sequence[str]) -> None:
    """Raise FederationError if clients would send buffers, such as BatchNorm's statistics, which no noise protects."""
    if buffers:
        raise FederationError(
            f"privacy: clients would send their buffers unprotected: {errors.listed(sorted(buffers))}. Give "
            "FederatedBayes(buffers='frozen'), a regressor noise='fixed', local_parameters with patterns, or put "
            "GroupNorm or LayerNorm in BatchNorm's place"
        )


EXACT: dict[Kind, str] = {
    "scores": "the figures of a validation",
    "temperature": "sums over its examples, for a temperature",
    "counts": "a histogram of its scores",
    "statistics": "sums over its examples, for a linear model",
    "curvature": "its weights and their curvature",
    "scale": "sums over its examples, for a scale. Give scaler=FederatedScaler(targets=(mean, std)) what is known "
    "without data, or let a regressor go without, scaler=False; otherwise",
}
"""Kinds of messages that no noise of :class:`UpdatePrivacy` protects, and what is in them."""


@dataclass(frozen=True)
class Door:
    """The one place that decides what leaves a client.

    Without ``privacy`` a client may send all that it can be asked for. With it, an update leaves with noise, counts of
    scores with noise of ε ``conformal_epsilon`` (None: without), and other kinds, such as "scores", "temperature",
    "counts", "statistics", "curvature" and "scale", only if ``exact`` names them. The same holds, but for updates,
    where single ``examples`` are protected by :class:`~lightning_fedbayes.ExamplePrivacy`. A failure always tells its
    class and stage, and its text, which can hold anything (names of files, rows of tables), only with ``share_errors``.
    Raises FederationError if an argument cannot be used.
    """

    privacy: UpdatePrivacy | None = None
    conformal_epsilon: float | None = None
    exact: Collection[str] = ()
    share_errors: bool = False
    examples: bool = False

    def __post_init__(self) -> None:
        if self.conformal_epsilon is not None:
            why = "the smaller, the more private"
            errors.check_number("conformal_epsilon", self.conformal_epsilon, "[1e-6, inf)", why=why)
        for kind in errors.check_strings("exact", self.exact, f"give some of {', '.join(EXACT)}"):
            if kind not in get_args(Kind) or kind not in EXACT:
                raise FederationError(f"exact='{kind}': {errors.nearest(kind, EXACT)}")
        errors.check_flag("share_errors", self.share_errors)
        errors.check_flag("examples", self.examples)

    def check(self, kind: Kind, epsilon: float | None = None) -> None:
        """Raise NotSent if a message may not leave. ``epsilon`` is of the noise that the server asks for, if any."""
        if kind == "counts" and epsilon != self.conformal_epsilon:
            raise NotSent(
                f"the server asks for counts with epsilon={epsilon}, and this client's is {self.conformal_epsilon}: "
                "give FederatedConformal(epsilon=...) and the client's conformal_epsilon=... the same"
            )
        is_noisy = kind == "counts" and epsilon is not None
        protects = self.privacy is not None or self.examples
        protects = protects or (self.conformal_epsilon is not None and kind == "temperature")
        if kind in EXACT and protects and not is_noisy and kind not in self.exact:
            remedy = "conformal_epsilon=..." if kind == "counts" else f"exact=['{kind}']"
            why = f"it sends none. {remedy} at the client would allow it"
            raise NotSent(f"this client's data are private, and the server asks for {EXACT[kind]}, exactly: {why}")

    def failure(self, error: Exception, stage: str) -> dict[str, str]:
        """Return what may leave of an exception: its class and stage. Its text if errors are shared."""
        text = {"text": str(error)} if self.share_errors else {}
        return {"error": type(error).__name__, "stage": stage, **text}
