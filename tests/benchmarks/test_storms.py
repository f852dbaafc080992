"""The storms over stored files and memory, at a small size."""

import gc
import random
import weakref

import pytest

import lightning_fedbayes as fb
from benchmarks.engine import storms
from lightning_fedbayes.clients import federation
from tests.federations import Plain, federate, quiet_checkpoints

pytestmark = quiet_checkpoints


@pytest.mark.slow
def test_a_flipped_bit_is_refused_or_changes_nothing(tmp_path, monkeypatch):
    pytest.importorskip("opacus")
    monkeypatch.setattr(storms.roster, "POLL_SECONDS", 0.005)
    found = storms.flips(90, random.Random(1), tmp_path)
    kinds = {outcome.partition(": ")[0] for outcome in found}
    assert {outcome.partition(": ")[2] for outcome in found} == {"refused", "harmless"}, found
    assert {f"{kind}: refused" for kind in kinds} <= found.keys()


def test_a_new_federation_lets_large_ones_go_that_are_over(monkeypatch):
    """Whatever the number of objects that wait for Python to collect them."""
    monkeypatch.setattr(federation, "MOST_HELD", 0)

    def fit():
        made = fb.FederatedBayes(fb.IIDPartition(3))
        federate(Plain(), made, 1)
        return weakref.ref(made.federation)

    gc.disable()
    try:
        earlier = fit()
        fit()
        assert earlier() is None
    finally:
        gc.enable()
