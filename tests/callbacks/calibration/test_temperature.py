"""Federated temperature against autograd, pooled temperature scaling and closed forms."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar
from torch.nn import functional as F
from torch.utils.data import ConcatDataset, Subset, TensorDataset

import lightning_fedbayes as fb
from lightning_fedbayes import FederatedTemperature
from lightning_fedbayes.callbacks.calibration import (
    TemperatureMessage,
    TemperatureSearch,
    predictions_of,
    temperature_message,
)
from lightning_fedbayes.core.errors import FedBayesError, FederationError
from tests.refusals import refusals


def draw(seed=0, examples=400, classes=6, true=2.0, scale=4.0, draws=None):
    """Logits whose best temperature is about ``true``, and classes drawn from it."""
    random = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(examples, classes, generator=random, dtype=torch.float64)
    targets = torch.multinomial((logits / true).softmax(-1), 1, generator=random).flatten()
    if draws is not None:
        logits = logits + scale / 3 * torch.randn(draws, examples, classes, generator=random, dtype=torch.float64)
    return logits, targets


def nll(logits, targets, log_t):
    """Sum of the NLL of the mean over draws, as plainly as it is defined."""
    draws = logits if logits.ndim == 3 else logits.unsqueeze(0)
    probs = (draws / torch.as_tensor(log_t, dtype=torch.float64).exp()).softmax(-1).mean(0)
    return F.nll_loss(probs.log(), targets, reduction="sum")


def pooled(logits, targets):
    found = minimize_scalar(
        lambda u: float(nll(logits, targets, u)), bounds=(-6, 6), method="bounded", options={"xatol": 1e-12}
    )
    return math.exp(found.x)


def dealt(logits, targets, clients, seed=1):
    owner = torch.randint(clients, targets.shape, generator=torch.Generator().manual_seed(seed))
    return {str(k): (logits[..., owner == k, :], targets[owner == k]) for k in range(clients)}


@pytest.mark.parametrize("draws", [None, 5])
@pytest.mark.parametrize("log_t", [-1.0, 0.0, 0.7])
def test_message_holds_the_derivatives_of_the_loss(draws, log_t):
    logits, targets = draw(draws=draws)
    u = torch.tensor(log_t, dtype=torch.float64, requires_grad=True)
    loss = nll(logits, targets, u)
    (first,) = torch.autograd.grad(loss, u, create_graph=True)
    (second,) = torch.autograd.grad(first, u)
    message = temperature_message(logits, targets, math.exp(log_t))
    expected = (first.item(), second.item(), len(targets))
    found = (message.gradient, message.curvature, message.num_examples)
    assert found == pytest.approx(expected, rel=1e-9)


def test_small_gradients_keep_their_digits():
    message = temperature_message(torch.tensor([[60.0, 0.0]]), torch.tensor([0]), 1.0)
    assert message.gradient == pytest.approx(60 * math.exp(-60), rel=1e-9)


@pytest.mark.parametrize(
    ("true", "scale", "draws"),
    [(1.0, 3.0, None), (1.5, 5.0, None), (3.0, 8.0, None), (0.5, 2.0, None), (2.0, 6.0, 7), (0.5, 2.0, 7)],
)
def test_equals_pooled_temperature_scaling_in_five_exchanges(true, scale, draws):
    logits, targets = draw(true=true, scale=scale, draws=draws)
    scaling = FederatedTemperature().fit(dealt(logits, targets, 7))
    assert scaling.temperature == pytest.approx(pooled(logits, targets), rel=1e-6)
    assert scaling.exchanges <= 5
    left = temperature_message(logits, targets, scaling.temperature)
    assert abs(left.gradient / left.curvature) < 1e-9


@given(seed=st.integers(0, 999), true=st.floats(0.2, 20), scale=st.floats(1, 20), clients=st.integers(2, 9))
@settings(max_examples=40, deadline=None)
def test_the_answer_does_not_depend_on_the_dealing(seed, true, scale, clients):
    logits, targets = draw(seed, 200, 4, true, scale)
    targets[:80] = logits[:80].argmax(-1)  # some are correct and some are not: a finite T is best
    targets[60:80] = (targets[60:80] + 1) % 4
    one = FederatedTemperature().fit({"all": (logits, targets)})
    many = FederatedTemperature(max_influence=None).fit(dealt(logits, targets, clients, seed))
    assert many.temperature == pytest.approx(one.temperature, rel=1e-9)
    assert one.temperature == pytest.approx(pooled(logits, targets), rel=1e-6)


@pytest.mark.parametrize("unit", [0.02, 50.0])
def test_temperature_has_the_unit_of_the_logits(unit):
    logits, targets = draw()
    base = FederatedTemperature().fit({"a": (logits, targets)}).temperature
    scaled = FederatedTemperature().fit({"a": (unit * logits, targets)}).temperature
    assert scaled == pytest.approx(unit * base, rel=1e-8)


def test_two_classes_have_a_closed_form():
    logits = torch.tensor([[3.0, 0.0]]).expand(10, 2)
    targets = torch.tensor([0] * 8 + [1] * 2)
    assert FederatedTemperature().fit({"a": (logits, targets)}).temperature == pytest.approx(3 / math.log(4), rel=1e-9)


def test_every_exchange_that_is_kept_lowers_the_loss():
    logits, targets = draw(true=15.0, scale=40.0)
    search, kept = TemperatureSearch(), []
    while not search.done:
        search = search.after([temperature_message(logits, targets, search.temperature)])
        kept.append(float(nll(logits, targets, search.last[0])))
    assert kept == sorted(kept, reverse=True)
    assert len(kept) > 3
    with pytest.raises(FedBayesError, match="the search is done"):
        search.after([temperature_message(logits, targets, 1.0)])


def test_a_step_to_a_larger_gradient_of_the_other_sign_is_halved():
    search = TemperatureSearch().after([TemperatureMessage(1.0, 1.0, 1)])
    assert search.temperature == pytest.approx(math.exp(-1))
    assert search.after([TemperatureMessage(-1.5, 10.0, 1)]).temperature == pytest.approx(math.exp(-0.5))
    assert search.after([TemperatureMessage(-0.5, 1.0, 1)]).temperature == pytest.approx(math.exp(-0.5))  # Newton's
    assert search.after([TemperatureMessage(-0.5, 0.1, 1)]).temperature == pytest.approx(math.exp(-0.5))  # inside


def test_the_search_ends_after_ten_exchanges_within_the_interval_that_signs_allow():
    """A cube root, on which Newton's steps go to and fro, twice as far each time."""
    search = TemperatureSearch()
    while not search.done:
        u = math.log(search.temperature) - 0.9
        search = search.after([TemperatureMessage(math.copysign(abs(u) ** (1 / 3), u), abs(u) ** (-2 / 3) / 3, 1)])
    assert search.exchanges == 10
    assert math.log(search.temperature) == pytest.approx(0.9, abs=0.02)


@pytest.mark.parametrize(("target", "limit"), [("argmax", 1e-3), ("argmin", 1e3)])
def test_without_a_finite_optimum_it_ends_at_a_limit_and_warns(target, limit):
    logits, _ = draw()
    with pytest.warns(UserWarning, match="ends at its limit"):
        scaling = FederatedTemperature().fit({"a": (logits, getattr(logits, target)(-1))})
    assert scaling.temperature == pytest.approx(limit)
    assert scaling.exchanges <= 20


def test_a_jump_to_a_limit_that_is_too_far_costs_one_exchange():
    """Steps up to T = 18 do not shrink within five exchanges."""
    logits, targets = draw(2, 400, 4, true=20.0, scale=4.0)
    search, asked = TemperatureSearch(), []
    while not search.done:
        asked.append(search.temperature)
        search = search.after([temperature_message(logits, targets, search.temperature)])
    assert max(asked) == pytest.approx(1e3)
    assert search.temperature == pytest.approx(pooled(logits, targets), rel=1e-6)
    assert search.exchanges <= 10


def test_a_flat_loss_leaves_the_logits_alone():
    with pytest.warns(UserWarning, match="does not depend on the temperature"):
        scaling = FederatedTemperature().fit({"a": (torch.zeros(4, 3), torch.tensor([0, 1, 2, 0]))})
    assert scaling.temperature == 1.0


test_bad_examples_are_refused_by_the_name_of_the_client = refusals(
    FedBayesError,
    (torch.zeros(4), torch.zeros(4), "client south: .*A regressor has none"),
    (torch.zeros(4, 2), torch.zeros(4), "client south: .*targets are of torch.float32"),
    (torch.zeros(4, 2), torch.tensor([0, 1, 2, 0]), "client south: .*targets run from 0 to 2"),
    (torch.tensor([[math.nan, 0.0]]), torch.tensor([0]), "client south: .*1 of 2 entries are not finite"),
    (torch.zeros(4, 2), torch.zeros(3, dtype=torch.long), "client south: .*one class is needed for each"),
    (torch.zeros(0, 2), torch.zeros(0, dtype=torch.long), "client south: .*no held-out example"),
    call=lambda *south: FederatedTemperature().fit({"north": draw(), "south": south}),
)

test_bad_messages_and_clients_are_refused = refusals(
    FedBayesError,
    (lambda: TemperatureMessage(math.nan, 1.0, 1), "gradient=nan"),
    (lambda: TemperatureMessage(1.0, 1.0, 0), "num_examples=0"),
    (lambda: FederatedTemperature().fit({}), "give a dict"),
    (lambda: TemperatureSearch().after([]), "give a list of the clients' messages"),
    (lambda: FederatedTemperature(max_influence=0.5), r"max_influence=0\.5.* None turns the bound off"),
    (lambda: FederatedTemperature().fit({"a": 3}), "client a: 3 is no pair"),
)


def ten(examples=180):
    return {str(k): draw(k, examples) for k in range(10)}


def found_with(change, clients, liars=1):
    """The temperature, and the exchanges, where some clients send changed messages."""
    search = TemperatureSearch()
    while not search.done:
        messages = [temperature_message(*each, search.temperature) for each in clients.values()]
        for liar in range(liars):
            sent = change(messages[liar].gradient, messages[liar].curvature)
            messages[liar] = TemperatureMessage(*sent, messages[liar].num_examples)
        search = search.after(messages)
    return search


LIES = {
    "a thousand times": lambda g, h: (1e3 * g, 1e3 * h),
    "a thousandth": lambda g, h: (1e-3 * g, 1e-3 * h),
    "upwards": lambda g, h: (-1e9, h),
    "downwards": lambda g, h: (1e9, h),
    "downwards, hidden": lambda g, h: (40.0, h),
    "no curvature": lambda g, h: (g, 0.0),
    "much curvature, which ends Newton's steps": lambda g, h: (g, 1e12),
    "negative curvature": lambda g, h: (g, -1e12),
    "another sign": lambda g, h: (-g, -h),
}


@pytest.mark.parametrize("name", LIES)
def test_one_liar_of_ten_moves_the_temperature_by_less_than_a_tenth(name):
    clients = ten()
    honest = FederatedTemperature().fit(clients)
    search = found_with(LIES[name], clients)
    assert search.temperature == pytest.approx(honest.temperature, rel=0.1)
    assert search.exchanges <= 10


def test_the_bound_is_that_of_the_median_client():
    """At the T found the bounded sum is 0: what the liar adds is c (median |g| + 2 √median h)."""
    clients = ten()
    search = found_with(LIES["upwards"], clients)
    sums = [temperature_message(*each, search.temperature) for each in clients.values()][1:]
    sizes = sorted([abs(each.gradient) for each in sums] + [math.inf])
    curvatures = sorted(each.curvature for each in sums)
    bound = 2 * (sizes[5] + 2 * math.sqrt(curvatures[5]))
    assert sum(each.gradient for each in sums) == pytest.approx(bound, rel=0.05)


@pytest.mark.parametrize("seed", range(2))
def test_honest_clients_are_summed_bit_for_bit(seed):
    clients = {str(k): draw(10 * seed + k, 180) for k in range(10)}
    bounded, believed = (FederatedTemperature(max_influence=each).fit(clients) for each in (2.0, None))
    assert bounded.temperature == believed.temperature
    two = {"0": clients["0"], "1": (5 * clients["1"][0], clients["1"][1])}  # two are never bounded
    bounded, believed = (FederatedTemperature(max_influence=each).fit(two) for each in (2.0, None))
    assert bounded.temperature == believed.temperature


@pytest.mark.parametrize(
    "state",
    [
        None,
        {},
        {"temperature": "warm", "exchanges": 1},
        {"temperature": 2.0, "exchanges": None},
        {"threshold": 0.5, "thresholds": {}, "temperature": 1.0},
    ],
)
def test_a_foreign_state_is_refused_and_changes_nothing(state):
    scaling = FederatedTemperature(3.0)
    with pytest.raises(FederationError):
        scaling.load_state_dict(state)
    assert scaling.temperature == 3.0
    scaling.load_state_dict(FederatedTemperature().state_dict())
    assert scaling.temperature is None


def federation(classes=3):
    """A linear network, and three clients whose targets it predicts with too much confidence."""
    torch.manual_seed(0)
    network = torch.nn.Linear(4, classes)
    inputs = torch.randn(300, 4)
    targets = torch.multinomial((network(inputs) / 1.5).softmax(-1), 1).flatten()
    return network, TensorDataset(inputs, targets)


def clients_of(data):
    return fb.ClientDatasets({name: Subset(data, range(k, len(data), 3)) for k, name in enumerate("abc")})


def test_fit_from_a_plain_module_is_fit_on_its_logits():
    network, data = federation()
    network.train()
    scaling = FederatedTemperature().fit_from(network, clients_of(data), batch_size=7)
    expected = FederatedTemperature().fit({"all": (network(data.tensors[0]).detach(), data.tensors[1])})
    assert scaling.temperature == pytest.approx(expected.temperature, rel=1e-6)
    assert network.training


def test_draws_of_a_posterior_are_gathered():
    network, data = federation()
    predictive = fb.PosteriorPredictive(network, fb.read_posterior(network).clone(), samples=3)
    found = predictions_of(predictive, clients_of(data), batch_size=40)
    assert {name: tuple(logits.shape) for name, (logits, _) in found.items()} == dict.fromkeys("abc", (3, 100, 3))
    assert torch.allclose(found["b"][0][1], network(data.tensors[0][1::3]))
    assert torch.equal(found["b"][1], data.tensors[1][1::3])
    same = FederatedTemperature().fit_from(network, {"all": data}).temperature
    assert FederatedTemperature().fit_from(predictive, clients_of(data)).temperature == pytest.approx(same, rel=1e-6)


def test_examples_that_were_trained_on_are_found():
    network, data = federation()
    train = ConcatDataset([Subset(data, range(0, 100)), Subset(Subset(data, range(100, 300)), range(50))])
    apart = {"a": Subset(data, range(150, 300))}
    FederatedTemperature().fit_from(network, apart, trained_on=train)  # warnings are errors
    with pytest.warns(UserWarning, match="client a: 15 of its 60 calibration examples were trained on"):
        FederatedTemperature().fit_from(network, {"a": Subset(data, range(135, 195))}, trained_on=train)
