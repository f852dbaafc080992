"""Examples that no other test runs."""

import importlib.util
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parents[1] / "examples"


def load(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.filterwarnings("ignore:.*There is a performance drop:UserWarning")  # torch of attention in a stack
def test_a_transformer_learns_a_posterior_from_its_optimizer():
    scores = load("own_network").main(rounds=8)
    assert scores["val/accuracy"] > 0.85  # an average under the fixed prior goes to its width, and ends at chance
    assert scores["val/epistemic"] > 0


def test_a_head_above_a_frozen_network_is_all_that_travels():
    scores = load("fine_tune").main()
    assert scores["val/accuracy"] > 0.85
    assert scores["val/epistemic"] > 0
    numbers = 3 * (256 * 10 + 10) + 2  # mean, gradient and precision of a client, and two numbers
    assert scores["megabytes_up"] == pytest.approx(5 * 4e-6 * numbers)  # five clients, float32


@pytest.mark.filterwarnings("ignore")  # of transformers
def test_adapters_in_a_bert_learn_a_posterior():
    pytest.importorskip("transformers")
    pytest.importorskip("peft")
    scores = load("fine_tune").main(lora=True)
    assert scores["val/accuracy"] > 0.6
    assert scores["val/epistemic"] > 0


@pytest.mark.filterwarnings("ignore:.*")  # of exporters, about their own parts
def test_an_exported_network_predicts_the_posterior_mean(tmp_path):
    distances = load("export").main(tmp_path)
    assert {"state_dict", "torch.export"} <= distances.keys()
    assert max(distances.values()) < 1e-5
    assert (tmp_path / "network.pt2").exists()


def test_plain_torch_learns_without_a_trainer(capsys):
    accuracies = load("plain_torch").main()
    assert len(capsys.readouterr().out.splitlines()) == len(accuracies) == 10
    assert accuracies[0] < 0.85 < accuracies[-1]


GALLERY = {  # job → setting of a short run, and what has to hold of its figures
    "survival": ({"rounds": 10}, lambda found: found["federation"] > found["alone"] + 0.02),
    "schools": ({}, lambda found: found["posterior"] < min(found["alone"], found["one"])),
    "activity": ({"rounds": 4}, lambda found: found["own"] < 0.9 * min(found["alone"], found["population"])),
    "images": ({"rounds": 2}, lambda found: found["exact"] > max(0.95, found["FedAvg"]) and found["AUROC"] > 0.8),
    "text": ({"rounds": 6}, lambda found: found["accuracy"] > 0.65 and found["adapters"] < found["whole"] / 7),
    "segmentation": ({"rounds": 15}, lambda found: found["wrong"] > 2 * found["right"] and found["coverage"] > 0.98),
    "labels": ({"rounds": 8}, lambda found: found["ece"] < 0.02 and 0.84 < found["coverage"] < 0.96),
    "untrusted": ({"rounds": 6}, lambda found: found["sites, guard"] > found["sites, no guard"] + 0.2),
}


@pytest.mark.filterwarnings("ignore")  # of Lightning about small runs without a logger
@pytest.mark.parametrize("name", GALLERY)
def test_a_job_of_the_gallery_shows_what_its_page_says(name, tmp_path, capsys):
    setting, holds = GALLERY[name]
    found = load(f"gallery/{name}").main(tmp_path, **setting)
    assert holds(found), found
    assert capsys.readouterr().out.startswith("| ")
    assert (tmp_path / f"{name}.png").stat().st_size > 5000
