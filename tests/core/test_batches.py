"""Which part of a batch is inputs and which targets, and how a network takes its inputs."""

from collections import UserDict, namedtuple
from types import SimpleNamespace

import lightning as L
import pytest
import torch
from torch import nn

import lightning_fedbayes as fb
from lightning_fedbayes.core.batches import Whole, number_of_examples, output_of, unpacked
from tests.refusals import refusals

X, Y = torch.randn(4, 3), torch.tensor([0, 1, 1, 0])
Named = namedtuple("Named", ["x", "y"])
GRAPH = SimpleNamespace(x=X, y=Y)


@pytest.mark.parametrize(
    ("batch", "inputs", "targets"),
    [
        (X, X, None),
        ((X, Y), X, Y),
        ([X, Y, "a.png"], X, Y),
        ([X], X, None),
        (Named(X, Y), X, Y),
        ({"x": X, "mask": Y, "labels": Y}, {"x": X, "mask": Y}, Y),
        (UserDict(x=X, target=Y), {"x": X}, Y),
        ({"x": X}, {"x": X}, None),
        (GRAPH, GRAPH, Y),
        (object, object, None),
    ],
)
def test_the_form_of_a_batch_says_what_its_targets_are(batch, inputs, targets):
    found = unpacked(batch)
    assert found == (inputs, targets) if isinstance(inputs, dict) else (found[0] is inputs and found[1] is targets)


def test_a_function_or_a_method_says_it_instead():
    batch = {"x": X, "y": Y, "labels": X}
    assert unpacked(batch, unpack=lambda batch: (batch["x"], batch["y"])) == (X, Y)
    module = nn.Linear(3, 2)
    module.unpack = lambda batch: [batch["x"], batch["y"]]
    assert unpacked(batch, module)[1] is Y
    assert unpacked(batch, module, lambda batch: (batch["x"], X))[1] is X
    assert unpacked(Whole((X, Y))) == (X, Y)


test_what_is_not_known_is_an_error = refusals(
    fb.FedBayesError,
    ([], {}, "a batch is empty"),
    ({"x": X, "y": Y, "labels": Y}, {}, r"'x', 'y', 'labels', and 'labels', 'y' may each be its targets: say what is"),
    ({"x": X}, {"needs_targets": True}, "a batch is a dict with the keys 'x', and not inputs with a tensor of targets"),
    ((X, [0, 1]), {"needs_targets": True}, r"a tuple, .*unpack=lambda batch: \(inputs, targets\)"),
    ((X, Y), {"unpack": lambda batch: X}, r"unpack makes Tensor of shape \(4, 3\) of a batch: let it return two"),
    ((X, Y), {"unpack": lambda batch: batch["x"]}, "unpack cannot take a batch that is a tuple: TypeError"),
    call=lambda batch, options: unpacked(batch, **options),
)


class Takes(nn.Module):
    """A module whose ``forward`` is a function, and gives its arguments' number as output."""

    def __init__(self, forward):
        super().__init__()
        self.forward = forward


@pytest.mark.parametrize(
    ("forward", "inputs"),
    [
        (lambda x, mask=None: x, {"x": X}),
        (lambda x, mask=None: x * mask[:, None], {"mask": torch.ones(4), "x": X}),
        (lambda x=None, *, other=None: x, {"x": X}),
        (lambda **batch: batch["x"], {"x": X, "mask": Y}),
        (lambda x, **others: x, {"x": X, "mask": Y}),
        (lambda *args, **keywords: keywords["x"], {"x": X}),
        (lambda batch: batch["x"], {"x": X, "mask": Y}),
        (lambda batch, **options: batch["x"], {"x": X}),
        (lambda batch=None: batch["x"], {"x": X}),
        (lambda *args: args[0]["x"], {"x": X}),
        (lambda batch: batch["x"], UserDict(x=X)),
        (lambda x, mask=None: x, UserDict(x=X)),
        (lambda graph: graph.x, GRAPH),
        (lambda pair: pair[0], (X, Y)),
        (lambda x: (x, "loss"), X),
        (lambda x: {"loss": 0.0, "logits": x}, X),
        (lambda x: SimpleNamespace(logits=x), X),
    ],
)
def test_inputs_are_given_as_the_signature_of_forward_takes_them(forward, inputs):
    assert torch.equal(output_of(Takes(forward), inputs), X)


test_a_forward_that_takes_other_inputs_is_an_error = refusals(
    fb.FedBayesError,
    (lambda x: x, "forward takes x, and the inputs are a mapping with the keys 'x', 'mask'"),
    (lambda ids, length: ids, "forward takes ids, length"),
    (lambda **batch: "nothing", "gives a str: wrap it"),
    (lambda batch: [X], "gives a list: wrap it"),
    (lambda batch: {"logits": None}, "gives a dict: wrap it"),
    call=lambda forward: output_of(Takes(forward), {"x": X, "mask": Y}),
)


@pytest.mark.parametrize(
    "steps",
    [
        lambda self, batch: self.layer(batch["x"]),
        lambda self, batch, batch_idx: self.layer(batch["x"]),
        lambda self, batch, batch_idx, dataloader_idx=0: self.layer(batch["x"]),
    ],
)
def test_a_module_without_a_forward_predicts_by_its_step(steps):
    class Steps(L.LightningModule):
        predict_step = steps

        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 2)

    module, batch = Steps(), {"x": X, "y": Y}
    inputs, targets = unpacked(batch, module)
    assert inputs is batch
    assert targets is Y
    values = {"layer.weight": torch.ones(2, 3), "layer.bias": torch.zeros(2)}
    assert torch.allclose(output_of(module, inputs, values), X.sum(1, keepdim=True).expand(4, 2))
    assert "forward" not in vars(module)


@pytest.mark.parametrize(
    ("inputs", "expected"),
    [
        (X, 4),
        ({"x": X, "y": Y}, 4),
        ((X, {"y": Y}), 4),
        ({"x": X, "return_dict": True, "mask": None}, 4),
        (GRAPH, None),
        ({"x": X, "edges": torch.zeros(2, 9)}, None),
        (torch.zeros(()), None),
        ({}, None),
        ({"x": X, "words": ["a", "b", "c", "d"]}, None),
    ],
)
def test_what_can_be_divided_into_examples(inputs, expected):
    assert number_of_examples(inputs) == expected
