"""Federations for FLARE's simulator: each a controller and what its clients need, known by its seed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import nvflare.client as flare

import lightning_fedbayes as fb
from lightning_fedbayes.nvflare import FusionClient, FusionController
from tests.federations import Plain, network
from tests.flower.clients import BlobData, hybrid

FOLDER = Path(os.environ.get("FLARE_FEDERATIONS", "/nowhere"))
"""Where checkpoints and states lie, the same in all processes of a simulation."""
PARTITION = fb.DirichletPartition(clients=2, alpha=1.0)
CLIENT = "from tests.nvflare.simulated import loop\n\nloop()\n"
JOB = """
from nvflare.job_config.api import FedJob
from nvflare.job_config.script_runner import ScriptRunner
from nvflare.client.config import ExchangeFormat
from tests.nvflare import simulated

job = FedJob("federations")
job.set_app_packages(["tests"])
for name in {names}:
    job.to_server(getattr(simulated, name)())
job.to_clients(ScriptRunner("client.py", server_expected_format=ExchangeFormat.PYTORCH))
raise SystemExit(job.simulator_run({workspace!r}, n_clients=2))
"""


def plain() -> Plain:
    """Return a network without posteriors, with buffers."""
    return Plain(network(0, batch_norm=True))


class OnceBroken(BlobData):
    """Data that the second site cannot read in the first round."""

    def train_dataloader(self) -> Any:
        raise ValueError("patient 4711")


class Simulated(FusionController):
    """A federation of two sites."""

    seed, make, rounds, fusion, data = 0, hybrid, 2, "reverse_kl_barycenter", BlobData

    def __init__(self) -> None:
        kind = type(self)
        super().__init__(
            kind.make(), kind.fusion, "equal", num_rounds=kind.rounds, seed=kind.seed,
            checkpoint=FOLDER / f"{kind.seed}.pt",
        )

    @classmethod
    def client(cls, site: str) -> FusionClient:
        """Return the client of a site."""
        data = OnceBroken if cls is Broken and site == "site-2" else BlobData
        return FusionClient(
            cls.make(), data(), partition=PARTITION, fusion=cls.fusion, trainer={"accelerator": "cpu"},
            state_folder=FOLDER / str(cls.seed),
        )


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

    seed, rounds = 4, 1


class Long(Simulated):
    """Rounds to be cut off in."""

    seed, rounds, fusion = 5, 5, "sites"


def loop() -> None:
    """Answer as the clients of all these federations."""
    flare.init()
    kinds = {kind.seed: kind for kind in Simulated.__subclasses__()}
    made: dict[int, FusionClient] = {}
    while flare.is_running():
        model = flare.receive()
        assert model is not None
        seed = model.meta["seed"]
        if seed not in made:
            made[seed] = kinds[seed].client(flare.get_site_name())
        flare.send(made[seed].answer(model))


def started(folder: Path, *names: str) -> subprocess.Popen:
    """Start a simulation of some federations, whose files lie in ``folder``; what it says goes to ``folder/log``."""
    code = folder / "code"
    code.mkdir(parents=True, exist_ok=True)
    (code / "client.py").write_text(CLIENT)
    (code / "job.py").write_text(JOB.format(names=names, workspace=str(folder / "workspace")))
    root = str(Path(__file__).parents[2])
    environment = {**os.environ, "FLARE_FEDERATIONS": str(folder), "PYTHONPATH": root, "OMP_NUM_THREADS": "1"}
    with (folder / "log").open("a") as log:
        return subprocess.Popen(
            [sys.executable, "job.py"], cwd=code, env=environment, stdout=log, stderr=log, start_new_session=True
        )
