"""The server of a Flower federation in one line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning as L
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp

from lightning_fedbayes.core.errors import check_at_least, check_kind, check_number
from lightning_fedbayes.flower.strategy import FusionStrategy
from lightning_fedbayes.flower.wire import record_of
from lightning_fedbayes.transport.calibration import Calibration, check_calibration
from lightning_fedbayes.transport.messages import initial_model


def initial_arrays(module: L.LightningModule, **options: Any) -> ArrayRecord:
    """Return the arrays that a federation starts from: posterior and buffers of ``module``, a digest of what is frozen.

    Where the module trains with :class:`~lightning_fedbayes.IVON`, its ``configure_optimizers`` must work without a
    Trainer: the server calls it once, to find the parameters with a posterior.

    Args:
        module: the network.
        options: ``buffers``, ``local_parameters`` and ``posterior`` of the clients; see
            :class:`~lightning_fedbayes.FederatedBayes`.
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
    :func:`~lightning_fedbayes.flower.load_checkpoint` loads the fused network afterwards.

    Args:
        module: the network before training, the same as the clients'.
        strategy: runs the rounds.
        rounds: number of rounds, rounds in the checkpoint included.
        timeout: seconds that a round waits for its clients.
        calibration: see :meth:`FusionStrategy.start`.
        options: ``buffers``, ``local_parameters`` and ``posterior`` of :func:`~lightning_fedbayes.flower.client_app`.

    Raises:
        FederationError: an argument cannot be used.
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
