"""Every rule gives the same whether one process has all clients or several have some of them."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lightning_fedbayes.core.exchange import ALONE

from .fusions import SPREADS, WEIGHTINGS, everything, rules

SCRIPT = Path(__file__).with_name("fusions.py")
CASES = [(name, i) for name, rule in rules() for i in range(len(WEIGHTINGS) if rule.uses_weights else 1)]


@pytest.fixture(scope="module", params=SPREADS)
def both(request, tmp_path_factory):
    """Results of every rule in one process, and in each of several."""
    spread = SPREADS[request.param]
    folder, ranks = tmp_path_factory.mktemp("fusions"), range(max(spread) + 1)
    started = [subprocess.Popen([sys.executable, str(SCRIPT), str(k), str(folder), request.param]) for k in ranks]
    assert [each.wait(120) for each in started] == [0 for _ in ranks]
    return everything(ALONE, spread), [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in ranks]


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
