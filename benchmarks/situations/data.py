"""Data modules, samplers, collate functions, and data sets that change."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, WeightedRandomSampler

from benchmarks.situations.situation import ALONE, NEVER, Group, Mapped, mapped
from tests.federations import CLASSES, FEATURES
from tests.zoo.case import Net, callback

asked = Group("Data")
LIGHTNING = "https://github.com/Lightning-AI/pytorch-lightning"


@asked(
    "WeightedRandomSampler",
    f"{LIGHTNING}/issues/3716",
    "draw examples of rare classes more often",
    given=lambda loader: DataLoader(
        loader.dataset, 4, sampler=WeightedRandomSampler([1.0] * len(loader.dataset), len(loader.dataset))
    ),
    why="clients' orders are planned by FederatedBayes",
    **NEVER,
)
class Plain(Net):
    pass


class Alike(Sampler):
    """Batches of three neighbours, as a sampler that puts like lengths together makes them."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __iter__(self) -> Any:
        yield from (list(range(start, start + 3)) for start in range(0, len(self.dataset) - 2, 3))

    def __len__(self) -> int:
        return len(self.dataset) // 3


asked(
    "a batch sampler of like lengths",
    f"{LIGHTNING}/issues/17793",
    "put sequences of one length into a batch, to pad nothing",
    given=lambda loader: DataLoader(loader.dataset, batch_sampler=Alike(loader.dataset)),
    why="clients' batches are planned by FederatedBayes",
    **NEVER,
)(Plain)


@asked(
    "CombinedLoader of two loaders",
    f"{LIGHTNING}/issues/11632",
    "train on labelled and unlabelled batches side by side",
    given=lambda loader: CombinedLoader({"a": loader, "b": DataLoader(loader.dataset, 4)}, "max_size_cycle"),
    why="the training loader is a CombinedLoader",
    **NEVER,
)
class TwoLoaders(Net):
    def training_step(self, batch, batch_idx):
        return self.loss(batch["a"]) + self.loss(batch["b"])


class Stream(IterableDataset):
    """Examples one after the other, without a length."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __iter__(self) -> Any:
        return iter(self.dataset)


asked(
    "IterableDataset",
    f"{LIGHTNING}/issues/2150",
    "stream examples from a data set without a length",
    dataset=Stream,
    why="no map-style data set",
    **NEVER,
)(Plain)


def none_of_bad_batches(rows: list[Any]) -> Any:
    """Collate; a batch with an example of a large first feature is dropped."""
    if max(float(x[0]) for x, _ in rows) > 2.5:
        return None
    return torch.stack([x for x, _ in rows]), torch.stack([y for _, y in rows])


@asked(
    "a collate function that returns None",
    f"{LIGHTNING}/issues/6753",
    "leave a whole batch out when an example in it is broken",
    loading={"collate_fn": none_of_bad_batches},
    why="batches hold more than tensors (NoneType)",
    **ALONE,
)
class SkipsNone(Net):
    def training_step(self, batch, batch_idx):
        return None if batch is None else self.loss(batch)


def without_none(rows: list[Any]) -> Any:
    rows = [row for row in rows if row is not None]
    return torch.stack([x for x, _ in rows]), torch.stack([y for _, y in rows])


asked(
    "a data set that returns None",
    f"{LIGHTNING}/issues/3491",
    "return None for a broken example, and collate the others",
    dataset=mapped(lambda x, y: None if float(x[1]) > 1.5 else (x, y)),
    loading={"collate_fn": without_none},
)(Plain)

Pair = namedtuple("Pair", ["features", "targets"])


@asked(
    "batches are namedtuples",
    "https://github.com/Lightning-AI/utilities/issues/199",
    "name the fields of a batch",
    dataset=mapped(Pair),
)
class Named(Net):
    def training_step(self, batch, batch_idx):
        return self.loss((batch.features, batch.targets))


@dataclass
class Bundle:
    """A batch with methods of its own."""

    features: Tensor
    targets: Tensor

    def to(self, *args: Any, **options: Any) -> Bundle:
        return Bundle(self.features.to(*args, **options), self.targets.to(*args, **options))


@asked(
    "batches are objects with a method to",
    f"{LIGHTNING}/issues/7878",
    "collate into a dataclass",
    loading={
        "collate_fn": lambda rows: Bundle(torch.stack([x for x, _ in rows]), torch.stack([y for _, y in rows])),
    },
    why="batches hold more than tensors (Bundle)",
    **ALONE,
)
class Objects(Named):
    pass


class Detector(nn.Module):
    """Takes images of different sizes with a dict of targets each, and returns a dict of losses."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Conv2d(1, 4, 2)
        self.label, self.box = nn.Linear(4, CLASSES), nn.Linear(4, 4)

    def forward(self, images: list[Tensor], targets: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        found = torch.stack([self.backbone(image).relu().mean((1, 2)) for image in images])
        labels = torch.stack([target["label"] for target in targets])
        boxes = torch.stack([target["boxes"].mean(0) for target in targets])
        return {
            "loss_classifier": nn.functional.cross_entropy(self.label(found), labels),
            "loss_box_reg": nn.functional.smooth_l1_loss(self.box(found), boxes),
        }


def with_boxes(x: Tensor, y: Tensor) -> Any:
    """An image of two or three rows, and one or two boxes."""
    tall = 2 + int(x[0] > 0)
    image = torch.cat([x, x[:3]])[: tall * 3].view(1, tall, 3)
    return image, {"label": y, "boxes": x[:4].expand(1 + int(x[1] > 0), 4)}


@asked(
    "images of different sizes, targets in dicts, a dict of losses",
    "https://github.com/Erlemar/wheat/issues/1",
    "train Faster R-CNN, which sums its losses",
    dataset=mapped(with_boxes),
    loading={"collate_fn": lambda rows: tuple(zip(*rows))},
)
class Detection(Net):
    def __init__(self):
        super().__init__(Detector())

    def training_step(self, batch, batch_idx):
        losses = self.net(*batch)
        self.log_dict({f"train_{name}": value for name, value in losses.items()}, batch_size=len(batch[0]))
        return sum(losses.values())


asked(
    "augmentation by torch in __getitem__",
    f"{LIGHTNING}/issues/20412",
    "draw an augmentation with torch's generator when an example is read",
    dataset=mapped(lambda x, y: (x + 0.3 * torch.randn(FEATURES), y)),
    data_noise=True,
)(Plain)

asked(
    "augmentation by NumPy in __getitem__",
    "https://github.com/pytorch/pytorch/issues/5059",
    "draw an augmentation with NumPy's global generator when an example is read",
    dataset=mapped(lambda x, y: (x + 0.3 * torch.from_numpy(np.random.randn(FEATURES)).float(), y)),
    data_noise=True,
)(Plain)


class InBatches(Dataset):
    """A data set whose elements are batches."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return -(-len(self.dataset) // 4)

    def __getitem__(self, index: int) -> Any:
        rows = [self.dataset[i] for i in range(4 * index, min(4 * index + 4, len(self.dataset)))]
        return torch.stack([x for x, _ in rows]), torch.stack([y for _, y in rows])


asked(
    "batch_size=None: the data set has batches",
    f"{LIGHTNING}/issues/10344",
    "store batches, and let the loader make none",
    dataset=InBatches,
    given=lambda loader: DataLoader(loader.dataset, batch_size=None),
    why="clients' batches are planned by FederatedBayes",
    **NEVER,
)(Plain)


class Centred(Dataset):
    """Reads batches at once, and centres their inputs."""

    def __init__(self, dataset: Any) -> None:
        self.x, self.y = dataset.tensors

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        return self.x[index], self.y[index]

    def __getitems__(self, indices: list[int]) -> list[Any]:
        x = self.x[indices]
        return list(zip(x - x.mean(0), self.y[indices]))


asked(
    "a data set that reads whole batches by __getitems__",
    "https://github.com/pytorch/pytorch/issues/107218",
    "read all examples of a batch at once, and normalize them together",
    dataset=Centred,
)(Plain)


class Doubling(DataLoader):
    """Changes batches on their way, as loaders that prefetch or repeat do."""

    def __iter__(self) -> Any:
        return ((2 * x, y) for x, y in super().__iter__())


asked(
    "a subclass of DataLoader with an __iter__ of its own",
    "https://github.com/talmolab/sleap-nn/pull/237",
    "change or repeat batches in the loader",
    given=lambda loader: Doubling(loader.dataset, 4),
    why="Doubling has its own __iter__",
    **NEVER,
)(Plain)


class Levelled(Mapped):
    """Examples that become harder with an attribute of the data set."""

    level = 0

    def __init__(self, dataset: Any) -> None:
        super().__init__(dataset, lambda x, y: (x * (1 + self.level), y))


asked(
    "a callback that sets an attribute of the data set in every epoch",
    f"{LIGHTNING}/issues/20407",
    "make examples harder from epoch to epoch (curriculum)",
    dataset=Levelled,
    callbacks=callback(
        on_train_epoch_start=lambda self, trainer, module: [
            setattr(part, "level", trainer.current_epoch)
            for part in getattr(trainer.train_dataloader.dataset, "datasets", [trainer.train_dataloader.dataset])
        ]
    ),
)(Plain)


class Shrinking(Mapped):
    """Has half of its examples after the first epoch."""

    share = 1.0

    def __init__(self, dataset: Any) -> None:
        super().__init__(dataset, lambda x, y: (x, y))

    def __len__(self) -> int:
        return int(self.share * super().__len__())


asked(
    "a data set that becomes smaller",
    f"{LIGHTNING}/issues/21448",
    "choose examples anew in every epoch, without a restart",
    dataset=Shrinking,
    callbacks=callback(
        on_train_epoch_start=lambda self, trainer, module: [
            setattr(part, "share", 0.5 if trainer.current_epoch else 1.0)
            for part in getattr(trainer.train_dataloader.dataset, "datasets", [trainer.train_dataloader.dataset])
        ]
    ),
    why="have another length than when the loader was made",
    **NEVER,
)(Plain)


class Growing(L.LightningDataModule):
    """Makes larger batches in later epochs, of data that it takes in ``setup``."""

    def __init__(self, loader: DataLoader) -> None:
        super().__init__()
        self.source, self.data = loader, None

    def setup(self, stage: str) -> None:
        self.data = self.source.dataset

    def train_dataloader(self) -> DataLoader:
        assert self.data is not None
        assert self.trainer is not None
        return DataLoader(self.data, batch_size=2 * (1 + self.trainer.current_epoch))


asked(
    "a data module with larger batches in every epoch",
    f"{LIGHTNING}/issues/14093",
    "read the data anew in every epoch, reload_dataloaders_every_n_epochs=1",
    given=Growing,
    trainer={"reload_dataloaders_every_n_epochs": 1},
)(Plain)


class Augmenting(L.LightningDataModule):
    """Augments batches on the device."""

    def __init__(self, loader: DataLoader) -> None:
        super().__init__()
        self.loader = loader

    def train_dataloader(self) -> DataLoader:
        return self.loader

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch[0] + 0.3 * torch.randn_like(batch[0]), batch[1]


asked(
    "augmentation in the data module's on_after_batch_transfer",
    f"{LIGHTNING}/issues/10469",
    "augment batches on the device, by a hook of the data module",
    given=Augmenting,
    why="has a hook on_after_batch_transfer",
    **ALONE,
)(Plain)


@asked(
    "a padding collate function with lengths in the batch",
    "https://github.com/pytorch/pytorch/pull/94513",
    "pad sequences to the longest of their batch",
    dataset=mapped(lambda x, y: {"sequence": x[: 2 + int(x[0] > 0) + int(x[1] > 0), None], "target": y}),
    loading={
        "collate_fn": lambda rows: {
            "sequence": pad_sequence([row["sequence"] for row in rows], batch_first=True),
            "lengths": torch.tensor([len(row["sequence"]) for row in rows]),
            "target": torch.stack([row["target"] for row in rows]),
        }
    },
)
class Padded(Net):
    def __init__(self):
        super().__init__(nn.Linear(1, 8))
        self.head = nn.Linear(8, CLASSES)

    def training_step(self, batch, batch_idx):
        steps = torch.arange(batch["sequence"].shape[1])
        mask = (steps < batch["lengths"][:, None]).unsqueeze(-1)
        mean = (self.net(batch["sequence"]).tanh() * mask).sum(1) / batch["lengths"][:, None]
        return nn.functional.cross_entropy(self.head(mean), batch["target"])
