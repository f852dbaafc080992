"""Each client's own model on every client's data: the table, and who stands out."""

import math

import pytest
import torch
from matplotlib.figure import Figure
from torch import nn
from torch.utils.data import TensorDataset

import lightning_fedbayes as fb
from lightning_fedbayes.clients.across import CrossScores, threshold
from lightning_fedbayes.clients.evaluation import ClientScores
from lightning_fedbayes.core.errors import FedBayesError
from tests.federations import FEATURES, blobs, clients, network


def named(values: torch.Tensor, figure: str = "nll") -> CrossScores:
    return CrossScores(tuple(f"c{k}" for k in range(len(values))), {figure: values})


def chance(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def own_models(data: fb.ClientDatasets) -> dict[str, fb.PosteriorPredictive]:
    found = {}
    for seed, name in enumerate(data.names):
        module = network(seed)
        found[name] = fb.PosteriorPredictive(module, fb.read_posterior(module))
    return found


def fitted(data: fb.ClientDatasets, steps: int = 60) -> dict[str, fb.PosteriorPredictive]:
    """A logistic regression for each client, by maximum a posteriori."""
    found = {}
    for name, part in zip(data.names, data.datasets, strict=True):
        layer = nn.Linear(FEATURES, 3)
        nn.init.zeros_(layer.weight), nn.init.zeros_(layer.bias)
        optimizer = torch.optim.LBFGS(layer.parameters(), max_iter=steps)

        def loss(layer=layer, part=part, optimizer=optimizer):
            optimizer.zero_grad()
            value = nn.functional.cross_entropy(layer(part.tensors[0]), part.tensors[1])
            value = value + 0.01 * layer.weight.square().sum()
            value.backward()
            return value

        optimizer.step(loss)
        found[name] = fb.PosteriorPredictive(layer, fb.read_posterior(layer))
    return found


def test_rows_are_those_of_each_model_on_all_data_and_the_diagonal_those_of_the_own():
    data = clients(9, 20, 13)
    models = own_models(data)
    scores = fb.evaluate_across(models, data, batch_size=5)
    assert scores.names == data.names
    assert set(scores.values) == {"accuracy", "nll", "ece"}
    own = fb.evaluate_clients(models, data, batch_size=5)
    for figure, values in scores.values.items():
        assert torch.equal(values.diagonal(), own.values[figure])
        for row, name in zip(values, data.names, strict=True):
            assert torch.equal(row, fb.evaluate_clients(models[name], data, batch_size=5).values[figure])
    assert scores.table("accuracy")[0][0] == "accuracy: model on data of"


def test_a_permutation_of_the_clients_permutes_the_matrix():
    data, order = clients(9, 12, 13, 8), [2, 0, 3, 1]
    models = own_models(data)
    first = fb.evaluate_across(models, data)
    other = fb.ClientDatasets({data.names[k]: data.datasets[k] for k in order})
    second = fb.evaluate_across(models, other)
    for figure, values in first.values.items():
        assert torch.equal(second.values[figure], values[order][:, order])
    for one, two in zip(first.effects(), second.effects(), strict=True):
        torch.testing.assert_close(two, one[order])


def test_effects_are_those_of_an_additive_table_whatever_its_diagonal():
    a, b = torch.randn(2, 6, generator=chance(), dtype=torch.float64)
    a, b = a - a.mean(), b - b.mean()
    table = 3 + a[:, None] + b[None, :]
    table.fill_diagonal_(-50)
    models, data = named(table).effects()
    torch.testing.assert_close(models, a)
    torch.testing.assert_close(data, b)
    rows, columns = named(table).others()
    torch.testing.assert_close(rows, 3 + a - b / 5)
    torch.testing.assert_close(columns, 3 + b - a / 5)


def test_effects_are_least_squares():
    values = torch.randn(5, 5, generator=chance(), dtype=torch.float64)
    pairs = [(i, j) for i in range(5) for j in range(5) if i != j]
    design = torch.zeros(len(pairs) + 2, 11, dtype=torch.float64)
    for line, (i, j) in enumerate(pairs):
        design[line, [0, 1 + i, 6 + j]] = 1
    design[-2, 1:6], design[-1, 6:] = 1, 1  # the sums are 0
    wanted = torch.tensor([*(float(values[i, j]) for i, j in pairs), 0, 0], dtype=torch.float64)
    fit = torch.linalg.lstsq(design, wanted[:, None]).solution[:, 0]
    torch.testing.assert_close(torch.cat(named(values).effects()), fit[1:])


def test_one_model_for_all_has_no_effect_although_the_data_of_a_client_are_hard():
    data = torch.tensor([0.3, 0.31, 0.28, 0.33, 0.29, 9.0]).expand(6, 6)
    scores = named(data)
    torch.testing.assert_close(scores.effects()[0], torch.zeros(6, dtype=torch.float64), atol=1e-12, rtol=0)
    assert scores.others()[0][5] < 0.5 < scores.others()[0][0]  # the plain means of the rows would say otherwise
    assert scores.outlying() == {"c5": ("data",)}
    assert named(data.T).outlying() == {"c5": ("model",)}
    assert named(-data).outlying() == {"c5": ("data",)}  # on either side


@pytest.mark.parametrize("liar", [0, 4])
def test_a_client_with_other_labels_stands_out(liar):
    x, y = blobs(600).tensors
    parts = list(zip(x.split(100), y.split(100)))
    parts[liar] = parts[liar][0], (parts[liar][1] + 1) % 3
    train = fb.ClientDatasets({f"c{k}": TensorDataset(u[:60], v[:60]) for k, (u, v) in enumerate(parts)})
    held_out = fb.ClientDatasets({f"c{k}": TensorDataset(u[60:], v[60:]) for k, (u, v) in enumerate(parts)})
    scores = fb.evaluate_across(fitted(train), held_out)
    assert scores.outlying() == {f"c{liar}": ("model", "data")}
    honest = [k for k in range(6) if k != liar]
    kept = scores.values["nll"][honest][:, honest]
    assert not named(kept).outlying()
    own = scores.values["nll"].diagonal()
    assert float(own[liar]) < float(scores.others()[0][liar])


def normal(k, g):
    return torch.randn(k, 1, generator=g) + torch.randn(1, k, generator=g) + 0.3 * torch.randn(k, k, generator=g)


def exponential(k, g):
    return torch.empty(k, 1).exponential_(generator=g) + torch.empty(1, k).exponential_(generator=g)


def regressions(k, g):
    """Least squares of five weights on 60 examples, scored on 40 others of each client."""
    x, noise = torch.randn(k, 100, 5, generator=g), torch.randn(k, 100, generator=g)
    y = x.sum(-1) + noise
    weights = torch.linalg.lstsq(x[:, :60], y[:, :60, None]).solution[..., 0]
    return 0.5 * (torch.einsum("jmd,id->ijm", x[:, 60:], weights) - y[None, :, 60:]).square().mean(-1)


@pytest.mark.parametrize("number", [3, 15])
@pytest.mark.parametrize("make", [normal, exponential, regressions])
def test_clients_that_differ_by_chance_stand_out_no_more_often_than_stated(make, number):
    trials, rate, generator = 600, 0.1, chance(3)
    found = sum(bool(named(make(number, generator)).outlying(rate=rate)) for _ in range(trials)) / trials
    assert found <= rate + 3 * math.sqrt(rate * (1 - rate) / trials)


def test_the_threshold_is_the_quantile_of_the_exponential_and_falls_with_the_rate():
    draws = torch.empty(4000, 8).exponential_(generator=chance(7)).double()
    far = (draws - draws.quantile(0.5, 1, keepdim=True)).abs()
    ratio = far.amax(1) / far.quantile(0.5, 1)
    assert float((ratio > threshold(8, 0.2)).double().mean()) == pytest.approx(0.1, abs=0.015)
    assert [round(threshold(k, 0.05)) for k in (3, 5, 10, 30, 100)] == [110, 33, 19, 16, 17]  # of the docstring
    assert threshold(8, 0.5) < threshold(8, 0.05)


def test_what_is_not_finite_stands_out_and_does_not_hide_others():
    values = normal(8, chance(1)).double()
    values[3], values[:, 6], values[5, 5] = math.inf, math.nan, math.nan
    assert named(values).outlying() == {"c3": ("model",), "c6": ("data",)}
    values[1] += 1000
    assert named(values).outlying() == {"c1": ("model",), "c3": ("model",), "c6": ("data",)}
    assert isinstance(named(values).plot(), Figure)
    values = torch.zeros(2, 2)
    values[0, 1] = math.nan
    assert named(values).outlying() == {"c0": ("model",)}


def test_ties_and_two_clients_give_nothing_to_measure_by():
    ties = torch.ones(6, 6)
    assert named(ties).outlying() == {}
    ties[2] = 0.9
    assert named(ties, "accuracy").outlying() == {}
    assert named(torch.tensor([[0.0, 9.0], [1.0, 0.0]])).outlying() == {}
    assert math.isnan(named(torch.ones(1, 1)).others()[0])


PAIR = named(torch.ones(2, 2))


@pytest.mark.whole
@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: fb.evaluate_across({}, clients(5)), "different names, such as 'c0'"),
        (lambda: fb.evaluate_across(network(), clients(5)), "name of the client → module"),
        (lambda: fb.evaluate_across({}, blobs()), "ClientDatasets"),
        (lambda: PAIR.table("nl"), "did you mean 'nll'"),
        (lambda: CrossScores(("a",), {}), "values is empty"),
        (lambda: CrossScores(("a",), {"nll": torch.ones(2, 2)}), "a row for each client's model"),
        (lambda: PAIR.effects(), "from 3 on"),
        (lambda: PAIR.outlying(rate=0), "rate"),
        (lambda: CrossScores.of({"a": ClientScores(("b",), (1,), {"nll": torch.ones(1)})}), "models of one task"),
    ],
)
def test_errors_say_what_to_do(call, says):
    with pytest.raises(FedBayesError, match=says):
        call()
