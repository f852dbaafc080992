"""Federations with adversaries, by either engine, interrupted or not."""

import pytest
import torch
from torch import nn

import lightning_fedbayes as fb
from benchmarks.untrusted import adversaries as untrusted
from lightning_fedbayes.core.errors import FederationError
from tests import federations
from tests.federations import Plain, assert_equal, bayesian, blobs, federate, loader, parameters

ENGINES = ["sequential", "vectorized"]
SIZES = fb.SizesPartition((20, 16, 16, 14, 10, 8))
ATTACKS = {
    "random": untrusted.RandomUpdate(0.3),
    "a little": untrusted.ALittleIsEnough([0, 5], z=1.5),
    "inner product": untrusted.InnerProductManipulation([5, 1], epsilon=2.0),
    "not a number": untrusted.NotANumber(["2"]),
}
SEVERAL = untrusted.ALittleIsEnough([3, 2]), untrusted.SignFlip([3]), untrusted.RandomUpdate(0.3)
ATTACKS["several"] = untrusted.Attacks([*SEVERAL])


def run(adversaries=None, engine="sequential", rounds=2, module=None, train=None, **options):
    module = Plain() if module is None else module
    options = {"partition": SIZES, "fusion": "fedavg", **options}
    fed = fb.FederatedBayes(engine=engine, adversaries=adversaries, **options)
    federate(module, fed, rounds, train)
    return module, fed


def assert_close(module, expected, rtol=1e-5, atol=1e-6) -> None:
    """The parameters of a module are those of another one, or those given."""
    expected = expected if isinstance(expected, dict) else parameters(expected)
    torch.testing.assert_close(parameters(module), expected, rtol=rtol, atol=atol)


def honest_update(client: int, labels=None) -> dict[str, torch.Tensor]:
    """Parameters of one client of ``SIZES`` after one full-batch step from the initial model."""
    x, y = blobs().tensors
    rows = SIZES.split(y, seed=0).indices[client]
    module = Plain()
    nn.functional.cross_entropy(module(x[rows]), (y if labels is None else labels)[rows]).backward()
    torch.optim.SGD(module.parameters(), lr=0.1).step()
    return parameters(module)


def averaged(updates, weights) -> dict[str, torch.Tensor]:
    return {n: sum(w * u[n] for w, u in zip(weights, updates)) / sum(weights) for n in updates[0]}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("attack", ["a little", "inner product"])
def test_colluding_adversaries_send_what_the_honest_means_say(attack, engine):
    """Clients 0 and 1 train before any honest one, 5 after all."""
    start, attackers = parameters(Plain()), ATTACKS[attack].clients
    updates = [honest_update(client) for client in range(6)]
    crafted = {}
    for name, value in start.items():
        honest = torch.stack([updates[client][name] for client in range(6) if client not in attackers])
        if attack == "a little":
            crafted[name] = honest.mean(0) - 1.5 * honest.std(0, correction=0)
        else:
            crafted[name] = value - 2.0 * (honest.mean(0) - value)
    for client in attackers:
        updates[client] = crafted
    module, _ = run(ATTACKS[attack], engine, rounds=1, train=loader(batch_size=90))
    assert_close(module, averaged(updates, SIZES.sizes))


@pytest.mark.parametrize("engine", ENGINES)
def test_flipped_labels_are_trained_on_and_nothing_else_changes(engine):
    data = blobs()
    y = data.tensors[1].clone()
    updates = [honest_update(k, federations.CLASSES - 1 - y if k in (1, 4) else y) for k in range(6)]
    train = loader(untrusted.with_flipped_labels(data, SIZES, [1, 4]), batch_size=90)
    module, _ = run(None, engine, 1, train=train, partition=None)
    assert_close(module, averaged(updates, SIZES.sizes))
    assert torch.equal(data.tensors[1], y)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "stack"), [("random", "vectorized"), ("a little", 1), ("not a number", 2), ("several", 4)]
)
def test_both_engines_agree(name, stack):
    """Also where adversaries wait beyond their own stack."""
    options = {"fraction": 0.8, "weighting": "equal"}
    first, _ = run(ATTACKS[name], "sequential", rounds=3, **options)
    second, _ = run(ATTACKS[name], stack, rounds=3, **options)
    assert_close(first, second, 1e-4, 1e-5)
    untouched, _ = run(None, "sequential", rounds=3, **options)
    assert any(not torch.allclose(parameters(first)[n], v, atol=1e-4) for n, v in parameters(untouched).items())


def test_attacks_follow_each_other():
    """Reflecting twice changes nothing; scaling by 2 and by 3 is scaling by 6."""
    both = run(untrusted.Attacks([untrusted.ScaledUpdate([1], factor=2.0), untrusted.ScaledUpdate([1], factor=3.0)]))[0]
    assert_close(both, run(untrusted.ScaledUpdate([1], factor=6.0))[0], 1e-4, 1e-5)
    assert_close(run(untrusted.Attacks([untrusted.SignFlip([1]), untrusted.SignFlip([1])]))[0], run()[0], 1e-4, 1e-5)


class Sick(Plain):
    def on_client_start(self, client) -> None:
        self.number = client.number
        if client.number == 3:
            raise RuntimeError("out of order")

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * (float("nan") if self.number == 2 else 1.0)


def test_invalid_clients_are_not_seen_and_fail_as_before():
    attack = untrusted.InnerProductManipulation([0, 3])
    module, fed = run(attack, module=Sick(), rounds=1, train=loader(batch_size=90), weighting="equal")
    start, updates = parameters(Plain()), [honest_update(client) for client in range(6)]
    seen = averaged([updates[k] for k in (1, 4, 5)], [1, 1, 1])
    crafted = {name: value - 0.1 * (seen[name] - value) for name, value in start.items()}
    assert_close(module, averaged([crafted, *(updates[k] for k in (1, 4, 5))], [1] * 4))
    assert fed.history[-1]["valid_clients"] == 4
    assert fed.history[-1]["failed_clients"] == 2
    assert fed._report.records.last_failure[3] == "RuntimeError: out of order"
    assert fed._report.records.rounds[0] == 1


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_honest_draws_do_not_depend_on_attacks(engine):
    """The noise, the orders and the cohorts are the same: only client 5, of no weight, attacks."""

    def weighting(facts):
        cohorts.append([each.client for each in facts])
        return [0.0 if each.client == 5 else 1.0 for each in facts]

    cohorts = []
    attacked, _ = run(untrusted.RandomUpdate([5]), engine, 3, bayesian(), weighting=weighting, fraction=0.8)
    untouched, _ = run(None, engine, 3, bayesian(), weighting=weighting, fraction=0.8)
    assert_equal(parameters(attacked), parameters(untouched))
    assert cohorts[:3] == cohorts[3:]
    assert any(5 in cohort for cohort in cohorts)


@pytest.mark.parametrize("adversaries", ["sign_flip", [untrusted.SignFlip], 3])
def test_adversaries_that_are_no_function_are_refused_at_once(adversaries):
    with pytest.raises(FederationError, match=r"adversaries=.*: give a function of a round"):
        fb.FederatedBayes(SIZES, adversaries=adversaries)


def test_a_function_may_hold_updates_back_and_send_none():
    """The model is that of the clients whose updates were sent, whatever their order."""

    def adversaries(round):
        held = []

        def send(update):
            if update is None:
                yield from held
            elif update.client == 0:
                held.append(update.clone())
            elif update.client != 3:
                yield update

        return send

    module, _ = run(adversaries, rounds=1, train=loader(batch_size=90))
    kept = [client for client in range(6) if client != 3]
    expected = averaged([honest_update(k) for k in kept], [SIZES.sizes[k] for k in kept])
    assert_close(module, expected)
