"""Whatever the number of clients and classes, what people read is bounded: lines, tables, settings and pictures."""

import csv
import logging
import time

import lightning as L
import pytest
import torch
import yaml
from lightning.pytorch.loggers import CSVLogger
from matplotlib.figure import Figure
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_fedbayes as fb

LONGER = 100
"""Characters by which a line may be longer with 10,000 clients and 1,000 classes than with 100 and 10."""
SIZES = {"small": (100, 10), "large": (10_000, 1_000)}


def data_of(clients, classes):
    """One example for each client, and a second for every other; every seventh cannot be trained on, some stand out."""
    torch.manual_seed(0)
    parts = {}
    for client in range(clients):
        inputs = torch.randn(1 + client % 2, 2)
        inputs *= 30.0 if client % 10 == 3 else 1.0
        inputs[0, 0] = torch.nan if client % 7 == 0 else inputs[0, 0]
        parts[f"clinic {client}"] = TensorDataset(inputs, (torch.arange(len(inputs)) * 5 + client) % classes)
    return fb.ClientDatasets(parts)


class Softmax(L.LightningModule):
    def __init__(self, classes):
        super().__init__()
        self.layer = nn.Linear(2, classes)

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.layer(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        return {"probs": self.layer(batch[0]).softmax(-1), "target": batch[1]}

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def federate(folder, clients, classes):
    """Two rounds of a federation; returns its callback."""
    torch.manual_seed(0)
    federation = fb.FederatedBayes(fusion="weighted_average", engine="vectorized")
    trainer = L.Trainer(
        max_epochs=2, accelerator="cpu", logger=CSVLogger(folder, name="", version=""), callbacks=[federation],
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
    )
    held_out = TensorDataset(torch.randn(classes, 2), torch.arange(classes))
    trainer.fit(Softmax(classes), DataLoader(data_of(clients, classes), 2), DataLoader(held_out, 256))
    return federation


if __name__ == "__main__":
    import sys, pathlib
    class H(logging.Handler):
        def __init__(self): super().__init__(); self.m=[]
        def emit(self, r): self.m.append(r.getMessage())
    h=H()
    for name in ("lightning.pytorch.utilities.rank_zero",): logging.getLogger(name).addHandler(h)
    for n,(c,k) in SIZES.items():
        h.m.clear()
        t=time.time(); federate(pathlib.Path(sys.argv[1])/n,c,k); print(n,time.time()-t)
        print(len(h.m), max(map(len,h.m)))
        for m in sorted(h.m,key=len)[-6:]: print("  ",len(m),m[:200])
