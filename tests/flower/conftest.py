"""State that Flower's own processes set before they run an app."""

import pytest
from flwr.supercore.task_identity import TaskIdentity


@pytest.fixture(autouse=True)
def _server_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages may be made here, as in the process of a ServerApp."""
    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)
