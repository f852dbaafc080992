"""Conformal sets and intervals: the sketch against exact quantiles, and coverage against its guarantee."""

import logging
import math
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import TensorDataset

import lightning_fedbayes as fb
from lightning_fedbayes import FederatedConformal, FederatedTemperature
from lightning_fedbayes.callbacks.calibration import (
    ScoreSketch,
    all_class_scores,
    class_scores,
    interval_scores,
    predictions_of,
)
from lightning_fedbayes.callbacks.calibration.scores import bounded_distribution
from lightning_fedbayes.core.errors import FedBayesError, FederationError
from tests.refusals import refusals

LEVELS = st.sampled_from([0.05, 0.5, 0.8, 0.9, 0.95, 0.99])


def exact(scores, level):
    """The ⌈(n + 1) level⌉-th smallest score; infinity if there are too few."""
    rank = math.ceil((len(scores) + 1) * level - 1e-9)
    return math.inf if rank > len(scores) else float(sorted(scores.tolist())[rank - 1])


def predictive(examples=50, classes=5, seed=0, sharpness=2.0):
    random = torch.Generator().manual_seed(seed)
    probs = (sharpness * torch.randn(examples, classes, generator=random)).softmax(-1)
    return probs, torch.multinomial(probs, 1, generator=random).flatten()


def test_scores_by_their_definition():
    probs, targets = predictive()
    rows = range(len(targets))
    assert torch.allclose(class_scores(probs, targets), 1 - probs[rows, targets].double())
    expected = [float(p[p >= p[y]].double().sum()) for p, y in zip(probs, targets)]
    assert class_scores(probs, targets, "aps").tolist() == pytest.approx(expected, abs=1e-6)


def test_interval_scores_have_the_unit_of_the_standard_deviation():
    mean, std, targets = torch.tensor([0.0, 1.0]), torch.tensor([1.0, 0.5]), torch.tensor([-2.0, 2.5])
    assert interval_scores(mean, std, targets).tolist() == [2.0, 3.0]
    assert torch.allclose(interval_scores(3 * mean, 3 * std, 3 * targets), interval_scores(mean, std, targets))


@given(
    scores=st.lists(st.floats(0, 1), min_size=1, max_size=80),
    level=LEVELS,
    bins=st.sampled_from([1, 2, 10, 49, 1000, 1024]),
)
@settings(max_examples=300, deadline=None)
def test_threshold_is_never_below_the_quantile_and_above_it_by_at_most_a_cell(scores, level, bins):
    scores = torch.tensor(scores, dtype=torch.float64)
    sketched, quantile = ScoreSketch.of(scores, bins).threshold(level), exact(scores, level)
    assert math.isinf(sketched) == math.isinf(quantile)
    if math.isfinite(quantile):
        assert quantile <= sketched <= quantile + 1 / bins + 1e-12


@given(scores=st.lists(st.floats(0, 1e6), min_size=1, max_size=80), level=LEVELS, bins=st.sampled_from([1, 10, 1024]))
@settings(max_examples=300, deadline=None)
def test_the_half_line_has_the_same_bound_in_its_own_scale(scores, level, bins):
    scores = torch.tensor(scores, dtype=torch.float64)
    sketched, quantile = ScoreSketch.of(scores, bins, "half_line").threshold(level), exact(scores, level)
    if math.isinf(quantile) or math.isinf(sketched):
        assert math.isinf(sketched)
        assert quantile >= (bins - 1) * (1 - 1e-9)
    else:
        assert quantile <= sketched * (1 + 1e-9)
        assert sketched / (1 + sketched) <= quantile / (1 + quantile) + 1 / bins + 1e-9


def test_a_client_beyond_its_bound_counts_as_twice_the_median_one():
    """The formulas of the docstring, of three clients of 10 and one of 1,000 scores in the first cell."""
    counts = [[2, 3, 5, 0], [1, 4, 4, 1], [3, 3, 3, 1], [1000, 0, 0, 0]]
    level, c = 0.75, 2.0
    found, exceeds = bounded_distribution([ScoreSketch(torch.tensor(each)) for each in counts], level, c)
    below, sizes = np.cumsum(counts, 1), np.sum(counts, 1)
    excess = below - level * sizes[:, None]
    middle = np.sort(sizes)[2]  # the upper one of four
    bound = c * (np.sort(abs(excess), 0)[2] + 2 * (level * (1 - level) * middle) ** 0.5)
    total, counted = excess.clip(-bound, bound).sum(0), sizes.clip(max=c * middle).sum()
    assert exceeds.any(1).tolist() == [False, False, False, True]
    assert found.numpy() == pytest.approx((level + (total - level) / (counted + 1)).clip(0, 1), rel=1e-6)


@given(
    parts=st.lists(st.lists(st.floats(0, 1), max_size=20), min_size=1, max_size=6),
    grid=st.sampled_from(["unit", "half_line"]),
)
@settings(deadline=None)
def test_sketches_merge_to_that_of_the_pooled_scores(parts, grid):
    merged, *others = [ScoreSketch.of(torch.tensor(part, dtype=torch.float64), 16, grid) for part in parts]
    for other in others:
        merged += other
    pooled = torch.tensor([score for part in parts for score in part], dtype=torch.float64)
    assert torch.equal(merged.counts, ScoreSketch.of(pooled, 16, grid).counts)
    assert merged.num_examples == len(pooled)


def test_noise_has_the_ratio_that_privacy_allows():
    """Discrete Laplace: P(k) / P(k + 1) = exp(ε), and it falls alike on both sides."""
    epsilon, cells = 0.7, 200_000
    counts = torch.full((cells,), 1000)
    noise = ScoreSketch(counts).noisy(epsilon, key=1).counts - counts
    shares = [(noise == k).double().mean().item() for k in range(-3, 4)]
    center = (1 - math.exp(-epsilon)) / (1 + math.exp(-epsilon))
    assert shares == pytest.approx([center * math.exp(-epsilon * abs(k)) for k in range(-3, 4)], abs=5e-3)
    assert torch.equal(ScoreSketch(counts).noisy(epsilon, key=1).counts, counts + noise)
    assert not torch.equal(ScoreSketch(counts).noisy(epsilon, key=2).counts, counts + noise)
    assert (ScoreSketch(torch.zeros(1000, dtype=torch.int64)).noisy(0.1, key=0).counts >= 0).all()


@pytest.mark.parametrize("kind", ["lac", "aps"])
@given(seed=st.integers(0, 999), level=LEVELS)
@settings(max_examples=40, deadline=None)
def test_a_label_is_in_the_set_if_and_only_if_its_score_is_at_most_the_threshold(kind, seed, level):
    probs, targets = predictive(60, seed=seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        conformal = FederatedConformal(level, kind=kind).fit({"a": class_scores(probs, targets, kind)})
    sets = conformal.sets(probs)
    assert torch.equal(sets, all_class_scores(probs, kind) <= conformal.threshold)
    for label in range(5):
        scores = class_scores(probs, torch.full((60,), label), kind)
        assert torch.equal(sets[:, label], scores <= conformal.threshold)
    if kind == "aps":  # a set holds the most probable classes
        assert all(p[s].min() >= p[~s].max() for p, s in zip(probs, sets) if s.any() and not s.all())


def test_intervals_hold_the_targets_whose_score_is_at_most_the_threshold():
    mean, std = torch.randn(500), torch.rand(500) + 0.1
    targets = mean + 2 * std * torch.randn(500)
    conformal = FederatedConformal(0.8, kind="interval")
    scores = interval_scores(mean, std, targets)
    ends = conformal.fit({"a": scores[:200], "b": scores[200:]}).intervals(mean, std)
    inside = (ends[:, 0] <= targets) & (targets <= ends[:, 1])
    assert torch.equal(inside, scores <= conformal.threshold)
    assert ends.shape == (500, 2)
    assert inside.double().mean() >= 0.8


@pytest.mark.parametrize(("examples", "level"), [(9, 0.9), (25, 0.8), (100, 0.9)])
def test_coverage_in_expectation_is_that_of_the_theorem(examples, level):
    """Exchangeable scores without ties: ⌈(n + 1) level⌉ / (n + 1), here with the mass of one cell."""
    random, bins, trials = torch.Generator().manual_seed(examples), 4096, 4000
    scores = torch.rand(trials, examples, generator=random, dtype=torch.float64)
    thresholds = [ScoreSketch.of(row, bins).threshold(level) for row in scores]
    coverage = torch.tensor(thresholds).clamp(0, 1)  # of a uniform score
    expected = math.ceil((examples + 1) * level - 1e-9) / (examples + 1)
    error = 4 * float(coverage.std()) / trials**0.5
    assert expected - error <= float(coverage.mean()) <= expected + 1 / bins + error
    assert level - error <= float(coverage.mean()) <= level + 1 / (examples + 1) + 1 / bins + error


def test_too_few_examples_give_the_whole_and_a_warning_that_names_the_client():
    few, many = torch.linspace(0, 1, 8), torch.linspace(0, 1, 50)
    conformal = FederatedConformal(per_client=True)
    with pytest.warns(UserWarning, match="client south: 8 held-out examples, and a level of 0.9 needs 9") as caught:
        conformal.fit({"north": many, "south": few})
    assert len(caught) == 1
    assert math.isinf(conformal.thresholds["south"])
    assert conformal.sets(torch.tensor([[1.0, 0.0]]), "south").all()
    assert not conformal.sets(torch.tensor([[1.0, 0.0]]), "north").all()
    assert FederatedConformal().fit({"a": torch.linspace(0, 0.9, 9)}).threshold < 1
    intervals = FederatedConformal(kind="interval")
    with pytest.warns(UserWarning, match="all clients: 8 held-out .*every interval is the whole line"):
        intervals.fit({"south": few})
    assert intervals.intervals(torch.zeros(1), torch.ones(1)).tolist() == [[-math.inf, math.inf]]
    with pytest.warns(UserWarning, match="lies beyond the sketch, which ends at 1023"):
        intervals.fit({"south": torch.full((100,), 5000.0)})


LIARS = [(cell, examples) for cell in (0, 1023) for examples in (180, 2**53)]


def uniform(seed, clients=10, examples=180):
    """Scores whose coverage at a threshold is the threshold itself."""
    random = torch.Generator().manual_seed(seed)
    return {str(k): torch.rand(examples, generator=random, dtype=torch.float64) for k in range(clients)}


def filled(cell, examples, bins=1024):
    counts = torch.zeros(bins, dtype=torch.int64)
    counts[cell] = examples
    return ScoreSketch(counts)


@pytest.mark.parametrize("pooling", ["sum", "median"])
@pytest.mark.parametrize(("cell", "examples"), LIARS)
def test_one_liar_of_ten_leaves_the_coverage_where_it_is(pooling, cell, examples):
    found = [
        FederatedConformal(pooling=pooling).fit({**uniform(seed), "4": filled(cell, examples)}).threshold
        for seed in range(60)
    ]
    assert 0.88 <= np.mean(found) <= 0.93
    assert max(found) < 0.97


def test_the_bound_is_that_of_the_median_client(caplog):
    """At the threshold the others' excess is what the liar may add, c (median |e| + 2 √(level (1 - level) n))."""
    scores, level = uniform(1), 0.8
    del scores["4"]
    with caplog.at_level(logging.INFO):
        threshold = FederatedConformal(level).fit({**scores, "4": filled(1023, 18_000)}).threshold
    assert "the scores of client 4 stand out, and count for at most max_influence=2 times" in caplog.text
    excess = [float((each < threshold).sum() - level * 180) for each in scores.values()]
    bound = 2 * (sorted([*map(abs, excess), math.inf])[5] + 2 * math.sqrt(level * (1 - level) * 180))
    assert sum(excess) == pytest.approx(bound + level, abs=4)  # a cell holds 1.6 scores


@pytest.mark.parametrize("seed", range(2))
def test_honest_clients_are_summed_bit_for_bit(seed):
    for clients in (uniform(seed), {"a": torch.rand(900) ** 3, "b": torch.rand(30)}):  # two are never bounded
        bounded, believed = (FederatedConformal(per_client=True, max_influence=c).fit(clients) for c in (2.0, None))
        assert (bounded.threshold, bounded.thresholds) == (believed.threshold, believed.thresholds)
        pooled = ScoreSketch.of(torch.cat(list(clients.values())))
        assert bounded.threshold == pooled.threshold(0.9)
        assert bounded.thresholds == {name: ScoreSketch.of(each).threshold(0.9) for name, each in clients.items()}


@pytest.mark.parametrize("liars", [0, 4])
def test_the_median_lies_between_the_honest_clients_thresholds(liars):
    scores = uniform(3)
    honest = sorted(ScoreSketch.of(each).threshold(0.9) for each in scores.values())
    assert FederatedConformal(pooling="median").fit(scores).threshold == honest[5]
    for cell in (0, 1023):
        lies = {str(k): filled(cell, 10**6) for k in range(liars)}
        own = [ScoreSketch.of(each).threshold(0.9) for name, each in scores.items() if name not in lies]
        threshold = FederatedConformal(pooling="median").fit({**scores, **lies}).threshold
        assert min(own) <= threshold <= max(own)


@pytest.mark.parametrize(
    "change",
    [
        {"threshold": "high"},
        {"threshold": math.nan},
        {"thresholds": {"a": None}},
        {"temperature": 0.0},
        {"releases": -1},
    ],
)
def test_a_foreign_state_is_refused_and_changes_nothing(change):
    conformal = FederatedConformal(per_client=True).fit({"a": torch.linspace(0, 1, 50)})
    state = conformal.state_dict()
    lacking = {name: value for name, value in state.items() if name not in change}
    for foreign in ({**state, **change}, lacking, {"temperature": 2.0, "exchanges": 3}, None):
        with pytest.raises(FederationError):
            conformal.load_state_dict(foreign)
    assert conformal.state_dict() == state
    conformal.load_state_dict({**state, "threshold": math.inf})
    assert conformal.threshold == math.inf


def test_the_noise_of_two_fits_does_not_cancel():
    """One example more: with common noise the difference of both noisy sketches would be that example alone."""
    scores = torch.rand(500, generator=torch.Generator().manual_seed(0))
    one, other = ScoreSketch.of(scores, 64), ScoreSketch.of(torch.cat([scores, torch.tensor([0.5])]), 64)
    differ = other.noisy(1.0, key=3).counts - one.noisy(1.0, key=3).counts
    assert int((differ != 0).sum()) > 20
    assert torch.equal(one.noisy(1.0, key=3).counts, one.noisy(1.0, key=3).counts)


def test_every_fit_is_a_release_that_costs_epsilon_and_has_noise_of_its_own():
    scores = {"a": torch.rand(500, generator=torch.Generator().manual_seed(0))}
    conformal, found = FederatedConformal(0.5, bins=4096, epsilon=0.5), []
    for release in range(1, 5):
        found.append(conformal.fit(scores).threshold)
        assert conformal.figures()["epsilon"] == 0.5 * release
    assert len(set(found)) > 1
    again = FederatedConformal(0.5, bins=4096, epsilon=0.5)
    assert [again.fit(scores).threshold for _ in found] != found, "a secret of its own"
    for seed, same in ((3, True), (4, False)):
        pair = [FederatedConformal(0.5, bins=4096, epsilon=0.5, seed=each).fit(scores) for each in (3, seed)]
        assert (pair[0].threshold == pair[1].threshold) is same
        assert pair[0].figures().keys() == {"threshold", "simulated_epsilon"}
    fresh = FederatedConformal(0.5, bins=4096, epsilon=0.5)
    fresh.load_state_dict(conformal.state_dict())
    assert fresh.fit(scores).threshold == conformal.fit(scores).threshold, "its secret goes with the state"
    assert fresh.figures()["epsilon"] == 2.5
    conformal.load_state_dict(FederatedConformal(0.5).state_dict())
    assert conformal.releases == 5  # what has been sent stays counted
    assert FederatedConformal().fit(scores).releases == 0


def test_from_a_posterior_with_a_temperature():
    probs, targets = predictive(400, 3)
    network = torch.nn.Linear(3, 3)
    torch.nn.init.eye_(network.weight)
    torch.nn.init.zeros_(network.bias)
    module = fb.PosteriorPredictive(network, fb.read_posterior(network).clone(), samples=2)
    data = fb.ClientDatasets({"a": TensorDataset(3 * probs.log(), targets)})
    temperature = FederatedTemperature().fit_from(module, data).temperature
    assert temperature == pytest.approx(3, rel=0.15)
    conformal = FederatedConformal().fit_from(module, data, temperature=temperature)
    logits, _ = predictions_of(module, data)["a"]
    scores = class_scores((logits / temperature).softmax(-1).mean(0), targets)
    assert conformal.threshold == FederatedConformal().fit({"a": scores}).threshold
    with pytest.warns(UserWarning, match="400 of its 400 calibration examples were trained on"):
        FederatedConformal().fit_from(module, data, trained_on=data)


def test_from_a_regressor():
    inputs = torch.randn(300, 2)
    network = torch.nn.Linear(2, 1)
    targets = network(inputs).detach() + 2 * torch.randn(300, 1)
    module = fb.PosteriorPredictive(network, fb.read_posterior(network).clone(), samples=2, likelihood=fb.Gaussian(4.0))
    data = {"a": TensorDataset(inputs[:100], targets[:100]), "b": TensorDataset(inputs[100:], targets[100:])}
    conformal = FederatedConformal(kind="interval").fit_from(module, data, batch_size=64)
    assert conformal.threshold == pytest.approx(2 / 4 * 1.645, rel=0.15)
    with pytest.raises(FedBayesError, match="numbers whose noise is not known"):
        FederatedConformal(kind="interval").fit_from(network, data)


test_bad_input_is_refused = refusals(
    FedBayesError,
    (lambda: class_scores(torch.zeros(2, 3), torch.tensor([0, 1])), "probs are no probabilities"),
    (lambda: class_scores(torch.full((2, 2), 0.5), torch.tensor([0, 2])), "targets run from 0 to 2"),
    (lambda: interval_scores(torch.zeros(2), torch.zeros(2), torch.zeros(2)), "a std is not above 0"),
    (lambda: interval_scores(torch.zeros(2), torch.ones(2, 1), torch.zeros(2)), "shapes differ"),
    (lambda: ScoreSketch.of(torch.tensor([1.5])), r"not all finite and in \[0, 1\]"),
    (lambda: ScoreSketch(torch.tensor([1, -1])), "counts hold -1"),
    (lambda: ScoreSketch(torch.tensor([2**62, 2**62])), r"counts hold 9\.22e\+18 scores.*at most 2\^53"),
    (lambda: ScoreSketch(torch.tensor([2**53])) + ScoreSketch(torch.tensor([2**53])), r"at most 2\^53"),
    (lambda: FederatedConformal(pooling="mean"), "pooling='mean'"),
    (lambda: FederatedConformal(max_influence=0.5), r"max_influence=0\.5.* None turns the bound off"),
    (lambda: ScoreSketch.of(torch.rand(2)) + ScoreSketch.of(torch.rand(2), 8), "1024 cells .* and 8"),
    (lambda: ScoreSketch.of(torch.rand(2)).noisy(0.0, 1), "epsilon=0.0"),
    (lambda: FederatedConformal(level=1.0), "level=1.0"),
    (lambda: FederatedConformal().fit({}), "give a dict"),
    (lambda: FederatedConformal().fit({"a": torch.rand(9), "b": torch.rand(0)}), "client b has no held-out"),
    (lambda: FederatedConformal().sets(torch.full((1, 2), 0.5)), "call fit"),
    (lambda: FederatedConformal().intervals(torch.zeros(1), torch.ones(1)), "has no intervals"),
    (lambda: FederatedConformal(kind="interval").sets(torch.full((1, 2), 0.5)), "has no sets"),
    (lambda: FederatedConformal().fit({"a": torch.rand(20)}).threshold_of("a"), "give per_client=True"),
    (lambda: FederatedConformal(per_client=True).fit({"a": torch.rand(20)}).threshold_of("b"), "no client 'b'"),
)


def test_each_client_is_scored_by_its_own_threshold():
    class Network(torch.nn.Module):
        def forward(self, x):
            return x

    sharp, vague = (scale * torch.randn(300, 4) for scale in (6.0, 1.0))
    datasets = {
        name: TensorDataset(logits, torch.multinomial(logits.softmax(1), 1)[:, 0])
        for name, logits in (("sharp", sharp), ("vague", vague))
    }
    conformal = FederatedConformal(0.8, per_client=True).fit_from(Network(), datasets, temperature=1.5)
    scores = conformal.evaluate(Network(), datasets)
    for number, (name, data) in enumerate(datasets.items()):
        logits, y = data.tensors
        probs = (logits.double() / 1.5).softmax(1)
        inside = 1 - probs <= conformal.thresholds[name]
        assert float(scores.values["coverage"][number]) == pytest.approx(float(inside[range(300), y].double().mean()))
        assert float(scores.values["set_size"][number]) == pytest.approx(float(inside.sum(1).double().mean()))
    assert conformal.thresholds["sharp"] < conformal.threshold < conformal.thresholds["vague"]
