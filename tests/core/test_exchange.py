"""Every rule gives the same whether one process has all clients or several have some of them."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lightning_fedbayes.core.exchange import ALONE

from .fusions import SPREADS, WEIGHTINGS, everything, rules

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).with_name("fusions.py")
CASES = [(name, i) for name, rule in rules() for i in range(len(WEIGHTINGS) if rule.uses_weights else 1)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What each of three processes has fused."""
    folder = tmp_path_factory.mktemp("fusions")
    started = [subprocess.Popen([sys.executable, str(SCRIPT), str(rank), str(folder)]) for rank in range(3)]
    assert [each.wait(200) for each in started] == [0, 0, 0]
    return folder


@pytest.fixture(scope="module", params=SPREADS)
def both(request, folder):
    """Results of every rule in one process, and in each of several."""
    spread = SPREADS[request.param]
    paths = [folder / f"{request.param}.{rank}.pt" for rank in range(max(spread) + 1)]
    return everything(ALONE, spread), [torch.load(path, weights_only=False) for path in paths]


@pytest.mark.parametrize(("name", "weighting"), CASES)
def test_fusion_does_not_depend_on_where_clients_are(both, name, weighting):
    alone, several = both
    expected = alone[name, weighting]
    for results in several:
        result = results[name, weighting]
        for part in ("mean", "variance"):
            torch.testing.assert_close(
                result.posterior.state_dict()[part], expected.posterior.state_dict()[part], rtol=1e-6, atol=1e-9
            )
        torch.testing.assert_close(result.buffers, expected.buffers, rtol=1e-6, atol=1e-9)
        assert result.weights == pytest.approx(expected.weights, rel=1e-6, abs=1e-12)
        assert result.metrics == pytest.approx(expected.metrics, rel=1e-6, abs=1e-12)
        assert (result.inferred, result.excluded.keys()) == (expected.inferred, expected.excluded.keys())
