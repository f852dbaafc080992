"""What is frozen at both ends is not sent; only a digest is, by which a client knows that its own is the server's."""

from functools import partial

import pytest
import torch

import lightning_fedbayes as fb
from lightning_fedbayes.methods import FedProx
from lightning_fedbayes.transport.flower import FusionStrategy, load_checkpoint
from tests.federations import Plain, network
from tests.flower.clients import client_apps, run
from tests.flower.grid import LocalGrid
from tests.transport.federation import in_process

pytestmark = pytest.mark.slow

FROZEN, HEAD = ("net.0.weight", "net.0.bias"), ("net.2.weight", "net.2.bias")


def frozen(seed: int = 0, layers: tuple[int, ...] = (0,), **options) -> Plain:
    module = Plain(network(), **options)
    for layer in layers:
        module.net[layer].requires_grad_(False)
    if seed:
        torch.manual_seed(seed)
        torch.nn.init.normal_(module.net[0].weight)
    return module


@pytest.mark.parametrize(
    ("make", "options"),
    [(frozen, {}), (frozen, {"fusion": FedProx(0.1)}), (partial(frozen, optimizer=fb.IVON), {"fusion": "sites"})],
    ids=["averaged", "FedProx", "IVON by sites"],
)
def test_only_what_trains_travels_and_it_is_what_one_process_has(make, options, tmp_path):
    rule = {"fusion": options.get("fusion", "rklb")}
    strategy = FusionStrategy(**rule, wait_for=4, seed=3, checkpoint=tmp_path / "server.pt")
    grid = LocalGrid(client_apps(make=make, state_folder=tmp_path, **options))
    result = run(grid, strategy, make=make)
    alone = in_process(make=make, **{**rule, **options}, seed=3)
    assert {key.partition("/")[2] for key in result.arrays if not key.startswith("buffer/method/")} == {*HEAD}
    for name in HEAD:
        assert torch.equal(strategy.server.posterior.mean[name], alone.posterior.mean[name])
        assert torch.equal(strategy.server.posterior.variance[name], alone.posterior.variance[name])
    module = make()
    load_checkpoint(module, tmp_path / "server.pt")
    for name, value in module.state_dict().items():
        assert torch.equal(value, alone.posterior.mean[name]), name
