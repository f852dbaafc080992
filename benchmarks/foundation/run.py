"""Heads on frozen features: an exact one in one exchange or in forty, beside federated fine-tuning with a temperature.

    python -m benchmarks.foundation.features --data DIR --out FOLDER
    python -m benchmarks.foundation.run --features FOLDER [--seeds 3] [--only NAME ...]

Each finished cell is one line of results/heads.jsonl, and no cell is run twice. The tables are written into README.md.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import torch
from scipy.optimize import minimize_scalar
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.functional.classification import binary_auroc
from tqdm import tqdm

import lightning_fedbayes as fb
from benchmarks import cells as study
from benchmarks.foundation.features import kept
from benchmarks.page import include
from lightning_fedbayes.core.quiet import quietly
from lightning_fedbayes.core.tables import markdown_table
from lightning_fedbayes.metrics.functional import calibration_diagram, negative_log_likelihood

HERE = Path(__file__).parent
FILE = HERE / "results" / "heads.jsonl"
ROUNDS, EPOCHS, BATCH = 30, 2, 32
SGD = (1e-3, 1e-2, 1e-1, 1.0, 10.0)
RATES = {"FedAvg": SGD, "FedProx": SGD, "SCAFFOLD": SGD[1:], "sites on the head": (1e-3, 1e-2)}
"""Rates of SGD, of sites of Adam; a method takes that of the least NLL on the examples that set temperatures."""
RETAINED = 0.8
"""Share of the examples, the surest, whose accuracy is given."""
ONE_HOT, SOFTMAX, VARIATIONAL = "exact head, one-hot", "exact head, softmax", "exact head, softmax, variational"
EXACT = {
    ONE_HOT: fb.BayesianHead(10, "one_hot"),
    SOFTMAX: fb.BayesianHead(10, inference="laplace"),
    VARIATIONAL: fb.BayesianHead(10),
}
TUNED = {"FedAvg": "weighted_average", "FedProx": "fedprox", "SCAFFOLD": "scaffold", "sites on the head": "sites"}
SPLITS = {
    "Dirichlet(0.5)": fb.DirichletPartition(10, alpha=0.5, min_examples=1),
    "Dirichlet(0.05)": fb.DirichletPartition(10, alpha=0.05, min_examples=1),
    "one class per client": fb.ClassPartition(10, 1),
}
SIZES = (200, 1000, 5000, 50_000)
FEW, LARGEST = 1000, "Dirichlet(0.05)"
"""Images up to which every seed tries all rates, with more only the first; and the split of the most images."""
RIDGES = tuple(10 ** (step / 5) for step in range(-15, 31))
"""λ of ridge regression beside that of the evidence."""
AFL = "AFL, its code"
"""Rows of :mod:`benchmarks.foundation.peers`."""


class Cell(NamedTuple):
    """One head of one data set."""

    data: str
    examples: int
    split: str
    method: str
    rate: float
    seed: int


class Task(NamedTuple):
    """Features, labels and clients of one cell."""

    train: tuple[Tensor, Tensor]
    calibration: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    outside: Tensor
    clients: Tensor
    classes: int


def cells_of(seeds: int, done: Mapping[Cell, Mapping[str, float]]) -> Iterator[Cell]:
    """Yield all cells, by size; rates of later seeds of large sizes follow from the cells of the first."""
    for size, seed in itertools.product(SIZES, range(seeds)):
        splits = SPLITS if size < SIZES[-1] else (LARGEST,)
        for split, method in itertools.product(splits, TUNED):
            cells = [Cell("CIFAR-10", size, split, method, rate, seed) for rate in RATES[method]]
            if size > FEW and seed:
                cells = [cell for cell in cells if cell.rate == best_rate(done, cell)]
            yield from cells
        own = SPLITS if size == FEW else (LARGEST,)
        yield from (Cell("CIFAR-10", size, split, AFL, 0.0, seed) for split in own)
    for seed in range(seeds):
        for method in TUNED:
            yield from (Cell("plays", 0, "a play per client", method, rate, seed) for rate in RATES[method])
    for method, size, seed in itertools.product(EXACT, SIZES, range(seeds)):
        yield Cell("CIFAR-10", size, "any", method, 0.0, seed)
    yield from (Cell("plays", 0, "any", method, 0.0, seed) for method in EXACT for seed in range(seeds))


def best_rate(done: Mapping[Cell, Mapping[str, float]], cell: Cell) -> float:
    """Return the rate of the least NLL on the examples that set temperatures, by the first seed's cells."""
    tried = [cell._replace(rate=rate, seed=0) for rate in RATES[cell.method]]
    return min((each for each in tried if each in done), key=lambda each: done[each]["calibration_nll"]).rate


# -- data --------------------------------------------------------------------------------------------------------------


def cifar(found: Mapping[str, Tensor], cell: Cell) -> Task:
    """Return a task: the test images are halved, one half for temperatures, and other pictures are outside."""
    order = torch.randperm(len(found["train_labels"]), generator=torch.Generator().manual_seed(cell.seed))
    chosen = order[: cell.examples]
    train = found["train_features"][chosen], found["train_labels"][chosen]
    half = len(found["test_labels"]) // 2
    clients = torch.zeros(len(chosen), dtype=torch.long)
    if cell.split != "any":
        for number, part in enumerate(SPLITS[cell.split].split(train[1], seed=cell.seed).indices):
            clients[part] = number
    test = found["test_features"], found["test_labels"]
    first, second = ((test[0][part], test[1][part]) for part in (slice(half), slice(half, None)))
    return Task(train, first, second, found["outside"], clients, 10)


def plays(found: Mapping[str, Any], cell: Cell) -> Task:
    """Return a task: of every play, a client, six tenths train and two are for temperatures; noise is outside."""
    generator = torch.Generator().manual_seed(cell.seed)
    draw = torch.rand(len(found["genres"]), generator=generator)
    parts = [draw < 0.6, (draw >= 0.6) & (draw < 0.8), draw >= 0.8]
    features = found["features"]
    train, calibration, test = ((features[each], found["genres"][each]) for each in parts)
    outside = F.normalize(torch.randn(2000, features.shape[1], generator=generator), dim=1)
    return Task(train, calibration, test, outside, found["plays"][parts[0]], 3)


# -- heads -------------------------------------------------------------------------------------------------------------


class Head(L.LightningModule):
    """A linear layer on features, trained by Adam."""

    def __init__(self, features: int, classes: int, rate: float, method: str) -> None:
        super().__init__()
        network = nn.Sequential(nn.Linear(features, classes))
        self.layer = fb.bayesianize(network, last=1) if method == "sites on the head" else network
        self.rate = rate
        self.kind = torch.optim.Adam if method == "sites on the head" else torch.optim.SGD

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.kind(self.parameters(), lr=self.rate)


def probabilities(cell: Cell, task: Task) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Return log-probabilities of the parts, and what they have cost."""
    inputs = {"calibration": task.calibration[0], "test": task.test[0], "outside": task.outside}
    started = time.perf_counter()
    if cell.method in EXACT:
        head = EXACT[cell.method]
        head = fb.BayesianHead(task.classes, head.likelihood, inference=head.inference)
        fit = head.fit_clients([(task.train[0], task.train[1])])
        seconds, columns = time.perf_counter() - started, task.train[0].shape[1] + 1
        sent = columns**2 / 2 + columns * task.classes + fit.exchanges * (columns + task.classes) * task.classes
        outputs = {name: head_logs(fit, each) for name, each in inputs.items()}
        costs = {"seconds": seconds, "exchanges": 1 + fit.exchanges, "megabytes": 8 * sent / 1e6}
        return outputs, costs | (best_ridge(fit, task) if cell.method == ONE_HOT else {})
    L.seed_everything(cell.seed, verbose=False)
    numbers = [each for each in range(int(task.clients.max()) + 1) if bool((task.clients == each).any())]
    parts = {str(k): TensorDataset(*(each[task.clients == k] for each in task.train)) for k in numbers}
    bayesian = cell.method == "sites on the head"
    module = Head(task.train[0].shape[1], task.classes, cell.rate, cell.method)
    if bayesian:
        module = fb.with_kl(module)
    federation = fb.FederatedBayes(fusion=TUNED[cell.method], local_epochs=EPOCHS, seed=cell.seed)
    trainer = L.Trainer(
        max_epochs=ROUNDS,
        accelerator="cpu",
        logger=False,
        callbacks=[federation],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(fb.ClientDatasets(parts), batch_size=BATCH))
    seconds = time.perf_counter() - started
    sent = sum(each["megabytes_up"] for each in federation.history) / len(numbers)
    outputs = {}
    predictive = fb.PosteriorPredictive(module, federation.posterior, samples=32)
    for name, each in inputs.items():
        with torch.inference_mode():
            logits = predictive.sample(each) if bayesian else module(each)[None]
        outputs[name] = logits.log_softmax(-1).logsumexp(0) - torch.tensor(float(len(logits))).log()
    return outputs, {"seconds": seconds, "exchanges": ROUNDS, "megabytes": sent}


def head_logs(fit: fb.modules.HeadFit, features: Tensor) -> Tensor:
    """Return the log-probabilities of an exact head, part by part."""
    predictive = fb.PosteriorPredictive(fit.linear(), fit.posterior)
    found = []
    for part in features.split(500):
        mean, covariance = fit.moments(part)
        draws = predictive._draws(mean.float(), covariance.float())
        found.append(draws.softmax(-1).mean(0).clamp_min(1e-30).log())
    return torch.cat(found)


def best_ridge(fit: fb.modules.HeadFit, task: Task) -> dict[str, float]:
    """Return λ by evidence, and the λ of ridge regression that a grid finds with the test labels."""
    x, labels = task.test
    scales, axes = torch.linalg.eigh(fit.sums.gram)
    turned, inputs = axes.T @ fit.sums.moment, F.pad(x.double(), (0, 1), value=1.0) @ axes
    outputs = {each: inputs @ (turned / (scales.clamp_min(0) + each)[:, None]) for each in RIDGES}
    accuracy = {each: float((found.argmax(1) == labels).float().mean()) for each, found in outputs.items()}
    best = max(RIDGES, key=lambda each: accuracy[each])
    return {"lambda": float(fit.prior_precision * fit.noise), "best_lambda": best, "best_accuracy": accuracy[best]}


# -- scores ------------------------------------------------------------------------------------------------------------


def run(cell: Cell, found: Mapping[str, Any]) -> dict[str, float]:
    """Return the scores of a cell, with and without a temperature."""
    task = (cifar if cell.data == "CIFAR-10" else plays)(found, cell)
    return scored(task, *probabilities(cell, task))


def scored(task: Task, logs: Mapping[str, Tensor], costs: Mapping[str, float]) -> dict[str, float]:
    """Return the scores of log-probabilities of a task's parts."""
    labels = task.test[1]
    heat = temperature(logs["calibration"], task.calibration[1])
    nll = float(F.cross_entropy(logs["calibration"] / heat, task.calibration[1]))
    scores = {"temperature": heat, "calibration_nll": nll, **costs}
    for name, at in (("", 1.0), ("scaled_", heat)):
        probs = (logs["test"] / at).softmax(-1)
        outside = (logs["outside"] / at).softmax(-1)
        confidence = probs.max(-1).values
        surest = confidence.argsort(descending=True)[: int(RETAINED * len(labels))]
        right = (probs.argmax(-1) == labels).float()
        entropies = [-(each * each.clamp_min(1e-30).log()).sum(-1) for each in (probs, outside)]
        is_outside = torch.cat([torch.zeros(len(probs)), torch.ones(len(outside))]).long()
        scores |= {
            f"{name}accuracy": float(right.mean()),
            f"{name}nll": float(negative_log_likelihood(probs, labels).mean()),
            f"{name}ece": float(calibration_diagram(probs, labels).ece),
            f"{name}retained": float(right[surest].mean()),
            f"{name}auroc": float(binary_auroc(torch.cat(entropies), is_outside)),
            f"{name}worst_class": min(float(right[labels == c].mean()) for c in range(task.classes)),
        }
    return scores


def temperature(logs: Tensor, labels: Tensor) -> float:
    """Return the temperature of least NLL, which a federated one is, too: clients' sums are those of all."""
    found: Any = minimize_scalar(
        lambda t: float(F.cross_entropy(logs / 2.0**t, labels)), bounds=(-6, 6), method="bounded"
    )
    return 2.0 ** float(found.x)


# -- tables ------------------------------------------------------------------------------------------------------------


def tables(done: Mapping[Cell, Mapping[str, float]]) -> str:
    """Return a table for each data set and size: means over the seeds."""
    parts = []
    for data, size in dict.fromkeys((cell.data, cell.examples) for cell in done):
        rows = []
        groups = dict.fromkeys((c.method, c.split) for c in done if (c.data, c.examples) == (data, size))
        for method, split in sorted(groups, key=lambda group: group[0] not in EXACT):
            by_rate = {
                rate: [found for c, found in done.items() if c[:5] == (data, size, split, method, rate)]
                for rate in {c.rate for c in done if c[:4] == (data, size, split, method)}
            }
            most = max(map(len, by_rate.values()))  # the rate that the first seed has chosen, where it has
            tried = [each for each, found in by_rate.items() if len(found) == most]
            rate = min(tried, key=lambda each: statistics.fmean(f["calibration_nll"] for f in by_rate[each]))
            found = by_rate[rate]

            def mean(name: str, found: list[Any] = found) -> float:
                return statistics.fmean(each[name] for each in found)

            errors = statistics.stdev(f["scaled_nll"] for f in found) / len(found) ** 0.5 if len(found) > 1 else 0.0
            rows.append(
                [
                    method,
                    split,
                    f"{mean('accuracy'):.3f}",
                    f"{mean('nll'):.3f}",
                    f"{mean('scaled_nll'):.3f} ± {errors:.3f}",
                    f"{mean('ece'):.3f} / {mean('scaled_ece'):.3f}",
                    f"{mean('auroc'):.3f} / {mean('scaled_auroc'):.3f}",
                    f"{mean('scaled_retained'):.3f}",
                    f"{mean('worst_class'):.3f}",
                    f"{mean('exchanges'):.0f}",
                    f"{mean('megabytes'):.2f}",
                    f"{mean('seconds'):.1f}",
                    len(found),
                ]
            )
        title = f"## {data}, {size:,} training images" if size else f"## Genre of lines of {data}"
        heads = [
            "method",
            "split",
            "accuracy",
            "NLL",
            "NLL, temperature",
            "ECE / with it",
            "AUROC outside / with it",
            "accuracy of the surest 80 %",
            "worst class",
            "exchanges",
            "MB up, a client",
            "seconds",
            "seeds",
        ]
        parts += [title, markdown_table(heads, rows)]
    return "\n\n".join([*parts, "## One-hot heads: λ by evidence, and the best of a grid", ridges(done)])


def ridges(done: Mapping[Cell, Mapping[str, float]]) -> str:
    """Return the table of λ by evidence, and of the best: a line for each data set and size, all seeds."""
    groups: dict[tuple[str, int], list[Mapping[str, float]]] = {}
    for cell, scores in done.items():
        if cell.method == ONE_HOT:
            groups.setdefault((cell.data, cell.examples), []).append(scores)
    rows = [
        [f"{data}, {size:,} images" if size else data]
        + [", ".join(f"{float(f'{each[name]:.3g}'):g}" for each in found) for name in ("lambda", "best_lambda")]
        + [", ".join(f"{each[name]:.4f}" for each in found) for name in ("accuracy", "best_accuracy")]
        + [f"{max(each['best_accuracy'] - each['accuracy'] for each in found):.4f}"]
        for (data, size), found in groups.items()
    ]
    best = f"best of {len(RIDGES)} by the test labels"
    heads = ["data", "λ by evidence", best, "accuracy", "of the best", "largest loss"]
    return markdown_table(heads, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--features", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", nargs="+", help="words that a cell's fields hold")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    pictures = {**kept(arguments.features, "cifar", dict), **kept(arguments.features, "outside", dict)}
    found = {"CIFAR-10": pictures, "plays": kept(arguments.features, "plays", dict)}
    done = study.read(FILE, Cell)
    for cell in tqdm(cells_of(arguments.seeds, done)):
        if cell in done or cell.method == AFL:
            continue
        if arguments.only and not all(any(word in str(field) for field in cell) for word in arguments.only):
            continue
        with quietly():
            done[cell] = run(cell, found[cell.data])
        study.keep(FILE, cell, done[cell])
    include(HERE / "README.md", tables({c: done[c] for c in cells_of(arguments.seeds, done) if c in done}))


if __name__ == "__main__":
    main()
