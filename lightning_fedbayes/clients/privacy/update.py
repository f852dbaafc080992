"""Client-level privacy: updates are clipped and noised before they leave the client."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lightning_fedbayes.clients.privacy.accountant import check_clip, check_delta, check_noise, check_opacus, epsilon_of
from lightning_fedbayes.core.errors import (
    LARGEST,
    FederationError,
    FusionError,
    check_at_least,
    check_flag,
    check_kind,
    listed,
)
from lightning_fedbayes.core.messages import ClientUpdate
from lightning_fedbayes.core.posterior import GaussianPosterior, check_posterior, is_zero
from lightning_fedbayes.core.seeding import generator
from lightning_fedbayes.fusion.accumulator import check_structure

SMALLEST_VARIANCE = torch.finfo(torch.float32).tiny
"""Variances are kept between this and its inverse: none becomes 0, which would mean deterministic, or infinite."""


def privatised(
    posterior: GaussianPosterior,
    previous: GaussianPosterior,
    *,
    clip: float,
    noise_multiplier: float,
    generator: torch.Generator,
    widen: bool = False,
) -> GaussianPosterior:
    r"""Return a client's posterior as the Gaussian mechanism releases it.

    The update is the step from the global posterior in the coordinates (μ, log σ), all parameters in one vector; it is
    clipped to the L2 norm C and gets independent Gaussian noise:

    .. math:: u = (\mu - \mu_o,\ \log\sigma - \log\sigma_o), \qquad
              \tilde u = u \min(1, C / \lVert u \rVert) + z C \epsilon, \qquad \epsilon \sim N(0, I)

    What is sent is the global posterior moved by ũ. The logarithm keeps the variance positive whatever the noise, and
    σ enters by its ratio to σ_o, so that C bounds the whole message: without u the same noise is sent, and the L2
    sensitivity of the message is C. (If one client's data are *replaced* by others instead, it is 2C.) For an
    optimizer that moves means and the layers' ρ alike, both parts of u are of one size. Deterministic parameters have
    a mean only.

    With ``widen`` the variance of the noise, which everybody knows, is added to the variances: the client's mean is
    then a measurement of what it has learnt, with error N(0, z²C²). What clipping took away is not covered.

    Args:
        posterior: the client's. Its parameters are those of ``previous``, in any order.
        previous: the global posterior (μ_o, σ_o²) that it started from.
        clip: C > 0.
        noise_multiplier: z ≥ 0.
        generator: the only source of randomness, on the CPU.
        widen: add z²C² to the variances that are not 0.

    Returns: names, shapes and dtypes of ``posterior`` in the order of ``previous``.

    Source: Gaussian mechanism, Dwork & Roth 2014, Appendix A; clipped client updates, McMahan et al. 2018.
    """
    posterior = posterior.ordered(previous.names)
    mean, variance = posterior.flatten()
    mean_before, variance_before = previous.flatten()
    # a tensor is Gaussian as a whole, by the global posterior, which everybody knows: the client's would tell something
    gaussian = torch.cat(
        [
            torch.full((like.numel(),), not is_zero(previous.variance[name]) and bool(previous.variance[name].any()))
            for name, like in previous.mean.items()
        ]
    ).to(mean.device)
    log_variance, log_before = (
        each[gaussian].clamp_min(SMALLEST_VARIANCE).log() for each in (variance, variance_before)
    )
    step = clipped(torch.cat([mean - mean_before, (log_variance - log_before) / 2]), clip)
    noise = torch.randn(step.shape, generator=generator, dtype=step.dtype).to(step.device)
    mean_step, log_std_step = (step + noise_multiplier * clip * noise).split([len(mean), len(log_before)])
    sent = (log_before + 2 * log_std_step).exp()
    if widen:
        sent = sent + (noise_multiplier * clip) ** 2
    variances = torch.zeros_like(mean)
    variances[gaussian] = sent.clamp(SMALLEST_VARIANCE, 1 / SMALLEST_VARIANCE)
    return posterior.unflatten(mean_before + mean_step, variances)


def clipped(vector: Tensor, clip: float) -> Tensor:
    """``vector``, or the vector of L2 norm ``clip`` in its direction if that is shorter; shape (P,).

    >>> clipped(torch.tensor([3.0, 4.0]), 1.0)
    tensor([0.6000, 0.8000])
    """
    return vector * (clip / vector.norm().clamp_min(clip))


@dataclass(frozen=True)
class UpdatePrivacy:
    r"""(ε, δ)-differential privacy for every client as a whole, against the server too.

    Each client clips what it has learnt in a round to the L2 norm C and adds Gaussian noise of standard deviation zC
    to every coordinate (see :func:`privatised`), before anything leaves it. Neighbouring federations differ in one
    client: it takes part with its data, or with none and sends noise alone. That changes the probability of whatever
    the server does by no more than a factor :math:`e^\varepsilon`, but for a probability δ. (Where its data may be
    *replaced* by others, ε is that of ``noise_multiplier / 2``.) When to use it: many clients that need not trust the
    server. The noise of the average of n clients is zC/√n per parameter, so it takes hundreds of them, or few
    parameters.

    Of a client's message nothing but the posterior is protected, so nothing else is sent: what it measured while
    training is dropped, and buffers are refused. Its number of examples, which weights it, is taken for public.

    The noise can be taken away again by whoever knows the seed. In a simulation that is the point: runs repeat. A
    client of its own machine passes :meth:`send` a seed that only it knows, another one for every message: two messages
    with one noise differ by what the client has learnt.

    Args:
        clip: C > 0.
        noise_multiplier: z ≥ 0; :func:`~lightning_fedbayes.noise_multiplier_for` finds it. 0 clips only.
        delta: δ in (0, 1), well below one over the number of clients.
        widen_posterior: add the noise's variance z²C² to the variances that are sent, so that they say how uncertain
            the noisy mean is.

    Raises:
        FederationError: an argument outside its range, or Opacus, which counts ε, is not installed.

    >>> privacy = UpdatePrivacy(clip=0.5, noise_multiplier=2.0)
    >>> after_one, after_ten = privacy.figures(rounds=1), privacy.figures(rounds=10)
    >>> round(after_one["privacy/epsilon"], 2), round(after_ten["privacy/epsilon"], 2)
    (2.17, 8.08)
    """

    clip: float = 1.0
    noise_multiplier: float = 1.0
    delta: float = 1e-5
    widen_posterior: bool = False

    def __post_init__(self) -> None:
        check_clip(self.clip)
        check_noise(self.noise_multiplier)
        check_delta(self.delta)
        check_flag("widen_posterior", self.widen_posterior)
        check_opacus()

    def send(self, update: ClientUpdate, previous: GaussianPosterior, seed: int, round: int) -> ClientUpdate:
        """Return the private update that a client sends in place of ``update``.

        Args:
            update: the client's own.
            previous: the global posterior that it started from.
            seed: where the noise comes from, together with ``round`` and the client's number.
            round: from 0. One seed, round and client give one noise: never send two updates with it.

        Raises:
            FusionError: names or shapes are not those of the global posterior.
            FederationError: the update has buffers.
        """
        check_kind("update", update, ClientUpdate, "give a ClientUpdate")
        check_posterior(previous, "the previous posterior", error=FusionError)
        check_at_least("seed", seed, -LARGEST)
        check_at_least("round", round, 0)
        check_structure(update.posterior, previous, f"client {update.client}")
        check_no_buffers(update.buffers)
        draws = generator(seed, "privacy", round, update.client)
        posterior = privatised(
            update.posterior,
            previous,
            clip=self.clip,
            noise_multiplier=self.noise_multiplier,
            generator=draws,
            widen=self.widen_posterior,
        )
        return replace(update, posterior=posterior, metrics={})

    def figures(self, rounds: int) -> dict[str, float]:
        """Return the ε spent so far, as it is logged.

        Args:
            rounds: number of messages that the client in question has sent, whether they counted or not; of a
                federation, that of the busiest client.

        Returns: ``privacy/epsilon``, for ``delta``, against the server, which sees every message, and so against
            everybody else. Who takes part is drawn without a look at the data and may be known. That the cohort might
            be secret is not made use of: cohorts have a fixed size, and the usual formula is for Poisson samples.
        """
        return {"privacy/epsilon": epsilon_of(self.noise_multiplier, self.delta, rounds)}


def check_no_buffers(buffers: Mapping[str, Tensor] | Sequence[str]) -> None:
    """Raise FederationError if clients would send buffers, such as BatchNorm's statistics, which no noise protects."""
    if buffers:
        raise FederationError(
            f"privacy: clients would send their buffers unprotected: {listed(sorted(buffers))}. Give "
            "FederatedBayes(buffers='frozen'), a regressor noise='fixed', local_parameters with patterns, or put "
            "GroupNorm or LayerNorm in BatchNorm's place"
        )
