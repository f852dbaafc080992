"""The method that docs/methods.md writes, as it stands there: on both engines, resumed, with privacy, and its limit."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

import lightning_fedbayes as fb
from lightning_fedbayes.methods import unregister_method
from tests.federations import FEATURES, Plain, bayesian, federate, loader

PAGE = Path(__file__).parents[2] / "docs" / "methods.md"


@pytest.fixture
def written():
    """The class of the page's block, up to where it is used; its name is registered."""
    block = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[0]
    code, use = block.split("# -- use it\n")
    assert len(code.strip().splitlines()) <= 45
    assert use
    space: dict = {"__name__": "page"}
    exec(compile(code, str(PAGE), "exec", dont_inherit=True), space)
    yield space["MyFedDyn"]
    unregister_method("my_feddyn")


def trained(make, rounds=3, engine="sequential", fraction=1.0, **options):
    module = make()
    privacy = options.pop("privacy", None)
    made = fb.FederatedBayes(
        fb.DirichletPartition(4, alpha=0.5), fusion="my_feddyn", engine=engine, local_epochs=2, fraction=fraction,
        seed=3, privacy=privacy,
    )
    federate(module, made, rounds, loader(), **options)
    return made


def same(first, second, tolerance=0.0):
    for name, value in first.posterior.mean.items():
        torch.testing.assert_close(second.posterior.mean[name], value, rtol=tolerance, atol=tolerance)


@pytest.mark.usefixtures("written")
@pytest.mark.filterwarnings("ignore:.*exists and is not empty.*", "ignore:.*callbacks used to create.*")
@pytest.mark.parametrize("fraction", [1.0, 0.5])
@pytest.mark.parametrize("make", [Plain, bayesian])
def test_both_engines_and_a_killed_run_end_alike(make, fraction, tmp_path):
    whole = trained(make, fraction=fraction)
    if make is Plain:  # the other draws
        same(whole, trained(make, engine="vectorized", fraction=fraction), 1e-5)
    trained(make, 2, fraction=fraction, callbacks=[ModelCheckpoint(tmp_path, save_last=True)],
            enable_checkpointing=True)
    again = trained(make, fraction=fraction, ckpt_path=tmp_path / "last.ckpt")
    same(whole, again)


@pytest.mark.usefixtures("written")
def test_noise_protects_what_it_sends():
    made = trained(Plain, privacy=fb.UpdatePrivacy(clip=1.0, noise_multiplier=0.1))
    assert made.history[-1]["valid_clients"] == 4


def test_it_ends_where_pooled_training_ends(written):
    """Least squares of unlike clients: the minimum of the weighted loss, which averages miss."""
    random = torch.Generator().manual_seed(0)
    parts, gram, moment = {}, 0, 0
    for number in range(3):
        x = torch.randn(20, FEATURES, generator=random) * (1 + number)
        y = x @ torch.linspace(-1, 1, FEATURES) + number
        parts[str(number)] = torch.utils.data.TensorDataset(x, y)
        gram, moment = gram + x.T @ x, moment + x.T @ y
    best = torch.linalg.solve(gram, moment)

    class Squares(Plain):
        def __init__(self):
            super().__init__(torch.nn.Linear(FEATURES, 1, bias=False), lr=0.03)

        def training_step(self, batch, batch_idx):
            x, y = batch
            return (self(x)[:, 0] - y).square().mean() / 2

    distances = {}
    for name, method in {"average": "weighted_average", "own": written(1.0)}.items():
        module = Squares()
        made = fb.FederatedBayes(fusion=method, local_epochs=30, seed=1, max_influence=None)
        federate(module, made, 60, loader(fb.ClientDatasets(parts), batch_size=20))
        distances[name] = float((module.net.weight[0].detach() - best).norm())
    assert distances["own"] < 0.01 < 0.03 < distances["average"]
