"""Width by round: mutual information and σ of every method at its defaults, beside a converged pooled posterior.

    python -m benchmarks.posterior.rounds [--only rounds|widths|rules|rate|networks] [--seeds 3] [--data DIR]
        [--out FOLDER]

"rounds": the demo's federation, and the same on two data sets that no default was chosen on.
"widths": sites beside the best σ around the same means, trained on all examples.
"rules": every rule on digits, 200 rounds.
"rate": sites and the average of layers at the modules' own rate and KL weight, 200 rounds.
"networks": what ``fusion=None`` takes, beside federated averaging, at every tenth round of 300: six data sets, all
layers Bayesian or the last one, 2 and 20 local epochs, 10 clients, and 50 of which a tenth trains in each round. The
three estimators take turns over the seeds. Beside them one client that holds all data, by the same optimizer: what the
rate and the length of training alone do.
Three of the data sets ship with scikit-learn; the others lie in DIR/uci_regression and DIR/FashionMNIST, and without
--data their cells are left out. Each finished cell is one line of FOLDER/rounds.jsonl, and no cell is run twice. The
tables are written into ROUNDS.md.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import numpy as np
import torch
from sklearn.datasets import load_breast_cancer, load_wine
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import lightning_fedbayes as fb
from benchmarks import cells as study
from benchmarks.page import include
from benchmarks.readers import read_images, stratified_order
from lightning_fedbayes.core.quiet import quietly
from lightning_fedbayes.core.tables import markdown_table
from lightning_fedbayes.data.splits import SplitDataModule
from lightning_fedbayes.layers.functional import Estimator
from lightning_fedbayes.layers.posterior_view import gaussian_parameters, load_posterior
from lightning_fedbayes.metrics.functional import mutual_information, negative_log_likelihood
from lightning_fedbayes.modules import mlp

HERE = Path(__file__).parent
CLIENTS, BATCH, DRAWS, KL_WEIGHT = 10, 32, 200, 0.05
LOOKS = (5, 10, 20, 40, 60, 100, 200, 300)
LONGEST = {"sites": 300}
"""Rounds of a method with seed 0; others take 100, and every method as many with further seeds."""
LAST = {"rules": 200, "rate": 200, "networks": 300, "widths": 60}
"""Rounds of a cell of other studies."""
WIDTHS = (20, 60)
"""Rounds after which σ is held beside the best one."""
STEPS = 10_000
"""Of pooled training, with rates from 1e-2 to 1e-4 (a factor of 100, geometric)."""
METHODS: dict[str, dict[str, Any]] = {
    "sites": {"fusion": "sites"},
    "reverse_kl_barycenter": {"fusion": "reverse_kl_barycenter"},
    "linear_pool": {"fusion": "linear_pool"},
    "conflation": {"fusion": "conflation"},
    "gaussian_fit": {"fusion": "gaussian_fit"},
    "default": {},
    "last layer": {},
    "fedavg": {"fusion": "fedavg"},
    "sites, no layers": {"fusion": "sites"},
    "IVON + sites": {"fusion": "sites"},
    "one client": {"fusion": "fedavg", "keep": ["optimizer"]},
    "IVON + reverse_kl_barycenter": {"fusion": "reverse_kl_barycenter"},
}
"""Rows: those from "fedavg" on have no Bayesian layers."""
PLAIN = ("fedavg", "sites, no layers", "IVON + sites", "IVON + reverse_kl_barycenter", "one client")
OTHERS = (
    "weighted_average",
    "wasserstein_barycenter",
    "log_variance_average",
    "trimmed_mean",
    "geometric_median",
    "ivar_vb",
    "icov_vb",
    "fedavgm",
    "fedadagrad",
    "fedadam",
    "fedyogi",
)
"""Rules that "rules" runs beside those of ``METHODS``."""
METHODS |= {name: {"fusion": name} for name in OTHERS}
METHODS |= {f"one client, {each}": METHODS["one client"] for each in ("default", "last layer")}
ONLY = {
    "networks": ("default", "last layer", "one client, default", "one client, last layer"),
    "rules": ("one client", "IVON + reverse_kl_barycenter", *OTHERS),
}
"""Methods of one study."""
ESTIMATORS: tuple[Estimator, ...] = ("flipout", "local_reparameterization", "reparameterization")
COHORTS = {10: 1.0, 50: 0.1}
"""Clients, and the share of them that trains in a round."""
BARS = {"sites": 1.5, "IVON + sites": 2.0}
"""Largest factor between a method's mutual information and the pooled one at rounds 20, 40 and 60."""


class Cell(NamedTuple):
    """One federation, or one training on pooled data."""

    study: str
    data: str
    method: str
    seed: int
    epochs: int = 2
    clients: int = CLIENTS
    estimator: Estimator = "flipout"


class Table(SplitDataModule):
    """Standardised columns and classes; the validation part is the last of a random order with equal shares."""

    def __init__(self, inputs: np.ndarray, classes: np.ndarray, seed: int, held_out: float = 0.2) -> None:
        super().__init__(BATCH, seed, held_out)
        self._inputs, self._classes = torch.from_numpy(inputs).float(), torch.from_numpy(classes).long()

    def setup(self, stage: str | None = None) -> None:
        """Split, and standardise by the training part; a column that is constant there stays."""
        order = stratified_order(self._classes, torch.Generator().manual_seed(self.seed))
        x, y = self._inputs[order], self._classes[order]
        count = round((1 - self.validation_fraction) * len(x))
        scale = x[:count].std(0)
        x = (x - x[:count].mean(0)) / torch.where(scale > 0, scale, 1)
        self.train, self.validation = TensorDataset(x[:count], y[:count]), TensorDataset(x[count:], y[count:])


def bundled(load: Callable[..., Any], _: Path | None, seed: int) -> Table:
    """Return all rows of a data set of scikit-learn."""
    inputs, classes = load(return_X_y=True)
    return Table(inputs, classes, seed)


def quartiles(name: str, folder: Path | None, seed: int) -> Table:
    """Return up to 2,500 rows of a data set of UCI with the quartile of the target as class."""
    assert folder is not None
    rows = np.loadtxt(folder / "uci_regression" / name / "data.txt")[:2500]
    return Table(rows[:, :-1], np.searchsorted(np.quantile(rows[:, -1], (0.25, 0.5, 0.75)), rows[:, -1]), seed)


def fashion(folder: Path | None, seed: int) -> Table:
    """Return 4,500 images, of which 1,500 are for training."""
    assert folder is not None
    images = read_images("fashion_mnist", folder)[0]
    return Table(images.images[:4500].flatten(1).numpy(), images.labels[:4500].numpy(), seed, 2 / 3)


class Source(NamedTuple):
    """A data set: its module, from a folder and a seed, and the sizes of its network."""

    data: Callable[[Path | None, int], SplitDataModule]
    sizes: tuple[int, int]


SOURCES = {
    "digits": Source(lambda _, seed: fb.DigitsDataModule(), (64, 10)),
    "breast cancer": Source(partial(bundled, load_breast_cancer), (30, 2)),
    "kin8nm": Source(partial(quartiles, "kin8nm"), (8, 4)),
    "wine": Source(partial(bundled, load_wine), (13, 3)),
    "concrete": Source(partial(quartiles, "concrete"), (8, 4)),
    "FashionMNIST": Source(fashion, (784, 10)),
}
STORED = ("kin8nm", "concrete", "FashionMNIST")
"""Those that ``--data`` holds."""
SHORT = tuple(SOURCES)[:3]
"""Those of the first two studies."""


def cells(seeds: int = 3) -> list[Cell]:
    """Return all cells, those of the bars first; a network's estimator changes with its seed."""
    found = []
    for method in ("pooled", *BARS):
        found += [Cell("rounds", data, method, seed) for seed in range(seeds) for data in SHORT]
    only = [method for methods in ONLY.values() for method in methods]
    found += [Cell("rounds", data, method, 0) for data in SHORT for method in METHODS if method not in (*BARS, *only)]
    found += [Cell("widths", data, "sites", seed) for seed in range(seeds) for data in SHORT]
    found += [Cell("rules", "digits", method, 0) for method in METHODS if method not in ONLY["networks"]]
    found += [Cell("rate", data, method, 0) for data in SHORT for method in ("sites", "weighted_average")]
    for seed, epochs in itertools.product(range(seeds), (2, 20)):
        ways = itertools.product(SOURCES, ("pooled", "one client"), ONLY["networks"][:2])
        found += [Cell("networks", data, f"{way}, {each}", seed) for data, way, each in ways]
        for place, (data, clients) in enumerate(itertools.product(SOURCES, COHORTS)):
            estimator = ESTIMATORS[(seed + place + epochs) % 3]
            for method in ONLY["networks"][:2]:
                found.append(Cell("networks", data, method, seed, epochs, clients, estimator))
            found.append(Cell("networks", data, "fedavg", seed, epochs, clients))
    return list(dict.fromkeys(found))


class Looks(L.Callback):
    """Scores the posterior after some of the rounds."""

    def __init__(self, held_out: TensorDataset, rounds: Iterable[int], federation: fb.FederatedBayes) -> None:
        self.held_out, self.rounds, self.federation = held_out, set(rounds), federation
        self.found: dict[int, dict[str, float]] = {}
        self.posteriors: dict[int, fb.GaussianPosterior] = {}

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Score the posterior of this round."""
        number = trainer.current_epoch + 1
        if number in self.rounds:
            assert isinstance(pl_module, fb.HybridBayesianClassifier)
            self.posteriors[number] = self.federation.posterior
            self.found[number] = scores(pl_module, self.posteriors[number], self.held_out)


@torch.no_grad()
def scores(
    module: fb.HybridBayesianClassifier, posterior: fb.GaussianPosterior, held_out: TensorDataset
) -> dict[str, float]:
    """Return accuracy, NLL and mutual information of 200 draws, and the median and the largest σ."""
    inputs, targets = held_out.tensors
    with torch.random.fork_rng():
        torch.manual_seed(0)
        outputs = fb.PosteriorPredictive(module, posterior, DRAWS).sample(inputs)
    module.train()
    probs = outputs.softmax(-1)
    mean = probs.mean(0)
    stds = [value.sqrt().flatten() for value in posterior.variance.values() if bool(value.any())]
    widths = torch.cat(stds) if stds else torch.zeros(1)
    return {
        "accuracy": float((mean.argmax(-1) == targets).float().mean()),
        "nll": float(negative_log_likelihood(mean, targets).mean()),
        "mutual_information": float(mutual_information(probs).mean()),
        "median": float(widths.median()),
        "largest": float(widths.max()),
    }


def network(cell: Cell) -> fb.HybridBayesianClassifier:
    """Return the demo's network for the data of a cell: one hidden layer of 50, Adam at 0.01."""
    options: dict[str, Any] = {"learning_rate": 0.01, "kl_weight": KL_WEIGHT, "bayesian_last": 2}
    if cell.method in PLAIN:
        options = {"bayesian_last": 0, "learning_rate": 0.01}
    if cell.method.startswith("IVON"):
        options = {"bayesian_last": 0, "optimizer": partial(fb.IVON, temperature=KL_WEIGHT)}
    if cell.method.endswith("last layer"):
        options["bayesian_last"] = 1
    if cell.method.startswith("pooled"):
        options["posterior_std"] = 0.1
    if cell.study == "rate":
        options = {"bayesian_last": 2}
    return fb.HybridBayesianClassifier(mlp(*SOURCES[cell.data].sizes, [50]), estimator=cell.estimator, **options)


def run(cell: Cell, folder: Path | None = None) -> dict[str, Any]:
    """Return the scores of a cell by round; of pooled training under 0."""
    L.seed_everything(cell.seed, verbose=False)
    data, module = SOURCES[cell.data].data(folder, cell.seed), network(cell)
    data.prepare_data()
    data.setup("fit")
    if cell.method.startswith("pooled"):
        train_pooled(module, data.train)
        return {"0": scores(module, fb.read_posterior(module), data.validation)}
    least = 1 if cell.clients == 50 and cell.data in ("breast cancer", "concrete") else None  # else there is no draw
    partition = (
        fb.IIDPartition(1)
        if cell.method.startswith("one client")
        else fb.DirichletPartition(cell.clients, alpha=0.5, min_examples=least)
    )
    federation = fb.FederatedBayes(
        partition, local_epochs=cell.epochs, seed=cell.seed, fraction=COHORTS[cell.clients], **METHODS[cell.method]
    )
    rounds = rounds_of(cell)
    tenths = range(10, rounds + 1, 10)
    every = {"rules": tenths, "networks": tenths, "widths": WIDTHS}.get(cell.study, LOOKS)
    if cell.method.startswith("one client, "):  # as many passes as a tenth of the clients make in ten rounds
        every = {*range(1, rounds // 10 + 1), *tenths}
    looks = Looks(data.validation, [each for each in every if each <= rounds], federation)
    trainer = L.Trainer(
        max_epochs=rounds,
        accelerator="cpu",
        logger=False,
        callbacks=[federation, looks],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        limit_val_batches=0,
    )
    found: dict[str, Any] = {}
    try:
        trainer.fit(module, datamodule=data)
    except fb.FedBayesError as error:
        found["error"] = str(error)[:200]
    if cell.study == "widths":
        for number, posterior in looks.posteriors.items():
            found[f"best {number}"] = with_best_widths(network(cell), posterior, data)
    return {**found, **{str(n): each for n, each in looks.found.items()}}


def with_best_widths(
    module: fb.HybridBayesianClassifier, posterior: fb.GaussianPosterior, data: SplitDataModule
) -> dict[str, float]:
    """Return the scores of the means of ``posterior`` with the σ that are best around them, trained on all examples."""
    load_posterior(module, posterior)
    for each in gaussian_parameters(module).values():
        each.mean.requires_grad_(False)
    train_pooled(module, data.train)
    return scores(module, fb.read_posterior(module), data.validation)


def rounds_of(cell: Cell) -> int:
    """Return the number of rounds of a cell."""
    return LAST.get(cell.study) or (LONGEST.get(cell.method, 100) if cell.seed == 0 else 100)


def train_pooled(module: fb.HybridBayesianClassifier, data: TensorDataset) -> None:
    """Mean-field variational inference on all examples, until it has converged."""
    inputs, targets = data.tensors
    trained = [parameter for parameter in module.network.parameters() if parameter.requires_grad]
    optimizer = torch.optim.Adam(trained, lr=0.01)
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * 10 ** (-2 * step / STEPS)
        rows = torch.randint(0, len(inputs), (BATCH,))
        loss = cross_entropy(module(inputs[rows].float()), targets[rows])
        optimizer.zero_grad()
        (loss + module.kl_weight / len(inputs) * fb.kl_divergence(module.network)).backward()
        optimizer.step()


# -- tables ------------------------------------------------------------------------------------------------------------


def tables(done: Mapping[Cell, dict[str, Any]]) -> str:
    """Return all tables as Markdown."""
    parts = []
    for data in SHORT:
        mine = {cell: found for cell, found in done.items() if cell.study == "rounds" and cell.data == data}
        pooled = {cell.seed: found["0"] for cell, found in mine.items() if cell.method == "pooled"}
        if pooled:
            parts += [f"## {data[0].upper()}{data[1:]}", by_round(mine, pooled)]
    widths = {cell: found for cell, found in done.items() if cell.study == "widths"}
    if widths:
        parts += ["## Sites beside the best σ around the same means", beside_best_widths(widths, done)]
    networks = {cell: found for cell, found in done.items() if cell.study == "networks"}
    if networks:
        parts += ["## The default beside federated averaging, 300 rounds", beside_averaging(networks)]
    rates = {cell: found for cell, found in done.items() if cell.study == "rate"}
    if rates:
        parts += ["## Rate 1e-3, KL weight 1", slow(rates)]
    rules = {cell.method: found for cell, found in done.items() if cell.study == "rules"}
    if rules:
        parts += ["## Every rule, 200 rounds of digits", grown(rules)]
    return "\n\n".join(parts)


def by_round(done: Mapping[Cell, dict[str, Any]], pooled: Mapping[int, dict[str, float]]) -> str:
    """Return NLL, mutual information over the pooled one, and median σ by round: means over the seeds."""
    reference = {key: statistics.fmean(each[key] for each in pooled.values()) for key in pooled[min(pooled)]}
    rows = [
        [
            "pooled",
            len(pooled),
            *["" for _ in LOOKS[:-1]],
            f"{reference['nll']:.3f} / 1 / {reference['median']:.2f}",
            "",
        ]
    ]
    for method in METHODS:
        seeds = {cell.seed: found for cell, found in done.items() if cell.method == method and cell.seed in pooled}
        if not seeds:
            continue
        line = []
        for number in LOOKS:
            found = {seed: each[str(number)] for seed, each in seeds.items() if str(number) in each}
            if not found:
                line.append("–")
                continue
            mean = {key: statistics.fmean(each[key] for each in found.values()) for key in ("nll", "median")}
            ratio = statistics.fmean(
                each["mutual_information"] / pooled[seed]["mutual_information"] for seed, each in found.items()
            )
            line.append(f"{mean['nll']:.3f} / {ratio:.2f} / {mean['median']:.2f}")
        rows.append([method, len(seeds), *line, met(method, seeds, pooled)])
    return markdown_table(["method", "seeds", *(f"round {number}" for number in LOOKS), "bar"], rows)


def met(method: str, seeds: Mapping[int, dict[str, Any]], pooled: Mapping[int, dict[str, float]]) -> str:
    """Return whether the mean mutual information is within the bar of the pooled one at rounds 20, 40 and 60."""
    if method not in BARS:
        return ""
    wanted = statistics.fmean(pooled[seed]["mutual_information"] for seed in seeds)
    factors = []
    for number in ("20", "40", "60"):
        mean = statistics.fmean(each[number]["mutual_information"] for each in seeds.values())
        factors.append(max(mean / wanted, wanted / mean) if mean else math.inf)
    return f"{max(factors):.2f} ≤ {BARS[method]}: {'yes' if max(factors) <= BARS[method] else '**no**'}"


def beside_best_widths(widths: Mapping[Cell, dict[str, Any]], done: Mapping[Cell, dict[str, Any]]) -> str:
    """Return mutual information of sites, and of their means with the best σ, over the pooled one; and all NLLs."""
    rows = []
    for data, number in itertools.product(SHORT, WIDTHS):
        seeds = {cell.seed: found for cell, found in widths.items() if cell.data == data}
        pooled = [done[Cell("rounds", data, "pooled", seed)]["0"] for seed in seeds]
        if not seeds:
            continue
        ways = [[found[f"{way}{number}"] for found in seeds.values()] for way in ("", "best ")]
        sites, best, pool = (
            {key: statistics.fmean(each[key] for each in way) for key in ("mutual_information", "nll", "median")}
            for way in (*ways, pooled)
        )
        factor = sites["mutual_information"] / best["mutual_information"]
        rows.append(
            [
                data,
                number,
                len(seeds),
                *(f"{way['mutual_information'] / pool['mutual_information']:.2f}" for way in (sites, best)),
                f"{factor:.2f}",
                *(f"{way['nll']:.3f}" for way in (sites, best, pool)),
            ]
        )
    columns = [
        "data",
        "round",
        "seeds",
        "sites / pooled",
        "best σ / pooled",
        "sites / best σ",
        "NLL, sites",
        "NLL, best σ",
        "NLL, pooled",
    ]
    return markdown_table(columns, rows)


def beside_averaging(done: Mapping[Cell, dict[str, Any]]) -> str:
    """Return NLL by round, how far above federated averaging's it is at any tenth, and the information over the pooled.

    Means over the seeds; the information's factor is the farthest from 1 at any tenth round from 40 on, of seeds whose
    pooled posterior has been trained. One client with all data is compared with the same averaging, after as many
    passes over the data.
    """
    rows = []
    kinds = sorted({cell[1:3] + cell[4:6] for cell in done if cell.method in ONLY["networks"][:2]})
    for data, method, epochs, clients in kinds:
        mine = {cell: found for cell, found in done.items() if cell[1:3] + cell[4:6] == (data, method, epochs, clients)}
        pairs = [
            (
                found,
                done[Cell("networks", data, "fedavg", cell.seed, epochs, clients)],
                done.get(Cell("networks", data, f"pooled, {method}", cell.seed), {}).get("0"),
            )
            for cell, found in mine.items()
            if Cell("networks", data, "fedavg", cell.seed, epochs, clients) in done
        ]
        if not pairs:
            continue
        tenths = [n for n in map(str, range(20, LAST["networks"] + 1, 10)) if all(n in found for found, *_ in pairs)]
        nll = {n: [statistics.fmean(each[n]["nll"] for each in way) for way in list(zip(*pairs))[:2]] for n in tenths}
        highest = max(tenths, key=lambda n: nll[n][0] - nll[n][1])
        beside = [(found, each["mutual_information"]) for found, _, each in pairs if each is not None]
        pooled = statistics.fmean(each for _, each in beside)
        factors = {
            n: statistics.fmean(found[n]["mutual_information"] for found, _ in beside) / pooled for n in tenths[2:]
        }
        farthest = max(factors, key=lambda n: max(factors[n], 1 / factors[n]))
        alone = above_alone(done, data, method, clients, epochs)
        last = tenths[-1]
        rows.append(
            [
                data,
                method,
                clients,
                epochs,
                len(pairs),
                *(
                    " / ".join(f"{each:.3f}" for each in nll[n]) if n in nll else "–"
                    for n in ("20", "40", "100", "300")
                ),
                f"{nll[highest][0] - nll[highest][1]:+.3f} ({highest})",
                "–" if alone is None else f"{alone:+.3f}",
                f"{factors['40']:.2f}, {factors[last]:.2f}; {factors[farthest]:.2f} ({farthest})",
                f"{max(found[n]['largest'] for found, *_ in pairs for n in tenths):.3f}",
            ]
        )
    columns = [
        "data",
        "Bayesian",
        "clients",
        "epochs",
        "seeds",
        *(f"NLL {n}" for n in (20, 40, 100, 300)),
        "most above FedAvg",
        "one client",
        "information / pooled",
        "largest σ",
    ]
    return markdown_table(columns, rows)


def above_alone(done: Mapping[Cell, dict[str, Any]], data: str, method: str, clients: int, epochs: int) -> float | None:
    """Return how far one client with all data is above averaging at most, after as many passes over the data."""
    above: dict[int, list[float]] = {}
    for cell, found in done.items():
        averaged = Cell("networks", data, "fedavg", cell.seed, epochs, clients)
        if cell[:3] == ("networks", data, f"one client, {method}") and averaged in done:
            for number in range(20, LAST["networks"] + 1, 10):
                at = str(round(number * COHORTS[clients] * epochs / cell.epochs))
                if at in found:
                    above.setdefault(number, []).append(found[at]["nll"] - done[averaged][str(number)]["nll"])
    return max(map(statistics.fmean, above.values()), default=None)


def slow(done: Mapping[Cell, dict[str, Any]]) -> str:
    """Return NLL / median σ by round."""
    looks = [str(number) for number in LOOKS if number <= LAST["rate"]]
    rows = [
        [cell.data, cell.method, *(f"{found[n]['nll']:.3f} / {found[n]['median']:.2f}" for n in looks)]
        for cell, found in done.items()
    ]
    return markdown_table(["data", "method", *(f"round {n}" for n in looks)], rows)


def grown(mine: Mapping[str, dict[str, Any]]) -> str:
    """Return the NLL of each method on digits by round, those that grow most first."""
    change = {
        method: found["200"]["nll"] - found["20"]["nll"] if "200" in found else math.inf
        for method, found in mine.items()
    }
    rows = [
        [
            method,
            *(
                f"{mine[method][number]['nll']:.3f}" if number in mine[method] else "died"
                for number in ("20", "40", "100", "200")
            ),
            f"{change[method]:+.3f}",
            f"{mine[method]['200']['median']:.2f}" if "200" in mine[method] else "",
        ]
        for method in sorted(mine, key=lambda each: -change[each])
    ]
    return markdown_table(["rule", "NLL 20", "NLL 40", "NLL 100", "NLL 200", "200 − 20", "median σ"], rows)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("rounds", "widths", "rules", "rate", "networks"), help="one of the studies")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--data", type=Path, help="folder with uci_regression and FashionMNIST")
    parser.add_argument("--out", type=Path, default=HERE / "results", help="folder for the results")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    file = options.out / "rounds.jsonl"
    done = study.read(file, Cell)
    todo = [cell for cell in cells(options.seeds) if cell not in done and options.only in (None, cell.study)]
    todo = [cell for cell in todo if options.data is not None or cell.data not in STORED]
    study.run(file, todo, lambda cell: run(cell, options.data))
    text = tables(study.in_order(study.read(file, Cell), cells()))
    if options.out == HERE / "results":
        include(HERE / "ROUNDS.md", text)
    print(text)


if __name__ == "__main__":
    with quietly():
        main()
