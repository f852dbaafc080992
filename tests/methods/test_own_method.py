"""The method that docs/extend.md writes, as it stands there: on both engines, resumed, with privacy, and its limit."""

import re
from functools import partial
from pathlib import Path

import pytest
import torch

import lightning_fedbayes as fb
from lightning_fedbayes.clients.settings import FederationSettings
from lightning_fedbayes.core.errors import FederationError, FusionError
from lightning_fedbayes.methods import Averaging, Ditto, FedProx, Quadratic, Report, Scaffold, unregister_method
from tests.federations import FEATURES, Plain, assert_close, bayesian, federate, loader, quiet_checkpoints, saving

PAGE = Path(__file__).parents[2] / "docs" / "extend.md"


@pytest.fixture
def written():
    """The class of the page's block, up to where it is used; its name is registered."""
    block = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[0]
    code, use = block.split("# -- use it\n")
    assert len(code.strip().splitlines()) <= 45
    assert use
    space: dict = {"__name__": "page"}
    exec(compile(code, str(PAGE), "exec", dont_inherit=True), space)
    yield space["MyFedDyn"]
    unregister_method("my_feddyn")


def trained(make, rounds=3, engine="sequential", fraction=1.0, **options):
    settings = {"local_epochs": 2, "fraction": fraction, "seed": 3, "privacy": options.pop("privacy", None)}
    made = fb.FederatedBayes(fb.DirichletPartition(4, alpha=0.5), fusion="my_feddyn", engine=engine, **settings)
    federate(make(), made, rounds, loader(), **options)
    return made


def same(first, second, tolerance=0.0):
    ours, theirs = (dict(each.posterior.mean) for each in (first, second))
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.usefixtures("written")
@quiet_checkpoints
@pytest.mark.parametrize("fraction", [1.0, 0.5])
@pytest.mark.parametrize("make", [Plain, bayesian])
def test_both_engines_and_a_killed_run_end_alike(make, fraction, tmp_path):
    whole = trained(make, fraction=fraction)
    if make is Plain:  # the other draws
        same(whole, trained(make, engine="vectorized", fraction=fraction), 1e-5)
    trained(make, 2, fraction=fraction, **saving(tmp_path, save_last=True))
    again = trained(make, fraction=fraction, ckpt_path=tmp_path / "last.ckpt")
    same(whole, again)


@pytest.mark.usefixtures("written")
def test_noise_protects_what_it_sends():
    made = trained(Plain, privacy=fb.UpdatePrivacy(clip=1.0, noise_multiplier=0.1))
    assert made.history[-1]["valid_clients"] == 4


@pytest.mark.slow
def test_it_ends_where_pooled_training_ends(written):
    """Least squares of unlike clients: the minimum of the weighted loss, which averages miss."""
    parts, gram, moment = {}, 0, 0
    for number in range(3):
        x = torch.randn(20, FEATURES) * (1 + number)
        y = x @ torch.linspace(-1, 1, FEATURES) + number
        parts[str(number)] = torch.utils.data.TensorDataset(x, y)
        gram, moment = gram + x.T @ x, moment + x.T @ y
    best = torch.linalg.solve(gram, moment)

    class Squares(Plain):
        def __init__(self):
            super().__init__(torch.nn.Linear(FEATURES, 1, bias=False), lr=0.03)

        def training_step(self, batch, batch_idx):
            x, y = batch
            return (self(x)[:, 0] - y).square().mean() / 2

    distances = {}
    for name, method in {"average": "weighted_average", "own": written(1.0)}.items():
        module = Squares()
        made = fb.FederatedBayes(fusion=method, local_epochs=30, seed=1, safeguards=fb.Safeguards(max_influence=None))
        federate(module, made, 60, loader(fb.ClientDatasets(parts), batch_size=20))
        distances[name] = float((module.net.weight[0].detach() - best).norm())
    assert distances["own"] < 0.01 < 0.03 < distances["average"]


def wrong(**hooks):
    return type("Wrong", (fb.Method,), hooks)("weighted_average")


def overwrites(self, shared, client, trained):
    for each in trained.posterior.mean.values():
        each.zero_()
    return Report(trained.posterior)


@pytest.mark.parametrize(
    ("hooks", "says"),
    [
        ({"problem": lambda self, shared, client: None}, r"problem\(...\)=None.*return an fb.methods.LocalProblem"),
        ({"report": lambda self, shared, client, trained: trained.posterior}, "return an fb.methods.Report"),
        ({"report": lambda self, shared, client, trained: Report(trained.posterior, {"a": 1})}, "kept"),
        (
            {"report": lambda self, shared, client, trained: Report(trained.posterior, {}, {"a": torch.ones(1)})},
            "sends a with its posterior; say sends = True",
        ),
        (
            {"sends": True, "init": lambda self, posterior: {"b": torch.ones(1)}},
            "sends nothing .* send the names of init, b",
        ),
        ({"report": overwrites}, "has written into the posterior"),
    ],
    ids=["problem", "report", "kept", "sent", "not sent", "written"],
)
@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_hooks_that_return_the_wrong_thing_are_told_so(hooks, says, engine):
    made = fb.FederatedBayes(fb.IIDPartition(3), fusion=wrong(**hooks), engine=engine)
    with pytest.raises(FederationError, match=says):
        federate(Plain(), made, 1, loader())


def test_a_term_by_hand_is_half_the_strength_times_the_squared_move_less_the_slope_along_it():
    values, start = {"w": torch.tensor([3.0, 1.0]), "b": torch.ones(1)}, {"w": torch.ones(2), "b": torch.zeros(1)}
    term = Quadratic(5.0, {"w": torch.tensor([0.5, 2.0])}, frozenset("w"))
    assert float(term(values, start)) == 5.0 / 2 * 2.0**2 - 0.5 * 2.0
    assert float(Quadratic({"w": torch.tensor([1.0, 3.0])})(values, start)) == 1.0 / 2 * 2.0**2


@pytest.mark.parametrize("method", [Averaging, FedProx, Ditto, Scaffold])
def test_sites_are_no_rule_of_another_method(method):
    """Clients of an average keep no sites: the server would add the same data again in every round."""
    for rule in ("sites", fb.Sites()):
        with pytest.raises(FusionError):
            method(rule=rule)
    assert isinstance(FederationSettings(fusion="sites").method, fb.Sites)


def own_source():
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (code,) = [block.split("\n\n\nnetwork = ")[0] for block in blocks if "PosteriorSource" in block]
    space: dict = {"__name__": "page"}
    exec(compile(code, str(PAGE), "exec", dont_inherit=True), space)
    return space["Travelled"]()


def by_own_source(rounds=3, engine="sequential", module=None, sizes=(40, 30, 20), source=None, **options):
    fusion = options.pop("fusion", "linear_pool")
    settings = {"posterior": source or own_source(), "fusion": fusion, "engine": engine, "seed": 1}
    made = fb.FederatedBayes(fb.SizesPartition(sizes), **settings)
    federate(module or Plain(), made, rounds, loader(), **options)
    return made


@pytest.mark.parametrize("sizes", [(30, 30, 30), (40, 30, 20)], ids=["alike", "unlike"])
@pytest.mark.parametrize("optimizer", [torch.optim.Adam, partial(torch.optim.SGD, momentum=0.9)], ids=["Adam", "SGD"])
def test_a_source_is_told_the_same_of_a_client_by_both_engines(optimizer, sizes, monkeypatch):
    source = own_source()
    kind, told = type(source.attach(Plain(), [])), []
    measured = kind.measured
    monkeypatch.setattr(kind, "measured", lambda self, client: told.append(client) or measured(self, client))
    for engine in ("sequential", "vectorized"):
        by_own_source(2, engine, Plain(optimizer=optimizer, lr=0.01), sizes, source)
    one, other = told[:6], told[6:]
    for first, second in zip(one, other, strict=True):
        assert first.num_examples == second.num_examples
        assert first.values.keys() >= second.values.keys()
        torch.testing.assert_close(dict(first.state), dict(second.state), rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("fusion", ["linear_pool", "sites", "fednova"])
def test_both_engines_give_the_same_posterior_of_an_own_source(fusion):
    one, other = by_own_source(fusion=fusion), by_own_source(fusion=fusion, engine="vectorized")
    assert_close(one.posterior, other.posterior, 1e-5, 1e-5)


@pytest.mark.slow
@quiet_checkpoints
def test_an_own_source_is_resumed_bit_by_bit(tmp_path):
    whole = by_own_source()
    by_own_source(2, **saving(tmp_path, save_last=True))
    assert_close(whole.posterior, by_own_source(ckpt_path=tmp_path / "last.ckpt").posterior)
    assert all(bool(value.all()) for value in whole.posterior.variance.values())
