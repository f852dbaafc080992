"""Parts of the experiments with untrusted parties: fixed features of images, and stochastic gradients."""

import pytest

from benchmarks.untrusted.attacks import RULES, attacks_of, run

pytestmark = pytest.mark.slow


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("rule", "adversaries"), [("reverse-KL barycenter", 1), ("geometric median", 3)])
def test_bad_clients_cost_at_most_three_hundredths(rule, adversaries):
    """Digits, ten clients. Unguarded, the first rule had 0.1 under the first attack, the second under the last."""
    honest, _ = run(RULES[rule], [], seed=0)
    assert honest > 0.93
    attacks = attacks_of(list(range(adversaries)))
    for title in ("flipped × 10, σ² × 1e-10", "update × 1e6", "honest, σ² × 1e10"):
        assert run(RULES[rule], attacks[title], seed=0)[0] >= honest - 0.03, title
