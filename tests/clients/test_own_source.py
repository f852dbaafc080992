"""A user's own source of posteriors, as docs/extend.md writes it: both engines, resumed, by an average and by sites."""

import re
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

import lightning_fedbayes as fb
from lightning_fedbayes.core.errors import FederationError
from tests.federations import Plain, federate, loader

pytestmark = pytest.mark.slow

PAGE = Path(__file__).parents[2] / "docs" / "extend.md"


def own_source():
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (code,) = [block.split("\n\n\nnetwork = ")[0] for block in blocks if "PosteriorSource" in block]
    space: dict = {"__name__": "page"}
    exec(compile(code, str(PAGE), "exec", dont_inherit=True), space)
    return space["Travelled"]()


def trained(rounds=3, engine="sequential", **options):
    module, fusion = Plain(), options.pop("fusion", "linear_pool")
    made = fb.FederatedBayes(
        fb.SizesPartition((40, 30, 20)), posterior=own_source(), fusion=fusion, engine=engine, seed=1
    )
    federate(module, made, rounds, loader(), **options)
    return made


def close(first, second, tolerance=0.0):
    for part in ("mean", "variance"):
        for name, value in getattr(first.posterior, part).items():
            torch.testing.assert_close(getattr(second.posterior, part)[name], value, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("fusion", ["linear_pool", "sites", "fednova"])
def test_both_engines_give_the_same_posterior(fusion):
    close(trained(fusion=fusion), trained(fusion=fusion, engine="vectorized"), 1e-5)


@pytest.mark.filterwarnings("ignore:.*exists and is not empty.*", "ignore:.*callbacks used to create.*")
def test_it_is_resumed_bit_by_bit(tmp_path):
    whole = trained()
    trained(2, callbacks=[ModelCheckpoint(tmp_path, save_last=True)], enable_checkpointing=True)
    close(whole, trained(ckpt_path=tmp_path / "last.ckpt"))
    assert all(bool(value.all()) for value in whole.posterior.variance.values())


def test_what_is_no_source_is_refused():
    with pytest.raises(FederationError, match=r"give .*PosteriorSource"):
        fb.FederatedBayes(posterior="laplace")  # pyright: ignore[reportArgumentType]
