"""Fusion of clients that are spread over several processes, by rules that are not sums."""

from __future__ import annotations

from dataclasses import replace

import torch

from lightning_fedbayes.core.errors import FusionError
from lightning_fedbayes.core.exchange import Collective, shard_bounds, shards
from lightning_fedbayes.core.posterior import GaussianPosterior, is_zero
from lightning_fedbayes.fusion.rule import Cohort, Fused, FusionRule, RuleState

SHARD = "shard"
"""Name of the one parameter of a posterior that is a shard of all parameters."""


def fuse_distributed(
    rule: FusionRule, own: Cohort, like: GaussianPosterior, state: RuleState, collective: Collective
) -> Fused:
    """Fuse the clients of all processes, whose weights sum to 1; the result is the same in each.

    If the rule, which is no sum, works by columns, each process receives a shard of the parameters of all clients;
    otherwise each receives all clients. A process may have no clients of its ``own``.

    Raises:
        FusionError: the rule cannot fuse these posteriors.
    """
    if collective.size == 1:
        return rule.apply(own, state)
    fuse = _fuse_shards if rule.by_columns else _fuse_everywhere
    return fuse(rule, own, like, state, collective)


def _fuse_everywhere(
    rule: FusionRule, own: Cohort, like: GaussianPosterior, state: RuleState, collective: Collective
) -> Fused:
    """Send all clients to every process, and let each fuse them: one collective call."""
    sent = [posterior.to("cpu") for posterior in own.posteriors]
    received = collective.all_gather(list(zip(own.clients, own.weights.tolist(), sent, strict=True)))
    everyone = sorted((each for part in received for each in part), key=lambda each: each[0])
    clients, weights, posteriors = zip(*everyone, strict=True)
    device = next(iter(like.mean.values())).device
    moved = [posterior.to(device) for posterior in posteriors]
    return rule.apply(Cohort(moved, torch.tensor(weights, dtype=torch.float64), own.previous, clients), state)


def _fuse_shards(
    rule: FusionRule, own: Cohort, like: GaussianPosterior, state: RuleState, collective: Collective
) -> Fused:
    """Let every process fuse its shard of the parameters of all clients, then join the shards: two collective calls.

    Sums over parameters take further calls. A process whose clients have no variances does not send any.
    """
    numbers = list(zip(own.clients, own.weights.tolist(), strict=True))
    flat = [posterior.flatten() for posterior in own.posteriors]
    spread = any(not is_zero(each) for posterior in own.posteriors for each in posterior.variance.values())
    means, variances = ([each[i].cpu() for each in flat] for i in (0, 1))
    vectors = [*means, *(variances if spread else ())]
    rows = torch.stack(vectors) if vectors else torch.zeros(0, like.num_parameters, dtype=torch.float64)
    received = collective.all_to_all([(numbers, shard) for shard in shards(rows, collective.size)])
    everyone = []
    for facts, shard in received:
        rows = torch.from_numpy(shard)
        variances = rows[len(facts) :] if len(rows) > len(facts) else torch.zeros_like(rows)
        everyone += [(*fact, _shard(*pair)) for fact, *pair in zip(facts, rows, variances)]
    clients, weights, posteriors = zip(*sorted(everyone, key=lambda each: each[0]), strict=True)
    previous = None
    if own.previous is not None:
        start, end = shard_bounds(like.num_parameters, collective.size)[collective.rank :][:2]
        previous = _shard(*(each[start:end].cpu() for each in own.previous.flatten()))
    cohort = Cohort(posteriors, torch.tensor(weights, dtype=torch.float64), previous, clients, collective)
    try:
        fused: Fused | FusionError = rule.apply(cohort, state)
    except FusionError as error:  # perhaps in this shard alone; the other processes must know
        fused = error
    result = torch.stack(fused.posterior.flatten()).cpu().numpy() if isinstance(fused, Fused) else fused
    results = collective.all_gather(result)
    for each in results:
        if isinstance(each, FusionError):
            raise each
    assert isinstance(fused, Fused)
    mean, variance = torch.cat([torch.from_numpy(each) for each in results], 1)
    return replace(fused, posterior=like.unflatten(mean, variance))


def _shard(mean: torch.Tensor, variance: torch.Tensor) -> GaussianPosterior:
    """Return a shard of all parameters as a posterior of one parameter."""
    return GaussianPosterior({SHARD: mean}, {SHARD: variance})
