"""Models, optimizers and schedules of timm."""

# pyright: reportMissingImports=false
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.situations.situation import ALONE, Group, mapped
from tests.federations import CLASSES
from tests.zoo.case import Net

asked = Group("timm", "timm")
LIGHTNING = "https://github.com/Lightning-AI/pytorch-lightning"
TIMM = "https://github.com/huggingface/pytorch-image-models"


def picture(x: Tensor, y: Tensor) -> Any:
    return x.repeat(32).view(3, 8, 8), y


def transformer(**options: Any) -> nn.Module:
    from timm.models import VisionTransformer

    sizes = {"img_size": 8, "patch_size": 4, "embed_dim": 12, "depth": 2, "num_heads": 2, "mlp_ratio": 2}
    return VisionTransformer(num_classes=CLASSES, **{**sizes, **options})


@asked(
    "timm's cosine schedule by lr_scheduler_step",
    f"{LIGHTNING}/issues/5555",
    "step a schedule that is none of torch's by the number of the epoch",
    dataset=mapped(picture),
    rounds=3,
    tolerance=1e-4,
)
class Cosine(Net):
    def __init__(self) -> None:
        super().__init__(transformer())

    def configure_optimizers(self):
        from timm.optim import create_optimizer_v2
        from timm.scheduler import CosineLRScheduler

        optimizer = create_optimizer_v2(self.net, "adamw", lr=0.01, weight_decay=0.05, eps=1e-3)
        return [optimizer], [CosineLRScheduler(optimizer, t_initial=4, warmup_t=1, warmup_lr_init=0.001)]

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        scheduler.step(epoch=self.current_epoch + 1)


@asked(
    "learning rates that fall with the depth of the layer",
    f"{TIMM}/pull/2532",
    "fine-tune a ViT with layer_decay",
    dataset=mapped(picture),
    tolerance=1e-4,
)
class Decayed(Net):
    def __init__(self) -> None:
        super().__init__(transformer())

    def configure_optimizers(self):
        from timm.optim import create_optimizer_v2

        optimizer = create_optimizer_v2(self.net, "sgd", lr=0.1, weight_decay=0.05, layer_decay=0.5)
        for group in optimizer.param_groups:
            group["lr"] *= group["lr_scale"]
        return optimizer


@asked(
    "a ViT that drops paths",
    f"{TIMM}/issues/2118",
    "drop layers at random for each example (stochastic depth)",
    dataset=mapped(picture),
    noisy=True,
    rounds=1,
)
def dropping():
    return Net(transformer(drop_path_rate=0.4))


@asked(
    "timm's Mixup with soft targets",
    "https://github.com/autogluon/autogluon/pull/1730",
    "mix examples in the step, by NumPy",
    dataset=mapped(picture),
    loading={"drop_last": True},
    why="aten::scatter_(self, *extra_args) is not possible",
    **ALONE,
)
class Mixed(Net):
    def __init__(self) -> None:
        from timm.data import Mixup
        from timm.loss import SoftTargetCrossEntropy

        super().__init__(transformer())
        self.mixup = Mixup(mixup_alpha=0.8, cutmix_alpha=1.0, label_smoothing=0.1, num_classes=CLASSES)
        self.criterion = SoftTargetCrossEntropy()

    def training_step(self, batch, batch_idx):
        x, y = self.mixup(*batch)
        return self.criterion(self(x), y)


@asked(
    "ModelEmaV3 beside the network",
    f"{LIGHTNING}/issues/10914",
    "update timm's moving average before gradients are cleared",
    dataset=mapped(picture),
    why="has a hook on_before_zero_grad",
    **ALONE,
)
class Averaged(Net):
    def __init__(self) -> None:
        from timm.utils import ModelEmaV3

        super().__init__(transformer())
        self.average = ModelEmaV3(self.net, decay=0.9)

    def on_before_zero_grad(self, optimizer):
        self.average.update(self.net)

    def configure_optimizers(self):
        return torch.optim.SGD(self.net.parameters(), lr=0.1)


@asked(
    "a ResNet with the statistics of its BatchNorms",
    f"{TIMM}/issues/990",
    "train a convolutional network, soft labels from smoothing",
    dataset=mapped(picture),
    loading={"drop_last": True},
    trainer={"precision": "64-true"},  # so many BatchNorms of so few values enlarge what float32 rounds away
)
class Residual(Net):
    def __init__(self) -> None:
        from timm.loss import LabelSmoothingCrossEntropy
        from timm.models import ResNet
        from timm.models.resnet import BasicBlock

        small = {"layers": (1, 1, 1, 1), "channels": (4, 8, 8, 8), "num_classes": CLASSES, "stem_width": 4}
        super().__init__(ResNet(BasicBlock, **small))
        self.criterion = LabelSmoothingCrossEntropy(0.1)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return self.criterion(self(x), y)
