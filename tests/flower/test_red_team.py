"""A server that reads everything: what leaves clients under UpdatePrivacy is what the page on privacy lists."""

import re
import shutil
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.utils.data import TensorDataset

import lightning_fedbayes as fb
from lightning_fedbayes.clients.privacy.update import EXACT
from lightning_fedbayes.modules import mlp
from lightning_fedbayes.transport.checkpoint import ServerState
from lightning_fedbayes.transport.flower import FusionStrategy, initial_arrays
from tests.federations import Plain, hears, loader, trainer
from tests.flower.clients import client_apps, run
from tests.flower.deployment import deployed
from tests.flower.grid import LocalGrid
from tests.transport.federation import BlobData

PAGE = Path(__file__).parents[2] / "docs" / "what_leaves.md"
EXAMPLE = Path(__file__).parents[2] / "examples" / "flower"
ROUNDS, CLIP, NOISE = 20, 1.0, 0.5
SECRET = "patients/jane_doe_positive"

APP = '''
import os

import torch
from flwr.serverapp import ServerApp

import lightning_fedbayes as fb
from lightning_fedbayes.transport.flower import FusionStrategy, client_app, initial_arrays
from lightning_fedbayes.modules import mlp


class Careless(fb.HybridBayesianClassifier):
    """Its errors name what nobody may know."""

    def on_client_start(self, client):
        super().on_client_start(client)
        if (client.number, client.round) in ((1, 3), (0, 11)):
            raise FileNotFoundError("no file {secret}.dcm")
        if os.path.exists("{folder}/seen.pt") and (client.number, client.round) == (1, 1):
            os._exit(1)


def network():
    torch.manual_seed(0)
    return Careless(mlp(64, 10, hidden=[8]), bayesian_last=1, learning_rate=0.01)


client = client_app(
    network(), fb.DigitsDataModule(), partition=fb.IIDPartition(clients=2), keep=["posterior"],
    state_folder="{folder}/state", privacy=fb.UpdatePrivacy({clip}, {noise}), conformal_epsilon=1.0,
    trainer={{"accelerator": "cpu"}},
)
server = ServerApp()


class Tap:
    """A grid that writes down all that comes."""

    def __init__(self, grid):
        self.grid, self.seen = grid, []

    def __getattr__(self, name):
        return getattr(self.grid, name)

    def send_and_receive(self, messages, timeout=None):
        replies = list(self.grid.send_and_receive(messages, timeout=timeout))
        for reply in replies:
            if reply.has_error():
                self.seen.append({{"error": reply.error.reason}})
                continue
            self.seen.append({{
                name: {{
                    key: torch.from_numpy(value.numpy().copy()) if name == "arrays" else value
                    for key, value in record.items()
                }} for name, record in reply.content.items()
            }})
        return replies


@server.main()
def main(grid, context):
    tap = Tap(grid)
    strategy = FusionStrategy("rklb", weighting="equal", wait_for=2, evaluate=True)
    arrays = strategy.start(tap, initial_arrays(network()), {rounds}, timeout=600).arrays
    exact, noisy = fb.FederatedConformal(bins=64), fb.FederatedConformal(epsilon=1.0, bins=64)
    for callback in (fb.FederatedTemperature(), exact, noisy):
        try:
            strategy.calibrate(tap, arrays, [callback], timeout=600)
        except fb.core.errors.FederationError as error:
            print("refused:", error)
    try:
        strategy.one_shot(tap, arrays, fb.KroneckerLaplace(), timeout=600)
    except fb.core.errors.FederationError as error:
        print("refused:", error)
    torch.save(tap.seen, "{folder}/seen.pt")
    again = FusionStrategy("rklb", wait_for=2)
    again.start(grid, initial_arrays(network()), 2, timeout=600)
    torch.save((again.server.history, again.server.posterior.state_dict()), "{folder}/again.pt")
'''


def listed(private=True):
    """Message → "arrays", "metrics" or "config" → patterns of names that the page lists, under UpdatePrivacy or not."""
    rows = re.findall(r"^\| (every one|`\w+`) \|(.*?)\|(.*?)\|(.*?)\|(.*?)\|$", PAGE.read_text(), re.MULTILINE)
    table: dict[str, dict[str, list[str]]] = {}
    for kind, fields, _, plain, protected in rows:
        if private and protected.strip().startswith(("refused", "not sent", "with `share_errors")):
            continue
        if not private and not plain.strip():
            continue
        entry = table.setdefault(kind.strip("`"), {"arrays": [], "metrics": [], "config": []})
        for record, names in re.findall(r"`(\w+): (.*?)`", fields):
            entry[record] += names.split(", ")
    every = table.pop("every one")["config"]
    for entry in table.values():
        entry["config"] += every
    return table


def check_fields(replies, table):
    for reply in replies:
        patterns = table[reply["config"]["kind"]]
        assert reply.keys() <= {"arrays", "metrics", "config"}
        for record, content in reply.items():
            for name in content:
                assert any(fnmatchcase(name, pattern) for pattern in patterns[record]), (reply["config"], name)


def test_the_page_lists_what_the_door_knows():
    table = listed()
    assert {"introduction", "update", "counts", "failure"} == set(table)  # all others are refused
    kinds = set(re.findall(r"^\| `(\w+)` \|", PAGE.read_text(), re.MULTILINE))
    assert kinds == {"introduction", "update", "failure", *EXACT}


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """The records of every reply of a run over Flower's own processes; its log; and a second federation in it."""
    folder = tmp_path_factory.mktemp("run")
    shutil.copytree(EXAMPLE, folder / "app", ignore=shutil.ignore_patterns("__pycache__"))
    values = {"secret": SECRET, "folder": folder, "clip": CLIP, "noise": NOISE, "rounds": ROUNDS}
    (folder / "app" / "digits_app.py").write_text(APP.format(**values))
    with deployed(folder) as deployment:
        deployment.start_simulation(2)
        log = deployment.run(folder / "app", f"rounds={ROUNDS}")
    assert log.count("refused:") == 3, log
    return torch.load(folder / "seen.pt"), log, torch.load(folder / "again.pt")


@pytest.mark.slow
def test_no_field_leaves_a_client_that_the_page_does_not_list(seen):
    replies, table = seen[0], listed()
    kinds = [reply["config"]["kind"] for reply in replies]
    assert kinds.count("update") == 2 * ROUNDS - 2
    assert kinds.count("failure") == 2 + 2 * ROUNDS + 6  # two careless clients, every evaluation, three requests
    assert kinds.count("counts") == 2
    check_fields(replies, table)


@pytest.mark.slow
def test_no_text_of_an_exception_leaves_a_client(seen):
    replies = seen[0]
    failures = [reply["config"] for reply in replies if reply["config"]["kind"] == "failure"]
    assert {(each["error"], each["stage"]) for each in failures} == {
        ("FileNotFoundError", "training"),
        ("NotSent", "evaluation"),
        ("NotSent", "calibration"),
        ("ClientMismatch", "training"),
    }
    for reply in replies:
        assert "doe" not in str({name: str(content) for name, content in reply.items()})


@pytest.mark.slow
def test_a_simulated_client_whose_process_dies_is_left_out(seen):
    _, log, (history, posterior) = seen
    assert [figures["valid_clients"] for figures in history] == [2, 1]
    assert "client 1 failed: " in log.partition("refused:")[2], log
    assert not any(banner in log for banner in ("GPU available", "Tip: For seamless", "Trainer.fit` stopped"))
    assert all(torch.isfinite(mean).all() for mean in posterior["mean"].values())


def test_no_figure_of_an_update_is_exact(seen):
    """In the first round the residual of the clipped update has the standard deviation z C, in every entry."""

    module = fb.HybridBayesianClassifier(mlp(64, 10, hidden=[8]), bayesian_last=1, learning_rate=0.01)
    heard = hears(module)
    start = fb.read_posterior(module).clone()
    made = fb.FederatedBayes(fb.IIDPartition(clients=2), fusion="rklb", weighting="equal", engine="sequential")
    trainer(1, [made], limit_val_batches=0).fit(module, datamodule=fb.DigitsDataModule())
    first = [reply for reply in seen[0] if reply["config"]["kind"] == "update" and reply["config"]["server-round"] == 1]
    assert len(first) == 2
    for reply in first:
        exact = heard[reply["config"]["client"]]
        moved, sent = [], []
        for name, mean in start.mean.items():
            moved.append((exact.mean[name] - mean).flatten())
            sent.append((reply["arrays"][f"mean/{name}"] - mean).flatten())
            if f"variance/{name}" in reply["arrays"]:
                for values, into in ((exact.variance[name], moved), (reply["arrays"][f"variance/{name}"], sent)):
                    into.append((values / start.variance[name]).log().flatten() / 2)
        u = torch.cat(moved)
        residual = torch.cat(sent) - u * min(1.0, CLIP / float(u.norm()))
        assert float(residual.std()) == pytest.approx(CLIP * NOISE, rel=0.1)
        assert bool((torch.cat(sent) != u).all())
    epsilons = [reply.get("metrics", {}).get("privacy/epsilon", 0.0) for reply in seen[0]]
    assert max(epsilons) == pytest.approx(fb.UpdatePrivacy(CLIP, NOISE).figures(ROUNDS)["privacy/epsilon"], rel=0.05)


class Records(BlobData):
    """One record for each client."""

    def train_dataloader(self):
        return loader(self.dataset, batch_size=1)


@pytest.mark.slow
@pytest.mark.parametrize("epochs", [1, 3])
@pytest.mark.parametrize("mode", [fb.UpdatePrivacy, fb.ExamplePrivacy])
def test_a_server_that_draws_every_noise_again_finds_no_record(mode, epochs, tmp_path, monkeypatch):
    """It trains on both records that each client may have, with all that it knows as key, and takes the closer one."""
    pytest.importorskip("opacus")
    whose = torch.arange(8) % 2

    def sent(labels, folder, **options):
        made = mode(0.01, 30.0, **options)
        private = {"privacy": made} if mode is fb.UpdatePrivacy else {}
        trainer = {"accelerator": "cpu", "callbacks": [] if private else [made]}
        data = partial(Records, TensorDataset(torch.ones(8, 6), labels))
        told = {"local_epochs": epochs, "partition": fb.IIDPartition(8), "state_folder": folder, "trainer": trainer}
        grid = LocalGrid(client_apps(8, Plain, data=data, **told, **private))
        run(grid, FusionStrategy(wait_for=8, seed=3, checkpoint=folder / "server.pt"), 1, Plain)
        replies = {k: dict(reply.content["arrays"]) for k, asked, reply in grid.seen if "arrays" in reply.content}
        flat = [torch.cat([torch.tensor(a.numpy()).flatten() for a in replies[client].values()]) for client in range(8)]
        return torch.stack(flat)

    def attack(answers, folder):
        state = ServerState.load(folder / "server.pt")
        keys = [0, state.seed, str(state.seed), state.federation, ""]
        tried = []
        for i, key in enumerate(keys):
            with monkeypatch.context() as patch:
                patch.setattr("secrets.token_hex", lambda size, key=key: str(key))
                options = {"seed": key} if isinstance(key, int) else {}
                both = [sent(torch.full((8,), j), folder / f"{i}-{j}", **options) for j in range(2)]
            tried.append(torch.stack([(each - answers).norm(dim=1) for each in both]))
        closest = torch.stack(tried).amin(0)
        parts = fb.IIDPartition(8).split(whose, seed=3).indices
        found = sum(int(closest[:, k].argmin() == whose[part[0]]) for k, part in enumerate(parts))
        return found, float(closest.amin())

    known, closest = attack(sent(whose, tmp_path / "known", seed=3), tmp_path / "known")
    assert known == 8
    assert closest < 1e-5
    hidden, closest = attack(sent(whose, tmp_path / "hidden"), tmp_path / "hidden")
    assert hidden < 8
    assert closest > (0.1 * 0.01 * 30 if mode is fb.ExamplePrivacy else 0.01 * 30)


class Careless(Plain):
    def on_client_start(self, client):
        if client.number == 2 and client.round == 1:
            raise FileNotFoundError(SECRET)


@pytest.mark.slow
@pytest.mark.parametrize("shared", [True, False])
def test_without_privacy_too_no_field_leaves_a_client_that_the_page_does_not_list(shared, tmp_path):
    """Every kind of message: rounds with kept posteriors, evaluation, calibration, one shot, and a failure."""
    curvature = fb.KroneckerLaplace(fb.Laplace(prior_std=1.0))
    told = {"share_errors": shared, "one_shot": curvature}
    apps = client_apps(make=Careless, keep=["posterior"], state_folder=tmp_path, **told)
    grid = LocalGrid(apps)
    strategy = FusionStrategy("rklb", wait_for=4, evaluate=True)
    arrays = run(grid, strategy, make=Careless).arrays
    strategy.calibrate(grid, arrays, [fb.FederatedTemperature(), fb.FederatedConformal(0.8)], timeout=1)
    strategy.one_shot(grid, initial_arrays(Careless()), curvature, timeout=1)
    assert not any(reply.has_error() for *_, reply in grid.seen)
    seen = [{name: dict(record) for name, record in reply.content.items()} for *_, reply in grid.seen]
    table, kinds = listed(private=False), {reply["config"]["kind"] for reply in seen}
    assert kinds == set(table) - {"statistics", "scale"}  # sums, in test_one_shot.py and test_scale.py
    check_fields(seen, table)
    assert any("doe" in str(reply["config"].get("text", "")) for reply in seen) == shared
