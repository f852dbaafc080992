"""Posteriors and buffers come back from the wire as they were."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from flwr.app import Message, RecordDict

import lightning_fedbayes as fb
from lightning_fedbayes.callbacks.calibration import ScoreSketch, TemperatureMessage
from lightning_fedbayes.core.errors import FusionError
from lightning_fedbayes.core.messages import Message as ClientMessage
from lightning_fedbayes.methods import FedProx
from lightning_fedbayes.modules.sources.curvature import KroneckerSite
from lightning_fedbayes.transport.flower import FusionStrategy, initial_arrays, load_checkpoint
from lightning_fedbayes.transport.flower.wire import message_in, records_of
from tests.federations import Plain, blobs, loader, network
from tests.flower.clients import client_apps, run
from tests.flower.grid import LocalGrid
from tests.flower.test_parity import Headed, Learned
from tests.transport.federation import PARTITION, BlobData, hybrid, in_process


@pytest.mark.parametrize("make", [hybrid, Learned, Plain])
def test_a_client_of_sites_sends_means_and_changes_and_is_told_no_precisions_of_sites(tmp_path, make):
    """Single precision: a mean and a gradient for each parameter, and a precision for each Gaussian one."""
    grid = LocalGrid(client_apps(make=make, fusion="sites", state_folder=str(tmp_path)))
    strategy = FusionStrategy(fusion="sites", wait_for=4)
    run(grid, strategy, make=make)
    posterior = strategy.server.posterior
    own = {f"buffer/{name}" for name, _ in make().named_buffers()}
    means = {f"mean/{name}" for name in posterior.names}
    gaussian = [name for name, variance in posterior.variance.items() if variance.any()]
    entries = sum(posterior.mean[name].numel() for name in gaussian)
    told = {f"buffer/method/{name}" for name in ("slope", "examples", "clients", "age", "start")}
    asked = [set(message.content["arrays"]) for _, message, _ in grid.of("train")]
    replies = [reply for *_, reply in grid.of("train")]
    assert len(asked) == 12
    assert all(arrays == means | own | told | {f"variance/{name}" for name in gaussian} for arrays in asked)
    for reply in replies:
        arrays = {key: array.numpy() for key, array in reply.content["arrays"].items()}
        sites = {key.removeprefix("buffer/method/"): arrays[key] for key in arrays.keys() - means - own}
        sizes = {"gradient": posterior.num_parameters, "precision": entries, "examples": 1, "clients": 1}
        assert {name: site.size for name, site in sites.items()} == sizes
        assert all(arrays[key].dtype == "float32" for key in arrays.keys() - own)


@pytest.mark.parametrize(
    ("fusion", "beside"),
    [("fedprox", set()), ("ditto", set()), ("population", set()), ("fednova", {"steps"}), ("scaffold", None)],
)
def test_methods_send_what_the_page_on_privacy_says(fusion, beside, tmp_path):
    """Beside a posterior FedNova a number of steps, SCAFFOLD one tensor per mean; all others nothing."""
    grid = LocalGrid(client_apps(make=Plain, fusion=fusion, state_folder=str(tmp_path)))
    run(grid, FusionStrategy(fusion=fusion, wait_for=4), make=Plain)
    for *_, reply in grid.of("train"):
        arrays = {key.partition("/")[::2] for key in reply.content["arrays"]}
        means = {name for kind, name in arrays if kind == "mean"}
        sent = {name.removeprefix("method/") for kind, name in arrays if kind == "buffer"}
        assert sent == (means if beside is None else beside)
        assert {kind for kind, _ in arrays} <= {"mean", "buffer"}


def frozen(seed: int = 0, layers: tuple[int, ...] = (0,), **options) -> Plain:
    module = Plain(network(), **options)
    for layer in layers:
        module.net[layer].requires_grad_(False)
    if seed:
        torch.manual_seed(seed)
        torch.nn.init.normal_(module.net[0].weight)
    return module


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "options"),
    [(frozen, {}), (frozen, {"fusion": FedProx(0.1)}), (partial(frozen, optimizer=fb.IVON), {"fusion": "sites"})],
    ids=["averaged", "FedProx", "IVON by sites"],
)
def test_only_what_trains_travels_and_it_is_what_one_process_has(make, options, tmp_path):
    """Of the rest only a digest is sent, by which a client knows that its own is the server's."""
    rule = {"fusion": options.get("fusion", "rklb")}
    strategy = FusionStrategy(**rule, wait_for=4, seed=3, checkpoint=tmp_path / "server.pt")
    grid = LocalGrid(client_apps(make=make, state_folder=tmp_path, **options))
    result = run(grid, strategy, make=make)
    alone = in_process(make=make, **{**rule, **options}, seed=3)
    assert {key.partition("/")[2] for key in result.arrays if not key.startswith("buffer/method/")} == {
        "net.2.weight",
        "net.2.bias",
    }
    for name in ("net.2.weight", "net.2.bias"):
        assert torch.equal(strategy.server.posterior.mean[name], alone.posterior.mean[name])
        assert torch.equal(strategy.server.posterior.variance[name], alone.posterior.variance[name])
    module = make()
    load_checkpoint(module, tmp_path / "server.pt")
    for name, value in module.state_dict().items():
        assert torch.equal(value, alone.posterior.mean[name]), name


@pytest.mark.parametrize("private", [False, True])
def test_a_head_sends_its_sums_and_under_privacy_none_exactly(private, tmp_path, monkeypatch):
    monkeypatch.setattr(BlobData, "train_dataloader", lambda self: loader(self.dataset))
    clip, noise = 50.0, 0.5
    options = {"privacy": fb.UpdatePrivacy(clip, noise)} if private else {}
    grid = LocalGrid(client_apps(make=Headed, fusion="sums", state_folder=str(tmp_path), **options))
    run(grid, FusionStrategy(fusion="sums", wait_for=4), rounds=1, make=Headed)
    split = PARTITION.split(blobs().tensors[1], seed=0)
    for (*_, reply), rows in zip(grid.of("train"), split.indices, strict=True):
        arrays, kept = reply.content["arrays"], reply.content["metrics"]
        assert set(arrays) == {"mean/sums.gram", "mean/sums.moment", "mean/sums.square"}
        exact = Headed().head.sums(*(each[rows] for each in blobs().tensors))
        pairs = [
            (getattr(exact, name), torch.from_numpy(arrays[f"mean/sums.{name}"].numpy()))
            for name in ("gram", "moment", "square")
        ]
        own, sent = (torch.cat([pair[i].flatten() for pair in pairs]) for i in (0, 1))
        if private:
            assert set(kept) == {"num-examples", "privacy/epsilon"}
            residual = sent - own * min(1.0, clip / float(own.norm()))
            assert float(residual.std()) == pytest.approx(clip * noise, rel=0.25)
            assert bool((sent != own).all())
        else:
            torch.testing.assert_close(sent, own)


Softmax = partial(Headed, "softmax")


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("inference", ["variational", "laplace"])
def test_what_a_softmax_head_is_told_and_sends(inference, large, monkeypatch):
    if large:
        monkeypatch.setattr("lightning_fedbayes.modules.head.head.DENSE", 0)
    make = partial(Softmax, inference=inference)
    grid = LocalGrid(client_apps(make=make, one_shot=make().head))
    FusionStrategy(wait_for=4).one_shot(grid, initial_arrays(make()), make().head)
    asked = [set(message.content["told"]) if "told" in message.content else set() for _, message, _ in grid.seen]
    replies = [reply for *_, reply in grid.seen if "arrays" in reply.content]
    covariance = {"inner", "outer", "prior_precision"} if inference == "variational" else set()
    assert {frozenset(each) for each in asked} == {frozenset(), frozenset({"weights", *covariance})}
    sent = {frozenset(each.content["arrays"]) for each in replies}
    assert sent == {frozenset({"gram", "moment", "square"}), frozenset({"loss", "slope", "spread", "curvature"})}
    for each in replies:
        assert set(each.content["config"]) == {"kind", "client", "server-round", "version"}
        assert set(each.content["metrics"]) == {"num-examples"}
    assert replies[-1].content["arrays"]["curvature"].numpy().size == (0 if large else 3 * 49)


SENT = [
    ("temperature", TemperatureMessage(1.5, -2.0, 7), {}),
    ("counts", ScoreSketch(torch.tensor([3, 0, 2])), {"grid": "unit"}),
    ("statistics", fb.modules.LinearStatistics.of(torch.randn(5, 2), torch.randn(5)), {}),
    (
        "curvature",
        KroneckerSite({"w": torch.ones(2)}, {}, {"": torch.eye(3)}, {"": torch.eye(1, dtype=torch.bfloat16)}, 9),
        {},
    ),
]


@pytest.mark.parametrize(("kind", "value", "known"), SENT, ids=[kind for kind, *_ in SENT])
def test_what_a_client_sends_comes_back_field_by_field(kind, value, known):
    question = Message(RecordDict({}), dst_node_id=1, message_type="query")
    sent = ClientMessage.of(kind, 4, 2, value, {"epsilon": 0.5})
    came = message_in(Message(records_of(sent), reply_to=question), 4, kind, 2)
    assert (came.kind, came.client, came.round, came.num_examples) == (kind, 4, 2, value.num_examples)
    assert came.figures["epsilon"] == 0.5
    read = vars(came.read(type(value), **known))
    for name, own in vars(value).items():
        tensors = own if isinstance(own, dict) else {"": own}
        others = read[name] if isinstance(own, dict) else {"": read[name]}
        assert tensors.keys() == others.keys()
        for key, each in tensors.items():
            same = others[key] == each
            assert bool(same.all()) if isinstance(same, torch.Tensor) else same
    more = replace(came, tensors={**came.tensors, "names": torch.ones(1)})
    with pytest.raises(FusionError, match="'names' is no part of a"):
        more.read(type(value), **known)
    if kind != "curvature":  # whose parts are all dicts, which are checked when sites are fused
        with pytest.raises(FusionError, match="its message has no"):
            replace(came, tensors={}, figures={}).read(type(value), **known)
