"""The two apps of a Flower federation, from a Lightning module and a data module or a strategy."""

from collections.abc import Callable, Sequence
from typing import Any

import flwr.app
import lightning as L
from flwr.app import ArrayRecord, ConfigRecord, Context
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from lightning_fedbayes.core.errors import ClientMismatch, FederationError, check_at_least, check_kind, check_number
from lightning_fedbayes.core.messages import Message
from lightning_fedbayes.transport.calibration import Calibration, check_calibration
from lightning_fedbayes.transport.client import STAGES, Asked, Question, RemoteClient
from lightning_fedbayes.transport.flower.strategy import FusionStrategy
from lightning_fedbayes.transport.flower.wire import record_of, records_of, tensors_in
from lightning_fedbayes.transport.messages import COUNTED, initial_model
from lightning_fedbayes.transport.one_shot import TOLD

NODE_CONFIG_KEY = "partition-id"
"""Key of the client's number in a node's configuration, in Flower's simulation and by ``--node-config``."""
DataModule = L.LightningDataModule | Callable[[Context], L.LightningDataModule]


def client_app(module: L.LightningModule, datamodule: DataModule, **options: Any) -> ClientApp:
    """Return the ClientApp of a client: it trains ``module`` on the client's data when the server asks for it.

    ::

        app = client_app(HybridBayesianClassifier(mlp(64, 10), bayesian_last=1), OwnData("/data"), local_epochs=2)

    Every random draw comes from the server's seed, the round and the client's number, which is the node's
    ``partition-id``, so a federation over Flower ends where one inside a single process ends. A client that raises is
    left out of the round. The server says why. Raise FederationError if an argument cannot be used.

    Args:
        module: the network, the same at every client and at the server. A message starts from it as it was built.
        datamodule: its training loader holds the client's data, or a function of the node's Context
            (``context.node_config["data"]``) that makes it.
        options: arguments of :class:`~lightning_fedbayes.transport.client.RemoteClient`.
    """
    client = RemoteClient(module, datamodule, **options)

    def answering(asked: Asked | None) -> Callable[[flwr.app.Message, Context], flwr.app.Message]:
        def answer(message: flwr.app.Message, context: Context) -> flwr.app.Message:
            def reply() -> Message:
                if asked is None:
                    return Message("introduction", client_number(context))
                return client.reply(asked, question_in(message, context), context)

            number = context.node_config.get(NODE_CONFIG_KEY)
            number = number if isinstance(number, int) else -1
            records = client.attempt(STAGES[asked] if asked else "introduction", number, reply, records_of)
            return flwr.app.Message(records, reply_to=message)

        return answer

    app = ClientApp()
    app.query()(answering(None))
    app.train()(answering("train"))
    app.evaluate()(answering("evaluate"))
    app.query("calibrate")(answering("calibrate"))
    app.query("once")(answering("once"))
    return app


def client_number(context: Context) -> int:
    """Return the client's number of a node. Raise FederationError if the node's configuration lacks it."""
    number = context.node_config.get(NODE_CONFIG_KEY)
    if not isinstance(number, int) or isinstance(number, bool) or number < 0:
        remedy = f'start every SuperNode with another number from 0, as by --node-config "{NODE_CONFIG_KEY}=0"'
        raise FederationError(f"this node's {NODE_CONFIG_KEY} is {number!r}: {remedy}")
    return number


def question_in(message: flwr.app.Message, context: Context) -> Question:
    """Return the question in a server's message. Raise FedBayesError for foreign messages or an unnumbered node."""
    content = message.content
    arrays, config = content.get("arrays"), content.get("config")
    if not isinstance(arrays, ArrayRecord) or not isinstance(config, ConfigRecord):
        raise ClientMismatch("the server's message has no arrays or no config: it is none of FusionStrategy's")
    told = content.get(COUNTED, content.get(TOLD))
    told = tensors_in(told, "the server") if isinstance(told, ArrayRecord) else None
    return Question(client_number(context), dict(config), tensors_in(arrays, "the server"), told)


def initial_arrays(module: L.LightningModule, **options: Any) -> ArrayRecord:
    """Return the arrays that a federation starts from: posterior and buffers of ``module``, a digest of what is frozen.

    Where the module trains with :class:`~lightning_fedbayes.IVON`, its ``configure_optimizers`` must work without
    more of a Trainer than ``max_epochs`` and ``estimated_stepping_batches``: the server calls it once, to find the
    parameters with a posterior, and whether clients are to be asked for steps. ``options`` are ``buffers``,
    ``local_parameters`` and ``posterior`` of the clients, see :class:`~lightning_fedbayes.FederatedBayes`.
    """
    return record_of(initial_model(module, **options))


def server_app(
    module: L.LightningModule,
    strategy: FusionStrategy,
    *,
    rounds: int,
    timeout: float = 3600,
    calibration: Sequence[Calibration] = (),
    **options: Any,
) -> ServerApp:
    """Return the ServerApp of a federation.

    ::

        app = server_app(module, FusionStrategy("conflation", checkpoint="/var/lib/federation.pt"), rounds=50)

    With a checkpoint, a run that was killed goes on when it is submitted again, and
    :func:`~lightning_fedbayes.transport.flower.load_checkpoint` loads the fused network afterwards. Raise
    FederationError if an argument cannot be used.

    Args:
        module: the network before training, the same as the clients'.
        strategy: runs the rounds.
        rounds, timeout, calibration: see :meth:`FusionStrategy.start`, ``num_rounds`` and the others.
        options: ``buffers``, ``local_parameters`` and ``posterior`` of :func:`client_app`.
    """
    check_kind("strategy", strategy, FusionStrategy, "give a FusionStrategy")
    check_at_least("rounds", rounds, 1)
    check_number("timeout", timeout, "(0, inf)")
    check_calibration(calibration)
    arrays = initial_arrays(module, **options)
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        strategy.start(grid, arrays, num_rounds=rounds, timeout=timeout, calibration=calibration)

    return app
