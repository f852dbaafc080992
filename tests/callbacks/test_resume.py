"""Crash, resume, compare: a federation that was interrupted ends as one that was not, bit by bit."""

import copy
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from torch import nn

import lightning_fedbayes as fb
from benchmarks.untrusted.adversaries import ALittleIsEnough, Attacks, GaussianVector, NotANumber, RandomUpdate
from lightning_fedbayes.clients.vectorized import engine
from lightning_fedbayes.core.errors import FedBayesError, FederationError
from lightning_fedbayes.core.store import FILE, Store
from lightning_fedbayes.fusion import AutoFusion, Reliability
from lightning_fedbayes.methods import Averaging
from tests import federations
from tests.federations import CLASSES, Crash, Interrupt, Plain, assert_equal, federate, loader, network, saving

ROUNDS, SIZES = 4, (30, 26, 14, 12, 8)

pytestmark = federations.quiet_checkpoints


class Everything(fb.HybridBayesianClassifier):
    """Noise, dropout, batch norm, momentum, a learning-rate schedule and a personal head."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        first = nn.Linear(federations.FEATURES, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.ReLU()
        net = nn.Sequential(*first, nn.Linear(8, 5), nn.ReLU(), nn.Linear(5, CLASSES))
        super().__init__(net, bayesian_last=2, estimator="flipout", samples=2)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


class OnPlateau(Everything):
    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=0.05)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=10.0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val/nll"}}


PERSONAL = {"buffers": "local", "local_parameters": ["network.6.*"]}
SETTINGS = {
    "plain": {},
    "everything kept": {**PERSONAL, "keep": ["optimizer"], "local_epochs": 2},
    "global prior": {"fusion": Averaging("wb", "global"), "weighting": "distance"},
    "state of reliability": {"fusion": Reliability("ivar_vb", then="rklb"), "adversaries": GaussianVector(clients=[1])},
    "state of covariance": {"fusion": "icov_vb", "adversaries": RandomUpdate(clients=[0])},
    "sites": {"fusion": "sites", "local_epochs": 2},
    "population": {"fusion": "population"},
    "held posteriors": {
        **{"weighting": "max_discrepancy", "fusion": "linear_pool"},
        "adversaries": Attacks([RandomUpdate(0.3), ALittleIsEnough([1], z=1.0)]),
    },
    "ivon": {"fusion": "sites", "keep": ["posterior"]},
    "laplace": {"fusion": "sites", "posterior": fb.Laplace()},
    "swag": {"posterior": fb.SWAG(), "local_epochs": 2},
    "plateau": {},
    "best of several": {"fusion": AutoFusion(["ivar_vb", "linear_pool"])},
    "exact head": {"fraction": 1.0, "engine": "sequential"},
}
MODULES = {
    "ivon": lambda: Plain(network(batch_norm=True), optimizer=fb.IVON),
    "laplace": lambda: Plain(network(batch_norm=True)),
    "swag": lambda: Plain(network(batch_norm=True)),
    "plateau": OnPlateau,
    "exact head": lambda: fb.HeadModule(nn.Identity(), fb.BayesianHead(CLASSES), federations.FEATURES),
}
"""Modules of settings that are not for :class:`Everything`."""
ENGINES = ["sequential", "vectorized"]


@pytest.fixture(autouse=True)
def _one_step_per_batch(monkeypatch):
    """So that there is something inside a round to interrupt."""
    monkeypatch.setattr(engine, "STEPS_PER_BATCH", 1)


def federation(setting: str, engine: str = "vectorized") -> fb.FederatedBayes:
    options = {"fraction": 0.6, "engine": engine, **SETTINGS[setting]}
    return fb.FederatedBayes(fb.SizesPartition(SIZES), seed=3, **options)


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


EACH_IN_A_FORK = """
import os, signal, sys, traceback
for name, call in CALLS.items():
    child = os.fork()
    if not child:
        try:
            exec(call, {**globals(), "folder": Path(sys.argv[1]) / name})
        except BaseException:
            traceback.print_exc()
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL, name
"""


def killed(module: str, calls: dict[str, str], folder: Path) -> Path:
    """Make calls, each ended by a kill, in forks of one process that knows the names of a module and a ``folder``."""
    root = Path(__file__).parents[2]
    program = f"from pathlib import Path\nfrom {module} import *\nCALLS = {calls!r}\n{EACH_IN_A_FORK}"
    environment = {**os.environ, "PYTHONPATH": str(root)}
    command = [sys.executable, "-c", program, str(folder)]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    return folder


def run(folder: Path, setting: str, ckpt_path=None, callbacks=(), engine="vectorized", **checkpoint):
    """Fit with checkpoints in ``folder``; the module, its federation and the trainer."""
    module, fed = MODULES.get(setting, Everything)(), federation(setting, engine)
    options = saving(folder, *callbacks, **checkpoint)
    made = federate(module, fed, ROUNDS, loader(), loader(shuffle=False), ckpt_path, **options)
    return module, fed, made


def state(module, fed, made) -> dict[str, torch.Tensor]:
    last = {f"federation/{name}" for name in fed.history[-1]}  # others are of earlier rounds
    figures = {
        k: v
        for k, v in made.callback_metrics.items()
        if "seconds" not in k and (k in last or not k.startswith("federation/sites/"))
    }
    variances = {f"variance/{n}": v for n, v in fed.posterior.variance.items()}
    return {**module.state_dict(), **figures, **variances}


@pytest.mark.whole
@pytest.mark.parametrize(("setting", "engine"), list(zip(SETTINGS, ENGINES * len(SETTINGS))))
def test_a_crash_inside_a_round_changes_nothing(tmp_path, setting, engine):
    whole = state(*run(tmp_path / "whole", setting, engine=engine))
    with pytest.raises(Crash):
        run(tmp_path / "parts", setting, callbacks=[Interrupt(2, 2)], engine=engine)
    resumed = state(*run(tmp_path / "parts", setting, ckpt_path="last", engine=engine))
    assert_equal(whole, resumed)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_checkpoint_of_one_engine_resumes_with_the_other(tmp_path, engine):
    """Momentum, personal heads and statistics are kept in the same form; without noise the end is the same."""
    other = next(name for name in ENGINES if name != engine)
    settings = {"keep": ["optimizer"], "buffers": "local", "local_parameters": ["net.3.*"], "fraction": 0.6}

    def fit(name, rounds, ckpt_path=None):
        # Adam would blow the rounding error of a bias before batch norm, whose gradient is 0, up to a step
        module = Plain(network(batch_norm=True), optimizer=partial(torch.optim.SGD, momentum=0.9))
        fed = fb.FederatedBayes(fb.SizesPartition((32, 24, 18, 16)), engine=name, **settings)
        made = federate(module, fed, rounds, loader(), ckpt_path=ckpt_path)
        return module, made

    whole, _ = fit(other, 5)
    _, made = fit(engine, 3)
    made.save_checkpoint(tmp_path / "three.ckpt")
    resumed, _ = fit(other, 5, tmp_path / "three.ckpt")
    torch.testing.assert_close(dict(resumed.state_dict()), dict(whole.state_dict()), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("setting", "round", "checkpoint"),
    [
        ("plain", 2, {"every_n_train_steps": 4}),
        ("everything kept", 2, {"every_n_train_steps": 1}),
        ("everything kept", 3, {"save_on_exception": True}),
    ],
)
def test_checkpoints_written_inside_a_round_resume_at_its_start(tmp_path, setting, round, checkpoint):
    whole = state(*run(tmp_path / "whole", setting, **checkpoint))
    with pytest.raises(Crash):
        run(tmp_path / "parts", setting, callbacks=[Interrupt(round, 2)], **checkpoint)
    last = "last"
    if "save_on_exception" in checkpoint:
        (last,) = (tmp_path / "parts").glob("epoch=3*.ckpt")
        assert torch.load(last, weights_only=False)["epoch"] == 3
    assert_equal(whole, state(*run(tmp_path / "parts", setting, ckpt_path=last, **checkpoint)))


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"save_weights_only": True}, {"save_weights_only": False}])
def test_a_checkpoint_never_holds_one_clients_model(tmp_path, options):
    starts = []
    spy = LambdaCallback(on_train_epoch_start=lambda _, module: starts.append(copy.deepcopy(dict(module.state_dict()))))
    run(tmp_path, "plain", callbacks=[spy], every_n_train_steps=1, save_top_k=-1, filename="{step}", **options)
    checkpoints = [torch.load(path, weights_only=False) for path in tmp_path.glob("step*.ckpt")]
    assert len(checkpoints) > 2 * ROUNDS
    for checkpoint in checkpoints:
        round = checkpoint["epoch"]
        assert all(not each["state"] for each in checkpoint.get("optimizer_states", [])), "momentum of one client"
        if round < ROUNDS:
            assert_equal(checkpoint["state_dict"], starts[round])


@pytest.mark.slow
def test_more_rounds_on_the_same_trainer_equal_all_rounds_at_once(tmp_path):
    def module():
        torch.manual_seed(0)
        return fb.HybridBayesianClassifier(nn.Linear(federations.FEATURES, CLASSES), bayesian_last=1, samples=2)

    whole, parts = module(), module()
    federate(whole, federation("held posteriors"), 4)
    fed = federation("held posteriors")
    made = federate(parts, fed, 2)
    made.fit_loop.max_epochs = 4
    made.fit(parts, loader())
    assert_equal(dict(whole.state_dict()), dict(parts.state_dict()))
    assert [row["round"] for row in fed.history] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("sizes", "options", "message"),
    [
        (SIZES, {"seed": 4}, r"seed=4 \(was 3\)"),
        ((50, 10, 10, 10, 10), {}, "client_sizes"),
        (SIZES, {"local_parameters": ["network.6.*"]}, r"local_parameters=\['network.6.\*'\] \(was \[\]\)"),
    ],
)
def test_a_checkpoint_of_another_federation_is_refused(tmp_path, sizes, options, message):
    module, _, made = run(tmp_path, "plain")
    made.save_checkpoint(tmp_path / "one.ckpt")
    other = fb.FederatedBayes(fb.SizesPartition(sizes), fraction=0.6, **{"seed": 3, **options})
    with pytest.raises(FederationError, match=f"another federation: .*{message}.*load_from_checkpoint"):
        federate(module, other, ROUNDS + 1, loader(), ckpt_path=tmp_path / "one.ckpt")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({}, None),
        ({"fusion": "conflation"}, f"fusion=conflation (was {fb.Sites().described}), weighting=none (was train_size)"),
        ({"local_epochs": 2, "keep": ["optimizer"]}, "local_epochs=2 (was 1), keep=['optimizer'] (was [])"),
    ],
)
def test_other_settings_of_a_resumed_run_are_told_in_one_line(tmp_path, caplog, changed, told):
    module, _, made = run(tmp_path, "plain")
    made.save_checkpoint(tmp_path / "one.ckpt")
    options = {"fraction": 0.6, "seed": 3, "engine": "vectorized"} | changed
    other = fb.FederatedBayes(fb.SizesPartition(SIZES), **options)
    with caplog.at_level("INFO"):
        federate(module, other, ROUNDS + 1, loader(), ckpt_path=tmp_path / "one.ckpt")
    lines = [line for line in caplog.messages if "other settings" in line]
    assert lines == ([] if told is None else [f"Resuming with other settings than those of the checkpoint: {told}"])
    assert len(other.history) == ROUNDS + 1


ON_DISK = {
    "sites": {"fusion": "sites", "local_epochs": 2},
    "everything": {**PERSONAL, "fusion": "fedavg"},
    "ditto": {"fusion": "ditto"},
    "refused": {"fusion": "fedavg", "adversaries": NotANumber(clients=[0, 1])},
    "ivon": {"fusion": "sites"},
    "late": {
        "fusion": "sites",
        "fraction": 1.0,
        "schedule": fb.Asynchronous(3, 1, fb.Delays(slow={0: 10.0}), max_staleness=4),
    },
}
WHAT = ["optimizer", "posterior"]


def fit(folder, setting, engine, *, disk=True, rounds=ROUNDS, ckpt_path=None):
    """Fit with checkpoints in ``folder``, and the clients' states beside them or in them."""
    module = Plain(optimizer=fb.IVON) if setting == "ivon" else Everything()
    keep = fb.Kept(WHAT, folder / "clients") if disk else WHAT
    options = {"fraction": 0.6, "keep": keep, **ON_DISK[setting]}
    federation = fb.FederatedBayes(fb.SizesPartition((30, 24, 16, 12, 8)), seed=3, engine=engine, **options)
    made = federate(module, federation, rounds, loader(), loader(shuffle=False), ckpt_path, **saving(folder))
    return module, federation, made


def everything(module, federation, made):
    """All that a federation leaves behind, at every client, too."""
    found = state(module, federation, made)
    for client in range(5):
        kept = vars(federation.federation.engine.states.of(client))
        found |= {f"{client}/{name}": value for name, value in [*kept["kept"].items(), *kept["local"].items()]}
        own = federation.posterior_of(client)
        found |= {f"{client}/own/{name}": value for name, value in own.mean.items()}
    return found


@pytest.mark.parametrize(
    ("setting", "engine"),
    [("sites", "vectorized"), ("everything", "sequential"), ("ditto", "vectorized"), ("refused", "sequential")],
)
def test_clients_on_disk_are_clients_in_memory(tmp_path, setting, engine):
    memory = fit(tmp_path / "memory", setting, engine, disk=False)
    fit(tmp_path / "disk", setting, engine, rounds=2)
    disk = fit(tmp_path / "disk", setting, engine, ckpt_path="last")
    assert_equal(everything(*memory), everything(*disk))
    assert not disk[1].federation.engine.states.memory
    large, small = (torch.load(tmp_path / each / "last.ckpt", weights_only=False) for each in ("memory", "disk"))
    key = next(name for name in large["callbacks"] if "FederatedBayes" in name)
    assert len(large["callbacks"][key]["clients"]) >= 2
    assert small["callbacks"][key]["clients"].keys() == {"folder", "run", "rounds"}


@pytest.mark.slow
def test_a_federation_in_memory_goes_on_on_disk_and_not_without_its_folder(tmp_path):
    whole = fit(tmp_path / "whole", "sites", "sequential", disk=False)
    fit(tmp_path / "parts", "sites", "sequential", disk=False, rounds=2)
    parts = fit(tmp_path / "parts", "sites", "sequential", ckpt_path="last")
    assert_equal(everything(*whole), everything(*parts))
    with pytest.raises(FederationError, match=r"states lie in .*clients: resume with keep=fb\.Kept\(folder="):
        fit(tmp_path / "parts", "sites", "sequential", disk=False, rounds=ROUNDS + 1, ckpt_path="last")
    with pytest.raises(FederationError, match="holds the clients of another run, of 3 rounds") as held:
        fit(tmp_path / "parts", "sites", "sequential")
    fit(tmp_path / "parts", "sites", "sequential", rounds=ROUNDS + 1, ckpt_path="last")  # as the message says
    del held  # what holds a traceback holds no folder


def test_a_posterior_that_cannot_be_measured_leaves_the_folder_free(tmp_path):
    options = {"keep": fb.Kept(["optimizer"], tmp_path), "fusion": "fedavg"}
    with pytest.raises(FedBayesError, match="bernoulli") as held:
        federate(Plain(), fb.FederatedBayes(fb.IIDPartition(3), posterior=fb.Laplace(fb.Bernoulli()), **options))
    federate(Plain(), fb.FederatedBayes(fb.IIDPartition(3), **options))
    del held


def test_a_site_is_removed_from_disk_as_from_memory(tmp_path):
    _, memory, _ = fit(tmp_path / "memory", "sites", "sequential", disk=False)
    _, disk, _ = fit(tmp_path / "disk", "sites", "sequential")
    wanted = fb.remove_client(memory, 1)
    saved = torch.load(tmp_path / "disk" / "last.ckpt", weights_only=False)
    for found in (fb.remove_client(disk, 1), fb.remove_client(saved, 1)):
        assert_equal(dict(found.mean), dict(wanted.mean))
        assert_equal(dict(found.variance), dict(wanted.variance))


def test_a_checkpoint_of_another_version_is_refused_by_name(tmp_path):
    federation = fit(tmp_path, "sites", "sequential")[1]
    state = federation.federation.state_dict()
    del state["secret"]
    with pytest.raises(FederationError, match="has no secret: another version of lightning_fedbayes wrote it"):
        federation.federation.load_state_dict(state)


def kill_at(calls: int, name: str):
    """Let the process be killed at a call of a method of :class:`Store`."""
    method, left = getattr(Store, name), [calls]

    def counted(self, *arguments, **options):
        left[0] -= 1
        if not left[0]:
            kill()
        return method(self, *arguments, **options)

    setattr(Store, name, counted)


KILLED_ON_DISK = {
    "everything": ("sequential", 8, "put"),
    "sites": ("vectorized", 3, "mark"),
    "ivon": ("vectorized", 3, "finish"),
    "late": ("sequential", 8, "put"),
}
"""Setting → engine, and the call at which the process is killed."""


@pytest.fixture(scope="module")
def left(tmp_path_factory):
    """What killed processes have left, by the name of the setting."""
    calls = {
        setting: f"kill_at({number}, {name!r}); fit(folder, {setting!r}, {engine!r})"
        for setting, (engine, number, name) in KILLED_ON_DISK.items()
    }
    return killed("tests.callbacks.test_resume", calls, tmp_path_factory.mktemp("left"))


@pytest.mark.slow
@pytest.mark.parametrize("setting", KILLED_ON_DISK)
def test_a_killed_process_with_clients_on_disk_resumes_bit_by_bit(tmp_path, left, setting):
    engine = KILLED_ON_DISK[setting][0]
    assert (left / setting / "clients" / FILE).exists()
    resumed = fit(left / setting, setting, engine, ckpt_path="last")
    whole = fit(tmp_path / "whole", setting, engine, disk=False)
    assert_equal(everything(*whole), everything(*resumed))


def test_the_bytes_of_a_stacked_optimizer_do_not_depend_on_hashes():
    module = Plain(optimizer=torch.optim.Adam)
    made = fb.FederatedBayes(fb.IIDPartition(3), fusion="rklb", engine="vectorized", keep=["optimizer"])
    federate(module, made, 2, loader())
    for client in range(3):
        (state,) = made.federation.engine.states.of(client).optimizers
        assert all(list(entries) == sorted(entries) and len(entries) == 3 for entries in state.values())
