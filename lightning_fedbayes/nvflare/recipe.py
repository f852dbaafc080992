"""The job of a federation over NVIDIA FLARE, for its simulator and for real sites."""

from __future__ import annotations

from typing import Any

from nvflare.client.config import ExchangeFormat
from nvflare.job_config.api import FedJob
from nvflare.job_config.script_runner import ScriptRunner
from nvflare.recipe.spec import Recipe

from lightning_fedbayes.core.errors import check_kind
from lightning_fedbayes.nvflare.controller import FusionController


class FusionRecipe(Recipe):
    """A job of a :class:`FusionController` and a client script, which sends tensors as they are.

    ::

        recipe = FusionRecipe("digits", Digits(), "client.py", min_clients=2)
        recipe.execute(SimEnv(num_clients=2))

    Args:
        name: of the job.
        controller: for the server.
        train_script: the client script, whose loop a :class:`FusionClient` fills.
        min_clients: clients without which FLARE does not start the job.
        runner: options of FLARE's ``ScriptRunner``, such as ``script_args="--data /data"`` or
            ``launch_external_process=True``.

    Raises:
        FederationError: ``controller`` is none.
    """

    def __init__(
        self, name: str, controller: FusionController, train_script: str, *, min_clients: int = 1, **runner: Any
    ) -> None:
        check_kind("controller", controller, FusionController, "give an object of a class of your own, of this one")
        job = FedJob(name, min_clients)
        job.to_server(controller)
        job.to_clients(ScriptRunner(train_script, server_expected_format=ExchangeFormat.PYTORCH, **runner))
        super().__init__(job)
