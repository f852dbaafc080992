"""Federations in FLARE's own simulator, all in one start: the example of docs/nvflare.md, and others after it."""

import pytest

pytest.importorskip("nvflare")

import torch

import lightning_fedbayes as fb
from lightning_fedbayes.transport.nvflare import load_checkpoint
from tests.federations import assert_close, federate, trainer
from tests.nvflare.simulated import PARTITION, Average, Broken, Scaffold, Sites, files_of_the_page, started
from tests.transport.federation import BlobData

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]  # as at the sites


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("flare")
    (folder / "fedbayes_digits").mkdir()
    names = [kind.__name__ for kind in (Sites, Average, Scaffold, Broken)]
    assert started(folder, *names).wait(280) == 0, (folder / "log").read_text()[-9000:]
    return folder


@pytest.mark.parametrize("kind", [Sites, Average, Scaffold])
def test_same_posterior_and_buffers_as_in_one_process(kind, folder):
    model, alone = kind.make(), kind.make()
    state = load_checkpoint(model, folder / f"{kind.seed}.pt")
    made = fb.FederatedBayes(PARTITION, engine="sequential", fusion=kind.fusion, weighting="equal", seed=kind.seed)
    federate(alone, made, kind.rounds, BlobData().train_dataloader())
    assert state.rounds == kind.rounds
    assert_close(state.posterior, made.posterior)
    buffers = dict(alone.named_buffers())
    assert all(torch.equal(value, buffers[name]) for name, value in model.named_buffers())


def test_the_example_of_the_page_ends_where_one_process_ends(folder, monkeypatch, capsys):
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.syspath_prepend(folder / "code")
    exec(compile(files_of_the_page()["after.py"], "after.py", "exec"), found := {})
    state, module = found["state"], found["network"]()
    federation = fb.FederatedBayes(
        fb.DirichletPartition(clients=2, alpha=0.5), fusion="conflation", local_epochs=2, engine="sequential"
    )
    trainer(3, [federation], limit_val_batches=0).fit(module, datamodule=fb.DigitsDataModule())
    assert_close(state.posterior, federation.posterior)
    assert found["scaling"].temperature != 1
    assert "3 " in capsys.readouterr().out


def test_a_client_that_raises_is_left_out_and_its_reason_stays_at_home(folder):
    state = load_checkpoint(Broken.make(), folder / f"{Broken.seed}.pt")
    assert [row["failed_clients"] for row in state.history] == [1, 0]
    server, site = ((folder / "workspace" / "digits" / name / "log.txt").read_text() for name in ("server", "site-2"))
    assert "patient 4711" in site
    assert "patient 4711" not in server
    told = (folder / "log").read_text()
    assert "client 1 is left out: FusionError: client 1 failed in training: ValueError" in told
