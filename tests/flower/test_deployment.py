"""The example over Flower's own processes."""

from pathlib import Path
from runpy import run_path

import pytest

import lightning_fedbayes as fb
from lightning_fedbayes.transport.flower import load_checkpoint
from tests.federations import assert_close, trainer
from tests.flower.deployment import deployed

pytestmark = pytest.mark.slow

EXAMPLE = Path(__file__).parents[2] / "examples" / "flower"


def test_a_deployment_ends_at_the_posterior_of_a_single_process(tmp_path):
    """TLS, authenticated nodes, a process per message."""
    make = run_path(str(EXAMPLE / "digits_app.py"))["network"]
    federation = fb.FederatedBayes(
        fb.DirichletPartition(clients=2, alpha=0.5), fusion="rklb", local_epochs=2, engine="sequential"
    )
    trainer(2, [federation], limit_val_batches=0).fit(make(), datamodule=fb.DigitsDataModule())
    with deployed(tmp_path) as deployment:
        deployment.start_nodes(2)
        deployment.run(EXAMPLE, f'rounds=2 checkpoint="{tmp_path}/federation.pt" evaluate=false')
    network = make()
    state = load_checkpoint(network, tmp_path / "federation.pt")
    assert [figures["valid_clients"] for figures in state.history] == [2, 2]
    assert_close(state.posterior, federation.posterior, rtol=1e-6, atol=1e-7)
    assert any(bool((variance > 0).any()) for variance in state.posterior.variance.values())
