"""Modules that several tests share."""

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import lightning_fedbayes as fb
from lightning_fedbayes.core.errors import FederationError
from lightning_fedbayes.layers import kl_divergence
from tests.federations import CLASSES, FEATURES, Plain, assert_equal, federate, parameters


def assert_goes_one_by_one(make, partition, reason: str, ends: str | None = "", **options) -> list[Plain]:
    """A stack is refused for ``reason``, and "auto" trains as "sequential"; ``ends`` is the error that ends both.

    With ``ends`` None, which no engine takes, nothing else is tried.
    """
    with pytest.raises(FederationError, match="engine='vectorized' cannot be used") as refusal:
        federate(make(), fb.FederatedBayes(partition, engine="vectorized"), 1, **options)
    assert reason in str(refusal.value)
    if ends is None:
        return []
    results = []
    for engine in ("auto", "sequential"):
        module, federation = make(), fb.FederatedBayes(partition, engine=engine)
        with pytest.raises(FederationError, match=ends) if ends else nullcontext():
            federate(module, federation, 1, **options)
        assert federation.federation.engine.name == federation.described()["engine"] == "sequential"
        results.append(module)
    assert_equal(*map(parameters, results))
    return results


class Divergence(nn.Module):
    """KL(q‖p) of the network inside as an output, for ``functional_call``."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self) -> Tensor:
        return kl_divergence(self.inner)


class Convolutional(Plain):
    """Images, group norm, an unused and a frozen parameter, a scalar one, a tied one and a constant buffer."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(
            nn.Sequential(
                nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.GELU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, CLASSES)
            )
        )
        self.unused = nn.Parameter(torch.zeros(3))
        self.frozen = nn.Parameter(torch.full((CLASSES,), 0.1), requires_grad=False)
        self.temperature = nn.Parameter(torch.tensor(1.0))
        self.tied = self.net[5].bias
        self.register_buffer("shift", torch.full((1,), 0.3))

    def training_step(self, batch, batch_idx):
        x, y = batch
        return nn.functional.cross_entropy(self(x + self.shift) * self.temperature + self.frozen + self.tied, y)


def images() -> TensorDataset:
    torch.manual_seed(1)
    return TensorDataset(torch.randn(60, 1, 8, 8), torch.arange(60) % CLASSES)


class PerClient(Plain):
    """The loss depends on what a client is told when it starts."""

    def on_client_start(self, client) -> None:
        self.client, self.scale = client, 10.0 / client.num_examples
        self.anchor = [p.detach().clone() for p in self.parameters()]
        self.round_weight = 1.0 + client.round

    def training_step(self, batch, batch_idx):
        distance = sum((p - a).square().sum() for p, a in zip(self.parameters(), self.anchor))
        loss = super().training_step(batch, batch_idx) * self.scale * self.round_weight
        return loss + 0.1 * distance * self.client.num_examples / 10


class Padded(Plain):
    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Sequential(nn.Embedding(7, 4, padding_idx=0), nn.Flatten(), nn.Linear(20, CLASSES)))


def words() -> TensorDataset:
    drawn = torch.randint(0, 7, (60, 5), generator=torch.Generator().manual_seed(0))
    return TensorDataset(drawn, torch.arange(60) % CLASSES)


class Late(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def training_step(self, batch, batch_idx):
        if self.current_epoch > 0:
            self.seen.add_(1.0)
        return super().training_step(batch, batch_idx)


class SkipsShort(Plain):
    def training_step(self, batch, batch_idx):
        self.log("seen", 1.0, on_step=False, on_epoch=True)
        return None if len(batch[1]) < 4 else super().training_step(batch, batch_idx)


class Logging(Plain):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("mean", loss, on_step=False, on_epoch=True, batch_size=len(batch[1]))
        self.log("default", loss)
        self.log("greatest", loss, on_step=False, on_epoch=True, reduce_fx="max")
        self.log("constant", 3.0, on_step=False, on_epoch=True)
        return {"loss": loss, "logits": self(batch[0]), "note": "kept"}


class Adapter(nn.Module):
    """A frozen linear layer with an update of low rank, W + BA, as a LoRA layer has it."""

    def __init__(self, inputs: int, outputs: int, rank: int = 2) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs).requires_grad_(False)
        self.lora_A, self.lora_B = nn.Linear(inputs, rank, bias=False), nn.Linear(rank, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.lora_B(self.lora_A(x))


class Backbone(nn.Module):
    """Adapters in a frozen network, with a BatchNorm, a constant buffer and a head that trains."""

    def __init__(self, width: int = 8) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.first, self.second = Adapter(FEATURES, width), Adapter(width, width)
        self.norm = nn.BatchNorm1d(width).requires_grad_(False)
        self.is_fixed = True
        self.register_buffer("turn", torch.linalg.qr(torch.randn(width, width))[0])
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        if self.is_fixed:
            self.norm.eval()
        return self.head(self.norm(self.second(self.first(x).tanh() @ self.turn)).tanh())
