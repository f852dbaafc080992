"""Thirty people with a phone in the pocket: what are they doing, and whom does a common model serve worst?

    python examples/gallery/activity.py [--output DIR]

Data made on the spot: windows of an accelerometer. Each person carries the phone at an angle of its own, walks at a
tempo of its own, and does some things more often than others; new windows are of all activities alike. Look at the NLL
of each person: by FedAvg, by a network of the person alone, by its own posterior given the population, by the latter.
"""

import argparse
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset

import lightning_fedbayes as fb
from lightning_fedbayes.core import plots
from lightning_fedbayes.core.quiet import quietly
from lightning_fedbayes.core.tables import markdown_table
from lightning_fedbayes.modules import mlp

KNOWN, NEW = 60, 200
TEMPO = torch.tensor([0.0, 0.0, 1.8, 1.6, 2.7])  # steps per second of: lying, sitting, walking, stairs, running
FORCE = torch.tensor([0.03, 0.03, 0.4, 0.45, 1.2])  # of a step, in g


def person() -> TensorDataset:
    """Return the windows of one person as 9 features (mean, deviation, mean change of three axes), and activities."""
    activity = torch.cat(
        [
            torch.distributions.Dirichlet(torch.ones(5)).sample().multinomial(KNOWN, replacement=True),
            torch.randint(5, (NEW,)),
        ]
    )
    turn, _ = torch.linalg.qr(torch.eye(3) + 0.4 * torch.randn(3, 3))
    tempo, force = (own * (0.15 * torch.randn(())).exp() for own in (TEMPO, FORCE))
    phase = 6.28 * (tempo[activity, None] * torch.arange(64) / 20 + torch.rand(len(activity), 1))
    step = force[activity, None, None] * torch.stack([phase.sin(), (2 * phase).sin() / 2, phase.cos() / 3], 1)
    gravity = torch.tensor([[0.0, 1, 0], [1, 0, 0], [1, 0, 0], [0.95, 0.3, 0], [1, 0, 0]])  # lying is across
    signal = turn @ (gravity[activity, :, None] + step + 0.1 * torch.randn(len(activity), 3, 64))
    return TensorDataset(torch.cat([signal.mean(2), signal.std(2), signal.diff().abs().mean(2)], 1), activity)


def train(clients: dict[str, TensorDataset], rounds: int, fusion: str, local_epochs: int) -> tuple[Any, Any]:
    bayesian, rate = (1, 0.03) if fusion == "population" else (0, 0.01)
    model = fb.HybridBayesianClassifier(mlp(9, 5, [32]), bayesian, posterior_std=0.05, learning_rate=rate)
    federation = fb.FederatedBayes(fusion=fusion, local_epochs=local_epochs)
    trainer = L.Trainer(max_epochs=rounds, callbacks=[federation], barebones=True)
    trainer.fit(model, DataLoader(fb.ClientDatasets(clients), batch_size=32, shuffle=True))
    return model.eval(), federation


def main(output: Path, rounds: int = 10) -> dict[str, float]:
    L.seed_everything(0, verbose=False)
    everybody = {f"person {k}": person() for k in range(30)}
    known = {name: TensorDataset(*(own[:KNOWN])) for name, own in everybody.items()}
    new = fb.ClientDatasets({name: TensorDataset(*own[KNOWN:]) for name, own in everybody.items()})
    shared, _ = train(known, rounds, "weighted_average", 5)
    alone = {name: train({name: own}, 1, "weighted_average", 5 * rounds)[0] for name, own in known.items()}
    network, federation = train(known, max(1, rounds // 2), "population", 20)
    own = {name: fb.PosteriorPredictive(network, federation.posterior_of(name), samples=20) for name in known}
    newcomer = fb.PosteriorPredictive(network, federation.posterior, samples=20)
    methods = {"global, FedAvg": shared, "each alone": alone, "own posterior": own, "the population's": newcomer}
    scores = {name: fb.evaluate_clients(model, new) for name, model in methods.items()}
    rows = [
        [
            name,
            each.mean("accuracy"),
            each.mean("nll"),
            each.worst("accuracy"),
            each.worst("nll"),
            each.names[int(each.values["nll"].argmax())],
        ]
        for name, each in scores.items()
    ]
    print(markdown_table(["", "accuracy", "NLL", "of the worst 3", "NLL of the worst 3", "served worst"], rows))
    figure, order = plots.empty_figure(10, 3.75), scores["global, FedAvg"].values["nll"].argsort()
    for axes, name in zip(figure.subplots(1, 2), ("accuracy", "nll")):
        for (label, each), color in zip(scores.items(), plots.PALETTE):
            axes.plot(each.values[name][order], "o", color=color, markersize=4, label=label)
        axes.set(xlabel="person, by the NLL of the global network", ylabel=name.replace("nll", "NLL (nats)"))
        axes.legend(frameon=False)
    output.mkdir(parents=True, exist_ok=True)
    figure.savefig(output / "activity.png")
    return {name: row[2] for name, row in zip(("global", "alone", "own", "population"), rows)}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("outputs/gallery/activity"))
    with quietly():
        main(parser.parse_args().output)
