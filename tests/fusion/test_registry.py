"""Rules are found by name, and no name is given twice."""

import pytest
import torch

from lightning_fedbayes import fuse, fusion, register_fusion
from lightning_fedbayes.core.errors import FusionError
from tests.refusals import refusals

from .strategies import posterior

CLIENTS = [posterior([1.0, 2.0], [0.5, 0.1]), posterior([3.0, -1.0], [2.0, 0.4])]


@pytest.fixture
def temporary():
    """A name that is forgotten after the test."""
    name = "temporary_rule"
    yield name
    if name in fusion.available_fusions():
        fusion.unregister_fusion(name)


def test_function_becomes_a_rule(temporary):
    @register_fusion(temporary, aliases=("temporary_alias",))
    def rule(posteriors, weights, previous):
        return posteriors[int(weights.argmax())]

    assert temporary in fusion.available_fusions()
    assert "temporary_alias" not in fusion.available_fusions()
    assert "temporary_alias" in fusion.available_fusions(aliases=True)
    for name in (temporary, "temporary_alias", rule):
        assert torch.equal(fuse(name, CLIENTS, [0.2, 0.8]).mean["w"], CLIENTS[1].mean["w"])
    fusion.unregister_fusion(temporary)
    assert not {temporary, "temporary_alias"} & set(fusion.available_fusions(aliases=True))


def test_sum_type_rule_from_scratch(temporary):
    """A rule of two sums, as the documentation of ``SumRule`` has it."""

    @register_fusion(temporary)
    class MeanOfSquares(fusion.SumRule):
        def update(self, statistics, mean, variance, weight):
            for key, value in (("weight", mean.new_tensor(weight)), ("sum", weight * mean**2)):
                statistics[key] = statistics.get(key, 0) + value

        def compute(self, statistics, like, previous):
            mean = statistics["sum"] / statistics["weight"]
            return mean, torch.zeros_like(mean)

    fused = fuse(temporary, iter(CLIENTS), [3.0, 1.0])
    torch.testing.assert_close(fused.mean["w"], torch.tensor([3.0, 3.25], dtype=torch.float64))
    rule, halves = fusion.get_rule(temporary), [{}, {}]
    for half, client, weight in zip(halves, CLIENTS, (3.0, 1.0)):
        rule.update(half, *client.flatten(), weight)
    rule.merge(halves[0], halves[1])
    torch.testing.assert_close(rule.compute(halves[0], CLIENTS[0], None)[0], fused.mean["w"])


@pytest.mark.parametrize("taken", ["conflation", "wc"])
def test_taken_names_are_refused_and_nothing_is_registered(temporary, taken):
    for name, aliases in ((taken, ()), (temporary, (taken,)), (temporary, ("free_alias", taken))):
        with pytest.raises(FusionError, match=rf"'{taken}' is registered already.*another name"):
            register_fusion(name, aliases)(lambda posteriors, weights, previous: posteriors[0])
    assert temporary not in fusion.available_fusions()
    assert "free_alias" not in fusion.available_fusions(aliases=True)
    assert fusion.rule_name("wc") == "weighted_conflation"


@pytest.mark.parametrize("thing", [int, 3, fusion.LinearPool(), "conflation"], ids=["class", "number", "rule", "name"])
def test_only_rule_classes_and_functions_are_registered(temporary, thing):
    with pytest.raises(FusionError, match=r"cannot register .* as 'temporary_rule'.*FusionRule subclass or a function"):
        register_fusion(temporary)(thing)


test_what_is_no_rule_is_refused_with_the_nearest_name = refusals(
    FusionError,
    ("reverse_kl", r"unknown fusion rule 'reverse_kl': did you mean 'reverse_kl_barycenter'\?.*wasserstein"),
    ("fedavgg", "did you mean 'fedavg'"),
    ("dwcc", "did you mean 'dwc'"),
    *((thing, "no fusion rule: give a name") for thing in (3, None, ["conflation"], fusion.LinearPool)),
    call=lambda thing: fuse(thing, CLIENTS),
)


def test_names_have_the_arguments():
    inner = "norm_clipping(then=krum(byzantine=1, keep=1), radius=2.0)"
    rules = [
        "rklb",
        fusion.AlphaBarycenter(0.25),
        fusion.NormClipping(fusion.Krum(1), 2.0),
        fusion.Reliability("krum", then="nwa"),
    ]
    assert fusion.AutoFusion(rules).names == (
        "reverse_kl_barycenter",
        "alpha_barycenter(alpha=0.25)",
        inner,
        "Reliability(by=krum(keep=1), then=weighted_average)",
    )


test_candidates_that_cannot_be_chosen_from_are_refused = refusals(
    FusionError,
    (["wb"], "give two or more"),
    (["rklb", "llp"], "names a rule twice"),
    (["rklb", "rklp"], "did you mean 'rklb'"),
    call=fusion.AutoFusion,
)
