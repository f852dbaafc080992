"""Federations for FLARE's simulator: each a controller and what its clients need, known by its seed."""

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import nvflare.client as flare
from nvflare.app_common.abstract.fl_model import FLModel

import lightning_fedbayes as fb
from lightning_fedbayes.transport.nvflare import FusionClient, FusionController, FusionRecipe
from tests.federations import Plain, network
from tests.transport.federation import BlobData, hybrid

FOLDER = Path(os.environ.get("FLARE_FEDERATIONS", "/nowhere"))
"""Where checkpoints and states lie, the same in all processes of a simulation."""
PARTITION = fb.DirichletPartition(clients=2, alpha=1.0)
PAGE = Path(__file__).parents[2] / "docs" / "nvflare.md"
QUICK = {"server": {"task_request_interval": 0.2}}


def plain() -> Plain:
    """Return a network without posteriors, with buffers."""
    return Plain(network(0, batch_norm=True))


class OnceBroken(BlobData):
    """Data that the second site cannot read in the first round."""

    def train_dataloader(self) -> Any:
        if self.trainer and self.trainer.current_epoch == 0:
            raise ValueError("patient 4711")
        return super().train_dataloader()


class Simulated(FusionController):
    """A federation of two sites."""

    seed, make, rounds, fusion, data = 0, hybrid, 2, "reverse_kl_barycenter", BlobData

    def __init__(self) -> None:
        kind = type(self)
        options = {"num_rounds": kind.rounds, "seed": kind.seed, "checkpoint": FOLDER / f"{kind.seed}.pt"}
        super().__init__(kind.make(), kind.fusion, "equal", **options)

    @classmethod
    def client(cls, site: str) -> FusionClient:
        """Return the client of a site."""
        data = OnceBroken if cls is Broken and site == "site-2" else BlobData
        options = {"fusion": cls.fusion, "trainer": {"accelerator": "cpu"}, "state_folder": FOLDER / str(cls.seed)}
        return FusionClient(cls.make(), data(), partition=PARTITION, **options)


class Sites(Simulated):
    """Bayesian layers."""

    seed, fusion = 1, "sites"


class Average(Simulated):
    """A plain network with buffers."""

    seed, make, fusion = 2, plain, "weighted_average"


class Scaffold(Simulated):
    """Something is sent beside."""

    seed, make, fusion = 3, plain, "scaffold"


class Broken(Simulated):
    """One client fails."""

    seed = 4


class Long(Simulated):
    """Rounds to be cut off in."""

    seed, rounds, fusion = 5, 5, "sites"


class Beside:
    """Answers as the client of a page's federation, whose seed is 0, or as one of those above."""

    def __init__(self, client: FusionClient) -> None:
        self.kinds = {kind.seed: kind for kind in Simulated.__subclasses__()}
        self.clients = {0: client}

    def answer(self, model: FLModel) -> FLModel:
        """Return the answer of the client that the task is for."""
        seed = model.meta["seed"]
        if seed not in self.clients:
            self.clients[seed] = self.kinds[seed].client(flare.get_site_name())
        return self.clients[seed].answer(model)


def add(recipe: FusionRecipe, names: Sequence[str]) -> None:
    """Let FLARE run some federations after that of a recipe."""
    recipe.add_server_config(QUICK)
    recipe._job.set_app_packages(["tests"])
    for name in names:
        recipe._job.to_server(globals()[name]())


def files_of_the_page() -> dict[str, str]:
    """Return the files of the page's example, by name; the last block is what is done afterwards."""
    blocks = re.findall(r"^```py\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    return dict(zip(("digits.py", "client.py", "job.py", "after.py"), blocks, strict=True))


def changed(text: str, old: str, new: str) -> str:
    """Return ``text`` with ``old``, which must be there once, replaced."""
    assert text.count(old) == 1, old
    return text.replace(old, new)


def started(folder: Path, *names: str, alone: bool = False) -> subprocess.Popen:
    """Start the page's example in a simulation in ``folder``, with federations by ``names`` after its own."""
    code, files = folder / "code", files_of_the_page()
    code.mkdir(parents=True, exist_ok=True)
    loop = "while flare.is_running():"
    beside = "from tests.nvflare.simulated import Beside\nclient = Beside(client)\n"
    files["client.py"] = changed(files["client.py"], loop, beside + loop)
    execute = "recipe.execute(SimEnv(num_clients=2))"
    more = f"from tests.nvflare.simulated import add; add(recipe, {names}); "
    files["job.py"] = changed(files["job.py"], execute, more + execute)
    if alone:
        files["job.py"] = (
            changed(files["job.py"], "Digits()", f"simulated.{names[0]}()")
            .replace("from digits import Digits", "from tests.nvflare import simulated")
            .replace(f"{names}", f"{names[1:]}")
        )
    for name, text in files.items():
        (code / name).write_text(text)
    environment = {
        **os.environ,
        "HOME": str(folder),
        "FLARE_FEDERATIONS": str(folder),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(PAGE.parents[1]),
        "NVFLARE_SIMULATOR_WORKSPACE_ROOT": str(folder / "workspace"),
    }
    with (folder / "log").open("a") as log:
        return subprocess.Popen(
            [sys.executable, "job.py"], cwd=code, env=environment, stdout=log, stderr=log, start_new_session=True
        )
