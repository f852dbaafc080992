"""Figures of predictions that the package has drawn itself have names of their own, in log, tables and report."""

from __future__ import annotations

import csv

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader

import lightning_fedbayes as fb
from lightning_fedbayes.cli import main
from tests.clients.test_evaluation import clients
from tests.federations import Plain, bayesian, blobs, federate, loader, network, trainer

pytestmark = [
    pytest.mark.filterwarnings("ignore:the temperature ends at its limit"),
    pytest.mark.filterwarnings("ignore:Your `val_dataloader`'s sampler has shuffling enabled"),
]


class Own(Plain):
    """Scores itself at the mean; its steps return "none", "probs" or "probs and logits"."""

    def __init__(self, returns="none", optimizer=fb.IVON):
        super().__init__(optimizer=optimizer)
        self.returns = returns

    def validation_step(self, batch, batch_idx):
        logits = self(batch[0])
        stage = "test" if self.trainer.testing else "val"
        self.log(f"{stage}/acc", (logits.argmax(1) == batch[1]).float().mean())
        if self.returns != "none":
            found = {"probs": logits.softmax(-1), "target": batch[1]}
            return found | ({"logits": logits} if "logits" in self.returns else {})
        return None

    test_step = validation_step


def held_out(**options):
    return DataLoader(clients(16, 40), **{"batch_size": 8, **options})


def everything():
    return [fb.UncertaintyReport(5), fb.ClientReport(), fb.FederatedTemperature(), fb.FederatedConformal(0.8)]


def figures_of(module, val=None, callbacks=None, test=False, **options):
    """Names of what the reports have logged in a fit, or in a test after it, behind "val/" or "test/"."""
    logged = everything() if callbacks is None else callbacks
    federation = fb.FederatedBayes(seed=3, **options)
    made = federate(
        module, federation, 2, loader(clients(40, 30)), held_out() if val is None else val, callbacks=logged
    )
    if test:
        made = trainer(1, [federation, *logged])
        made.test(module, held_out(), verbose=False)
    return {name.partition("/")[2] for name in made.callback_metrics if name[:4] in ("val/", "test")}


BY_BATCH = {f"retained_area_{name}" for name in ("entropy", "epistemic", "kwon_aleatoric", "kwon_epistemic")}
BY_CLIENT = {f"clients/{name}{end}" for name in ("accuracy", "nll", "ece") for end in ("", "_worst", "_spread")}
CALIBRATED = {"scaled/temperature", "lac_80/threshold"}


def drawn(names):
    return {f"draws/{name}" for name in names}


def test_figures_by_draws_stand_beside_the_module_s_own_at_the_mean():
    assert figures_of(Own()) == {"acc"} | drawn(BY_BATCH | BY_CLIENT | CALIBRATED)


def test_a_report_on_clients_that_is_given_asks_for_predictions():
    assert figures_of(Own(), callbacks=[fb.ClientReport()]) == {"acc"} | drawn(BY_BATCH | BY_CLIENT)
    assert figures_of(Own(optimizer=torch.optim.SGD), callbacks=[fb.ClientReport()]) == {"acc"} | BY_BATCH | BY_CLIENT
    assert figures_of(Own(), callbacks=[]) == {"acc"}
    assert figures_of(Own(), DataLoader(blobs(30), 8), [fb.ClientReport()]) == {"acc"}


def test_a_test_has_the_same_names():
    found = figures_of(Own(), test=True)
    assert {"acc", "draws/clients/nll", "draws/scaled/ece", "draws/lac_80/coverage"} <= found
    assert all(name == "acc" or name.startswith("draws/") for name in found)


@pytest.mark.parametrize(
    ("module", "own"),
    [
        (lambda: Own(optimizer=torch.optim.SGD), {"acc"}),  # a point: there is nothing to draw from
        (lambda: Own("probs and logits"), {"acc"}),
        (bayesian, None),
    ],
)
@pytest.mark.parametrize("shuffle", [False, True])
def test_figures_of_other_predictions_have_no_such_word(module, own, shuffle):
    made = module()
    found = figures_of(made, held_out(shuffle=shuffle))
    clients_ = BY_CLIENT | CALIBRATED
    if shuffle and isinstance(made, Own) and made.returns != "none":  # its clients are predicted once more, by draws
        assert found == own | BY_BATCH | drawn(clients_)
    elif own is not None:
        assert found == own | BY_BATCH | clients_
    else:
        assert BY_BATCH | clients_ <= found
        assert not any("draws" in name for name in found)


def test_logits_alone_may_be_drawn():
    """Where a step returns probabilities at the mean, and a temperature needs logits."""
    assert figures_of(Own("probs")) == {"acc"} | BY_BATCH | BY_CLIENT | drawn(CALIBRATED)
    assert figures_of(Own("probs"), callbacks=[fb.FederatedConformal(0.8)]) == {"acc", "lac_80/threshold"} | (
        BY_BATCH | BY_CLIENT
    )


def test_a_ready_module_whose_step_is_the_user_s_is_drawn():
    class Mute(fb.HybridBayesianClassifier):
        def validation_step(self, batch, batch_idx):
            self.log("val/acc", 0.5)

        def on_validation_epoch_end(self):
            """Log no scores: the step has collected none."""

    assert figures_of(Mute(network(), bayesian_last=1, samples=3)) == {"acc"} | drawn(BY_BATCH | BY_CLIENT | CALIBRATED)


def test_an_estimate_from_shares_of_classes_is_by_draws_too():
    found = figures_of(Own(), DataLoader(blobs(30), 8), [fb.UncertaintyReport(5)])
    assert found == {"acc"} | drawn({*BY_BATCH, "client_accuracy", "worst_client_accuracy"})


@pytest.mark.parametrize(("returns", "by"), [("none", "draws/"), ("probs and logits", "")])
def test_each_client_s_own_posterior_is_drawn(returns, by):
    """Also where the module's steps return predictions: those are of the global one, at its mean."""
    found = figures_of(Own(returns), keep=["posterior"])
    assert {f"{by}clients/nll", "draws/personal/nll"} <= found
    assert "personal/nll" not in found
    assert "personal/nll" in figures_of(bayesian(), keep=["posterior"])


def rows_in(path):
    with open(path) as file:
        return list(csv.DictReader(file))


def test_tables_curves_pictures_and_the_page_say_so_too(tmp_path, caplog):
    logger, saver = CSVLogger(tmp_path), ModelCheckpoint(tmp_path / "saved", monitor="val/draws/clients/nll")
    module = Own()
    federation = fb.FederatedBayes(seed=3, keep=["posterior"])
    made = federate(
        module,
        federation,
        2,
        loader(clients(40, 30)),
        held_out(),
        logger=logger,
        callbacks=[*everything(), saver],
        enable_checkpointing=True,
    )
    assert float(saver.best_model_score) > 0
    home = tmp_path / "lightning_logs" / "version_0"
    tables = {path.stem for path in home.glob("*.csv")}
    assert {"val_draws_clients", "val_draws_personal", "val_draws_across", "federation_clients"} <= tables
    assert {path.stem for path in home.glob("val_*.png")} == {
        "val_draws_calibration",
        "val_draws_accuracy_retained",
        "val_draws_across",
    }
    own = {row["client"]: float(row["accuracy"]) for row in rows_in(home / "val_draws_clients.csv")}
    shown = {row["client"]: float(row["draws/accuracy"]) for row in rows_in(home / "federation_clients.csv")}
    assert shown == pytest.approx(own)
    columns = {name for row in rows_in(home / "metrics.csv") for name, value in row.items() if value}
    assert {"draws/client_accuracy/c0", "draws/client_accuracy/c1", "val/acc"} <= columns
    assert main(["report", str(home)]) == 0
    page = (home / "report.html").read_text()
    for text in (
        "accuracy of each client, by draws",
        "<th>accuracy, by draws</th>",
        "accuracy worst, by draws",
        "validation accuracy by confidence, by draws",
        "validation accuracy of the most certain, by draws",
        "validation clients/accuracy worst, by draws",
        "val/draws/clients/accuracy",
    ):
        assert text in page, text
    assert made.current_epoch == 2


@pytest.mark.parametrize(("module", "passes"), [(bayesian, 1), (lambda: Plain(optimizer=fb.IVON), 2)])
def test_reports_and_calibrations_share_one_pass(module, passes):
    """Beside the pass of the module's own step, where that returns nothing they can read; a call draws all networks."""
    made, seen = module(), []
    federate(made, fb.FederatedBayes(engine="sequential"), 1, loader(clients(40, 30)))
    layer = next(each for each in made.modules() if isinstance(each, torch.nn.Linear))
    layer.register_forward_hook(lambda layer, inputs, output: seen.append(len(inputs[0])))
    trainer(1, everything()).validate(made, held_out(), verbose=False)
    assert sum(seen) == passes * (16 + 40)


class OwnStep(fb.HybridBayesianRegressor):
    def validation_step(self, batch, batch_idx):
        self.log("val/mine", self(batch[0]).mean())


def test_a_ready_module_with_a_step_of_one_s_own_logs_no_empty_scores(recwarn):
    x = torch.randn(40, 6)
    data = fb.ClientDatasets({name: torch.utils.data.TensorDataset(x, x.sum(1)) for name in "ab"})
    module = OwnStep(torch.nn.Sequential(torch.nn.Linear(6, 1)), bayesian_last=1)
    logged = federate(module, fb.FederatedBayes(), 1, loader(data), DataLoader(data, 8)).callback_metrics
    assert {name for name in logged if name.startswith("val/") and "draws" not in name} == {"val/mine"}
    assert not [each for each in recwarn if "before the ``update``" in str(each.message)]
