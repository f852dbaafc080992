"""ClientApps of a small federation."""

from __future__ import annotations

from typing import Any

from lightning_fedbayes.flower import FusionStrategy, client_app, initial_arrays
from tests.flower.grid import LocalGrid
from tests.transport.federation import PARTITION, BlobData, hybrid


def client_apps(clients: int = 4, make: Any = hybrid, shared: bool = True, **settings: Any) -> list[Any]:
    """One ClientApp per client: the same one, as in a simulation, or a new one per message, as in a deployment."""

    def app() -> Any:
        return client_app(make(), BlobData(), partition=PARTITION, trainer={"accelerator": "cpu"}, **settings)

    return [app() if shared else lambda message, context: app()(message, context)] * clients


def run(grid: LocalGrid, strategy: FusionStrategy, rounds: int = 3, make: Any = hybrid, **arrays: Any) -> Any:
    """The strategy's result after ``rounds``."""
    return strategy.start(grid, initial_arrays(make(), **arrays), rounds, timeout=1)
