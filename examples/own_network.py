"""Uncertainty for a network that knows nothing of it: a transformer reads digits row by row, with IVON for Adam."""

from typing import Any

import lightning as L
import torch
from torch import nn
from torch.nn import functional as F

import lightning_fedbayes as fb
from lightning_fedbayes.core.quiet import quietly


class Reader(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, nhead=4, dim_feedforward=64, dropout=0.0, batch_first=True)
        self.embed, self.encoder = nn.Linear(8, 32), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.place, self.head = nn.Parameter(0.1 * torch.randn(8, 32)), nn.Linear(32, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(self.embed(images.view(-1, 8, 8)) + self.place).mean(1))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.log("val/loss", F.cross_entropy(self(batch[0]), batch[1]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return fb.IVON(self.parameters(), temperature=0.1)


def main(rounds: int = 15) -> dict[str, float]:
    """Return the scores of the validation digits."""
    L.seed_everything(0, verbose=False)
    module, data = Reader(), fb.DigitsDataModule()
    federation = fb.FederatedBayes(fb.DirichletPartition(clients=10, alpha=0.5), local_epochs=5)
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_model_summary": False}
    L.Trainer(max_epochs=rounds, callbacks=[federation], **quiet).fit(module, datamodule=data)
    predictive = fb.PosteriorPredictive(module, federation.posterior, samples=20)
    return dict(L.Trainer(**quiet).validate(predictive, datamodule=data)[0])


if __name__ == "__main__":
    with quietly():
        main()
