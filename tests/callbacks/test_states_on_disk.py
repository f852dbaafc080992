"""What clients keep, on disk: the same results, small checkpoints, and nothing lost when a process is killed."""

import pytest
import torch

import lightning_fedbayes as fb
from benchmarks.untrusted.adversaries import NotANumber
from lightning_fedbayes.core.errors import FederationError
from lightning_fedbayes.core.store import FILE, Store
from tests.callbacks.test_resume import PERSONAL, Everything, kill, killed, state
from tests.federations import Plain, assert_equal, federate, loader, quiet_checkpoints, saving

ROUNDS = 4
SETTINGS = {
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

pytestmark = quiet_checkpoints


def fit(folder, setting, engine, *, disk=True, rounds=ROUNDS, ckpt_path=None):
    """Fit with checkpoints in ``folder``, and the clients' states beside them or in them."""
    module = Plain(optimizer=fb.IVON) if setting == "ivon" else Everything()
    keep = fb.Kept(WHAT, folder / "clients") if disk else WHAT
    options = {"fraction": 0.6, "keep": keep, **SETTINGS[setting]}
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
    with pytest.raises(FederationError, match="holds the clients of another run, of 3 rounds"):
        fit(tmp_path / "parts", "sites", "sequential")


def test_a_site_is_removed_from_disk_as_from_memory(tmp_path):
    _, memory, _ = fit(tmp_path / "memory", "sites", "sequential", disk=False)
    _, disk, _ = fit(tmp_path / "disk", "sites", "sequential")
    wanted = fb.remove_client(memory, 1)
    saved = torch.load(tmp_path / "disk" / "last.ckpt", weights_only=False)
    for found in (fb.remove_client(disk, 1), fb.remove_client(saved, 1)):
        assert_equal(dict(found.mean), dict(wanted.mean))
        assert_equal(dict(found.variance), dict(wanted.variance))


def kill_at(calls: int, name: str):
    """Let the process be killed at a call of a method of :class:`Store`."""
    method, left = getattr(Store, name), [calls]

    def counted(self, *arguments, **options):
        left[0] -= 1
        if not left[0]:
            kill()
        return method(self, *arguments, **options)

    setattr(Store, name, counted)


KILLED = {
    "everything": ("sequential", 8, "put"),
    "sites": ("vectorized", 3, "mark"),
    "ivon": ("vectorized", 3, "finish"),
    "late": ("sequential", 8, "put"),
}
"""Setting → engine, and the call at which the process is killed."""


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    """What killed processes have left, by the name of the setting."""
    calls = {
        setting: f"kill_at({number}, {name!r}); fit(folder, {setting!r}, {engine!r})"
        for setting, (engine, number, name) in KILLED.items()
    }
    return killed("tests.callbacks.test_states_on_disk", calls, tmp_path_factory.mktemp("parts"))


@pytest.mark.slow
@pytest.mark.parametrize("setting", KILLED)
def test_a_killed_process_resumes_bit_by_bit(tmp_path, parts, setting):
    engine = KILLED[setting][0]
    assert (parts / setting / "clients" / FILE).exists()
    resumed = fit(parts / setting, setting, engine, ckpt_path="last")
    whole = fit(tmp_path / "whole", setting, engine, disk=False)
    assert_equal(everything(*whole), everything(*resumed))


def test_the_bytes_of_a_stacked_optimizer_do_not_depend_on_hashes():
    module = Plain(optimizer=torch.optim.Adam)
    made = fb.FederatedBayes(fb.IIDPartition(3), fusion="rklb", engine="vectorized", keep=["optimizer"])
    federate(module, made, 2, loader())
    for client in range(3):
        (state,) = made.federation.engine.states.of(client).optimizers
        assert all(list(entries) == sorted(entries) and len(entries) == 3 for entries in state.values())
