"""A client of a Flower federation: a Lightning module, a data module, and nothing else to write."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import flwr.app
import lightning as L
from flwr.app import ArrayRecord, ConfigRecord, Context
from flwr.clientapp import ClientApp

from lightning_fedbayes.clients.privacy import UpdatePrivacy
from lightning_fedbayes.clients.settings import BufferPolicy, Fusion, Keep, Source
from lightning_fedbayes.core.errors import ClientMismatch, FederationError
from lightning_fedbayes.core.messages import Message
from lightning_fedbayes.data.partition import Partition
from lightning_fedbayes.flower.wire import records_of, tensors_in
from lightning_fedbayes.transport.client import STAGES, Asked, Question, RemoteClient
from lightning_fedbayes.transport.messages import COUNTED
from lightning_fedbayes.transport.one_shot import TOLD, OneShot

NODE_CONFIG_KEY = "partition-id"
"""Key of the client's number in a node's configuration, in Flower's simulation and by ``--node-config``."""
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
            "temperature", "counts", "statistics", "curvature", "scale"; see the table in docs/privacy.md. Others are
            not sent.
        share_errors: send the text of an exception to the server, too, for federations of one owner. Otherwise the
            server hears of its class and of the stage alone, and the text stays in the client's own log.
        state_folder: where the client keeps its state, which never leaves it: local parameters and buffers, kept
            optimizer state, the number of its messages under ``privacy``.
        trainer: options of the client's Trainer, such as ``{"accelerator": "gpu", "gradient_clip_val": 1.0}``.

    Raises:
        FederationError: an argument cannot be used, something is to be kept and there is no ``state_folder``, or
            buffers would leave the client beside what ``privacy`` protects.
    """
    client = RemoteClient(
        module,
        datamodule,
        partition=partition,
        local_epochs=local_epochs,
        fusion=fusion,
        keep=keep,
        buffers=buffers,
        local_parameters=local_parameters,
        privacy=privacy,
        posterior=posterior,
        one_shot=one_shot,
        conformal_epsilon=conformal_epsilon,
        exact=exact,
        share_errors=share_errors,
        state_folder=state_folder,
        trainer=trainer,
    )

    def introduce(message: flwr.app.Message, context: Context) -> flwr.app.Message:
        number = number_or_none(context)
        sent = client.attempt("introduction", number, lambda: Message("introduction", client_number(context)))
        return flwr.app.Message(records_of(sent), reply_to=message)

    def answering(asked: Asked) -> Callable[[flwr.app.Message, Context], flwr.app.Message]:
        def answer(message: flwr.app.Message, context: Context) -> flwr.app.Message:
            def reply() -> Message:
                return client.reply(asked, question_in(message, context), context)

            sent = client.attempt(STAGES[asked], number_or_none(context), reply)
            return flwr.app.Message(records_of(sent), reply_to=message)

        return answer

    app = ClientApp()
    app.query()(introduce)
    app.train()(answering("train"))
    app.evaluate()(answering("evaluate"))
    app.query("calibrate")(answering("calibrate"))
    app.query("once")(answering("once"))
    return app


def client_number(context: Context) -> int:
    """The number of the client that a node is; raise FederationError if the node's configuration does not say."""
    number = context.node_config.get(NODE_CONFIG_KEY)
    if not isinstance(number, int) or isinstance(number, bool) or number < 0:
        raise FederationError(
            f"this node's {NODE_CONFIG_KEY} is {number!r}: start every SuperNode with a number of its own, from 0, as "
            f'in --node-config "{NODE_CONFIG_KEY}=0"'
        )
    return number


def number_or_none(context: Context) -> int:
    """Return the number of the client that a node is, -1 if its configuration does not say."""
    number = context.node_config.get(NODE_CONFIG_KEY)
    return number if isinstance(number, int) else -1


def question_in(message: flwr.app.Message, context: Context) -> Question:
    """Return the question in a message of the server.

    Raises:
        FedBayesError: it is no FusionStrategy's, or the node does not know which client it is.
    """
    content = message.content
    arrays, config = content.get("arrays"), content.get("config")
    if not isinstance(arrays, ArrayRecord) or not isinstance(config, ConfigRecord):
        raise ClientMismatch("the server's message has no arrays or no config: it is none of FusionStrategy's")
    told = content.get(COUNTED, content.get(TOLD))
    told = tensors_in(told, "the server") if isinstance(told, ArrayRecord) else None
    return Question(client_number(context), dict(config), tensors_in(arrays, "the server"), told)
