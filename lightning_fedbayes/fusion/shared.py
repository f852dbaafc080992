"""Fusing clients that are spread over processes."""

from __future__ import annotations

import itertools
from dataclasses import replace

import torch
from torch import Tensor

from lightning_fedbayes.errors import FusionError
from lightning_fedbayes.fusion.cohort import Cohort, Fused, Memory
from lightning_fedbayes.fusion.columns import columns_spread_over
from lightning_fedbayes.fusion.rule import FusionRule, Statistics, SumRule
from lightning_fedbayes.posterior import GaussianPosterior, is_zero
from lightning_fedbayes.processes import Processes, Talk
from lightning_fedbayes.processes.base import block_bounds, blocks

COLUMNS = "columns"
"""Name of the one parameter of a posterior that is a block of columns."""


def merging(rule: SumRule, own: Statistics, like: GaussianPosterior, processes: Processes) -> Talk[Statistics]:
    """The sums over the clients of all processes: what an all-reduce gives, with the rule's own way of adding.

    Two meetings: each process gets its columns of the sums of all, adds them up, and tells the others what comes of
    it. Sums that are 0 everywhere, such as those of the variances of a deterministic network, are not sent.

    Args:
        rule: says how sums are added.
        own: the sums over this process's clients, empty if it has none.
        like: a posterior of the clients' names and shapes, on this process's device.
        processes: of which each has a part.
    """
    if processes.count == 1:
        return own
    size, device = like.num_parameters, like.flatten()[0].device
    scalars = {name: value.item() for name, value in own.items() if not value.dim()}
    vectors = [name for name, value in own.items() if value.dim()]
    filled = [name for name in vectors if bool(own[name].any())]
    rows = _rows([own[name].cpu() for name in filled], size)
    total: Statistics = {}
    everyone = yield [(scalars, vectors, filled, block) for block in blocks(rows, processes.count)]
    for numbers, names, sent, block in everyone:
        part = {name: torch.tensor(number, dtype=torch.float64) for name, number in numbers.items()}
        part |= {name: torch.zeros(block.shape[1], dtype=torch.float64) for name in names}
        part |= dict(zip(sent, torch.from_numpy(block), strict=True))
        if part:  # that process has clients
            rule.merge(total, part)
    sums = {name: value for name, value in total.items() if value.dim()}
    everyone = yield [{name: value.numpy() for name, value in sums.items() if bool(value.any())}] * processes.count
    bounds = itertools.pairwise(block_bounds(size, processes.count))
    whole = {name: total[name].new_zeros(size) for name in sums}
    for (start, end), parts in zip(bounds, everyone, strict=True):
        for name, block in parts.items():
            whole[name][start:end] = torch.from_numpy(block)
    return {name: whole.get(name, value).to(device) for name, value in total.items()}


def fusing(
    rule: FusionRule, own: Cohort, like: GaussianPosterior, memory: Memory, processes: Processes
) -> Talk[Fused]:
    """Fuse the clients of all processes by a rule that is no sum; what comes out is the same in each.

    Args:
        rule: if it works by columns, each process gets a block of the columns of all clients; if not, all of them.
        own: this process's clients, if it has any. The weights of all processes' clients sum to 1.
        like: a posterior of their names and shapes.
        memory: what the rule remembers, the same in all processes.
        processes: of which each has a part of the clients.

    Raises:
        FusionError: the rule cannot fuse these.
    """
    if processes.count == 1:
        return rule.apply(own, memory)
    return (yield from (_by_columns if rule.by_columns else _everywhere)(rule, own, like, memory, processes))


def _everywhere(
    rule: FusionRule, own: Cohort, like: GaussianPosterior, memory: Memory, processes: Processes
) -> Talk[Fused]:
    """Every process gets all clients and fuses them: one meeting."""
    sent = [posterior.to("cpu") for posterior in own.posteriors]
    heard = yield [list(zip(own.clients, own.weights.tolist(), sent, strict=True))] * processes.count
    everyone = sorted((each for part in heard for each in part), key=lambda each: each[0])
    clients, weights, received = zip(*everyone, strict=True)
    device = next(iter(like.mean.values())).device
    posteriors = [posterior.to(device) for posterior in received]
    return rule.apply(Cohort(posteriors, torch.tensor(weights, dtype=torch.float64), own.previous, clients), memory)


def _by_columns(
    rule: FusionRule, own: Cohort, like: GaussianPosterior, memory: Memory, processes: Processes
) -> Talk[Fused]:
    """Every process fuses its block of the columns of all clients, and tells the others: two meetings.

    Where some clients have no variances, nothing is sent of them. What a rule sums over columns it meets for itself.
    """
    numbers = list(zip(own.clients, own.weights.tolist(), strict=True))
    flat = [posterior.flatten() for posterior in own.posteriors]
    spread = any(not is_zero(each) for posterior in own.posteriors for each in posterior.variance.values())
    means, variances = ([each[i].cpu() for each in flat] for i in (0, 1))
    rows = _rows([*means, *(variances if spread else ())], like.num_parameters)
    heard = yield [(numbers, block) for block in blocks(rows, processes.count)]
    everyone = []
    for facts, block in heard:
        received = torch.from_numpy(block)
        zeros = received.new_zeros(len(facts), received.shape[1])
        both = zip(received, torch.cat([received[len(facts) :], zeros]))
        everyone += [(*fact, *row) for fact, row in zip(facts, both)]
    clients, weights, *columns = zip(*sorted(everyone, key=lambda each: each[0]), strict=True)
    previous = None
    if own.previous is not None:
        start, end = block_bounds(like.num_parameters, processes.count)[processes.rank :][:2]
        previous = _block(*(each[start:end].cpu() for each in own.previous.flatten()))
    cohort = Cohort(
        [_block(*each) for each in zip(*columns, strict=True)], torch.tensor(weights, dtype=torch.float64), previous,
        clients,
    )
    fused: Fused | None = None
    error: FusionError | None = None
    with columns_spread_over(processes):
        try:
            fused = rule.apply(cohort, memory)
        except FusionError as raised:
            error = raised
    said = torch.stack(fused.posterior.flatten()).cpu().numpy() if fused is not None else error
    heard = yield [said] * processes.count
    for each in heard:
        if isinstance(each, FusionError):
            raise each
    assert fused is not None
    mean, variance = torch.cat([torch.from_numpy(each) for each in heard], 1)
    return replace(fused, posterior=like.unflatten(mean, variance))


def _rows(vectors: list[Tensor], size: int) -> Tensor:
    """``vectors`` of ``size`` parameters on the CPU as rows, of which there may be none."""
    return torch.stack(vectors) if vectors else torch.zeros(0, size, dtype=torch.float64)


def _block(mean: Tensor, variance: Tensor) -> GaussianPosterior:
    """A block of columns as a posterior of one parameter."""
    return GaussianPosterior({COLUMNS: mean}, {COLUMNS: variance})
