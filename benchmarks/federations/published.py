"""Fed-Heart and Fed-TCGA-BRCA as FLamby runs them: its networks, rates, batches and rounds beside its figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam
from torch.utils.data import DataLoader, Subset

import lightning_fedbayes as fb
from benchmarks.federations.data import Examples, Heart, heart_patients, joined, kept_apart, scaled, tcga_patients
from benchmarks.published import rows
from lightning_fedbayes.fusion.server_optimizers import FedAdam
from lightning_fedbayes.metrics.functional import concordance_index
from lightning_fedbayes.server.weighting import ClientFacts

SEEDS = (42, 43, 44, 45, 46)
UPDATES = 100
"""Steps of every client in a round."""
UNPASSED = "cyclic, model not passed on"
"""FLamby's class Cyclic gives each client its turn, but a copy of the model of its own, which is not passed on; what is
scored is the first client's."""
KEPT = ", without the validation part"
"""Trained on what is left where a fifth of each client's training examples is kept for validation."""


class Figure(NamedTuple):
    """A published figure: mean and standard deviation over the seeds (divided by n − 1)."""

    mean: float
    deviation: float


class Study(NamedTuple):
    """A federation of FLamby.

    Attributes:
        metric: its name.
        methods: ours → what FLamby publishes of it on the pooled test set.
        batch: examples in a step.
        rounds: of :data:`UPDATES` steps each.
        epochs: of pooled training.
        rate: of Adam on pooled data.
    """

    metric: str
    methods: Mapping[str, Figure]
    batch: int
    rounds: int
    epochs: int
    rate: float


def figures_of(study: str, metric: str, variants: Mapping[str, str]) -> dict[str, Figure]:
    """Return method → published figure, of FLamby's methods and of ``variants`` of them (ours → FLamby's)."""
    known = {
        row["method"]: Figure(*map(float, row[metric].split(" ± ")))
        for row in rows("flamby results")
        if row["study"] == study
    }
    return {**known, **{ours: known[theirs] for ours, theirs in variants.items()}}


STUDIES = {
    name: Study(metric, figures_of(name, metric, variants), **settings)
    for name, metric, variants, settings in (
        (
            "Fed-Heart, FLamby's settings",
            "accuracy",
            {UNPASSED: "cyclic"},
            {"batch": 4, "rounds": 15, "epochs": 50, "rate": 1e-3},
        ),
        (
            "TCGA-BRCA, FLamby's settings",
            "c-index",
            {UNPASSED: "cyclic", f"FedAvg{KEPT}": "FedAvg", f"FedAdam{KEPT}": "FedAdam"},
            {"batch": 8, "rounds": 5, "epochs": 30, "rate": 0.1},
        ),
    )
}
"""Batches, rounds and rates are those of FLamby's configuration files (15 = ⌊⌊486 / 4 / 4⌋ · 50 / 100⌋ rounds,
5 = ⌊⌊866 / 6 / 8⌋ · 30 / 100⌋)."""
RATES = {
    ("Fed-Heart, FLamby's settings", "FedAvg"): (1e-3, None),
    ("Fed-Heart, FLamby's settings", "FedAdam"): (1e-2, 1e-2),
    ("Fed-Heart, FLamby's settings", "cyclic"): (1e-2, None),
    ("Fed-Heart, FLamby's settings", UNPASSED): (1e-2, None),
    ("TCGA-BRCA, FLamby's settings", "FedAvg"): (1e-1, None),
    ("TCGA-BRCA, FLamby's settings", "FedAdam"): (1e-2, 1e-1),
    ("TCGA-BRCA, FLamby's settings", "cyclic"): (1e-2, None),
    ("TCGA-BRCA, FLamby's settings", UNPASSED): (1e-2, None),
}
"""Rates of the clients' SGD and of the server's Adam."""


class TwoLogits(nn.Module):
    """Logits (0, z) of the two classes: their cross-entropy is the binary one of z."""

    def forward(self, z: Tensor) -> Tensor:
        """Return the logits, shape (batch, 2)."""
        return torch.cat([torch.zeros_like(z), z], -1)


def run(folder: Path, study: str, method: str, seed: int) -> dict[str, Any]:
    """Train as FLamby does and score the pooled test set as it does.

    The clients' inputs are standardised by hospital, those of pooled training and of the pooled test set by all
    training examples (Fed-Heart), or not at all (TCGA-BRCA). FLamby goes on through a client's examples from round to
    round; here each round begins with a new order of them.
    """
    settings, heart = STUDIES[study], study.startswith("Fed-Heart")
    own = list(heart_patients(folder).values()) if heart else tcga_patients(folder)
    if method.endswith(KEPT):
        method = method.removesuffix(KEPT)
        divided = [kept_apart(*each, seed, number) for number, each in enumerate(own)]
        own = [Heart(each.train, each.test) for each in divided]
    together = torch.cat([each.train.inputs for each in own])

    def at_client(examples: Examples, like: Tensor) -> Examples:
        return scaled(examples, like) if heart else examples

    test = at_client(joined([each.test for each in own]), together)
    clients = [at_client(each.train, each.train.inputs) for each in own]
    torch.manual_seed(seed)  # FLamby draws its layer right after
    layer = nn.Linear(together.shape[1], 1)
    L.seed_everything(seed, verbose=False)
    if method == "pooled":
        optimizer: Any = partial(Adam, lr=settings.rate)
        pooled = at_client(joined([each.train for each in own]), together)
        data: dict[str, Any] = {"pooled": pooled.dataset()}
        options: dict[str, Any] = {"fusion": "weighted_average"}
        rounds = settings.epochs
    else:
        rate, server = RATES[study, method]
        optimizer = partial(SGD, lr=rate)
        rule = "weighted_average" if server is None else FedAdam(lr=server, beta2=0.999, epsilon=1e-8)
        sizes = [len(each.targets) for each in clients]
        data = {str(number): repeated(each, UPDATES * settings.batch) for number, each in enumerate(clients)}
        options, rounds = {"fusion": rule, "weighting": by_size(sizes)}, settings.rounds
        if method == "cyclic":  # a round is one client's turn
            options["fraction"] = "turns"
        elif method == UNPASSED:
            data, rounds = {"0": data["0"]}, first_turns(len(clients), settings.rounds, seed)
            options["weighting"] = "equal"
    modules: dict[str, Any] = {"optimizer": optimizer}
    module = (
        fb.HybridBayesianClassifier(nn.Sequential(layer, TwoLogits()), 0, **modules)
        if heart
        else fb.CoxRegressor(layer, **modules)
    )
    callback = fb.FederatedBayes(seed=seed, safeguards=fb.Safeguards(max_influence=None), **options)
    trainer = L.Trainer(
        max_epochs=rounds,
        accelerator="cpu",
        logger=False,
        callbacks=[callback],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        limit_val_batches=0,
    )
    if rounds:
        trainer.fit(module, DataLoader(fb.ClientDatasets(data), settings.batch, shuffle=True))
    with torch.no_grad():
        outputs = module(test.inputs)
    if heart:
        return {"metric": float((outputs.argmax(-1) == test.targets).double().mean())}
    return {"metric": float(concordance_index(outputs[:, 0], test.targets[:, 1], test.targets[:, 0]))}


def first_turns(clients: int, rounds: int, seed: int) -> int:
    """Return how many of ``rounds`` are the first client's turn in FLamby's random order, a new one in every cycle."""
    random = np.random.default_rng(seed)
    cycles = [random.permutation(clients) for _ in range(1 + rounds // clients)]
    return int((np.concatenate(cycles)[:rounds] == 0).sum())


def repeated(own: Examples, count: int) -> Subset:
    """Return a data set of ``count`` examples: all of a client's, over and over."""
    return Subset(own.dataset(), [number % len(own.targets) for number in range(count)])


def by_size(sizes: Sequence[int]) -> Any:
    """Return a weighting by the numbers of examples that the clients really have."""

    def weights(facts: Sequence[ClientFacts]) -> list[float]:
        return [float(sizes[each.client]) for each in facts]

    return weights
