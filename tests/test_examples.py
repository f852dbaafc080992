"""Examples and notebooks that no other test runs."""

import importlib.util
import json
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parents[1] / "examples"


def load(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SCRIPTS = {  # script and its arguments → packages that it needs, least accuracy
    ("own_network", "rounds", 8): ((), 0.85),  # an average under the fixed prior goes to its width, and ends at chance
    ("fine_tune", "lora", False): ((), 0.85),
    ("fine_tune", "lora", True): (("transformers", "peft"), 0.6),
}


@pytest.mark.filterwarnings("ignore")  # of attention in a stack, and of transformers
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_learns_a_posterior(script):
    name, argument, value = script
    packages, least = SCRIPTS[script]
    for package in packages:
        pytest.importorskip(package)
    scores = load(name).main(**{argument: value})
    assert scores["val/accuracy"] > least
    assert scores["val/epistemic"] > 0
    if value is False:  # a head above a frozen network is all that travels:
        numbers = 3 * (256 * 10 + 10) + 2  # mean, gradient and precision of a client, and two numbers
        assert scores["megabytes_up"] == pytest.approx(5 * 4e-6 * numbers)  # five clients, float32


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


NOTEBOOKS = {  # name → what its text says of the names that it leaves
    "ten_minutes_on_digits": lambda found: (
        found["curves"]["sites"][-1] < 0.5 * found["curves"]["FedAvg"][-1]
        and 1 - found["rows"][3][3] > 2 * (1 - found["rows"][1][3])  # in doubt of turned digits
    ),
    "a_hospitals_afternoon": lambda found: (
        found["scores"]["test/scaled/nll"] < found["scores"]["test/nll"]
        and found["scores"]["test/lac_90/coverage"] > 0.85
        and 0.85 < found["intervals"].evaluate(found["regressor"], found["test"]).mean("coverage") < 0.98
        and found["probs"][0, 0] > 0.9
    ),
}


@pytest.mark.filterwarnings("ignore")  # of Lightning and of exporters
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_is_stored_without_output_and_shows_what_it_says(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = {}
    for cell in json.loads((EXAMPLES / "notebooks" / f"{name}.ipynb").read_text())["cells"]:
        text = "".join(line for line in cell["source"] if not line.startswith("%"))
        if cell["cell_type"] == "markdown":
            text = "".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL))  # an app, which is made and not run
        assert not cell.get("outputs")
        exec(text, found)
    assert NOTEBOOKS[name](found)
