"""ClientApps of a small federation."""

from typing import Any

from lightning_fedbayes.transport.flower import FusionStrategy, client_app, initial_arrays
from tests.federations import assert_close
from tests.flower.grid import LocalGrid
from tests.transport.federation import PARTITION, BlobData, hybrid


def client_apps(
    clients: int = 4, make: Any = hybrid, shared: bool = True, data: Any = BlobData, **settings: Any
) -> list[Any]:
    """One ClientApp per client: the same one, as in a simulation, or a new one per message, as in a deployment."""

    def app() -> Any:
        return client_app(make(), data(), **{"partition": PARTITION, "trainer": {"accelerator": "cpu"}, **settings})

    return [app() if shared else lambda message, context: app()(message, context)] * clients


def run(grid: LocalGrid, strategy: FusionStrategy, rounds: int = 3, make: Any = hybrid, **arrays: Any) -> Any:
    """The strategy's result after ``rounds``."""
    return strategy.start(grid, initial_arrays(make(), **arrays), rounds, timeout=1)


def one_shot(apps: list[Any], method: Any, make: Any, change: Any = None) -> Any:
    """The fit of one exchange; ``change`` is of all replies of a client."""
    grid = LocalGrid(apps, change, kinds=None)
    return FusionStrategy(wait_for=len(apps)).one_shot(grid, initial_arrays(make()), method, timeout=1)


def assert_same(strategy: Any, federation: Any) -> None:
    """Bit by bit."""
    ours, theirs = strategy.server.posterior, federation.posterior
    assert ours.linearised == theirs.linearised
    assert_close(ours, theirs)
