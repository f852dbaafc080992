"""Adapters (LoRA) of pretrained networks: FedAvg with a temperature beside IVON + sites, and the exact head.

    python -m benchmarks.foundation.adapters --data DIR --features FOLDER [--seeds 3]

DIR and FOLDER are those of benchmarks.foundation.features; peft is needed, too. Layers below the adapters are frozen:
what they give is computed once and kept in FOLDER. Rates are chosen on seed 0 by held-out examples of the clients, and
of every method the same number is tried. Each finished cell is one line of results/adapters.jsonl, and no cell is run
twice. The table is written into ADAPTERS.md.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

import lightning_fedbayes as fb
from benchmarks import cells as study
from benchmarks.foundation import features as frozen
from benchmarks.foundation.run import SOFTMAX, head_logs
from benchmarks.page import include
from benchmarks.readers import read_images
from lightning_fedbayes.core.quiet import quietly
from lightning_fedbayes.core.tables import markdown_table
from lightning_fedbayes.metrics.functional import calibration_diagram, negative_log_likelihood

HERE = Path(__file__).parent
ROUNDS, BATCH, DRAWS = 10, 8, 10
RANK, ALPHA = 8, 16
"""Rank and scale of the adapters, which the last layer of MiniLM has, and the last block of EfficientNet-Lite0."""
TOKENS, TRAINED, HELD_OUT, TESTED = 32, 24, 8, 16
"""Tokens of a text, and texts of a play in each part."""
IMAGES, PICTURES = 1500, 1000
"""Training images of a seed, a third of each client's held out, and test images."""
SEEDS = 3
CLASSES = {"plays": 3, "CIFAR-10": 10}
FEDAVG, SITES = "FedAvg-LoRA", "IVON + sites, LoRA"
RATES = {
    "plays": {FEDAVG: (1e-4, 3e-4, 1e-3, 3e-3), SITES: (3e-3, 1e-2, 3e-2, 1e-1)},
    "CIFAR-10": {FEDAVG: (1e-3, 3e-3, 1e-2, 3e-2, 1e-1), SITES: (1e-3, 3e-3, 1e-2, 3e-2, 1e-1)},
}
"""Of AdamW and of IVON."""
OPTIONS = {FEDAVG: ("A and B", "B"), SITES: ("temperature 1", "temperature 0.1")}
"""What AdamW trains of an adapter BA, and IVON's temperature; IVON trains B."""
TRIES = {
    data: {method: [f"rate {rate:g}, {option}" for option in OPTIONS[method] for rate in own[method]] for method in own}
    for data, own in RATES.items()
}


class Cell(NamedTuple):
    """One fit."""

    data: str
    method: str
    choice: str
    seed: int


class Part(NamedTuple):
    """Inputs of the layers with adapters, labels, and the client of each example."""

    inputs: Tensor
    labels: Tensor
    clients: Tensor


# -- what the frozen layers give ---------------------------------------------------------------------------------------


@torch.inference_mode()
def of_texts(file: Path) -> dict[str, Tensor]:
    """Return states below MiniLM's last layer for texts of every play, in half precision, zeros after their ends."""
    tokenizer, backbone = frozen.minilm()
    layers = backbone.encoder.layer[:-1]
    found: dict[str, list[Tensor]] = {"inputs": [], "labels": [], "clients": []}
    size = SEEDS * (TRAINED + HELD_OUT + TESTED)
    for number, (_, genre, texts) in enumerate(tqdm(frozen.texts_of(file), desc="plays", leave=False)):
        texts = texts[:size]
        batch = tokenizer(texts, padding="max_length", truncation=True, max_length=TOKENS, return_tensors="pt")
        mask = batch["attention_mask"].bool()
        states = backbone.embeddings(input_ids=batch["input_ids"])
        for layer in layers:
            states = layer(states, mask[:, None, None])
        found["inputs"].append((states * mask[..., None]).half().clone())
        found["labels"].append(torch.full((len(texts),), genre))
        found["clients"].append(torch.full((len(texts),), number))
    return {name: torch.cat(each) for name, each in found.items()}


@torch.inference_mode()
def of_images(folder: Path) -> dict[str, Tensor]:
    """Return the inputs of EfficientNet's last block for training and test images."""
    backbone: Any = frozen.efficientnet()
    found: dict[str, Tensor] = {}
    below = nn.Sequential(backbone._conv_stem, backbone._bn0, backbone._swish, *backbone._blocks[:-1])
    sizes = SEEDS * IMAGES, PICTURES
    for name, images, size in zip(("train", "test"), read_images("cifar10", folder), sizes):
        found[name] = frozen.of_images(below, images.images[:size]).clone()
        found[f"{name}_labels"] = images.labels[:size].clone()
    return found


def parts_of(found: Mapping[str, Tensor], cell: Cell) -> tuple[Part, Part, Part]:
    """Return training, held-out and test examples; seeds share no training example."""
    generator = torch.Generator().manual_seed(cell.seed)
    if cell.data == "plays":
        rank = torch.cat([torch.arange(int(n)) for n in found["clients"].bincount()])
        rank = rank - cell.seed * (TRAINED + HELD_OUT + TESTED)
        edges = 0, TRAINED, TRAINED + HELD_OUT, TRAINED + HELD_OUT + TESTED
        kept = [(rank >= low) & (rank < high) for low, high in pairwise(edges)]
        first, second, third = (
            Part(found["inputs"][each].float(), found["labels"][each], found["clients"][each]) for each in kept
        )
        return first, second, third
    own = slice(cell.seed * IMAGES, (cell.seed + 1) * IMAGES)
    inputs, labels = found["train"][own], found["train_labels"][own]
    split = fb.DirichletPartition(10, alpha=0.3, min_examples=10).split(labels, seed=cell.seed).indices
    chosen: tuple[list[Tensor], list[Tensor]] = [], []
    clients = torch.zeros(len(labels), dtype=torch.long)
    for number, indices in enumerate(split):
        indices = torch.as_tensor(indices)[torch.randperm(len(indices), generator=generator)]
        clients[indices] = number
        chosen[0].append(indices[len(indices) // 3 :])
        chosen[1].append(indices[: len(indices) // 3])
    train, held = (Part(inputs[torch.cat(each)], labels[torch.cat(each)], clients[torch.cat(each)]) for each in chosen)
    return train, held, Part(found["test"], found["test_labels"], torch.zeros(len(found["test_labels"])).long())


# -- networks ----------------------------------------------------------------------------------------------------------


class Texts(nn.Module):
    """MiniLM's last layer, and the mean over tokens, in units of its root mean square."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = frozen.minilm()[1].encoder.layer[-1:]
        self.width = 384

    def forward(self, x: Tensor) -> Tensor:
        mask = x.abs().sum(-1) > 0
        for layer in self.layers:
            x = layer(x, mask[:, None, None])
        return F.normalize((x * mask[..., None]).sum(1), dim=1) * self.width**0.5


class Images(nn.Module):
    """EfficientNet's last block and its pooled features."""

    def __init__(self) -> None:
        super().__init__()
        backbone: Any = frozen.efficientnet()
        self.blocks = nn.Sequential(*backbone._blocks[-1:])
        self.last, self.norm, self.active = plain(backbone._conv_head), backbone._bn1, backbone._swish
        for block in backbone._blocks[-1:]:
            block._expand_conv, block._project_conv = plain(block._expand_conv), plain(block._project_conv)
        self.width = 1280

    def forward(self, x: Tensor) -> Tensor:
        return self.active(self.norm(self.last(self.blocks(x)))).mean((-2, -1))


def plain(layer: nn.Conv2d) -> nn.Conv2d:
    """Return a convolution of one pixel as torch's own layer, which peft knows."""
    made = nn.Conv2d(layer.in_channels, layer.out_channels, 1, bias=False)
    made.load_state_dict(layer.state_dict())
    return made


TOPS = {"plays": Texts, "CIFAR-10": Images}
TARGETS = {"plays": ["query", "value"], "CIFAR-10": ["_expand_conv", "_project_conv", "last"]}


class Adapted(L.LightningModule):
    """Adapters in a frozen network, and a head."""

    def __init__(self, cell: Cell) -> None:
        super().__init__()
        peft = import_module("peft")
        self.network = TOPS[cell.data]().eval().requires_grad_(False)
        config = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=TARGETS[cell.data])
        peft.inject_adapter_in_model(config, self.network)
        self.head = nn.Linear(self.network.width, CLASSES[cell.data])
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        first, self.option = cell.choice.split(", ")
        self.rate, self.method = float(first.split()[-1]), cell.method
        for name, parameter in self.network.named_parameters():
            parameter.requires_grad_("lora_B" in name or ("lora_A" in name and self.option == "A and B"))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.network(x))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trained = [each for each in self.parameters() if each.requires_grad]
        if self.method == SITES:
            return fb.IVON(trained, lr=self.rate, temperature=float(self.option.split()[-1]))
        return torch.optim.AdamW(trained, lr=self.rate)


# -- fits and scores ---------------------------------------------------------------------------------------------------


def run(cell: Cell, found: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the scores of a cell: of the prediction, with a temperature, and of the posterior's mean."""
    train, held, test = parts_of(found, cell)
    L.seed_everything(cell.seed, verbose=False)
    if cell.method == SOFTMAX:
        network = TOPS[cell.data]().eval()
        with torch.inference_mode():
            inputs = [torch.cat([network(x) for x in part.inputs.split(100)]).clone() for part in (train, held, test)]
        started = time.perf_counter()
        fit = fb.BayesianHead(CLASSES[cell.data], inference="laplace").fit_clients([(inputs[0], train.labels)])
        seconds, columns, classes = time.perf_counter() - started, inputs[0].shape[1] + 1, CLASSES[cell.data]
        sent = columns**2 / 2 + columns * classes + fit.exchanges * (columns + classes) * classes
        costs = {"seconds": seconds, "megabytes": 8 * sent / 1e6, "trained": columns * classes}
        return {**costs, **scores(head_logs(fit, inputs[1]), head_logs(fit, inputs[2]), held, test)}
    with quietly():
        module = Adapted(cell)
    fusion = "sites" if cell.method == SITES else "weighted_average"
    federation = fb.FederatedBayes(fusion=fusion, local_epochs=1, seed=cell.seed, buffers="frozen", engine="sequential")
    trainer = L.Trainer(
        max_epochs=ROUNDS,
        accelerator="cpu",
        logger=False,
        callbacks=[federation],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    parts = {
        str(k): TensorDataset(train.inputs[train.clients == k], train.labels[train.clients == k])
        for k in train.clients.unique().tolist()
    }
    started = time.perf_counter()
    trainer.fit(module, DataLoader(fb.ClientDatasets(parts), batch_size=BATCH, shuffle=True))
    seconds = time.perf_counter() - started
    sent = sum(each["megabytes_up"] for each in federation.history) / len(parts)
    trained = sum(each.numel() for each in module.parameters() if each.requires_grad)
    module.eval()
    with torch.inference_mode():
        means = [torch.cat([module(x) for x in part.inputs.split(100)]).log_softmax(-1) for part in (held, test)]
        logs = means
        if cell.method == SITES:
            torch.manual_seed(cell.seed)
            drawn = [federation.posterior.sample() for _ in range(DRAWS)]
            logs = [averaged(module, drawn, part.inputs) for part in (held, test)]
    result = {"seconds": seconds, "megabytes": sent, "trained": trained, **scores(logs[0], logs[1], held, test)}
    if cell.method == SITES:
        result |= {f"mean_{name}": value for name, value in scores(means[0], means[1], held, test).items()}
    return result


def averaged(module: nn.Module, drawn: Sequence[dict[str, Tensor]], inputs: Tensor) -> Tensor:
    """Return log-probabilities averaged over draws, one after the other: stacked, these layers take twice as long."""
    passes = [torch.cat([torch.func.functional_call(module, each, x) for x in inputs.split(100)]) for each in drawn]
    return torch.stack(passes).log_softmax(-1).logsumexp(0) - math.log(len(passes))


def scores(held_logs: Tensor, test_logs: Tensor, held: Part, test: Part) -> dict[str, float]:
    """Return the test scores of log-probabilities, alone and with the temperature that the clients find together."""
    clients = {str(k): (held_logs[held.clients == k], held.labels[held.clients == k]) for k in held.clients.unique()}
    heat = fb.FederatedTemperature().fit(clients).temperature
    assert heat is not None
    found = {"temperature": heat}
    for name, at in (("", 1.0), ("scaled_", heat)):
        probs = (test_logs / at).softmax(-1)
        found |= {
            f"{name}held_out_nll": float(F.cross_entropy(held_logs / at, held.labels)),
            f"{name}accuracy": float((probs.argmax(-1) == test.labels).float().mean()),
            f"{name}nll": float(negative_log_likelihood(probs, test.labels).mean()),
            f"{name}ece": float(calibration_diagram(probs, test.labels).ece),
        }
    return found


# -- cells and the table -----------------------------------------------------------------------------------------------


def chosen(done: Mapping[Cell, Mapping[str, float]], data: str, method: str) -> str:
    """Return a method's setting of the least held-out NLL on seed 0: FedAvg's with the temperature."""
    name = "scaled_held_out_nll" if method == FEDAVG else "held_out_nll"
    return min(TRIES[data][method], key=lambda choice: done[Cell(data, method, choice, 0)][name])


def cells_of(data: str, seeds: int, done: Mapping[Cell, Any]) -> Iterator[Cell]:
    """Yield cells: the tries of seed 0 first, then what they choose."""
    yield from (Cell(data, SOFTMAX, "", seed) for seed in range(seeds))
    for method, choices in TRIES[data].items():
        yield from (Cell(data, method, choice, 0) for choice in choices)
        yield from (Cell(data, method, chosen(done, data, method), seed) for seed in range(1, seeds))


def table(done: Mapping[Cell, Mapping[str, float]], data: str) -> str:
    """Return the table of a data set: means over the seeds, and standard errors."""
    rows = []
    for method in (*OPTIONS, SOFTMAX):
        choice = chosen(done, data, method) if method in OPTIONS else ""
        found = [each for cell, each in done.items() if cell[:3] == (data, method, choice)]
        shown = [("", method, "")] + ([("mean_", f"{method}, its mean", "")] if method == SITES else [])
        for prefix, title, _ in shown:

            def mean(name: str, digits: int = 3, prefix: str = prefix, found: list[Any] = found) -> str:
                values = [each[prefix + name] for each in found]
                error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
                return f"{statistics.fmean(values):.{digits}f} ± {error:.{digits}f}"

            def cost(name: str, found: list[Any] = found) -> float:
                return statistics.fmean(each[name] for each in found)

            rounds = ROUNDS if method in OPTIONS else 1
            rows.append(
                [
                    title,
                    mean("accuracy"),
                    mean("nll"),
                    mean("scaled_nll"),
                    f"{mean('ece')} / {mean('scaled_ece')}",
                    f"{cost('trained'):,.0f}",
                    f"{1000 * cost('megabytes') / rounds:.0f}",
                    f"{cost('seconds'):.0f}",
                    choice,
                    len(found),
                ]
            )
    heads = [
        "method",
        "accuracy",
        "NLL",
        "NLL, temperature",
        "ECE / with it",
        "trained parameters",
        "kB up, a client and round",
        "seconds",
        "chosen",
        "seeds",
    ]
    return f"## {data}\n\n{markdown_table(heads, rows)}"


def tries(done: Mapping[Cell, Mapping[str, float]], data: str) -> str:
    """Return the table of what was tried on seed 0."""
    rows = [
        [
            method,
            choice,
            f"{found['held_out_nll']:.3f}",
            f"{found['scaled_held_out_nll']:.3f}",
            f"{found['accuracy']:.3f}",
            f"{found['nll']:.3f}",
            f"{found['scaled_nll']:.3f}",
        ]
        for method, choices in TRIES[data].items()
        for choice in choices
        for found in [done[Cell(data, method, choice, 0)]]
    ]
    heads = ["method", "tried", "held-out NLL", "with temperature", "test accuracy", "test NLL", "with temperature"]
    return f"## {data}, what was tried (seed 0)\n\n{markdown_table(heads, rows)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--features", type=Path, required=True, help="keeps what the frozen layers give")
    parser.add_argument("--seeds", type=int, choices=range(1, SEEDS + 1), default=SEEDS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    plays = arguments.data / "shakespeare" / "roles.json.gz"
    found = {
        "plays": frozen.kept(arguments.features, "plays_below", lambda: of_texts(plays)),
        "CIFAR-10": frozen.kept(arguments.features, "cifar_below", lambda: of_images(arguments.data)),
    }
    file = HERE / "results" / "adapters.jsonl"
    done = study.read(file, Cell)
    for data in CLASSES:
        for cell in cells_of(data, arguments.seeds, done):
            if cell in done:
                continue
            print(cell, flush=True)
            done[cell] = run(cell, found[data])
            study.keep(file, cell, done[cell])
    include(HERE / "ADAPTERS.md", "\n\n".join(make(done, data) for make in (table, tries) for data in CLASSES))


if __name__ == "__main__":
    main()
