"""Fusing clients that are spread over processes."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from lightning_fedbayes.fusion.cohort import Cohort, Fused, Memory
from lightning_fedbayes.fusion.columns import columns_spread_over
from lightning_fedbayes.fusion.rule import FusionRule, Statistics, SumRule
from lightning_fedbayes.posterior import GaussianPosterior, is_zero
from lightning_fedbayes.processes import Processes
from lightning_fedbayes.processes.base import block_bounds

COLUMNS = "columns"
"""Name of the one parameter of a posterior that is a block of columns."""


def merged(rule: SumRule, own: Statistics, like: GaussianPosterior, processes: Processes) -> Statistics:
    """The sums over the clients of all processes: what an all-reduce gives, with the rule's own way of adding.

    Sums that are 0 everywhere, such as those of the variances of a deterministic network, are not sent.

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
    vectors = {name: bool(value.any()) for name, value in own.items() if value.dim()}
    rows = [own[name].cpu() for name, filled in vectors.items() if filled]
    block = processes.columns(torch.stack(rows) if rows else torch.zeros(0, size, dtype=torch.float64))
    place, total = 0, Statistics()
    for names, numbers in processes.gather((vectors, scalars)):
        part = {name: block.new_tensor(number) for name, number in numbers.items()}
        for name, filled in names.items():
            part[name] = block[place] if filled else block.new_zeros(block.shape[1])
            place += filled
        if part:  # that process has clients
            rule.merge(total, part)
    filled = processes.gather({name for name, value in total.items() if value.dim() and bool(value.any())})
    sent = sorted(set().union(*filled))
    joined = processes.join(torch.stack([total[name] for name in sent]) if sent else block[:0])
    whole = {name: value if not value.dim() else value.new_zeros(size) for name, value in total.items()}
    return {name: value.to(device) for name, value in {**whole, **dict(zip(sent, joined, strict=True))}.items()}


def fuse_shared(
    rule: FusionRule, own: Cohort, like: GaussianPosterior, memory: Memory, processes: Processes
) -> Fused:
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
    return (_fuse_by_columns if rule.by_columns else _fuse_everywhere)(rule, own, like, memory, processes)


def _fuse_everywhere(
    rule: FusionRule, own: Cohort, like: GaussianPosterior, memory: Memory, processes: Processes
) -> Fused:
    """Every process gets all clients and fuses them."""
    sent = [posterior.to("cpu") for posterior in own.posteriors]
    numbers = list(zip(own.clients, own.weights.tolist(), sent, strict=True))
    everyone = sorted((each for part in processes.gather(numbers) for each in part), key=lambda each: each[0])
    clients, weights, received = zip(*everyone, strict=True)
    device = next(iter(like.mean.values())).device
    posteriors = [posterior.to(device) for posterior in received]
    return rule.apply(Cohort(posteriors, torch.tensor(weights, dtype=torch.float64), own.previous, clients), memory)


def _fuse_by_columns(
    rule: FusionRule, own: Cohort, like: GaussianPosterior, memory: Memory, processes: Processes
) -> Fused:
    """Every process fuses its block of the columns of all clients, and gets the other blocks from the others."""
    numbers = list(zip(own.clients, own.weights.tolist(), strict=True))
    everyone = [each for part in processes.gather(numbers) for each in part]
    order = sorted(range(len(everyone)), key=lambda place: everyone[place][0])
    rows = [posterior.flatten() for posterior in own.posteriors]
    means = processes.columns(_stacked([mean for mean, _ in rows], like))[order]
    spread = any(not is_zero(each) for posterior in own.posteriors for each in posterior.variance.values())
    variances = torch.zeros_like(means)
    if any(processes.gather(spread)):
        variances = processes.columns(_stacked([variance for _, variance in rows], like))[order]
    previous = None
    if own.previous is not None:
        start, end = block_bounds(like.num_parameters, processes.count)[processes.rank :][:2]
        previous = _block(*(each[start:end].cpu() for each in own.previous.flatten()))
    cohort = Cohort(
        [_block(mean, variance) for mean, variance in zip(means, variances, strict=True)],
        torch.tensor([everyone[place][1] for place in order], dtype=torch.float64),
        previous,
        tuple(everyone[place][0] for place in order),
    )
    with columns_spread_over(processes):
        fused = processes.agree(lambda: rule.apply(cohort, memory))
    mean, variance = processes.join(torch.stack(fused.posterior.flatten()))
    return replace(fused, posterior=like.unflatten(mean, variance))


def _stacked(vectors: list[Tensor], like: GaussianPosterior) -> Tensor:
    """``vectors`` of all P parameters as rows on the CPU, of which there may be none."""
    return torch.stack(vectors).cpu() if vectors else torch.zeros(0, like.num_parameters, dtype=torch.float64)


def _block(mean: Tensor, variance: Tensor) -> GaussianPosterior:
    """A block of columns as a posterior of one parameter."""
    return GaussianPosterior({COLUMNS: mean}, {COLUMNS: variance})
