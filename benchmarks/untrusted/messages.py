"""What one liar of ten costs by its message, and its silence: posteriors, sites, a method's tensors, sums of heads.

    python -m benchmarks.untrusted.messages [--seeds 3] [--out FOLDER]

The data ship with scikit-learn. Sites of Bayesian layers, IVON and adapters have benchmarks.untrusted.sites, means and
variances benchmarks.untrusted.attacks. Every cell is a line of results/messages.jsonl, and a command that is cut off
goes on there. It writes results/messages.md.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import torch
from sklearn.datasets import load_breast_cancer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_fedbayes as fb
from benchmarks import cells as study
from benchmarks.readers import stratified_order
from benchmarks.untrusted.report import options, write
from lightning_fedbayes.clients.settings import Sending
from lightning_fedbayes.core.quiet import quietly
from lightning_fedbayes.core.tables import markdown_table
from lightning_fedbayes.methods import Averaging, Method, Report
from lightning_fedbayes.methods.method import joined, split
from lightning_fedbayes.modules import mlp

CLIENTS, ROUNDS, BATCH, EPOCHS = 10, (20, 60), 32, 2
HONEST = "honest"
BAR = 0.05
"""Accuracy that one liar of ten may cost."""


class Mean(Averaging):
    """A method of a user's own: clients send the moves of their means, and the server goes along the averaged ones."""

    sends = True

    def init(self, posterior: fb.GaussianPosterior) -> dict[str, Tensor]:
        return {name: torch.zeros_like(mean) for name, mean in posterior.mean.items()}

    def report(self, shared: Any, client: Any, trained: Any) -> Report:
        start = shared.posterior.mean
        return Report(trained.posterior, sent={n: trained.posterior.mean[n] - start[n] for n in start})

    def fuse(self, shared: Any, fused: Any, averages: Mapping[str, Tensor], heard: float) -> Any:
        mean = {name: value + averages[name] for name, value in shared.posterior.mean.items()}
        return fb.GaussianPosterior(mean, fused.variance), averages


class Plain(L.LightningModule):
    """A deterministic network and plain SGD."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.network = mlp(features, classes)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.network(inputs)

    def training_step(self, batch: Any, _: int) -> Tensor:
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def head(likelihood: Any, features: int, classes: int) -> fb.HeadModule:
    """Return a head on the inputs themselves."""
    return fb.HeadModule(nn.Identity(), fb.BayesianHead(classes, likelihood), features)


POSTERIOR, BESIDE, SUMS = "posterior", "tensors", "sums"
"""Messages: the move from the global posterior; what a method sends with it; sums, which are lied about as a whole."""
KINDS: dict[str, tuple[Callable[[int, int], L.LightningModule], str | Method, tuple[str, ...]]] = {
    "weighted_average": (Plain, "weighted_average", (POSTERIOR,)),
    "geometric_median": (Plain, "geometric_median", (POSTERIOR,)),
    "sites of a plain network": (Plain, "sites", (POSTERIOR, BESIDE)),
    "scaffold": (Plain, "scaffold", (POSTERIOR, BESIDE)),
    "fednova": (Plain, "fednova", (POSTERIOR, BESIDE)),
    "a method of one's own": (Plain, Mean("weighted_average"), (BESIDE,)),
    "head, one-hot": (partial(head, "one_hot"), "sums", (SUMS,)),
    "head, softmax": (partial(head, "softmax"), "sums", (SUMS,)),
}
FACTORS = {"× 1e30": 1e30, "× 1e6": 1e6, "× −1": -1.0, "× −10": -10.0, "× 0": 0.0, "NaN": math.nan}
NOISE, ASKEW, COUNT, SILENT = "noise", "askew", "count × 1e6", "silent"
ATTACKS = (*FACTORS, NOISE, ASKEW, COUNT)
OF = {POSTERIOR: ("× 1e6", "× −1", "× −10", NOISE, COUNT, SILENT), BESIDE: (*FACTORS, NOISE), SUMS: ATTACKS}
"""Message → attacks on it. A count is of the whole message; numbers that are not finite are refused in all alike. A
client that is silent is no attack: what that costs, its data are worth."""


class Cell(NamedTuple):
    """A federation: kind, data, rounds, the message that is false, the attack, seed."""

    kind: str
    data: str
    rounds: int
    message: str
    attack: str
    seed: int


def false(value: Tensor, attack: str, draws: torch.Generator) -> Tensor:
    """Return what is sent in place of ``value``."""
    if not value.is_floating_point():
        return value
    if attack == NOISE:
        return value + value.norm() * torch.randn(value.shape, generator=draws).to(value) / max(1, value.numel()) ** 0.5
    if attack == ASKEW:  # its entries in another order: sizes as they are, no symmetry
        return value.flatten()[torch.randperm(value.numel(), generator=draws)].view(value.shape)
    return value * FACTORS[attack]


def liar(cell: Cell) -> Callable[[Sending], Callable[[Any], Iterator[Any]]]:
    """Return the adversaries of a cell: client 0 lies about one message in every round."""

    def begin(round: Sending) -> Callable[[Any], Iterator[Any]]:
        start, draws = round.posterior.mean, torch.Generator().manual_seed(cell.seed + 1000 * round.plan.round)

        def send(update: Any) -> Iterator[Any]:
            if update is None or update.client:
                if update is not None:
                    yield update
                return
            if cell.attack == SILENT:
                return
            if cell.attack == COUNT:
                yield replace(update, num_examples=1_000_000 * update.num_examples)
                return
            own, beside = split(update.buffers)
            mean = dict(update.posterior.mean)
            if cell.message == BESIDE:
                beside = {name: false(value, cell.attack, draws) for name, value in beside.items()}
            else:
                mean = {n: start[n] + false(value - start[n], cell.attack, draws) for n, value in mean.items()}
            posterior = fb.GaussianPosterior(mean, update.posterior.variance)
            yield replace(update, posterior=posterior, buffers=joined(own, beside), kept=None)

        return send

    return begin


def examples(data: str) -> tuple[TensorDataset, TensorDataset, int, int]:
    """Return training and held-out examples, features and classes."""
    if data == "digits":
        digits = fb.DigitsDataModule()
        digits.prepare_data()
        digits.setup("fit")
        parts = [next(iter(DataLoader(part, len(part)))) for part in (digits.train, digits.validation)]
        return TensorDataset(*parts[0]), TensorDataset(*parts[1]), 64, 10
    inputs, classes = (torch.as_tensor(each) for each in load_breast_cancer(return_X_y=True))
    order = stratified_order(classes, torch.Generator().manual_seed(0))
    x, y = ((inputs - inputs.mean(0)) / inputs.std(0)).float()[order], classes[order]
    return TensorDataset(x[:455], y[:455]), TensorDataset(x[455:], y[455:]), x.shape[1], 2


def run(cell: Cell) -> dict[str, Any]:
    """Return accuracy and NLL on held-out data, or the error that ends the run."""
    L.seed_everything(cell.seed, verbose=False)
    train, held_out, features, classes = examples(cell.data)
    make, fusion, _ = KINDS[cell.kind]
    module = make(features, classes)
    federation = fb.FederatedBayes(
        fb.DirichletPartition(CLIENTS, alpha=0.5),
        fusion=fusion,
        local_epochs=1 if cell.kind.startswith("head") else EPOCHS,
        seed=cell.seed,
        adversaries=None if cell.attack == HONEST else liar(cell),
    )
    trainer = L.Trainer(
        max_epochs=cell.rounds,
        accelerator="cpu",
        logger=False,
        callbacks=[federation],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    try:
        trainer.fit(module, DataLoader(train, BATCH, shuffle=True))
    except fb.FedBayesError as error:
        return {"error": str(error)[:200]}
    x, y = held_out.tensors
    with torch.no_grad():
        probs = module(x).softmax(-1) if isinstance(module, Plain) else module.predict_step((x, y), 0).probs
    return {
        "accuracy": float((probs.argmax(-1) == y).double().mean()),
        "nll": float(-probs.gather(1, y[:, None]).clamp_min(1e-12).log().mean()),
    }


def cells_of(seeds: int) -> list[Cell]:
    """Return all cells. Heads are fitted in one exchange, and a softmax in as many as it needs."""
    found = []
    for seed, data, rounds, kind in itertools.product(range(seeds), ("digits", "breast cancer"), ROUNDS, KINDS):
        if rounds == ROUNDS[0] or not kind.startswith("head"):
            found.append(Cell(kind, data, rounds, "", HONEST, seed))
            for message in KINDS[kind][2]:
                found += [Cell(kind, data, rounds, message, attack, seed) for attack in OF[message]]
    return found


def table(done: Mapping[Cell, Mapping[str, Any]], data: str) -> str:
    """Return the table of a data set: honest accuracy, and the loss by the worst attack and by each."""
    rows = []
    for rounds, (kind, (_, _, messages)) in itertools.product(ROUNDS, KINDS.items()):
        for message in messages:

            def mean(message: str, attack: str, kind: str = kind, rounds: int = rounds) -> float | None:
                same = [r for c, r in done.items() if c[:5] == (kind, data, rounds, message, attack)]
                return statistics.fmean(r.get("accuracy", 0.0) for r in same) if same else None

            honest = mean("", HONEST)
            if honest is None:
                continue
            lost = {attack: honest - found for attack in ATTACKS if (found := mean(message, attack)) is not None}
            worst = max(lost, key=lambda attack: lost[attack], default="")
            silent = mean(message, SILENT)
            lost |= {} if silent is None else {SILENT: honest - silent}
            cost = [f"{lost[attack]:+.3f}" if attack in lost else "" for attack in (*ATTACKS, SILENT)]
            rows.append([kind, message, str(rounds), f"{honest:.3f}", f"{lost.get(worst, 0.0):.3f} ({worst})", *cost])
    return markdown_table(["method", "message", "rounds", "honest", "largest loss", *ATTACKS, SILENT], rows)


def main() -> None:
    parser = options(__doc__, data=False, seeds=3)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="those to run now")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    file: Path = arguments.out / "messages.jsonl"
    done, cells = study.read(file, Cell), cells_of(arguments.seeds)
    study.run(file, [each for each in cells if each not in done and each.kind in arguments.kinds], run)
    done = study.in_order(study.read(file, Cell), cells)
    tables = [f"{data}:\n\n{table(done, data)}" for data in ("digits", "breast cancer")]
    settings = (
        f"{CLIENTS} clients, Dirichlet(0.5), the first lies in every round; network with one hidden layer of 50; "
        f"{EPOCHS} local epochs of batches of {BATCH}. Accuracy that is lost, mean of {arguments.seeds} seeds; a run "
        f"that ends counts as 0. Rules and the guard have their defaults. The bar is {BAR}."
    )
    write(arguments.out, "messages", settings, tables, None, over_seeds=False)


if __name__ == "__main__":
    with quietly():
        main()
