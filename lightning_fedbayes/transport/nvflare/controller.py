"""A controller of NVIDIA FLARE that fuses posteriors, leaves bad clients out, and can be resumed; and its job."""

import math
import re
import time
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.utilities import rank_zero_info
from nvflare.apis.fl_context import FLContext
from nvflare.app_common.abstract.fl_model import FLModel
from nvflare.app_common.workflows.model_controller import ModelController
from nvflare.app_opt.pt.decomposers import TensorDecomposer
from nvflare.client.config import ExchangeFormat
from nvflare.fuel.utils import fobs
from nvflare.job_config.api import FedJob
from nvflare.job_config.script_runner import ScriptRunner
from nvflare.recipe.spec import Recipe
from torch import Tensor

from lightning_fedbayes.clients.evaluation import ClientScores
from lightning_fedbayes.clients.settings import BufferPolicy, Fusion, Source, Weighting
from lightning_fedbayes.core import errors
from lightning_fedbayes.core.errors import FedBayesError, FederationError, FusionError, listed
from lightning_fedbayes.core.messages import Kind, Message
from lightning_fedbayes.server import Server
from lightning_fedbayes.transport.calibration import Calibration, check_calibration, try_calibration
from lightning_fedbayes.transport.client import Asked, Question
from lightning_fedbayes.transport.messages import attempted, has_lost_state, initial_model, posterior_in, tensors_of
from lightning_fedbayes.transport.nvflare.wire import check_absolute, message_in, model_of
from lightning_fedbayes.transport.one_shot import COUNTING, SCALING, kind_of, with_scale
from lightning_fedbayes.transport.server import Rounds, told_round

TASKS: dict[Asked, str] = {"train": "train", "evaluate": "validate", "calibrate": "validate", "once": "validate"}
"""FLARE's names of tasks, by which filters are chosen."""
POLL_SECONDS = 0.1
"""Interval at which the server looks whether clients have answered."""


class FusionController(ModelController):
    """Fuses the posteriors of FLARE's clients by any registered rule. The server's half of ``FederatedBayes``.

    FLARE builds a controller from its class and the arguments of a file, so make a class of it that needs none::

        class Digits(FusionController):
            def __init__(self):
                super().__init__(network(), "conflation", num_rounds=10, checkpoint="/var/lib/federation.pt")

    Failures, a ``checkpoint`` (the job is submitted again) and refused arguments are as of
    :class:`~lightning_fedbayes.transport.flower.FusionStrategy`. Clients are :class:`FusionClient`. Sites are numbered
    by their names, in natural order (site-2 before site-10), and keep their numbers. Those that join later come after.

    Args:
        module, buffers, local_parameters, posterior: the network before training, and options, the same as the
            clients'.
        checkpoint: file of the federation, an absolute path at the server. None keeps it in memory.
        num_rounds: number of rounds, rounds in the checkpoint included.
        timeout: seconds that a round waits for its clients.
        calibration: callbacks that are fitted after the last round: a FederatedTemperature first. Before the first
            round each client tries one batch, and says whether it can answer. Their result is in the checkpoint.
        fusion, weighting, options: as of :class:`~lightning_fedbayes.transport.flower.FusionStrategy`, with
            ``fraction``, ``wait_for``, ``safeguards``, ``evaluate``, ``logger`` and ``seed`` of
            :class:`~lightning_fedbayes.transport.server.Rounds`.
    """

    def __init__(
        self,
        module: L.LightningModule,
        fusion: Fusion = "reverse_kl_barycenter",
        weighting: Weighting = "train_size",
        *,
        num_rounds: int,
        checkpoint: str | Path | None = None,
        timeout: float = 3600,
        buffers: BufferPolicy = "average",
        local_parameters: Sequence[str] = (),
        posterior: Source | None = None,
        calibration: Sequence[Calibration] = (),
        **options: Any,
    ) -> None:
        super().__init__(persistor_id="", ignore_result_error=True, task_check_period=POLL_SECONDS)
        errors.check_at_least("num_rounds", num_rounds, 1)
        errors.check_number("timeout", timeout, "(0, inf)")
        check_absolute("checkpoint", checkpoint)
        self._calibration = check_calibration(calibration)
        self._initial = initial_model(module, buffers=buffers, local_parameters=local_parameters, posterior=posterior)
        self._rounds = Rounds(fusion, weighting, checkpoint=checkpoint, across=False, **options)
        self._num_rounds, self._seconds = num_rounds, timeout

    @property
    def server(self) -> Server | None:
        """The :class:`~lightning_fedbayes.Server` that it drives. None before the run."""
        return self._rounds.server

    @property
    def client_scores(self) -> ClientScores:
        """Figures of each client's ``validation_step`` in the last evaluation, by the client's number."""
        return self._rounds.client_scores

    def add_to_fed_job(self, job: Any, ctx: Any, **kwargs: Any) -> None:
        """Add the controller to a job. FLARE calls it. Raises FederationError for a class that FLARE cannot build."""
        if type(self) is FusionController:
            why = "make a subclass whose __init__ takes no arguments and calls super().__init__(network(), ...)"
            raise FederationError(f"FLARE writes a controller's class into the job, and not its network: {why}")
        job.set_app_packages([*job.job.app_packages, "lightning_fedbayes"])  # installed at every site
        super().add_to_fed_job(job, ctx, **kwargs)

    def start_controller(self, fl_ctx: FLContext) -> None:
        """Get ready. FLARE calls it."""
        fobs.register(TensorDecomposer)
        super().start_controller(fl_ctx)

    def run(self) -> None:
        """Run the rounds that are still to do, and calibrate. FLARE calls it.

        Raise FederationError if the checkpoint is of another federation, too few clients, too many failed rounds in a
        row, or no client answers a calibration.
        """
        rounds, count = self._rounds, self._num_rounds
        rounds.summary()
        server = rounds.resume(self._initial)
        if server.rounds >= count:
            rank_zero_info(f"{rounds.checkpoint} is complete: {server.rounds} of {count} rounds are done.")
        sites = self._wait(rounds.wait_for)
        rank_zero_info(f"Clients: {listed(f'{number} is {site}' for number, site in sites.items())}")

        def once(what: str) -> Mapping[int, Message | FedBayesError]:
            return self._ask("once", kind_of(what), 1, self._sites(), {"one-shot": repr(what)})[0]

        server.buffers = with_scale(server.buffers, partial(once, SCALING))
        rounds.count(count, partial(once, COUNTING))

        def ask(request: dict[str, Any], clients: set[int] | None, kind: Kind) -> Mapping[int, Message | FedBayesError]:
            chosen = {client: site for client, site in self._sites().items() if clients is None or client in clients}
            return self._ask("calibrate", kind, max(1, server.rounds), chosen, request)[0]

        if server.rounds < count:
            try_calibration(self._calibration, ask)
        for server_round in range(server.rounds + 1, count + 1):
            sites = self._wait(rounds.safeguards.min_clients)
            server.posterior, server.buffers = posterior_in(self._model(), "the global model")
            asked = rounds.begin(server_round, sites)
            answers, lost = self._ask("train", "update", server_round, {each: sites[each] for each in asked})
            if self.is_aborted():
                return
            figures = rounds.finish(server_round, asked, answers, lost).figures
            if rounds.evaluate:
                found = self._ask("evaluate", "scores", server_round, self._sites())[0]
                figures = {**figures, **rounds.take_scores(server_round, found)}
            told_round(server_round, count, figures)
        if self._calibration and not self.is_aborted():
            rounds.calibrate_by(self._calibration, ask)

    def _model(self) -> dict[str, Tensor]:
        server = self._rounds.running
        return tensors_of(server.posterior, server.buffers)

    def _sites(self) -> dict[int, str]:
        """Return the sites at hand by their clients' numbers, ascending."""
        engine: Any = self.engine
        names, numbers = {client.name for client in engine.get_clients()}, self._rounds.numbers
        for name in sorted(names - numbers.keys(), key=in_natural_order):
            numbers[name] = max(numbers.values(), default=-1) + 1
        return {number: name for name, number in sorted(numbers.items(), key=lambda item: item[1]) if name in names}

    def _wait(self, clients: int) -> dict[int, str]:
        start = time.monotonic()
        while len(sites := self._sites()) < clients and not self.is_aborted():
            if time.monotonic() - start > self._seconds:
                remedy = "start the other sites, or lower wait_for= or Safeguards(min_clients=)"
                have = f"{len(sites)} of {clients} clients"
                raise FederationError(f"{have} are connected after {self._seconds:g} s; {remedy}")
            time.sleep(POLL_SECONDS)
        return sites

    def _ask(
        self,
        asked: Asked,
        kind: Kind,
        server_round: int,
        sites: Mapping[int, str],
        request: Mapping[str, Any] | None = None,
    ) -> tuple[dict[int, Message | FedBayesError], Collection[int]]:
        """Ask clients, and wait. Return client → its message or why it has none, and those that lost their state."""
        replies: dict[str, FLModel] = {}
        sent = {key: tensor for key, tensor in self._model().items() if self._rounds.method.tells(key)}
        for client, site in sites.items():
            config = {**(request or {}), **self._rounds.config_for(client, server_round)}
            told = self._rounds.counted_for(client) if asked == "train" else None
            task = model_of(asked, Question(client, config, sent, told), self._num_rounds)
            take = partial(replies.__setitem__, site)
            self.send_model(TASKS[asked], task, [site], timeout=math.ceil(self._seconds), callback=take)
        while self.get_num_standing_tasks() and not self.is_aborted():
            time.sleep(POLL_SECONDS)

        def read(client: int, site: str) -> Message:
            if site not in replies:
                silence = f"{site} has sent nothing that FLARE takes within {self._seconds:g} s"
                raise FusionError(f"client {client}: {silence}; its log says why, if its script has ended")
            return message_in(replies[site], client, kind, server_round)

        answers = {client: attempted(partial(read, client, site)) for client, site in sites.items()}
        lost = [client for client, site in sites.items() if site in replies and has_lost_state(replies[site].meta)]
        return answers, lost


class FusionRecipe(Recipe):
    """A job of a :class:`FusionController` and a client script, which sends tensors as they are.

    ::

        recipe = FusionRecipe("digits", Digits(), "client.py", min_clients=2)
        recipe.execute(SimEnv(num_clients=2))

    Raises FederationError if ``controller`` is no FusionController.

    Args:
        name, controller: of the job, and for the server.
        train_script: the client script, whose loop a :class:`FusionClient` fills.
        min_clients: clients without which FLARE does not start the job.
        runner: options of FLARE's ``ScriptRunner``, such as ``script_args="--data /data"`` or
            ``launch_external_process=True``.
    """

    def __init__(
        self, name: str, controller: FusionController, train_script: str, *, min_clients: int = 1, **runner: Any
    ) -> None:
        errors.check_kind("controller", controller, FusionController, "give an object of a subclass of this one")
        job = FedJob(name, min_clients)
        job.to_server(controller)
        job.to_clients(ScriptRunner(train_script, server_expected_format=ExchangeFormat.PYTORCH, **runner))
        super().__init__(job)


def in_natural_order(name: str) -> list[tuple[int, str]]:
    """Return the key that sorts names by the numbers in them.

    >>> sorted(["site-10", "site-2", "clinic"], key=in_natural_order)
    ['clinic', 'site-2', 'site-10']
    """
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]
