"""A user's own source of posteriors, as docs/extend.md writes it: both engines, resumed, by an average and by sites."""

import re
from pathlib import Path

import pytest

import lightning_fedbayes as fb
from lightning_fedbayes.core.errors import FederationError
from tests.federations import Plain, assert_close, federate, loader, quiet_checkpoints, saving

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
    settings = {"posterior": own_source(), "fusion": fusion, "engine": engine, "seed": 1}
    made = fb.FederatedBayes(fb.SizesPartition((40, 30, 20)), **settings)
    federate(module, made, rounds, loader(), **options)
    return made


@pytest.mark.parametrize("fusion", ["linear_pool", "sites", "fednova"])
def test_both_engines_give_the_same_posterior(fusion):
    one, other = trained(fusion=fusion), trained(fusion=fusion, engine="vectorized")
    assert_close(one.posterior, other.posterior, 1e-5, 1e-5)


@quiet_checkpoints
def test_it_is_resumed_bit_by_bit(tmp_path):
    whole = trained()
    trained(2, **saving(tmp_path, save_last=True))
    assert_close(whole.posterior, trained(ckpt_path=tmp_path / "last.ckpt").posterior)
    assert all(bool(value.all()) for value in whole.posterior.variance.values())


def test_what_is_no_source_is_refused():
    with pytest.raises(FederationError, match=r"give .*PosteriorSource"):
        fb.FederatedBayes(posterior="laplace")  # pyright: ignore[reportArgumentType]
