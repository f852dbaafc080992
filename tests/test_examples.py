"""Examples that no other test runs."""

import importlib.util
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


def load(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.filterwarnings("ignore:.*There is a performance drop:UserWarning")  # torch of attention in a stack
def test_a_transformer_learns_a_posterior_from_its_optimizer():
    scores = load("own_network").main()
    assert scores["val/accuracy"] > 0.85  # an average under the fixed prior goes to its width, and ends at chance
    assert scores["val/epistemic"] > 0


def test_plain_torch_learns_without_a_trainer(capsys):
    accuracies = load("plain_torch").main()
    assert len(capsys.readouterr().out.splitlines()) == len(accuracies) == 10
    assert accuracies[0] < 0.85 < accuracies[-1]
