"""Without the private names of Lightning, or with a version that was not tested, federations train all the same."""

import subprocess
import sys

import lightning as L
import pytest

import lightning_fedbayes as fb
from lightning_fedbayes.core.errors import FederationError
from tests.federations import Plain, assert_equal, federate, parameters

pytestmark = pytest.mark.slow

WITHOUT = """
import lightning.pytorch.strategies.launchers as launchers
del launchers._MultiProcessingLauncher, launchers._SubprocessScriptLauncher
import lightning_fedbayes as fb
from tests.federations import Plain, blobs, federate, loader
auto = fb.fusion.AutoFusion(["fedavg", "linear_pool"], score=lambda m, b: 0.0)
callback = fb.FederatedBayes(fb.IIDPartition(3), fusion=auto)
federate(Plain(), callback, val=loader(blobs(20), shuffle=False))
print(len(callback.history), callback.history[-1]["failed_clients"])
"""


def test_a_process_without_private_names_of_lightning_imports_and_trains():
    run = subprocess.run([sys.executable, "-W", "ignore", "-c", WITHOUT], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "2 0.0"


@pytest.mark.parametrize("engine", ["auto", "sequential"])
def test_an_untested_version_takes_lightning_s_own_loop_and_one_line_says_so(engine, monkeypatch, caplog):
    caplog.set_level("INFO")
    fast = Plain()
    federate(fast, fb.FederatedBayes(fb.IIDPartition(3), engine="sequential"))
    assert "is not tested" not in caplog.text
    monkeypatch.setattr(L, "__version__", "2.99.0")
    own = Plain()
    federate(own, fb.FederatedBayes(fb.IIDPartition(3), engine=engine))
    assert_equal(parameters(own), parameters(fast))
    assert sum("own loop runs" in record.message for record in caplog.records) == 1


def test_the_vectorized_engine_is_refused_with_an_untested_version(monkeypatch):
    monkeypatch.setattr(L, "__version__", "2.99.0")
    with pytest.raises(FederationError, match=r"the fast loop is not tested with lightning 2\.99\.0"):
        federate(Plain(), fb.FederatedBayes(fb.IIDPartition(3), engine="vectorized"))
