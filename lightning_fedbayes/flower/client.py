"""A client of a Flower federation: a Lightning module, a data module, and nothing else to write."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import flwr.app
import lightning as L
from flwr.app import ArrayRecord, ConfigRecord, Context
from flwr.clientapp import ClientApp

from lightning_fedbayes.callbacks import ExamplePrivacy
from lightning_fedbayes.clients.model import ResidentModel
from lightning_fedbayes.clients.privacy import Door, UpdatePrivacy, check_no_buffers
from lightning_fedbayes.clients.settings import BufferPolicy, FederationSettings, Fusion, Keep, Source
from lightning_fedbayes.core.errors import (
    ClientMismatch,
    FedBayesError,
    FederationError,
    LostState,
    check_kind,
    check_path,
    check_strings,
)
from lightning_fedbayes.core.messages import Message
from lightning_fedbayes.core.quiet import without_banners
from lightning_fedbayes.data.partition import Partition
from lightning_fedbayes.flower.calibration import ACTION, answer, check_allowed, count_noise, own_data, request_in
from lightning_fedbayes.flower.checkpoint import StateFile
from lightning_fedbayes.flower.one_shot import (
    ONCE,
    TOLD,
    OneShot,
    answer_once,
    check_agreed,
    check_one_shot,
    kind_of,
    needs_training,
    training_data,
)
from lightning_fedbayes.flower.training import ClientTraining, Task
from lightning_fedbayes.flower.wire import COUNTED, from_arrays, records_of, tensors_in, tensors_of
from lightning_fedbayes.methods import get_method
from lightning_fedbayes.modules.head import BayesianHead

LOG = logging.getLogger(__name__)
"""The client's own log."""
NODE_CONFIG_KEY = "partition-id"
"""Key of the client's number in a node's configuration, in Flower's simulation and by ``--node-config``."""

QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
"""Options of a client's Trainer, unless others are given: a client writes no files and says nothing."""

CONFIG_KEYS = ("server-round", "phase", "seed", "federation", "accepted", "begun", "share", "method", "frozen")
"""Keys of a message's configuration that the server sets.

"server-round" is the round, or the version of the global posterior that comes with it, from 1, and "phase" the round as
methods count it that settle over rounds, from 0. For "federation" and "accepted" see :class:`StateFile`; "begun" is
False until a round has been fused; "share" is that of a client among all; "method" is
:meth:`~lightning_fedbayes.Method.agreement`; "frozen" is the digest of the parameters that nobody sends, "" for none.
"""

DataModule = L.LightningDataModule | Callable[[Context], L.LightningDataModule]


def client_app(
    module: L.LightningModule,
    datamodule: DataModule,
    *,
    partition: Partition | None = None,
    local_epochs: int = 1,
    fusion: Fusion = "reverse_kl_barycenter",
    keep: Sequence[Keep] = (),
    buffers: BufferPolicy = "average",
    local_parameters: Sequence[str] = (),
    privacy: UpdatePrivacy | None = None,
    posterior: Source | None = None,
    one_shot: OneShot | None = None,
    conformal_epsilon: float | None = None,
    exact: Collection[str] = (),
    share_errors: bool = False,
    state_folder: str | Path | None = None,
    trainer: Mapping[str, Any] | None = None,
) -> ClientApp:
    """Return the ClientApp of a client: it trains ``module`` on the client's own data when the server asks for it.

    ::

        app = client_app(HybridBayesianClassifier(mlp(64, 10), bayesian_last=1), OwnData("/data"), local_epochs=2)

    Every random draw comes from the server's seed, the round and the client's number, which is the node's
    ``partition-id``; so a federation over Flower ends where one inside a single process ends. A client that raises
    is left out of the round; the server says why.

    Args:
        module: the network, the same at every client and at the server. A message starts from it as it was built.
        datamodule: whose training loader holds the client's own data; or a function of the node's Context
            (``context.node_config["data"]``) that makes it.
        partition: deals out data that all clients have in common, as in a simulation. Without one, a
            :class:`~lightning_fedbayes.ClientDatasets` is dealt out by its parts, and other data are the client's own.
        fusion: the federated method, the server's own: its name, a :class:`~lightning_fedbayes.Method`, or a fusion
            rule, which matters to the server alone.
        local_epochs, keep, buffers, local_parameters, posterior: see
            :class:`~lightning_fedbayes.FederatedBayes`. ``buffers`` and ``local_parameters`` must be those of
            :func:`~lightning_fedbayes.flower.server_app`. With "posterior" in ``keep`` the client's own is for
            :func:`~lightning_fedbayes.flower.personal_posterior`, and where the server lets clients score the global
            posterior, the client scores its own, too, under names that begin with "personal/".
        privacy: clips what the client sends and adds noise to it, in every message from a fresh seed that nobody knows.
            The client counts all messages that it has ever sent from its ``state_folder``, those for a round that is
            asked for again and those of other federations among them, and tells the server their ε.
        one_shot: an :class:`~lightning_fedbayes.KroneckerLaplace`, an
            :class:`~lightning_fedbayes.HierarchicalLinearRegression`, or the :class:`~lightning_fedbayes.BayesianHead`
            of a ``module`` that is a :class:`~lightning_fedbayes.HeadModule`, by which the client may be asked to send
            in place of rounds; see :meth:`FusionStrategy.one_shot`. None: it sends no such thing.
        conformal_epsilon: ε of the noise on counts of scores, where the server calibrates by
            ``FederatedConformal(epsilon=...)``, which must be the same. Each answer costs it anew; the client adds them
            up in its ``state_folder``. It sends no exact sums then, for a temperature. None: counts are exact, and none
            are sent under ``privacy``.
        exact: kinds of messages that may leave as they are in spite of ``privacy``, or of an
            :class:`~lightning_fedbayes.ExamplePrivacy` among the Trainer's callbacks: "scores" of a validation,
            "temperature", "counts", "statistics", "curvature"; see the table in docs/privacy.md. Others are not sent.
        share_errors: send the text of an exception to the server, too, for federations of one owner. Otherwise the
            server hears of its class and of the stage alone, and the text stays in the client's own log.
        state_folder: where the client keeps its state, which never leaves it: local parameters and buffers, kept
            optimizer state, the number of its messages under ``privacy``.
        trainer: options of the client's Trainer, such as ``{"accelerator": "gpu", "gradient_clip_val": 1.0}``.

    Raises:
        FederationError: an argument cannot be used, something is to be kept and there is no ``state_folder``, or
            buffers would leave the client beside what ``privacy`` protects.
    """
    check_kind("module", module, L.LightningModule, "give a LightningModule")
    check_strings("keep", keep, "give 'optimizer', 'posterior' or both; they lie in state_folder")
    check_kind("trainer", {} if trainer is None else trainer, Mapping, "give a dict of a Trainer's options")
    settings = FederationSettings(
        partition, local_epochs=local_epochs, fusion=get_method(fusion), keep=keep, buffers=buffers,
        local_parameters=local_parameters, privacy=privacy, posterior=posterior,
    )
    keeps = bool(local_parameters) or bool(settings.kept.what) or buffers == "local" or privacy is not None
    keeps = keeps or bool(settings.method.keeps) or conformal_epsilon is not None
    callbacks = () if trainer is None else trainer.get("callbacks") or ()
    callbacks = callbacks if isinstance(callbacks, Sequence) else (callbacks,)
    protects_examples = any(isinstance(each, ExamplePrivacy) for each in callbacks)
    door = Door(privacy, conformal_epsilon, exact, share_errors, protects_examples)
    if keeps and state_folder is None:
        raise FederationError(
            "local parameters, local buffers, kept optimizer states and posteriors, sites and the accounts of privacy "
            "stay at the client from round to round: pass state_folder=..., a folder of the client's own"
        )
    if privacy is not None:
        check_no_buffers(ResidentModel(module, settings.local_parameters, buffers).federated_buffers)
    folder = check_path("state_folder", state_folder) if keeps else None
    if one_shot is not None:
        check_one_shot(one_shot)
    handler = _MessageHandler(module, datamodule, settings, folder, trainer or {}, door)
    handler.one_shot = one_shot
    app = ClientApp()
    app.query()(handler.answering("introduction", handler.introduce))
    app.train()(handler.answering("training", handler.train))
    app.evaluate()(handler.answering("evaluation", handler.evaluate))
    app.query(ACTION)(handler.answering("calibration", handler.calibrate))
    app.query(ONCE)(handler.answering("training", handler.send_once))
    return app


def client_number(context: Context) -> int:
    """The number of the client that a node is.

    Raises:
        FederationError: the node's configuration does not say.
    """
    number = context.node_config.get(NODE_CONFIG_KEY)
    if not isinstance(number, int) or isinstance(number, bool) or number < 0:
        raise FederationError(
            f"this node's {NODE_CONFIG_KEY} is {number!r}: start every SuperNode with a number of its own, from 0, as "
            f'in --node-config "{NODE_CONFIG_KEY}=0"'
        )
    return number


class _MessageHandler:
    """Answers the server's messages, and keeps a Trainer between those that one process handles."""

    def __init__(
        self, module: L.LightningModule, datamodule: DataModule, settings: FederationSettings,
        state_folder: Path | None, options: Mapping[str, Any], door: Door,
    ) -> None:
        self.module = module
        self.datamodule = datamodule
        self.training = ClientTraining(settings)
        self.state_folder = state_folder
        self.door = door
        self.options = {**QUIET, **options}
        self.one_shot: OneShot | None = None
        self._trainer: L.Trainer | None = None

    def answering(
        self, stage: str, answer: Callable[[flwr.app.Message, Context], Message]
    ) -> Callable[[flwr.app.Message, Context], flwr.app.Message]:
        """Return what Flower calls: it sends what ``answer`` returns, or, where that raises, a failure.

        The text of an exception goes to the client's own log.
        """
        def reply(message: flwr.app.Message, context: Context) -> flwr.app.Message:
            try:
                sent = answer(message, context)
            except Exception as error:
                name, own = type(error).__name__, isinstance(error, FedBayesError)
                LOG.error("%s failed, and the server hears of a %s: %s", stage, name, error, exc_info=not own)
                number = context.node_config.get(NODE_CONFIG_KEY)
                client = number if isinstance(number, int) else -1
                sent = Message("failure", client, texts=self.door.failure(error, stage))
            return flwr.app.Message(records_of(sent), reply_to=message)

        return reply

    def introduce(self, message: flwr.app.Message, context: Context) -> Message:
        """Say which client this node is."""
        return Message("introduction", client_number(context))

    def train(self, message: flwr.app.Message, context: Context) -> Message:
        """Train in the round that the server names, from the posterior that it sends."""
        config = _config(message)
        method = self.training.method
        own = method.agreement()
        if config["method"] != own:
            raise ClientMismatch(
                f"the server's method is ({config['method'] or 'an average'}), this client's ({own or 'an average'}): "
                "give client_app(fusion=...) what FusionStrategy has"
            )
        number = client_number(context)
        kept = StateFile(self.state_folder, number, config)
        counted = message.content.get(COUNTED)
        if isinstance(counted, ArrayRecord):
            kept.amend(number, tensors_in(counted, "the server"))
        if method.keeps and config["accepted"] and number not in kept.clients:
            raise LostState(
                f"client {number} has lost {method.keeps}. A server with a max_influence sends a site when it asks "
                "again; otherwise bring the state_folder back, or remove the client from the server's checkpoint"
            )
        task = _task(message, context, kept.before)
        update, after = self._with_trainer(
            lambda trainer: self.training.train(trainer, self.module, self._data(context), task)
        )
        update = self.door.protected(update, task.posterior, task.round)
        spent = {} if self.door.privacy is None else {"privacy/epsilon": kept.count(self.door.privacy)}
        kept.write(after)  # before anything is sent
        figures = {name: value for name, value in {**update.metrics, **spent}.items() if math.isfinite(value)}
        tensors = tensors_of(update.posterior, update.buffers)
        return Message("update", task.client, task.round + 1, update.num_examples, tensors, figures)

    def evaluate(self, message: flwr.app.Message, context: Context) -> Message:
        """Score the server's posterior on the client's own validation data, and the client's own if it keeps one."""
        self.door.check("scores")
        number, keeps = client_number(context), self.training.settings.keeps_posteriors
        task = _task(message, context, StateFile(self.state_folder, number, _config(message)).before if keeps else {})
        figures, count = self._with_trainer(
            lambda trainer: self.training.evaluate(trainer, self.module, self._data(context), task)
        )
        return Message("scores", number, task.round + 1, count, figures=figures)

    def calibrate(self, message: flwr.app.Message, context: Context) -> Message:
        """Answer what the server asks of the client's validation data, to calibrate the posterior that it sends."""
        task, request = _task(message, context, {}), request_in(_config(message))
        kind = check_allowed(request, self.door)
        datamodule = self._data(context)
        datamodule.prepare_data()
        datamodule.setup("validate")
        data = own_data(datamodule.val_dataloader(), task.client)
        self.training.load_global(self.module, task)
        spent = {}
        if request["epsilon"]:
            assert self.state_folder is not None
            spent["epsilon"] = count_noise(self.state_folder, task.client, request["epsilon"])  # before it is sent
        sent = answer(self.module, data, request, task.client, task.seed)
        return Message.of(kind, task.client, task.round + 1, sent, spent)

    def send_once(self, message: flwr.app.Message, context: Context) -> Message:
        """Send what a federation without rounds asks for: sums, or weights after training with their curvature."""
        task = _task(message, context, {})
        method = check_agreed(self.one_shot, str(message.content["config"].get("one-shot")))
        kind = kind_of(method)
        self.door.check(kind)
        datamodule = self._data(context)
        loader = training_data(datamodule, self.training.settings, task.client, task.seed)
        if needs_training(method):
            self._with_trainer(lambda trainer: self.training.train(trainer, self.module, datamodule, task))
        if isinstance(method, BayesianHead):
            self.training.check_frozen(self.module, task)
        told = message.content.get(TOLD)
        told = tensors_in(told, "the server") if isinstance(told, ArrayRecord) else {}
        return Message.of(kind, task.client, task.round + 1, answer_once(method, self.module, loader, told))

    def _data(self, context: Context) -> L.LightningDataModule:
        """The client's data module; made anew for every message if a function makes it."""
        return self.datamodule if isinstance(self.datamodule, L.LightningDataModule) else self.datamodule(context)

    def _with_trainer(self, use: Callable[[L.Trainer], Any]) -> Any:
        """Return ``use(trainer)`` for the resident Trainer; a Trainer that an error has left is not used again."""
        with without_banners():  # the log of a run is the server's; a client's would repeat itself in every message
            if self._trainer is None:
                callbacks = [*self.options.get("callbacks", []), self.training]
                self._trainer = L.Trainer(**{**self.options, "callbacks": callbacks, "num_sanity_val_steps": 0})
            trainer, self._trainer = self._trainer, None
            result = use(trainer)
        self._trainer = trainer
        return result


def _task(message: flwr.app.Message, context: Context, kept: Mapping[int, Any]) -> Task:
    """Return the task that a message of the server sets."""
    arrays, config = message.content["arrays"], _config(message)
    assert isinstance(arrays, ArrayRecord)
    posterior, buffers = from_arrays(arrays, "the server")
    return Task(
        client_number(context), config["server-round"] - 1, config["seed"], posterior, buffers, kept, config["begun"],
        config["share"], config["frozen"], config["phase"],
    )


def _config(message: flwr.app.Message) -> dict[str, Any]:
    """Return the configuration in a message of the server.

    Raises:
        ClientMismatch: it is not one of FusionStrategy's.
    """
    config = message.content["config"]
    assert isinstance(config, ConfigRecord)
    missing = [key for key in CONFIG_KEYS if key not in config]
    if missing:
        raise ClientMismatch(
            f"the server's message lacks {', '.join(missing)}: this client works with a server that runs "
            "FusionStrategy"
        )
    return dict(config)
