"""The table and the picture of each client's own posterior on every client's data, at the end of training."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import TensorDataset

import lightning_fedbayes as fb
from lightning_fedbayes.callbacks import clients as reports
from tests.clients.test_evaluation import clients
from tests.federations import Plain, assert_equal, bayesian, blobs, federate, loader, parameters

SIZES = (9, 12, 8)


def held_out(*sizes: int) -> torch.utils.data.DataLoader:
    return loader(clients(*(sizes or SIZES)), shuffle=False)


@pytest.mark.parametrize(
    "options",
    [
        {"keep": ["posterior"]},
        {"fusion": "population"},
        {"fusion": "ditto"},
        {"keep": ["posterior"], "local_parameters": ["network.2.*"], "buffers": "local"},
    ],
)
def test_own_posteriors_are_scored_on_the_data_of_all_at_the_end(options, tmp_path):
    module, logger = bayesian(), CSVLogger(tmp_path)
    callback, report = fb.FederatedBayes(**options), fb.ClientReport()
    federate(module, callback, 2, loader(clients(40, 30, 20)), held_out(), logger=logger, callbacks=[report])
    before, data, rows = parameters(module), clients(*SIZES), []
    for number in range(3):
        with callback.holding(number):
            rows.append(fb.evaluate_clients(module, data, batch_size=8).values["nll"])
    assert report.across is not None
    assert torch.equal(report.across.values["nll"], torch.stack(rows))
    assert torch.equal(report.across.values["nll"].diagonal(), report.scores["personal/val"].values["nll"])
    assert_equal(parameters(module), before)
    with open(f"{logger.log_dir}/val_across.csv") as file:
        head, *lines = csv.reader(file)
    assert head == ["nll: model on data of", "c0", "c1", "c2"]
    assert [float(each) for each in lines[1][1:]] == pytest.approx(rows[1].tolist())
    assert Path(logger.log_dir, "val_across.png").stat().st_size > 1000


def test_the_users_own_module_is_scored_by_draws():
    module, callback, report = Plain(optimizer=fb.IVON), fb.FederatedBayes(keep=["posterior"]), fb.ClientReport()
    federate(module, callback, 2, loader(clients(40, 30)), held_out(9, 12), callbacks=[report, fb.UncertaintyReport(5)])
    own = {name: fb.PosteriorPredictive(module, callback.posterior_of(name), 5) for name in ("c0", "c1")}
    expected = fb.evaluate_across(own, clients(9, 12), batch_size=8)
    assert report.across is not None
    assert report.across.rows() == expected.rows()


def test_a_client_with_other_labels_is_named(caplog):
    caplog.set_level("INFO")
    x, y = blobs(640).tensors
    parts = list(zip(x.split(80), y.split(80)))
    parts[2] = parts[2][0], (parts[2][1] + 1) % 3
    train = fb.ClientDatasets({f"c{k}": TensorDataset(u[:50], v[:50]) for k, (u, v) in enumerate(parts)})
    test = fb.ClientDatasets({f"c{k}": TensorDataset(u[50:], v[50:]) for k, (u, v) in enumerate(parts)})
    report = fb.ClientReport()
    callback = fb.FederatedBayes(keep=["posterior"], local_epochs=30, fusion="rklb")
    federate(bayesian(), callback, 3, loader(train), loader(test, shuffle=False), callbacks=[report])
    assert report.across.outlying() == {"c2": ("model", "data")}
    assert "unlike the others': c2 (model and data); see val/across" in caplog.text


def test_nothing_is_scored_across_where_clients_keep_no_posterior_or_there_is_one(tmp_path):
    for options, sizes in (({}, (9, 12)), ({"keep": ["posterior"]}, (9,))):
        logger, report = CSVLogger(tmp_path), fb.ClientReport()
        train = loader(clients(*(20 for _ in sizes)))
        federate(
            bayesian(),
            fb.FederatedBayes(safeguards=fb.Safeguards(min_clients=1), **options),
            1,
            train,
            held_out(*sizes),
            logger=logger,
            callbacks=[report],
        )
        assert report.across is None
        assert not list(Path(logger.log_dir).glob("val_across*"))


def test_of_many_clients_a_few_are_taken(monkeypatch):
    monkeypatch.setattr(reports, "MOST_ACROSS", 3)
    report = fb.ClientReport()
    federate(
        bayesian(),
        fb.FederatedBayes(keep=["posterior"]),
        1,
        loader(clients(8, 8, 8, 8, 8)),
        held_out(4, 4, 4, 4, 4),
        callbacks=[report],
    )
    assert report.across is not None
    assert report.across.names == ("c0", "c2", "c4")
