"""Files of offline W&B runs: the keys that docs/running.md names and no others, best rounds, alerts, a posterior."""

import re
from types import SimpleNamespace

import pytest
from lightning.pytorch.loggers import WandbLogger

import lightning_fedbayes as fb
from lightning_fedbayes.core.errors import PosteriorError
from tests.callbacks.wandb_file import read_run
from tests.cli.commands import ROOT
from tests.federations import Plain, bayesian, blobs, clients, federate, loader

pytestmark = pytest.mark.slow

OWN = ("accuracy", "nll", "ece", "brier", "client_accuracy", "entropy", "epistemic", "kwon_aleatoric", "kwon_epistemic")
"""What modules log themselves, behind "val/" or "test/"."""
NOT_HERE = {"federation/megabytes_between_processes"}
"""Keys of several processes."""


class Fails(Plain):
    def on_client_start(self, client):
        if client.name == "c2" or client.round == 1:
            raise RuntimeError("no data")


def ivon():
    return Plain(optimizer=lambda parameters, lr: fb.IVON(parameters, 0.05))


PARTS, BY_CLIENT = loader(clients(40, 30, 20)), loader(clients(9, 12, 8), shuffle=False)
DEALT, TOGETHER = loader(), loader(blobs(30, seed=1), shuffle=False)
ONE, QUICK = fb.Safeguards(min_clients=1), {"engine": "sequential"}
RUNS = {
    "sites": (bayesian, PARTS, BY_CLIENT, fb.FederatedBayes(keep=["posterior"], seed=1), 4),
    "draws": (ivon, PARTS, BY_CLIENT, fb.FederatedBayes(fusion="rklb"), 1),
    "auto": (bayesian, DEALT, TOGETHER, fb.FederatedBayes(fb.DirichletPartition(3, 0.5), fusion="auto"), 1),
    "reliability": (bayesian, DEALT, TOGETHER, fb.FederatedBayes(fb.IIDPartition(6), fusion="multi_krum"), 1),
    "no rounds": (bayesian, PARTS, BY_CLIENT, fb.FederatedBayes(schedule=fb.Asynchronous()), 1),
    "private": (Plain, PARTS, None, fb.FederatedBayes(privacy=fb.UpdatePrivacy(1.0, 1.0)), 1),
    "proximal": (Plain, PARTS, None, fb.FederatedBayes(fusion="fedprox"), 1),
    "scaled": (lambda: bayesian(scaler=True), PARTS, None, fb.FederatedBayes(), 1),
    "failing": (Fails, PARTS, None, fb.FederatedBayes(fusion="fedavg", safeguards=fb.Safeguards(1), **QUICK), 8),
}


def logged(folder, name):
    """The federation, and what its run's file holds."""
    make, train, val, federation, rounds = RUNS[name]
    logger = WandbLogger(project="fedbayes", save_dir=str(folder), id=name.replace(" ", "-"))
    callbacks = [fb.UncertaintyReport()] if name == "draws" else []
    made = federate(make(), federation, rounds, train, val, logger=logger, callbacks=callbacks, num_sanity_val_steps=0)
    if name == "sites":
        made.test(made.lightning_module, BY_CLIENT, verbose=False)
        federation.posterior.to_wandb(logger.experiment, "blobs")
    logger.experiment.finish()
    (path,) = (folder / "wandb").glob(f"offline-run-*-{logger.version}/run-*.wandb")
    return federation, read_run(path)


@pytest.fixture(scope="module")
def runs(home):
    return {name: logged(home, name) for name in RUNS}


def documented():
    text = (ROOT / "docs" / "running.md").read_text()
    section = text[text.index("## What is logged") : text.index("### By draws")]
    cells = re.findall(r"^\| (`[^|]*) \|", section, re.MULTILINE)
    return {key for cell in cells for key in re.findall(r"`([^`]+)`", cell)}


def fits(key, pattern):
    return re.fullmatch(re.sub(r"NAME|FIGURE|LAYER|RULE|KEY", ".+", pattern), key)


def test_every_key_is_documented_and_every_documented_key_is_logged(runs):
    found = {key for _, run in runs.values() for key in run.keys}
    own = {f"{stage}/{name}" for stage in ("val", "test") for name in OWN} | {
        "train/nll",
        "train/kl",
        "train/kl_factor",
    }
    known = documented() - NOT_HERE
    assert {key for key in found if not any(fits(key, each) for each in known)} <= own
    assert {each for each in known if not any(fits(key, each) for key in found)} == set()


def test_what_is_defined_is_logged_and_the_summary_keeps_the_best_round_beside_the_last(runs):
    for name, (_, run) in runs.items():
        assert set(run.defined) - {"trainer/global_step"} - run.keys == set(), name
    defined = runs["sites"][1].defined
    best = {"nll": "min", "ece": "min", "brier": "min", "accuracy": "max", "clients/accuracy_worst": "max"}
    assert {name: defined[f"val/{name}"] for name in best} == {name: {each, "last"} for name, each in best.items()}
    assert not any(defined[each] for each in ("val/clients/nll_spread", "federation/train_loss", "test/nll"))


def test_who_fails_again_and_again_is_an_alert_once(runs):
    assert runs["failing"][1].alerts == [("Clients fail", "c2 in each of their last 5 rounds")]
    assert runs["sites"][1].alerts == []


def test_an_artifact_holds_the_posterior(runs, monkeypatch):
    federation, run = runs["sites"]
    (path,) = run.artifacts["blobs"].values()
    artifact = SimpleNamespace(name="blobs", get_entry=lambda file: SimpleNamespace(download=lambda: path))
    used = []
    monkeypatch.setattr("wandb.run", SimpleNamespace(use_artifact=lambda name: used.append(name) or artifact))
    posterior = fb.GaussianPosterior.from_wandb("me/fedbayes/blobs:latest")
    assert used == ["me/fedbayes/blobs:latest"]
    assert posterior.kl(federation.posterior) == 0
    draws = fb.PosteriorPredictive(bayesian(), posterior, samples=2).sample(blobs().tensors[0])
    assert draws.shape == (2, 90, 3)
    path = __file__
    with pytest.raises(PosteriorError, match="artifact blobs holds no posterior"):
        fb.GaussianPosterior.from_wandb(artifact)
