"""Stacks of adapters over one frozen network, which the clients share; branches, modes and batches of such networks."""

from collections import UserDict

import pytest
import torch
from torch import nn
from torch.utils.data import default_collate

import lightning_fedbayes as fb
from lightning_fedbayes.clients.vectorized.stack import ClientStack
from lightning_fedbayes.core.errors import CannotVectorize
from lightning_fedbayes.core.private_torch import outside_of_vmap
from tests.clients.vectorized.modules import Backbone
from tests.clients.vectorized.test_parity import assert_same, both
from tests.federations import Plain, federate, loader, network, parameters

pytestmark = pytest.mark.slow

SIZES = fb.SizesPartition((35, 22, 20, 13))


class Adapted(Plain):
    def __init__(self, *, everything: bool = False, **options) -> None:
        super().__init__(Backbone(), **options)
        self.everything = everything

    def configure_optimizers(self):
        held = [p for p in self.parameters() if self.everything or p.requires_grad]
        return self.optimizer_class(held, lr=self.lr)


METHODS = {
    "average": {},
    "proximal": {"fusion": "fedprox"},
    "scaffold": {"fusion": "scaffold"},
    "ditto": {"fusion": "ditto"},
    "sites": {"fusion": "sites"},
    "two at once": {"stack": 2, "local_epochs": 2},
    "personal": {"local_parameters": ["*lora_B*"]},
    "own buffers": {"buffers": "local"},
}


@pytest.mark.parametrize(("method", "everything"), list(zip(METHODS, [False, True] * len(METHODS))))
def test_adapters_end_equal_by_either_engine(method, everything):
    results = both(lambda: Adapted(everything=everything), SIZES, rounds=3, **METHODS[method])
    assert_same(results)
    start, module = Backbone().state_dict(), results[1][0]
    moved = {name for name, value in module.net.state_dict().items() if not torch.equal(value, start[name])}
    own = {"first.lora_B.weight", "second.lora_B.weight"} if method == "personal" else set()  # they stay at the clients
    assert moved == {name for name, each in module.net.named_parameters() if each.requires_grad} - own


@pytest.mark.parametrize("everything", [False, True])
def test_what_is_frozen_and_what_does_not_change_enters_a_stack_once(everything):
    shared: dict[str, bool] = {}

    class Looking(Adapted):
        def training_step(self, batch, batch_idx):
            own = self.net.state_dict(keep_vars=True)
            shared.update({name: outside_of_vmap(each) is each for name, each in own.items()})
            return super().training_step(batch, batch_idx)

    federate(Looking(everything=everything), fb.FederatedBayes(SIZES, engine="vectorized"), 1)
    assert shared == {name: "lora" not in name and "head" not in name for name in shared}
    assert len(shared) == 16


class Late(Adapted):
    """Changes a buffer from the third batch on, after the trial step."""

    way = "in place"

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def training_step(self, batch, batch_idx):
        if batch_idx >= 2:
            if self.way == "in place":
                self.seen += 1
            elif self.way == "of the data":
                self.seen += batch[0].mean()
            else:
                self.seen = self.seen + batch[0].mean()
        return super().training_step(batch, batch_idx) * (1 + 0.1 * self.seen)


class Thawed(Late):
    way = "batch norm"

    def on_train_epoch_start(self):
        self.net.is_fixed = self.current_epoch == 0


@pytest.mark.parametrize("way", ["in place", "of the data", "replaced", "batch norm"])
def test_a_buffer_that_begins_to_change_becomes_each_client_s_own(way):
    kind = Thawed if way == "batch norm" else type("Own", (Late,), {"way": way})
    train = loader(batch_size=4, drop_last=True)  # a BatchNorm takes no batch of one example
    assert_same(both(kind, SIZES, rounds=3, train=train))


class Masked(Plain):
    def training_step(self, batch, batch_idx):
        x, y = batch
        return super().training_step((x * 0.5 if (x[:, 0] > 3.4).any() else x, y), batch_idx)


def test_clients_that_branch_differently_step_apart(monkeypatch):
    taken = []
    forward = ClientStack.forward_backward

    def spy(self, slots, *args, **options):
        result = forward(self, slots, *args, **options)
        if len(self.optimizer.rows[0]) == 5:  # not of the probe
            taken.append(len(slots))
        return result

    monkeypatch.setattr(ClientStack, "forward_backward", spy)
    results = both(Masked, fb.IIDPartition(5), rounds=3)
    assert_same(results)
    trained = [count for count in taken if count != 5]
    assert trained  # some have disagreed
    assert any(1 < count < 5 for count in trained)  # and those of one mind have stayed together


class Encoding(UserDict):
    source = "tokenizer"

    def __getattr__(self, name):
        try:
            return self.data[name]
        except KeyError:
            raise AttributeError(name) from None


@pytest.mark.parametrize("kind", [dict, Encoding])
def test_batches_with_keys(kind):
    class Own(Plain):
        def training_step(self, batch, batch_idx):
            assert type(batch) is kind
            assert kind is dict or batch.source == "tokenizer"
            x = batch["x"] if kind is dict else batch.x
            return super().training_step((x, batch["y"]), batch_idx)

    def collate(examples):
        x, y = default_collate(examples)
        return kind({"x": x, "y": y})

    assert_same(both(Own, SIZES, train=loader(batch_size=4, collate_fn=collate)))


class Evaluates(Plain):
    """Puts a part into evaluation in its forward, before or after it is used."""

    def __init__(self, when: str = "before") -> None:
        super().__init__(network(batch_norm=True))
        self.when, self.modes = when, []

    def forward(self, x):
        if self.when == "before":
            self.net[1].eval()
        output = self.net(x)
        if self.when == "after":
            self.net[1].eval()
        elif self.when == "in turns":
            self.net[1].train(not self.net[1].training)
        return output

    def on_train_epoch_end(self):
        self.modes.append(self.net[1].training)


@pytest.mark.parametrize(("when", "stack"), [("before", "vectorized"), ("after", 2)])
def test_modes_are_those_of_the_sequential_engine(when, stack):
    sizes = fb.SizesPartition((34, 31, 22, 3))  # the last one's first step is a short one, after that of the others
    results = both(lambda: Evaluates(when), sizes, rounds=3, train=loader(batch_size=4), stack=stack, local_epochs=2)
    assert_same(results)
    (one, *_), (other, *_) = results
    assert one.modes == other.modes == [True] * 3
    assert one.net[1].training == other.net[1].training


def test_modes_that_change_from_step_to_step_are_refused():
    with pytest.raises(CannotVectorize, match=r"between train\(\) and eval\(\) from step to step"):
        federate(Evaluates("in turns"), fb.FederatedBayes(SIZES, engine="vectorized"), 1)


@pytest.mark.parametrize(("frozen", "engine"), [(True, "vectorized"), (False, "sequential")])
def test_auto_takes_long_steps_of_frozen_networks_into_a_stack(frozen, engine):
    wide = nn.Sequential(nn.Linear(6, 1500), nn.ReLU(), nn.Linear(1500, 1500), nn.ReLU(), nn.Linear(1500, 3))
    wide[:4].requires_grad_(not frozen)
    module = Plain(wide)
    before = parameters(module)
    federation = fb.FederatedBayes(fb.IIDPartition(3))
    federate(module, federation, 1, loader(batch_size=15))
    assert federation.federation.engine.name == engine
    assert torch.equal(before["net.0.weight"], module.net[0].weight) == frozen
