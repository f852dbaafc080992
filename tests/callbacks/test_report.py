"""What is told while a federation trains: the progress bar, and clients whose training diverges, each once."""

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback, RichProgressBar, TQDMProgressBar
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_fedbayes as fb
from lightning_fedbayes.callbacks.report import ClientRecords
from lightning_fedbayes.core.messages import ClientOutcome
from tests.federations import Plain, federate, loader

BARS = {
    TQDMProgressBar: lambda bar: bar.train_progress_bar.desc.removesuffix(": "),
    RichProgressBar: lambda bar: bar.progress.tasks[bar.train_progress_bar_id].description,
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", BARS)
def test_the_progress_bar_shows_round_and_client(kind):
    pytest.importorskip("rich")
    bar, seen = kind(), []
    spy = LambdaCallback(on_train_batch_end=lambda *_: seen.append(BARS[kind](bar)))
    parts = fb.ClientDatasets({"north": loader().dataset, "south": loader().dataset})
    federation = fb.FederatedBayes(engine="sequential")
    federate(Plain(), federation, 2, loader(parts), enable_progress_bar=True, callbacks=[bar, spy])
    assert list(dict.fromkeys(seen)) == [
        f"Round {round}/2, client {client} ({name})"
        for round in (1, 2)
        for client, name in (("1/2", "north"), ("2/2", "south"))
    ]


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"gradient_clip_val": 1e9}], ids=["fast loop", "Lightning's loop"])
def test_the_bar_counts_the_batches_of_the_round_and_is_given_back(options):
    seen, bar = [], TQDMProgressBar()
    spy = LambdaCallback(on_train_epoch_end=lambda *_: seen.append(vars(bar.train_progress_bar).copy()))
    federation = fb.FederatedBayes(fb.IIDPartition(3), engine="sequential")
    federate(Plain(), federation, 2, loader(), enable_progress_bar=True, callbacks=[bar, spy], **options)
    assert [(each["n"], each["total"]) for each in seen] == [(12, 12)] * 2
    assert "on_train_batch_end" not in vars(bar)


class Regression(Plain):
    """A linear regression with noise 0.1, whose loss is the Gaussian's."""

    def training_step(self, batch, batch_idx):
        return (self.net(batch[0]) - batch[1]).square().mean() / (2 * 0.1**2)


def data():
    random = torch.Generator().manual_seed(0)
    x = torch.randn(80, 3, generator=random)
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=10)


OPTIMIZERS = {
    "adam": (lambda p, lr: torch.optim.Adam(p, 3.0), lambda p, lr: torch.optim.Adam(p, 0.03)),
    "published": (lambda p, lr: fb.IVON(p, 0.1, curvature="ivon"), lambda p, lr: fb.IVON(p, 0.01)),
}


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_who_diverges_is_named_once_and_who_learns_is_not(caplog, engine, name):
    for diverges, optimizer in zip((True, False), OPTIMIZERS[name]):
        caplog.clear()
        with caplog.at_level("INFO"):
            safeguards = fb.Safeguards(max_influence=None)
            options = {"engine": engine, "seed": 1, "local_epochs": 2, "safeguards": safeguards}
            federation = fb.FederatedBayes(fb.IIDPartition(clients=4), **options)
            federate(Regression(nn.Linear(3, 1), optimizer=optimizer), federation, 8, data())
        told = [line for line in caplog.text.splitlines() if "has diverged" in line]
        names = [name for line in told for name in line.split("client")[1].split(" has")[0].strip("s ").split(", ")]
        assert bool(told) == diverges
        assert len(names) == len(set(names)) <= 4


@pytest.mark.parametrize(("first", "worst"), [(2.3, 4.6), (0.1, 1.1), (-3.0, 0.0), (50.0, 100.0)])
def test_the_worst_loss_is_above_the_first_by_its_size(first, worst):
    for above in (-1e-6, 1e-6):
        records = ClientRecords(1)
        outcomes = [ClientOutcome(0, None, 1.0, 1, metrics={"train_loss": loss}) for loss in (first, worst + above)]
        assert [records.note(each) for each in outcomes] == [False, above > 0]
