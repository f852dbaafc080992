"""Ten clients, three of which lie: does the common model survive?

    python examples/gallery/untrusted.py [--output DIR]

Digits of scikit-learn, dealt out at random. Clients 0 and 1 flip their labels (0 for 9, 1 for 8, ...), client 2 sends
five times its update in the opposite direction. Look at the accuracy round by round: of FedAvg where nobody lies, then
with the liars and without the guard that every server has, with it, of the geometric median, and of sites.
"""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset

import lightning_fedbayes as fb
from lightning_fedbayes.clients.settings import Sending
from lightning_fedbayes.core import plots
from lightning_fedbayes.core.quiet import quietly
from lightning_fedbayes.core.tables import markdown_table
from lightning_fedbayes.modules import mlp

OFF = fb.Safeguards(max_influence=None)
HONEST = "FedAvg, nobody lies"
METHODS = {
    HONEST: {"fusion": "weighted_average"},
    "FedAvg, no guard": {"fusion": "weighted_average", "safeguards": OFF},
    "FedAvg, guard": {"fusion": "weighted_average"},
    "geometric median": {"fusion": "geometric_median"},
    "sites, no guard": {"fusion": "sites", "safeguards": OFF},
    "sites, guard": {"fusion": "sites"},
}


def turned(round: Sending) -> Callable[[fb.ClientUpdate | None], Iterator[fb.ClientUpdate]]:
    """Client 2 sends five times its update in the opposite direction."""

    def send(update: fb.ClientUpdate | None) -> Iterator[fb.ClientUpdate]:
        if update is None:  # the last has come: nothing is held back
            return
        if update.client == 2:
            start, sent = round.posterior.mean, update.posterior
            mean = {name: start[name] - 5 * (value - start[name]) for name, value in sent.mean.items()}
            beside = {  # what sites send beside the means, in the same way
                name: -5 * value if name.startswith("method/") and value.numel() > 1 else value
                for name, value in update.buffers.items()
            }
            posterior = fb.GaussianPosterior(mean, sent.variance)
            update = replace(update, posterior=posterior, buffers=beside, kept=None)
        yield update

    return send


def clients(data: fb.DigitsDataModule, liars: bool) -> fb.ClientDatasets:
    """Ten clients; the labels of the first two are flipped where they lie."""
    inputs, labels = data.train.tensors
    rows = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0)).chunk(10)
    flips = (0, 1) if liars else ()
    return fb.ClientDatasets(
        {
            str(number): TensorDataset(inputs[own], 9 - labels[own] if number in flips else labels[own])
            for number, own in enumerate(rows)
        }
    )


class Curve(L.Callback):
    """Keeps a metric of every round."""

    def __init__(self) -> None:
        self.rounds: list[dict[str, float]] = []

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.rounds.append({name: float(trainer.callback_metrics[f"val/{name}"]) for name in ("accuracy", "nll")})


def main(output: Path, rounds: int = 20) -> dict[str, float]:
    found, data = {}, fb.DigitsDataModule()
    data.setup()
    for name, options in METHODS.items():
        L.seed_everything(0, verbose=False)
        bayesian = 2 if options["fusion"] == "sites" else 0
        model = fb.HybridBayesianClassifier(mlp(64, 10), bayesian, "flipout", learning_rate=0.01, kl_weight=0.05)
        lie = name != HONEST
        federation = fb.FederatedBayes(local_epochs=2, adversaries=turned if lie else None, **options)
        curve = Curve()
        trainer = L.Trainer(
            max_epochs=rounds,
            callbacks=[federation, curve],
            logger=False,
            enable_checkpointing=False,
            enable_model_summary=False,
            enable_progress_bar=False,
            num_sanity_val_steps=0,
        )
        train = DataLoader(clients(data, lie), batch_size=16, shuffle=True)
        trainer.fit(model, train, data.val_dataloader())
        found[name] = curve.rounds
    shown = sorted({1, max(1, rounds // 4), rounds})
    rows = [[name, *(curve[k - 1]["accuracy"] for k in shown), curve[-1]["nll"]] for name, curve in found.items()]
    print(markdown_table(["", *(f"accuracy, round {k}" for k in shown), "NLL at the end"], rows))

    figure = plots.rounds({name: [each["accuracy"] for each in curve] for name, curve in found.items()}, "accuracy")
    figure.set_size_inches(6, 4.5)
    axes = figure.axes[0]
    axes.legend().remove()
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)
    output.mkdir(parents=True, exist_ok=True)
    figure.savefig(output / "untrusted.png")
    return {name: curve[-1]["accuracy"] for name, curve in found.items()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("outputs/gallery/untrusted"))
    with quietly():
        main(parser.parse_args().output)
