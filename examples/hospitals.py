"""Four hospitals learn to recognise heart disease: each alone, by FedAvg, and by fusing their posteriors.

Run it with ``python examples/hospitals.py --download``, which gets the UCI heart disease data (four small files), or
with ``--data DIR``, where DIR holds ``processed.cleveland.data`` and its sisters. Prints accuracy, NLL and ECE on the
patients that each hospital held out, and writes the table and a picture to ``--output``. "alone" scores each
hospital's patients by a network that saw this hospital only; "guess" knows nothing of a patient but the hospital. The
ECE of a few dozen patients is biased upwards, except for a guess that is the same for all: compare it between
networks only.
"""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Mapping
from pathlib import Path

import lightning as L
import torch
from heart_disease import HOSPITALS, HospitalsDataModule
from matplotlib.figure import Figure
from torch import Tensor
from torch.utils.data import DataLoader
from tqdm import tqdm

import lightning_fedbayes as fb
from lightning_fedbayes.core import plots
from lightning_fedbayes.core.quiet import quietly
from lightning_fedbayes.core.tables import markdown_table
from lightning_fedbayes.fusion import FusionRule
from lightning_fedbayes.metrics.functional import calibration_diagram, negative_log_likelihood
from lightning_fedbayes.modules import mlp

SCORES = ("accuracy", "NLL", "ECE")
COLUMNS = (*HOSPITALS, "overall")
FUSIONS: dict[str, str | FusionRule] = {
    "FedAvg": "weighted_average",
    "reverse KL barycenter": "reverse_kl_barycenter",
    "reliability (IVAR-VB)": fb.fusion.Reliability("ivar_vb", then="reverse_kl_barycenter"),
}
METHODS = ("guess", "alone", *FUSIONS)
HIDDEN, LOCAL_EPOCHS, LEARNING_RATE, SAMPLES = 16, 2, 0.01, 50


def federate(
    clients: fb.ClientDatasets, fusion: str | FusionRule, rounds: int, seed: int
) -> fb.HybridBayesianClassifier:
    """Train some rounds and return the global model. With one client every rule returns that client's posterior."""
    L.seed_everything(seed, verbose=False)
    features = HospitalsDataModule.num_features
    model = fb.HybridBayesianClassifier(
        mlp(features, 2, hidden=(HIDDEN,)), bayesian_last=1, learning_rate=LEARNING_RATE, samples=SAMPLES
    )
    trainer = L.Trainer(
        max_epochs=rounds,
        accelerator="cpu",
        logger=False,
        callbacks=[fb.FederatedBayes(local_epochs=LOCAL_EPOCHS, fusion=fusion, seed=seed)],
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    trainer.fit(model, DataLoader(clients, batch_size=16, shuffle=True))
    return model


@torch.no_grad()
def predict(model: fb.HybridBayesianClassifier, data: HospitalsDataModule, hospital: str) -> Tensor:
    """Mean predictive of the patients that a hospital held out, shape (patients, 2)."""
    return model.predict_step(data.test_sets[hospital].tensors[0]).probs


def predictions(data: HospitalsDataModule, method: str, rounds: int, seed: int) -> dict[str, Tensor]:
    """Mean predictive of every hospital's held-out patients."""
    if method == "guess":
        shares = {name: part.tensors[1].float().mean() for name, part in data.train_sets.items()}
        return {
            name: torch.stack([1 - shares[name], shares[name]]).expand(len(part), 2)
            for name, part in data.test_sets.items()
        }
    if method == "alone":
        alone = {name: fb.ClientDatasets({name: part}) for name, part in data.train_sets.items()}
        return {
            name: predict(federate(client, "weighted_average", rounds, seed), data, name)
            for name, client in alone.items()
        }
    model = federate(fb.ClientDatasets(data.train_sets), FUSIONS[method], rounds, seed)
    return {name: predict(model, data, name) for name in HOSPITALS}


def score(probs: Mapping[str, Tensor], data: HospitalsDataModule) -> Tensor:
    """Accuracy, NLL (nats) and ECE (rows) at every hospital and over all patients (columns), shape (3, 5)."""
    pairs = [(probs[name], data.test_sets[name].tensors[1]) for name in HOSPITALS]
    pairs.append((torch.cat([p for p, _ in pairs]), torch.cat([y for _, y in pairs])))
    return torch.tensor(
        [
            [(p.argmax(1) == y).float().mean() for p, y in pairs],
            [negative_log_likelihood(p, y).mean() for p, y in pairs],
            [calibration_diagram(p, y).ece for p, y in pairs],
        ]
    )


def picture(mean: Tensor, error: Tensor) -> Figure:
    """Every method's scores at every hospital, with one standard error; both of shape (methods, 3, 5)."""
    figure = plots.empty_figure(12.0, 3.75)
    for panel, (axes, name) in enumerate(zip(figure.subplots(1, len(SCORES)), SCORES)):
        for row, method in enumerate(METHODS):
            x = torch.arange(len(COLUMNS)) + 0.14 * (row - (len(METHODS) - 1) / 2)
            axes.errorbar(
                x.numpy(),
                mean[row, panel].numpy(),
                error[row, panel].numpy(),
                fmt="o",
                markersize=4.5,
                color=plots.PALETTE[row],
                label=method,
            )
        axes.set_xticks(range(len(COLUMNS)), COLUMNS)
        axes.set_title(f"{name}: {'higher' if name == 'accuracy' else 'lower'} is better", fontsize=11)
        axes.grid(axis="y", color=plots.GRID, linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(colors=plots.INK, labelsize=9, length=0)
    figure.legend(
        *figure.axes[0].get_legend_handles_labels(),
        loc="outside lower center",
        ncols=len(METHODS),
        frameon=False,
        fontsize=9,
    )
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("outputs/data/heart-disease"), help="folder of the files")
    parser.add_argument("--download", action="store_true", help="get the files that are not there")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--output", type=Path, default=Path("outputs/hospitals"))
    arguments = parser.parse_args()
    try:
        HospitalsDataModule(arguments.data, download=arguments.download).prepare_data()
    except (OSError, ValueError) as error:
        parser.error(str(error).replace("download=True", "--download"))
    arguments.output.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)  # threads cost a network this small more than they gain

    start = time.perf_counter()
    scores = torch.empty(arguments.seeds, len(METHODS), len(SCORES), len(COLUMNS))
    sizes = ""
    with tqdm(total=arguments.seeds * len(METHODS)) as bar:
        for seed in range(arguments.seeds):
            data = HospitalsDataModule(arguments.data, seed=seed)
            data.setup()
            sizes = ", ".join(f"{name} {len(data.train_sets[name])}+{len(data.test_sets[name])}" for name in HOSPITALS)
            for row, method in enumerate(METHODS):
                bar.set_description(f"seed {seed}, {method}")
                scores[seed, row] = score(predictions(data, method, arguments.rounds, seed), data)
                bar.update()
    mean = scores.mean(0)
    error = scores.std(0) / arguments.seeds**0.5

    setting = (
        f"Patients for training + test: {sizes}. Network {HospitalsDataModule.num_features}-{HIDDEN}-2, last layer "
        f"Bayesian, Adam {LEARNING_RATE}, {arguments.rounds} rounds of {LOCAL_EPOCHS} local epochs, weights by size; "
        f"mean ± standard error of {arguments.seeds} seeds (split, initial network and noise); torch "
        f"{torch.__version__}, {torch.get_num_threads()} thread, {platform.machine()}, "
        f"{time.perf_counter() - start:.0f} s."
    )
    rows = [
        [name, method, *(f"{m:.3f} ± {e:.3f}" for m, e in zip(mean[row, panel], error[row, panel]))]
        for panel, name in enumerate(SCORES)
        for row, method in enumerate(METHODS)
    ]
    table = markdown_table(("score", "method", *COLUMNS), rows)
    (arguments.output / "table.md").write_text(f"{setting}\n\n{table}\n")
    picture(mean, error).savefig(arguments.output / "hospitals.png")
    print(f"\n{setting}\n\n{table}\n\nTable and picture: {arguments.output}")


if __name__ == "__main__":
    with quietly():
        main()
