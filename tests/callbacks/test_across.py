"""The table and the picture of each client's own posterior on every client's data, at the end of training."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger

import lightning_fedbayes as fb
from tests.clients.test_evaluation import clients
from tests.federations import assert_equal, bayesian, federate, loader, parameters

pytestmark = pytest.mark.slow

SIZES = (9, 12, 8)


def held_out(*sizes: int) -> torch.utils.data.DataLoader:
    return loader(clients(*(sizes or SIZES)), shuffle=False)


@pytest.mark.parametrize(
    "options",
    [
        {"keep": ["posterior"]},
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
