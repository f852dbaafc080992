"""Four clients with one kind of images each, and a pretrained network: does one exchange teach all of them all kinds?

    python examples/gallery/images.py [--backbone NAME] [--output DIR]

Digits of scikit-learn. The backbone is trained here on the digits 0 to 3, as if others had published it, and frozen;
each client holds one of 4 to 7; nobody has seen 8 and 9. NAME is a backbone of timm instead, which timm may download.
Look at the accuracy of FedAvg's head and of the exact head, and at how well uncertainty tells digits that nobody has
seen from those that are known (AUROC: 0.5 is a guess).
"""

import argparse
from pathlib import Path
from typing import Any

import lightning as L
import torch
from sklearn.datasets import load_digits
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import lightning_fedbayes as fb
from lightning_fedbayes.core import plots
from lightning_fedbayes.core.quiet import quietly
from lightning_fedbayes.core.tables import markdown_table


def pretrained(images: Tensor, labels: Tensor, name: str) -> nn.Module:
    if name:
        from timm import create_model  # pyright: ignore[reportMissingImports]

        return nn.Sequential(nn.Upsample(size=64), create_model(name, pretrained=True, num_classes=0))
    body = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
    )
    network = nn.Sequential(body, nn.Linear(128, 4))
    optimizer = torch.optim.Adam(network.parameters(), 0.003)
    for batch in torch.randint(len(labels), (200, 64)):
        optimizer.zero_grad()
        F.cross_entropy(network(images[batch]), labels[batch]).backward()
        optimizer.step()
    return body


def main(output: Path, backbone: str = "", rounds: int = 20) -> dict[str, float]:
    L.seed_everything(0, verbose=False)
    images, labels = (torch.tensor(each) for each in load_digits(return_X_y=True))
    images = (images / 16).float().view(-1, 1, 8, 8).expand(-1, 3, -1, -1)
    body = pretrained(images[labels < 4], labels[labels < 4], backbone).requires_grad_(False).eval()
    width = body(images[:1]).shape[1]
    here = (labels >= 4) & (labels < 8)
    (own, test), (y, target) = ((each[here][:-200], each[here][-200:]) for each in (images, labels - 4))
    clients = {f"client {k}": TensorDataset(own[y == k], y[y == k]) for k in range(4)}
    loader = DataLoader(fb.ClientDatasets(clients), batch_size=32, shuffle=True)
    linear = fb.HybridBayesianClassifier(nn.Sequential(body, nn.Linear(width, 4)), 0, learning_rate=0.01)
    rows, figure = [], plots.empty_figure(10, 3)
    for axes, (name, model, epochs, federation) in zip(
        figure.subplots(1, 2),
        (
            ("FedAvg", linear, rounds, fb.FederatedBayes(fusion="weighted_average", local_epochs=5)),
            ("exact head", fb.HeadModule(body, fb.BayesianHead(4, "one_hot"), width), 1, fb.FederatedBayes()),
        ),
    ):
        L.Trainer(max_epochs=epochs, callbacks=[federation], barebones=True).fit(model, loader)
        predict: Any = model.eval().predict_step
        known, new = predict(test), predict(images[labels >= 8])
        entropy = torch.cat([known.entropy, new.entropy])
        auroc = float(roc_auc_score(torch.arange(len(entropy)) >= len(known.entropy), entropy.detach()))
        rows.append([name, len(federation.history), float((known.label == target).float().mean()), auroc])
        for side, label in ((known, "digits 4 to 7"), (new, "digits 8 and 9")):
            axes.hist(side.entropy.detach(), 30, (0, 1), density=True, alpha=0.6, label=label)
        axes.set(title=f"{name}: AUROC {auroc:.2f}", xlabel="normalised entropy")
        axes.legend(frameon=False)
    print(markdown_table(["head", "exchanges", "accuracy", "AUROC by entropy"], rows))
    output.mkdir(parents=True, exist_ok=True)
    figure.savefig(output / "images.png")
    return {"FedAvg": rows[0][2], "exact": rows[1][2], "AUROC": rows[1][3]}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backbone", default="")
    parser.add_argument("--output", type=Path, default=Path("outputs/gallery/images"))
    with quietly():
        main(**vars(parser.parse_args()))
