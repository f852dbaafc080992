"""Lies about the sums of an exact head: one of ten clients, Dirichlet(0.5), three seeds.

    python -m benchmarks.untrusted.heads [--seeds 3]

Digits and breast cancer ship with scikit-learn. A cell is the accuracy and NLL on a quarter of the examples, the mean
over the seeds: unguarded, and guarded, where "absent" is the federation that the liar never joins.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace

import torch
from sklearn.datasets import load_breast_cancer, load_digits
from torch import Tensor

import lightning_fedbayes as fb
from lightning_fedbayes.core.tables import markdown_table
from lightning_fedbayes.modules.linear_regression import LinearStatistics
from lightning_fedbayes.transport.one_shot import bounded

CLIENTS, LIAR = 10, 3
Data = tuple[Tensor, Tensor]


def data(name: str, seed: int) -> tuple[list[Data], Data, fb.BayesianHead]:
    """Return the clients' examples, those held out, and a head."""
    x, y = (load_digits if name == "digits" else load_breast_cancer)(return_X_y=True)
    x = x / 16 if name == "digits" else (x - x.mean(0)) / x.std(0)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    x, y = torch.tensor(x)[order].double(), torch.tensor(y)[order]
    test = len(x) // 4
    split = fb.DirichletPartition(CLIENTS, alpha=0.5, min_examples=3).split(y[test:], seed=seed)
    parts = [(x[test:][rows], y[test:][rows]) for rows in split.indices]
    return parts, (x[:test], y[:test]), fb.BayesianHead(int(y.max()) + 1, "one_hot")


def _changed(**change: Callable[[Tensor], Tensor]) -> Callable[[fb.BayesianHead, Tensor, Tensor], LinearStatistics]:
    def lie(head: fb.BayesianHead, x: Tensor, y: Tensor) -> LinearStatistics:
        sums = head.sums(x, y)
        return replace(sums, **{name: each(getattr(sums, name)) for name, each in change.items()})

    return lie


def _times(factor: int, shift: int) -> Callable[[fb.BayesianHead, Tensor, Tensor], LinearStatistics]:
    return lambda head, x, y: head.sums(x.repeat(factor, 1), (y.repeat(factor) + shift) % head.outputs)


LIES: dict[str, Callable[[fb.BayesianHead, Tensor, Tensor], LinearStatistics]] = {
    "none": _times(1, 0),
    "Gram matrix + 1e6 I": _changed(gram=lambda v: v + 1e6 * torch.eye(len(v)).to(v)),
    "Gram matrix × 3 off the diagonal": _changed(gram=lambda v: v * (3 - 2 * torch.eye(len(v)).to(v))),
    "moments × −20": _changed(moment=lambda v: -20 * v),
    "moments × −1": _changed(moment=torch.neg),
    "squares × 1e6": _changed(square=lambda v: 1e6 * v),
    "classes moved on by one": _times(1, 1),
    "the same, features × 2": lambda head, x, y: head.sums(2 * x, (y + 1) % head.outputs),
    "the same, 5 times": _times(5, 1),
    "the same, 100 times": _times(100, 1),
    "its examples 100 times": _times(100, 0),
    "one class": lambda head, x, y: head.sums(x, 0 * y),
    "features × −1": lambda head, x, y: head.sums(-x, y),
}


def score(head: fb.BayesianHead, sums: list[LinearStatistics], held_out: Data) -> Tensor:
    """Return accuracy and NLL of the head's posterior predictive. NaN if there is no posterior."""
    try:
        fit = head.fit(sums)
        predictive = fb.PosteriorPredictive(fit.linear(), fit.posterior, 64)
        probs = predictive.predict_step(held_out[0].float()).probs
    except (fb.FedBayesError, torch.linalg.LinAlgError):  # pyright: ignore[reportPrivateImportUsage]
        return torch.tensor([torch.nan, torch.nan])
    right = (probs.argmax(1) == held_out[1]).double().mean()
    return torch.stack([right, -probs.gather(1, held_out[1][:, None]).clamp_min(1e-30).log().mean()])


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    seeds, rows = parser.parse_args().seeds, []
    for name in ("digits", "breast cancer"):
        for what, lie in LIES.items():
            found, honest = torch.zeros(3, 2).double(), 0
            for seed in range(seeds):
                torch.manual_seed(seed)
                parts, held_out, head = data(name, seed)
                sent = {client: head.sums(*part) for client, part in enumerate(parts)}
                absent = [sums for client, sums in sent.items() if client != LIAR]
                sent[LIAR] = lie(head, *parts[LIAR])
                kept = bounded(head, sent, 2.0, fb.GaussianPosterior.point_mass({}))
                honest += len(sent.keys() - kept.keys() - {LIAR})
                each = [[*sent.values()], [*kept.values()], absent]
                found += torch.stack([score(head, sums, held_out) for sums in each]) / seeds
            rows.append([name, what, *(f"{a:.3f}, {nll:.2f}" for a, nll in found.tolist()), honest])
    print(markdown_table(["data", "lie", "unguarded", "guarded", "absent", "honest left out"], rows))


if __name__ == "__main__":
    main()
