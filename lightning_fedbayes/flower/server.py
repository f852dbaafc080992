"""The server of a Flower federation in one line."""

from __future__ import annotations

from collections.abc import Sequence

import lightning as L
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp

from lightning_fedbayes.clients.settings import BufferPolicy, Source
from lightning_fedbayes.core.errors import check_at_least, check_kind, check_number
from lightning_fedbayes.flower.strategy import FusionStrategy
from lightning_fedbayes.flower.wire import record_of
from lightning_fedbayes.transport.calibration import Calibration, check_calibration
from lightning_fedbayes.transport.initial import initial_model


def initial_arrays(
    module: L.LightningModule,
    *,
    buffers: BufferPolicy = "average",
    local_parameters: Sequence[str] = (),
    posterior: Source | None = None,
) -> ArrayRecord:
    """Return the arrays that a federation starts from: posterior and buffers of ``module``, of frozen ones a digest.

    Where the module trains with :class:`~lightning_fedbayes.IVON`, its ``configure_optimizers`` must work without a
    Trainer: the server calls it once, to know which parameters have a posterior.

    Args:
        module: the network.
        buffers, local_parameters: tensors that stay at the clients; see :class:`~lightning_fedbayes.FederatedBayes`.
        posterior: see there; that of the clients.
    """
    return record_of(initial_model(module, buffers=buffers, local_parameters=local_parameters, posterior=posterior))


def server_app(
    module: L.LightningModule,
    strategy: FusionStrategy,
    *,
    rounds: int,
    timeout: float = 3600,
    buffers: BufferPolicy = "average",
    local_parameters: Sequence[str] = (),
    posterior: Source | None = None,
    calibration: Sequence[Calibration] = (),
) -> ServerApp:
    """Return the ServerApp of a federation.

    ::

        app = server_app(module, FusionStrategy("conflation", checkpoint="/var/lib/federation.pt"), rounds=50)

    With a checkpoint, a run that was killed goes on when it is submitted again, and
    :func:`~lightning_fedbayes.flower.load_checkpoint` loads the fused network afterwards.

    Args:
        module: the network before training, the same as the clients'.
        strategy: runs the rounds.
        rounds: number of rounds, those in the checkpoint among them.
        timeout: seconds that a round waits for its clients.
        buffers, local_parameters, posterior: those of :func:`~lightning_fedbayes.flower.client_app`.
        calibration: see :meth:`FusionStrategy.start`.

    Raises:
        FederationError: an argument cannot be used.
    """
    check_kind("strategy", strategy, FusionStrategy, "give a FusionStrategy")
    check_at_least("rounds", rounds, 1)
    check_number("timeout", timeout, "(0, inf)")
    check_calibration(calibration)
    arrays = initial_arrays(module, buffers=buffers, local_parameters=local_parameters, posterior=posterior)
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        strategy.start(grid, arrays, num_rounds=rounds, timeout=timeout, calibration=calibration)

    return app
