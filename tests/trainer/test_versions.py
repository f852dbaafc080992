"""With a version of Lightning that was not tested federations train by its own loop."""

import lightning as L
import pytest

import lightning_fedbayes as fb
from lightning_fedbayes.core.errors import FederationError
from tests.federations import Plain, assert_equal, federate, parameters

pytestmark = pytest.mark.slow


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
