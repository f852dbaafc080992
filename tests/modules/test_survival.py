"""The Cox loss against its definition and lifelines; the Cox regressor trains, predicts and is scored."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import TensorDataset

import lightning_fedbayes as fb
from lightning_fedbayes import ClientDatasets, CoxRegressor, FedBayesError, FederatedBayes
from lightning_fedbayes.metrics.functional import concordance_index, cox_loss
from lightning_fedbayes.modules import mlp
from tests.federations import trainer
from tests.modules.helpers import loader, summed_kl
from tests.refusals import refusals

TIME = torch.tensor([5, 8, 8.5, 12, 3, 7, 20, 15, 11, 1, 9, 21], dtype=torch.float64)
EVENT = torch.tensor([1, 1, 0, 0, 1, 1, 0, 1, 1, 1, 0, 1])
INPUTS = torch.tensor(
    [[1.5, 0.3, 0.3, -0.2, 2.0, 0.9, -1.0, -0.4, 0.3, 1.5, 1.1, -1.0], [0, 1, 1, 0, 0, 1, 0, 1, 0, 1, 1, 0]],
    dtype=torch.float64,
).T
COEFFICIENTS, LOG_LIKELIHOOD = (3.061336073574191, 0.755994535166687), -6.942530541956061
"""lifelines 0.30.3: ``CoxPHFitter().fit`` of these 12 examples, whose times are all different."""
rows = st.lists(st.tuples(st.floats(-3, 3), st.integers(0, 4), st.booleans()), min_size=1, max_size=15)


def columns(examples):
    risk, time, event = (torch.tensor(column) for column in zip(*examples))
    return risk.double().requires_grad_(), time, event


def by_definition(log_risk, time, event):
    """The mean over events of −h_i + log of the sum over the risk set."""
    terms = [torch.log(log_risk[time >= time[i]].exp().sum()) - log_risk[i] for i in range(len(time)) if event[i]]
    return torch.stack(terms).mean() if terms else 0 * log_risk.sum()


def gradient(function, log_risk, *others):
    return torch.autograd.grad(function(log_risk, *others), log_risk)[0]


@given(rows)
@settings(deadline=None)
def test_loss_and_gradient_are_those_of_the_definition(examples):
    arguments = columns(examples)
    assert cox_loss(*arguments).item() == pytest.approx(by_definition(*arguments).item(), abs=1e-9)
    assert torch.allclose(gradient(cox_loss, *arguments), gradient(by_definition, *arguments), atol=1e-9)


def test_likelihood_and_its_maximum_are_those_of_lifelines():
    coefficients = torch.tensor(COEFFICIENTS, dtype=torch.float64, requires_grad=True)
    loss = cox_loss(INPUTS @ coefficients, TIME, EVENT)
    assert -loss.item() * EVENT.sum().item() == pytest.approx(LOG_LIKELIHOOD, abs=1e-9)
    assert torch.autograd.grad(loss, coefficients)[0].abs().max() < 1e-6
    found = torch.zeros(2).double().requires_grad_()
    optimizer = torch.optim.LBFGS([found], max_iter=200, tolerance_grad=1e-10, line_search_fn="strong_wolfe")

    def closure():
        optimizer.zero_grad()
        loss = cox_loss(INPUTS @ found, TIME, EVENT)
        loss.backward()
        return loss

    optimizer.step(closure)
    assert found.tolist() == pytest.approx(COEFFICIENTS, abs=1e-5)


test_errors_of_the_loss = refusals(
    FedBayesError,
    (torch.zeros(12, 1), TIME, EVENT, r"shapes differ: log_risk \(12, 1\)"),
    (torch.zeros(12), TIME, EVENT * 2, "event holds 2 among 8 of 12"),
    call=cox_loss,
)


def simulated(examples=240, features=3):
    """Exponential times whose log hazard is 1.5 x₀ − x₁, a third or so of them censored."""
    inputs = torch.randn(examples, features)
    time = torch.empty(examples).exponential_() / (1.5 * inputs[:, 0] - inputs[:, 1]).exp()
    censored = 2 * torch.empty(examples).exponential_()
    return TensorDataset(inputs, torch.stack([(time <= censored).float(), torch.minimum(time, censored)], 1))


def linear(**options):
    options = {"bayesian_last": 1, "learning_rate": 0.05, "posterior_std": 0.1, **options}
    return CoxRegressor(nn.Linear(3, 1, bias=False), **options)


def test_loss_is_the_negative_elbo_per_example():
    """The partial likelihood summed over events, divided by the batch size, as the KL is by the number of examples."""
    inputs, targets = simulated(40).tensors
    model = CoxRegressor(mlp(3, 1, (4,)), bayesian_last=1, prior_std=0.7)
    model.num_examples = 400
    model.log_dict = lambda *arguments, **options: None
    torch.manual_seed(1)
    loss = model.training_step((inputs, targets), 0)
    torch.manual_seed(1)
    summed = by_definition(model(inputs).squeeze(1), targets[:, 1], targets[:, 0]) * targets[:, 0].sum()
    assert loss.item() == pytest.approx(summed.item() / 40 + summed_kl(model.network, 0.7) / 400, rel=1e-5)


def test_prediction_is_mean_and_standard_deviation_of_the_log_risk():
    r"""For a linear network :math:`\mu^\top x` and :math:`\sqrt{\sum_i \sigma_i^2 x_i^2}`."""
    model, inputs = linear(samples=20_000, posterior_std=0.3), torch.randn(5, 3)
    prediction = model.predict_step((inputs, torch.zeros(5, 2)))
    mean = (inputs @ fb.read_posterior(model.network).mean["weight"].T).squeeze(1)
    assert prediction.samples.shape == (20_000, 5)
    assert torch.allclose(prediction.log_risk, mean, atol=0.03)
    assert torch.allclose(prediction.std, 0.3 * inputs.norm(dim=1), rtol=0.05)


@pytest.mark.parametrize("stage", ["val", "test"])
def test_logged_scores_take_all_batches_together(stage):
    data = simulated(50)
    model, run = linear(), trainer()
    known, targets = data.tensors
    draws = torch.randn(7, 50)
    model.sample = lambda inputs, samples=None: draws[:, [int((known == x).all(1).nonzero()) for x in inputs]]
    evaluate = run.validate if stage == "val" else run.test
    for batch_size in (16, 50):  # the second starts anew
        (logged,) = evaluate(model, loader(data, batch_size), verbose=False)
        event, time = targets.T
        nll = by_definition(draws.mean(0), time, event) * event.mean()
        index = concordance_index(draws.mean(0), time, event).item()
        assert logged == pytest.approx({f"{stage}/c_index": index, f"{stage}/nll": nll.item()}, rel=1e-5)


def test_a_rule_is_chosen_by_the_partial_likelihood_of_held_out_data():
    data = ClientDatasets({str(k): simulated(60) for k in range(2)})
    model, callback = linear(), FederatedBayes(fusion="auto")
    trainer(2, [callback]).fit(model, loader(data, 60), loader(simulated(60), 60))
    losses = [value for name, value in callback.history[-1].items() if name.startswith("held_out_loss/")]
    assert len(losses) > 1
    assert all(math.isfinite(value) for value in losses)


test_errors_of_the_module = refusals(
    FedBayesError,
    (lambda: linear().negative_log_likelihood(torch.zeros(4), torch.zeros(4)), r"shape \(4,\).*two columns"),
    (lambda: CoxRegressor(nn.Linear(3, 2)).predict_step(torch.zeros(4, 3)), "one log risk per example"),
    (lambda: linear().validation_step((torch.zeros(4, 3), torch.full((4, 2), 3.0)), 0), "event holds 3"),
)


WRONG_TARGETS = {
    "swapped": (lambda event, time: (time, event), "event holds"),
    "events coded -1 and 1": (lambda event, time: (2 * event - 1, time), "event holds -1"),
    "negative": (lambda event, time: (event, time - time.mean()), "time holds -"),
}


@pytest.mark.parametrize("engine", ["none", "sequential", "vectorized"])
@pytest.mark.parametrize("wrong", WRONG_TARGETS)
def test_training_refuses_wrong_targets_in_the_first_epoch(wrong, engine):
    inputs, targets = simulated(24).tensors
    change, says = WRONG_TARGETS[wrong]
    data = TensorDataset(inputs, torch.stack(change(*targets.T), 1))
    callbacks = [] if engine == "none" else [FederatedBayes(fb.IIDPartition(3), engine=engine)]
    run, batches = trainer(2, callbacks), loader(data, 4)
    with pytest.raises(FedBayesError, match=says):
        run.fit(linear(), batches)
    assert run.current_epoch == 0
