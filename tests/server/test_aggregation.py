"""One round on the server, with its updates kept or streamed."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_fedbayes import GaussianPosterior, fuse
from lightning_fedbayes.core.errors import FusionError
from lightning_fedbayes.core.messages import ClientUpdate
from lightning_fedbayes.fusion import FusionRule, Preaggregation, ReliabilityRule, available_fusions, get_rule
from lightning_fedbayes.server.aggregation import Aggregation
from lightning_fedbayes.server.weighting import PER_CLIENT, PER_COHORT, ClientFacts, client_weights
from tests.federations import assert_close

RULES = [  # those that report no shares of their own
    name
    for name in available_fusions()
    if name != "first_client" and not isinstance(get_rule(name), ReliabilityRule | Preaggregation)
]
SHAPES = {"body": (3,), "head": (2, 2)}
PREVIOUS = GaussianPosterior(*({n: torch.full(s, each) for n, s in SHAPES.items()} for each in (0.0, 50.0)))


def update(client, num_examples=10, mean=None, buffers=None, **metrics):
    """An update whose values follow from the client's number."""
    draws = torch.Generator().manual_seed(client)
    means = {n: torch.randn(s, generator=draws) if mean is None else torch.full(s, mean) for n, s in SHAPES.items()}
    variances = {n: torch.rand(s, generator=draws) + 0.1 for n, s in SHAPES.items()}
    if buffers is None:
        buffers = {"running_mean": torch.randn(4, generator=draws), "num_batches_tracked": torch.tensor(client + 3)}
    return ClientUpdate(client, num_examples, GaussianPosterior(means, variances), buffers, metrics)


def run(rule, weighting, updates, previous=PREVIOUS):
    fusion = Aggregation(get_rule(rule), weighting, previous)
    for each in updates:
        fusion.add(each)
    assert len(fusion) == len(updates)
    return fusion.finish()


def by_name(name):
    """The weighting ``name`` as a function, for which updates are kept instead of streamed."""
    return lambda facts: client_weights(name, facts)


class Kept(FusionRule):
    """A sum-type rule that is given all clients side by side."""

    def __init__(self, rule):
        self.rule = get_rule(rule)
        self.uses_weights = self.rule.uses_weights

    def fuse(self, posteriors, weights, previous):
        return self.rule.fuse(posteriors, weights, previous)


def assert_same(first, second):
    assert first.weights == pytest.approx(second.weights)
    for name in first.metrics.keys() & second.metrics.keys():  # a rule may have figures of its own
        assert first.metrics[name] == pytest.approx(second.metrics[name])
    assert {"effective_clients", "disagreement"} <= first.metrics.keys() & second.metrics.keys()
    torch.testing.assert_close(first.buffers, second.buffers)
    assert_close(first.posterior, second.posterior, 1.3e-6, 1e-5)


@pytest.mark.parametrize("rule", RULES[::3])
@pytest.mark.parametrize("weighting", sorted(PER_CLIENT))
@given(sizes=st.lists(st.integers(1, 500), min_size=1, max_size=4))
@settings(deadline=None, max_examples=5)
def test_streaming_equals_keeping(rule, weighting, sizes):
    updates = [update(client, size) for client, size in enumerate(sizes)]
    streamed = run(rule, weighting, updates)
    assert_same(streamed, run(rule, by_name(weighting), updates))
    assert_same(streamed, run(Kept(rule), weighting, updates))


@pytest.mark.parametrize("rule", RULES[::3])
@pytest.mark.parametrize("weighting", sorted([*PER_CLIENT, *PER_COHORT]))
def test_round_is_fuse_with_its_weights(rule, weighting):
    updates = [update(client, 10 * client + 1) for client in (0, 4, 2)]
    result = run(rule, weighting, updates)
    facts = [ClientFacts(u.client, u.num_examples, u.posterior, PREVIOUS, u.metrics) for u in updates]
    weights = client_weights(weighting, facts) if get_rule(rule).uses_weights else [1 / 3] * 3
    expected = fuse(rule, [u.posterior for u in updates], weights, PREVIOUS)
    assert result.weights == pytest.approx(dict(zip((0, 4, 2), weights)))
    assert_close(result.posterior, expected, 1.3e-6, 1e-5)


@pytest.mark.parametrize("weighting", ["train_size", by_name("train_size")], ids=["streamed", "kept"])
class TestBuffers:
    def buffers_of(self, weighting, *sent, sizes=(1, 3)):
        updates = [update(k, n, buffers=buffers) for k, (n, buffers) in enumerate(zip(sizes, sent, strict=True))]
        return run("nwa", weighting, updates).buffers

    @pytest.mark.parametrize(
        ("sent", "sizes", "fused"),
        [
            (([0.0, 4.0], [8.0, 4.0]), (1, 3), [6.0, 4.0]),
            ((10, 15), (1, 3), 14),  # 13.75: integers stay integers
            ((1.0, 9.0), (2, 0), 1.0),  # a client of weight zero has no say
        ],
    )
    def test_they_are_averaged_with_the_weights(self, weighting, sent, sizes, fused):
        found = self.buffers_of(weighting, *({"b": torch.tensor(each)} for each in sent), sizes=sizes)
        assert found["b"].tolist() == fused

    @pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64, torch.int64, torch.uint8])
    def test_dtype_is_kept(self, weighting, dtype):
        fused = self.buffers_of(weighting, *[{"b": torch.ones(2, dtype=dtype)}] * 2)
        assert fused["b"].dtype == dtype

    def test_none_sent_none_fused(self, weighting):
        assert self.buffers_of(weighting, {}, {}) == {}


SPOILED = {  # what it does to means, variances and buffers, and words of the reason
    "nan mean": (lambda m, v, b: m.update(head=m["head"] * math.nan), "mean of 'head' is not finite at 4 of 4"),
    "infinite variance": (lambda m, v, b: v.update(body=v["body"] / 0), "variance of 'body' is not finite at 3 of 3"),
    "missing name": (lambda m, v, b: (m.pop("head"), v.pop("head")), "head.*same network"),
    "more names": (lambda m, v, b: (m.update(tail=m["head"]), v.update(tail=v["head"])), "tail.*same network"),
    "wrong shape": (
        lambda m, v, b: (m.update(head=m["head"].view(4)), v.update(head=v["head"].view(4))),
        r"'head' has shape \(2, 2\).*\(4,\)",
    ),
    "nan buffer": (lambda m, v, b: b["running_mean"].fill_(math.nan), "buffer 'running_mean' is not finite"),
    "buffer of another shape": (lambda m, v, b: b.update(running_mean=torch.zeros(5)), "running_mean"),
    "buffer that would broadcast": (lambda m, v, b: b.update(running_mean=torch.zeros(1)), "running_mean"),
    "missing buffer": (lambda m, v, b: b.pop("running_mean"), "running_mean"),
    "more buffers": (lambda m, v, b: b.update(other=torch.zeros(1)), "other"),
}


@pytest.mark.parametrize("weighting", ["train_size", by_name("train_size")], ids=["streamed", "kept"])
@pytest.mark.parametrize("kind", SPOILED)
def test_inadmissible_update_leaves_the_round_unchanged(weighting, kind):
    (spoil, words), good = SPOILED[kind], update(7)
    parts = dict(good.posterior.mean), dict(good.posterior.variance), dict(good.buffers)
    spoil(*parts)
    bad = ClientUpdate(7, 10, GaussianPosterior(*parts[:2]), parts[2])
    fusion = Aggregation(get_rule("reverse_kl_barycenter"), weighting, PREVIOUS)
    fusion.add(update(0))
    with pytest.raises(FusionError, match=rf"client 7.*{words}|{words}.*client 7"):
        fusion.add(bad)
    assert len(fusion) == 1
    fusion.add(update(1))
    assert_same(fusion.finish(), run("reverse_kl_barycenter", weighting, [update(0), update(1)]))


@pytest.mark.parametrize("weighting", ["train_size", lambda facts: [0.0, 0.0]], ids=["streamed", "kept"])
def test_round_without_weight(weighting):
    with pytest.raises(FusionError, match="positive weight"):
        run("nwa", weighting, [update(0, 0), update(1, 0)])


class TestDiagnostics:
    def test_effective_clients(self):
        sent = [update(0, 80), update(1, 20)]
        assert run("nwa", "train_size", sent).metrics["effective_clients"] == pytest.approx(1 / 0.68)
        assert run("conflation", "train_size", sent).metrics["effective_clients"] == 2

    def test_disagreement_is_the_weighted_variance_of_means(self):
        """Weights 1/4 and 3/4 at distance 4: 1/4 · 3/4 · 16 = 3 in every parameter."""
        metrics = run("nwa", "train_size", [update(0, 1, mean=1.0), update(1, 3, mean=5.0)]).metrics
        assert metrics["disagreement"] == pytest.approx(3.0)
        assert run("nwa", "equal", [update(0), update(0)][:1]).metrics["disagreement"] == 0

    def test_posterior_variance_is_the_mean_over_probabilistic_tensors(self):
        means = {"a": torch.zeros(2), "b": torch.zeros(100)}
        hybrid = GaussianPosterior(means, {"a": torch.tensor([1.0, 3.0]), "b": torch.zeros(()).expand(100)})
        result = run("nwa", "equal", [ClientUpdate(k, 1, hybrid) for k in range(2)], previous=hybrid)
        assert result.metrics["posterior_variance"] == pytest.approx(2.0)

    def test_deterministic_network_has_no_posterior_variance(self):
        point = GaussianPosterior.point_mass(PREVIOUS.mean)
        result = run("nwa", "equal", [ClientUpdate(k, 1, point) for k in range(2)], previous=point)
        assert set(result.metrics) == {"effective_clients", "disagreement"}
