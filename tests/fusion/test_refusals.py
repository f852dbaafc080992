"""Input that cannot be fused is refused with a message that names the value, the rule and the remedy."""

import math

import pytest
import torch

from lightning_fedbayes import GaussianPosterior, fuse, fusion
from lightning_fedbayes.core.errors import FusionError
from tests.federations import assert_close
from tests.refusals import refusals

from .strategies import KINDS, RULES, posterior


def two_layers(head=(2, 3), mean=1.0, variance=0.5):
    parts = ({"body": torch.full((4,), each), "head": torch.full(head, each)} for each in (mean, variance))
    return GaussianPosterior(*parts)


GOOD = two_layers()
PREVIOUS = two_layers(mean=0.0, variance=10.0)


@pytest.mark.parametrize("rule", ["linear_pool", "krum"])
@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ([0.5, -0.25], r"weights must be finite and at least 0, got -0\.25"),
        ([0.5, math.nan], "weights must be finite and at least 0, got nan"),
        ([math.inf, 1.0], "weights must be finite and at least 0, got inf"),
        (torch.tensor([1.0, -2.0]), r"at least 0, got -2\.0"),
        ([0.0, 0.0], "weights sum to 0.*at least one client needs a positive weight"),
        ([1.0], "1 weights for more than 1 posteriors; give one per client"),
        ([1.0, 1.0, 1.0], "3 weights for 2 posteriors; give one per client"),
    ],
)
def test_weights(rule, weights, words):
    for clients in ([GOOD, GOOD], iter([GOOD, GOOD])):
        with pytest.raises(FusionError, match=words):
            fuse(rule, clients, weights, PREVIOUS)


@pytest.mark.parametrize("rule", KINDS)
def test_no_client(rule):
    for weights in (None, []):
        with pytest.raises(FusionError, match=r"nothing to fuse.*at least one client"):
            fuse(rule, [], weights, PREVIOUS)


@pytest.mark.parametrize("rule", KINDS)
@pytest.mark.parametrize(("kind", "value"), [("mean", -math.inf), ("variance", math.nan)])
def test_values_that_are_not_finite(rule, kind, value):
    bad = two_layers()
    getattr(bad, kind)["head"][1, 2] = value
    with pytest.raises(FusionError, match=f"client 1: {kind} of 'head' is not finite at 1 of 6 entries"):
        fuse(rule, [GOOD, bad], previous=PREVIOUS)


@pytest.mark.parametrize("kind", ["mean", "variance"])
def test_previous_posterior_that_is_not_finite(kind):
    bad = two_layers(mean=0.0, variance=10.0)
    getattr(bad, kind)["head"][1, 2] = math.nan
    with pytest.raises(FusionError, match=r"previous.*'head' is not finite"):
        fuse("dwc", [GOOD, GOOD], previous=bad)


@pytest.mark.parametrize("rule", KINDS)
def test_names_and_shapes_that_differ(rule):
    parts = ({"body": part["body"], "tail": part["head"]} for part in (GOOD.mean, GOOD.variance))
    other = GaussianPosterior(*parts)
    for clients in ([GOOD, other], [other, GOOD]):
        with pytest.raises(FusionError, match=r"(?s)name different parameters.*(head|tail).*same network"):
            fuse(rule, clients, previous=PREVIOUS)
    with pytest.raises(FusionError, match=r"'head' has shape \(2, 3\).*\(3, 2\) in client 1.*same network"):
        fuse(rule, [GOOD, two_layers(head=(3, 2))], previous=PREVIOUS)


@pytest.mark.parametrize("rule", RULES)
def test_rule_says_if_it_needs_the_previous_posterior(rule):
    if not fusion.get_rule(rule).needs_previous:
        assert fuse(rule, [GOOD, GOOD]).names == GOOD.names
        return
    with pytest.raises(FusionError, match=rf"{rule} needs the previous.*pass previous="):
        fuse(rule, [GOOD, GOOD])


@pytest.mark.parametrize("rule", KINDS)
def test_refused_client_leaves_the_others_as_they_were(rule):
    accumulator = fusion.FusionAccumulator(fusion.get_rule(rule), PREVIOUS)
    accumulator.add(GOOD, 1.0)
    nan = two_layers()
    nan.mean["body"][0] = math.nan
    for client, weight in ((nan, 1.0), (two_layers(head=(3, 2)), 1.0), (GOOD, -1.0), (GOOD, math.nan)):
        with pytest.raises(FusionError):
            accumulator.add(client, weight)
    accumulator.add(two_layers(mean=3.0), 2.0)
    expected = fuse(rule, [GOOD, two_layers(mean=3.0)], [1.0, 2.0], PREVIOUS)
    fused = accumulator.compute()
    assert accumulator.count == 2
    assert_close(fused, expected)


VAGUE = GaussianPosterior(
    {"body": torch.zeros(4), "head": torch.full((2, 3), 2.0)},
    {"body": torch.full((4,), 0.5), "head": torch.tensor([[20.0, 1.0, 1.0], [25.0, 1.0, 1.0]])},
)


def test_dwc_of_clients_vaguer_than_the_previous_posterior():
    """Precisions 1/20 + 1/20 − 1/5 = −0.1 and 1/25 + 1/25 − 1/5 = −0.12."""
    with pytest.raises(FusionError) as caught:
        fuse("dwc", [VAGUE, VAGUE], previous=two_layers(mean=0.0, variance=5.0))
    message = str(caught.value)
    assert "'head' at 2 of 6 entries (minimum -0.12)" in message
    assert "'body'" not in message
    for words in ("not positive", "less certain", "Pre-train", "min_precision"):
        assert words in message


def test_dwc_floor_replaces_what_is_not_positive_and_nothing_else():
    previous = two_layers(mean=0.0, variance=5.0)
    floored = fuse(fusion.DistributedWeightConsolidation(min_precision=1e-3), [VAGUE, VAGUE], previous=previous)
    low = torch.tensor([[True, False, False], [True, False, False]])
    torch.testing.assert_close(floored.variance["head"][low], torch.full((2,), 1e3))
    torch.testing.assert_close(floored.mean["head"][low], torch.full((2,), 2.0))
    precision = 1 / 1.0 + 1 / 1.0 - 1 / 5.0
    torch.testing.assert_close(floored.variance["head"][~low], torch.full((4,), 1 / precision))
    torch.testing.assert_close(floored.mean["head"][~low], torch.full((4,), 4.0 / precision))


OFF = "min_precision=.*above 0.*None turns the floor off"
test_arguments_and_previous_posteriors_that_cannot_be = refusals(
    FusionError,
    (lambda: fuse("dwc", [GOOD], previous=two_layers(head=(3, 2))), r"'head' has shape \(3, 2\).*\(2, 3\) in client 0"),
    (lambda: fuse("dwc", [posterior([1.0], [1.0])] * 2, previous=posterior([1.0], [0.0])), "'w' at 1 of 1 entries"),
    *((lambda least=each: fusion.DistributedWeightConsolidation(least), OFF) for each in (0.0, -1.0, math.nan)),
    (lambda: fusion.AlphaBarycenter(math.nan), "alpha=nan"),
    (lambda: fusion.Reliability("fedavg"), "infers no reliability of clients"),
    (lambda: fusion.Reliability("ivar_vb", then="conflation"), "takes no weights"),
    (lambda: fusion.Reliability("ivar_bv"), "ivar_vb"),
)
