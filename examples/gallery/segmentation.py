"""Four clinics mark tissue and lesions in images: where does the network not know, and what else could it be there?

    python examples/gallery/segmentation.py [--output DIR]

Images made on the spot: ellipses of tissue, lesions in some, blurred; brightness and noise are each clinic's own. What
lies outside of the scan has no label (255). Look at the uncertainty along the borders, and at the sets: of each pixel
those classes that hold the truth with 99 % probability, calibrated by all clinics together.
"""

import argparse
from pathlib import Path

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d
from torch.utils.data import DataLoader, TensorDataset

import lightning_fedbayes as fb
from lightning_fedbayes.core import plots
from lightning_fedbayes.core.quiet import quietly
from lightning_fedbayes.core.tables import markdown_table

SIZE, NO_LABEL = 24, 255
CLINICS = {"north": (1.0, 0.1), "east": (0.8, 0.2), "south": (1.2, 0.15), "west": (0.9, 0.3)}  # brightness, noise
GRID = torch.stack(torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")).float()


def ellipses(count: int, smallest: float, largest: float) -> Tensor:
    """Return masks of one ellipse in each image, shape (count, SIZE, SIZE)."""
    centre = SIZE / 2 + 4 * torch.randn(count, 2, 1, 1)
    radii = smallest + (largest - smallest) * torch.rand(count, 2, 1, 1)
    return ((GRID - centre) / radii).square().sum(1) < 1


def scans(count: int, brightness: float, noise: float) -> TensorDataset:
    """Return images (count, 1, SIZE, SIZE) and classes of pixels: 0 nothing, 1 tissue, 2 lesion, 255 no label."""
    tissue = ellipses(count, 5, 10)
    lesion = ellipses(count, 2, 4) & tissue & (torch.rand(count, 1, 1) < 0.7)
    mask = tissue.long() + lesion.long()
    image = avg_pool2d(mask[:, None].float() * brightness, 3, 1, 1) + noise * torch.randn(count, 1, SIZE, SIZE)
    outside = (GRID - SIZE / 2).square().sum(0) > (SIZE / 2) ** 2
    return TensorDataset(image, mask.masked_fill(outside, NO_LABEL))


def main(output: Path, rounds: int = 40) -> dict[str, float]:
    L.seed_everything(0, verbose=False)
    train, held_out, new = (
        fb.ClientDatasets({name: scans(count, *own) for name, own in CLINICS.items()}) for count in (60, 30, 60)
    )
    network = nn.Sequential(
        nn.Conv2d(1, 16, 5, padding=2), nn.ReLU(), nn.Conv2d(16, 16, 5, padding=2), nn.ReLU(), nn.Conv2d(16, 3, 1)
    )
    model = fb.HybridBayesianClassifier(network, likelihood=fb.Categorical(ignore_index=NO_LABEL), learning_rate=0.01)
    trainer = L.Trainer(max_epochs=rounds, callbacks=[fb.FederatedBayes()], barebones=True)
    trainer.fit(model, DataLoader(train, batch_size=20, shuffle=True))
    conformal = fb.FederatedConformal(level=0.99).fit_from(model.eval(), held_out)
    scores, covered = fb.evaluate_clients(model, new), conformal.evaluate(model, new)
    figures = ("accuracy", "nll", "ece")
    rows = [
        [
            name,
            *(float(scores.values[each][k]) for each in figures),
            float(covered.values["coverage"][k]),
            float(covered.values["set_size"][k]),
        ]
        for k, name in enumerate(scores.names)
    ]
    print(markdown_table(["clinic", "accuracy of pixels", "NLL", "ECE", "coverage of sets", "classes in a set"], rows))

    images, masks = new.datasets[3][:4]
    with torch.no_grad():
        prediction = model.predict_step(images)
    sets = conformal.sets(prediction.probs.movedim(1, -1).flatten(0, 2)).sum(-1).reshape(prediction.label.shape)
    shown = {
        "image": images[:, 0],
        "truth": masks.float().masked_fill(masks == NO_LABEL, torch.nan),
        "prediction": prediction.label,
        "uncertainty": prediction.entropy,
        "size of the set": sets,
    }
    figure = plots.empty_figure(7, 5.8)
    for row, axes in zip(range(4), figure.subplots(4, 5)):
        for (name, values), each in zip(shown.items(), axes):
            each.imshow(
                values[row].float(),
                cmap="gray" if name == "image" else "viridis",
                **({} if name.startswith(("image", "unc")) else {"vmin": 0, "vmax": 3 if "set" in name else 2}),
            )
            each.set(xticks=[], yticks=[], title="" if row else name)
    output.mkdir(parents=True, exist_ok=True)
    figure.savefig(output / "segmentation.png")
    wrong = (prediction.label != masks) & (masks != NO_LABEL)
    right = (prediction.label == masks) & (masks != NO_LABEL)
    return {
        "accuracy": scores.mean("accuracy"),
        "coverage": covered.mean("coverage"),
        "wrong": float(prediction.entropy[wrong].mean()),
        "right": float(prediction.entropy[right].mean()),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("outputs/gallery/segmentation"))
    with quietly():
        print(main(parser.parse_args().output))
