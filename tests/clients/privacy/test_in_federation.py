"""Client-level privacy inside a federation."""

import math

import pytest
import torch

import lightning_fedbayes as fb
from benchmarks.untrusted.adversaries import ScaledUpdate
from lightning_fedbayes.clients.privacy import UpdatePrivacy, epsilon_of
from lightning_fedbayes.core.errors import FederationError
from lightning_fedbayes.layers import read_posterior
from tests.federations import Plain, assert_equal, bayesian, federate, network, parameters

pytest.importorskip("opacus")

HUGE = UpdatePrivacy(clip=1e6, noise_multiplier=0.0)


def run(module, privacy, rounds=2, clients=3, ckpt_path=None, **options):
    federation = fb.FederatedBayes(fb.IIDPartition(clients), privacy=privacy, **options)
    return federate(module, federation, rounds, ckpt_path=ckpt_path), federation


def distance(first, second):
    """Norm of the step from one posterior to another, in (μ, log σ)."""
    parts = [(first.mean[n] - second.mean[n]).flatten() for n in first.names]
    parts += [
        (first.variance[n] / second.variance[n]).log().flatten() / 2 for n in first.names if first.variance[n].any()
    ]
    return float(torch.cat(parts).norm())


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_no_noise_and_no_clipping_changes_nothing(engine):
    plain, private = bayesian(), bayesian()
    run(plain, None, engine=engine, fusion="rklb")
    run(private, HUGE, engine=engine)
    for name, value in parameters(plain).items():
        torch.testing.assert_close(parameters(private)[name], value, rtol=1e-4, atol=1e-6)


def test_the_engines_send_the_same_noise():
    modules = Plain(), Plain()
    for module, engine in zip(modules, ("sequential", "vectorized")):
        run(module, UpdatePrivacy(0.5, 0.3), engine=engine)
    first, second = map(parameters, modules)
    for name in first:
        torch.testing.assert_close(first[name], second[name], rtol=1e-4, atol=1e-5)


def test_an_average_of_clipped_updates_is_no_longer_than_one_of_them():
    module = bayesian(learning_rate=0.5)
    before = read_posterior(module).clone()
    _, federation = run(module, UpdatePrivacy(0.01, 0.0), rounds=1, fusion="log_variance_average", engine="sequential")
    assert 0.005 < distance(federation.posterior, before) <= 0.01 * (1 + 1e-3)


def test_epsilon_is_logged_after_every_round():
    made, federation = run(Plain(), UpdatePrivacy(1.0, 2.0, delta=1e-4), rounds=3, clients=4, fraction=0.5, seed=1)
    rounds = list(federation._report.records.rounds)
    assert sum(rounds) == 6
    assert float(made.callback_metrics["privacy/epsilon"]) == pytest.approx(epsilon_of(2.0, 1e-4, max(rounds)))


def test_a_resumed_run_ends_like_one_that_was_not_interrupted(tmp_path):
    privacy = UpdatePrivacy(0.5, 0.2, widen_posterior=True)
    whole, half, resumed = bayesian(), bayesian(), bayesian(seed=1)
    made, _ = run(whole, privacy, rounds=4)
    run(half, privacy, rounds=2)[0].save_checkpoint(tmp_path / "half.ckpt")
    again, _ = run(resumed, privacy, rounds=4, ckpt_path=tmp_path / "half.ckpt")
    assert_equal(parameters(whole), parameters(resumed))
    assert again.callback_metrics["privacy/epsilon"] == made.callback_metrics["privacy/epsilon"]
    with pytest.raises(FederationError, match=r"privacy=None \(was UpdatePrivacy"):
        run(bayesian(), None, rounds=4, ckpt_path=tmp_path / "half.ckpt")


def test_adversaries_begin_with_what_they_would_have_sent():
    """A free rider sends the global posterior's means; its variances are protected as those of any client."""
    free_riders = ScaledUpdate(clients=1.0, factor=0.0)
    (_, fed), (_, honest), (_, unprotected) = (
        run(bayesian(), privacy, rounds=1, adversaries=adversaries)
        for privacy, adversaries in (
            (UpdatePrivacy(1.0, 1.0), free_riders),
            (UpdatePrivacy(1.0, 1.0), None),
            (None, None),
        )
    )
    for name, value in read_posterior(bayesian()).mean.items():
        torch.testing.assert_close(fed.posterior.mean[name], value)
        torch.testing.assert_close(fed.posterior.variance[name], honest.posterior.variance[name])
    name = "network.2.weight"
    assert not torch.allclose(fed.posterior.variance[name], unprotected.posterior.variance[name], rtol=0.1)


def test_figures_of_training_do_not_leave_the_client():
    _, federation = run(Plain(), HUGE, rounds=1)
    assert "train_loss" not in federation.history[0]
    assert all(map(math.isnan, federation._report.records.train_loss))


def test_buffers_are_refused_before_training():
    module = Plain(network(batch_norm=True))
    before = parameters(module)
    for buffers in ("average", "local"):
        with pytest.raises(FederationError, match=r"net\.1\.running_mean.*buffers='frozen'"):
            run(module, HUGE, buffers=buffers)
    assert_equal(before, parameters(module))
    run(module, HUGE, rounds=1, buffers="frozen")
    run(Plain(network(batch_norm=True)), HUGE, rounds=1, local_parameters=["net.1.*"])


def test_another_share_of_the_clients_goes_on_with_the_account(tmp_path):
    """It counts the rounds that each client has taken part in."""
    privacy = UpdatePrivacy(noise_multiplier=1.0)
    run(bayesian(), privacy, rounds=2)[0].save_checkpoint(tmp_path / "half.ckpt")
    made, federation = run(bayesian(), privacy, rounds=4, ckpt_path=tmp_path / "half.ckpt", fraction=0.34)
    rounds = list(federation._report.records.rounds)
    assert sum(rounds) == 2 * 3 + 2 * 1
    assert float(made.callback_metrics["privacy/epsilon"]) == pytest.approx(epsilon_of(1.0, 1e-5, max(rounds)))
