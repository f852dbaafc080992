"""The report of every client: what is logged, and what is left alone."""

import csv

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger

import lightning_fedbayes as fb
from lightning_fedbayes.core.errors import FederationError
from tests.federations import Plain, assert_equal, bayesian, clients, federate, loader, network, parameters, trainer

pytestmark = pytest.mark.slow


def batches(*sizes):
    return loader(clients(*sizes), shuffle=False)


def test_validation_and_test_log_mean_worst_and_spread_of_the_clients(tmp_path):
    module, logger = fb.HybridBayesianClassifier(network(), bayesian_last=0), CSVLogger(tmp_path)
    report = fb.ClientReport()
    options = {"logger": logger, "callbacks": [report]}
    made = federate(module, fb.FederatedBayes(), 2, loader(clients(40, 30)), batches(8, 12), **options)
    expected = fb.evaluate_clients(module, clients(8, 12), batch_size=8)
    assert report.scores["val"].rows() == expected.rows()
    for name, value in expected.summary().items():
        assert float(made.callback_metrics[f"val/{name}"]) == pytest.approx(value)
    with open(f"{logger.log_dir}/val_clients.csv") as file:
        assert [(row["client"], row["examples"]) for row in csv.DictReader(file)] == [("c0", "8"), ("c1", "12")]
    tested = trainer(1, [fb.ClientReport()]).test(module, batches(8, 8, 8), verbose=False)
    assert tested[0]["test/clients/nll"] == pytest.approx(fb.evaluate_clients(module, clients(8, 8, 8)).mean("nll"))


@pytest.mark.parametrize(
    "options",
    [
        {"keep": ["posterior"]},
        {"fusion": "population"},
        {"fusion": "ditto"},
        {"keep": ["posterior"], "local_parameters": ["network.2.*"], "buffers": "local"},
    ],
)
def test_the_own_posteriors_of_clients_are_scored_on_their_data(options, tmp_path):
    module, logger, sizes = bayesian(), CSVLogger(tmp_path), (9, 12, 8)
    callback, report = fb.FederatedBayes(**options), fb.ClientReport()
    parts = loader(clients(40, 30, 20))
    made = federate(module, callback, 2, parts, batches(*sizes), logger=logger, callbacks=[report])
    before, held_out, own = parameters(module), clients(*sizes), []
    for number, (name, data) in enumerate(zip(held_out.names, held_out.datasets, strict=True)):
        with callback.federation.holding(number) as held:
            assert_equal(dict(held.mean), {name: fb.read_posterior(module).mean[name] for name in held.names})
            own.append(fb.evaluate_clients(module, fb.ClientDatasets({name: data}), batch_size=8).rows()[0])
    personal = report.scores["personal/val"]
    assert personal.rows() == own
    assert_equal(parameters(module), before)
    logged = float(made.callback_metrics["val/personal/nll"])
    assert logged == pytest.approx(personal.mean("nll"))
    assert logged != pytest.approx(float(made.callback_metrics["val/clients/nll"]))
    with open(f"{logger.log_dir}/val_personal.csv") as file:
        assert [row["client"] for row in csv.DictReader(file)] == ["c0", "c1", "c2"]


def test_own_posteriors_of_the_users_own_module_and_of_another_model():
    module, callback, report = Plain(optimizer=fb.IVON), fb.FederatedBayes(keep=["posterior"]), fb.ClientReport()
    federate(module, callback, 2, loader(clients(40, 30)), batches(9, 12), callbacks=[report, fb.UncertaintyReport(5)])
    own = fb.PosteriorPredictive(module, callback.posterior_of("c1"), 5)
    expected = fb.evaluate_clients(own, fb.ClientDatasets({"c1": clients(9, 12).datasets[1]}), batch_size=8)
    assert report.scores["personal/val"].rows()[1] == expected.rows()[0]
    torch.nn.init.zeros_(module.net[0].weight)
    with pytest.raises(FederationError, match="the module holds another model"), callback.federation.holding(0):
        pass
    tested = trainer(1, [report]).test(bayesian(), batches(9, 12), verbose=False)
    assert not any("personal" in name for name in tested[0])
