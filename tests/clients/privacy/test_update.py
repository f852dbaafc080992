"""Updates that are clipped and noised: bounds, distribution, and coverage with the noise's variance added."""

import math
import secrets
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch.callbacks import LambdaCallback

import lightning_fedbayes as fb
from benchmarks.untrusted.adversaries import ScaledUpdate
from lightning_fedbayes.clients.privacy import UpdatePrivacy, epsilon_of, privatised
from lightning_fedbayes.clients.privacy.update import clipped
from lightning_fedbayes.core.errors import FederationError, FusionError
from lightning_fedbayes.core.messages import ClientUpdate
from lightning_fedbayes.core.posterior import GaussianPosterior
from lightning_fedbayes.core.seeding import derive_seed, private_normal, private_uniform
from lightning_fedbayes.layers import read_posterior
from tests.federations import Plain, assert_equal, bayesian, federate, network, parameters
from tests.refusals import refusals

pytest.importorskip("opacus")


def draws(seed=0):
    return torch.Generator().manual_seed(seed)


def posterior(seed, size=4, scale=1.0):
    noise = draws(seed)
    mean = {"weight": scale * torch.randn(size, 2, generator=noise), "bias": scale * torch.randn(3, generator=noise)}
    variance = {"weight": torch.rand(size, 2, generator=noise) + 0.01, "bias": torch.zeros(()).expand(3)}
    return GaussianPosterior(mean, variance)


def step(sent, previous):
    """The step from one posterior to another, in (μ, log σ)."""
    means = [(sent.mean[name] - previous.mean[name]).double().flatten() for name in previous.names]
    wide = [name for name, variance in previous.variance.items() if variance.any()]
    ratios = [sent.variance[name].double() / previous.variance[name].double() for name in wide]
    return torch.cat([*means, *(ratio.log().flatten() / 2 for ratio in ratios)])


@given(scale=st.floats(0.0, 1e4), clip=st.floats(1e-3, 1e3))
def test_without_noise_the_update_keeps_its_direction_and_no_more_than_the_norm(scale, clip):
    before = posterior(0)
    after = posterior(1, scale=scale)
    sent = privatised(after, before, clip=clip, noise_multiplier=0.0, key=0)
    honest, clipped = step(after, before), step(sent, before)
    assert clipped.norm() <= clip * (1 + 1e-4) + 1e-5
    expected = honest * min(1.0, clip / float(honest.norm()))
    torch.testing.assert_close(clipped, expected, rtol=1e-3, atol=2e-6 * (1 + scale))


def test_the_noise_is_gaussian_of_the_stated_size_in_every_coordinate():
    before = posterior(0, size=20_000)
    clip, z = 0.5, 0.8
    sent = privatised(before, before, clip=clip, noise_multiplier=z, key=0)
    noise = step(sent, before) / (clip * z)
    means, log_stds = noise[:40_000], noise[-40_000:]
    for part in (means, log_stds):  # 5 standard errors of mean, variance and fourth moment
        assert abs(float(part.mean())) < 5 / 200
        assert abs(float(part.var()) - 1) < 5 * math.sqrt(2) / 200
        assert abs(float((part**4).mean()) - 3) < 5 * math.sqrt(96) / 200
    assert abs(float((means * log_stds).mean())) < 5 / 200, "means and variances have noise of their own"
    assert not sent.variance["bias"].any(), "what is deterministic stays so"


def test_one_client_moves_the_message_by_no_more_than_clip():
    """The same noise with any update and with none: sensitivity C."""
    before, clip = posterior(0), 0.7
    nothing = privatised(before, before, clip=clip, noise_multiplier=1.0, key=0)
    for seed in range(1, 20):
        sent = privatised(posterior(seed, scale=10.0**seed), before, clip=clip, noise_multiplier=1.0, key=0)
        moved = step(sent, before) - step(nothing, before)
        assert moved.norm() <= clip * (1 + 1e-3)


def test_a_gaussian_tensor_hides_which_of_its_variances_are_zero():
    before, after = posterior(0), posterior(1)
    for broken in (before, after):
        broken.variance["weight"][0, 0] = 0.0
        sent = privatised(after, before, clip=1.0, noise_multiplier=0.1, key=0)
        assert (sent.variance["weight"] > 0).all()
        assert torch.isfinite(sent.variance["weight"]).all()


def test_a_tensor_whose_variances_have_all_come_down_to_zero_gets_noise_like_any_other():
    before, after = posterior(0, size=2_000), posterior(0, size=2_000)
    after.variance["weight"].zero_()
    clip, z = 2.0, 0.5
    sent = privatised(after, before, clip=clip, noise_multiplier=z, key=0)
    noise = step(sent, before)[-4_000:]
    shift = -clip / math.sqrt(4_000)  # the clipped step, spread over all entries, nearly evenly
    assert float(noise.mean()) == pytest.approx(shift, abs=5 * clip * z / math.sqrt(4_000))
    assert float(noise.std()) == pytest.approx(clip * z, rel=5 / math.sqrt(8_000))


def test_what_is_deterministic_is_decided_by_the_global_posterior():
    """Not by the client, whose values would tell."""
    before, after = posterior(0), posterior(1)
    after.variance["bias"] = torch.rand(3)
    assert not privatised(after, before, clip=1.0, noise_multiplier=0.1, key=0).variance["bias"].any()


def test_names_come_in_the_order_of_the_global_posterior():
    before, after = posterior(0), posterior(1)
    turned = after.ordered(["bias", "weight"])
    options = {"clip": 1.0, "noise_multiplier": 1.0}
    first, second = (privatised(each, before, key=0, **options) for each in (after, turned))
    assert first.names == second.names == before.names
    assert all(torch.equal(first.mean[name], second.mean[name]) for name in before.names)


def test_widening_adds_the_variance_of_the_noise():
    before, after = posterior(0), posterior(1)
    plain, wide = (
        privatised(after, before, clip=0.5, noise_multiplier=0.4, key=0, widen=widen) for widen in (False, True)
    )
    torch.testing.assert_close(wide.variance["weight"], plain.variance["weight"] + 0.04)
    assert torch.equal(wide.mean["weight"], plain.mean["weight"])
    assert not wide.variance["bias"].any()


@pytest.mark.parametrize(("widen", "nominal"), [(True, True), (False, False)])
def test_the_widened_posterior_of_a_conjugate_model_covers_the_truth_at_the_nominal_rate(widen, nominal):
    """θᵢ ~ N(0, 1), one observation of variance s²: the exact posterior, sent with noise, against the truth."""
    size, observation, noise = 40_000, 0.1**2, 0.1
    rng = draws(3)
    truth = torch.randn(size, generator=rng)
    observed = truth + math.sqrt(observation) * torch.randn(size, generator=rng)
    variance = torch.full((size,), 1 / (1 + 1 / observation))
    exact = GaussianPosterior({"w": observed * variance / observation}, {"w": variance})
    before = GaussianPosterior({"w": torch.zeros(size)}, {"w": variance.clone()})
    clip = 10 * float(exact.mean["w"].norm())  # the update is not clipped
    sent = privatised(exact, before, clip=clip, noise_multiplier=noise / clip, key=3, widen=widen)
    covered = float(((sent.mean["w"] - truth).abs() <= 1.6449 * sent.variance["w"].sqrt()).double().mean())
    if nominal:
        assert covered == pytest.approx(0.9, abs=0.01)
    else:  # the error has twice the stated variance: Φ(1.6449/√2) = 0.878, 0.755 within
        assert covered == pytest.approx(0.755, abs=0.02)


def test_widened_messages_fuse_to_the_right_variance_of_independent_measurements():
    """Conflation of n messages: 1/Σ(1/σ²) is the variance of the error of its mean."""
    from lightning_fedbayes import fuse

    size, n, noise = 5_000, 10, 0.3
    before = GaussianPosterior({"w": torch.zeros(size)}, {"w": torch.full((size,), 1e-4)})
    options = {"clip": 1.0, "noise_multiplier": noise, "widen": True}
    sent = [privatised(before, before, key=client, **options) for client in range(n)]
    fused = fuse("conflation", sent)
    assert float(fused.mean["w"].square().mean()) == pytest.approx(float(fused.variance["w"].mean()), rel=0.1)
    assert float(fused.variance["w"].mean()) == pytest.approx(noise**2 / n, rel=0.01)


def update(client=0, **options):
    return ClientUpdate(client, 10, posterior(1), metrics={"train_loss": 1.0}, **options)


def same(first, second):
    return all(torch.equal(first.posterior.mean[name], second.posterior.mean[name]) for name in first.posterior.names)


def test_noise_belongs_to_key_round_and_client_and_that_of_a_secret_to_the_update():
    before = posterior(0)
    secret, seeded = UpdatePrivacy(), UpdatePrivacy(seed=7)
    for privacy in (secret, seeded):
        sent = privacy.send(update(), before, "a", 2)
        assert same(sent, privacy.send(update(), before, "a", 2))
        for other in (privacy.send(update(), before, "a", 3), privacy.send(update(client=1), before, "a", 2)):
            assert not same(sent, other)
    assert not same(secret.send(update(), before, "a", 2), secret.send(update(), before, "b", 2))
    assert same(seeded.send(update(), before, "a", 2), seeded.send(update(), before, "b", 2))
    nearly = replace(update(), posterior=posterior(1, scale=1 + 1e-6))
    apart = (step(each.send(nearly, before, "a", 2).posterior, before) for each in (secret, seeded))
    given = (step(each.send(update(), before, "a", 2).posterior, before) for each in (secret, seeded))
    of_secret, of_seed = (float((a - b).norm()) for a, b in zip(apart, given))
    assert of_seed < 1e-3 < 1 < of_secret, "two updates never share one noise"


def test_who_knows_all_but_the_secret_finds_nothing_in_a_message():
    """A seed of 32 bits can be tried; what is left of a message after any such noise is as far from the update."""
    clip, before = 1.0, posterior(0, size=500)
    learnt = replace(update(), posterior=posterior(1, size=500))
    sent = step(UpdatePrivacy(clip, 1.0).send(learnt, before, secrets.token_hex(32), 2).posterior, before)
    honest = clipped(step(learnt.posterior, before), clip)
    chance = math.sqrt(2) * math.sqrt(len(sent))  # of two unrelated noises
    for seed in (0, 2, *range(100, 300)):
        for name in (("update", 2, 0), ()):
            guess = private_normal(seed, sent, *name)
            assert (sent - guess - honest).norm() > 0.8 * chance
        torch_noise = torch.randn(len(sent), generator=draws(derive_seed(seed, "training", 2, 0)), dtype=torch.float64)
        assert (sent - torch_noise - honest).norm() > 0.8 * chance
    known = UpdatePrivacy(clip, 1.0, seed=7).send(learnt, before, "", 2)
    noise = private_normal(7, sent, "update", 2, 0)
    torch.testing.assert_close(step(known.posterior, before) - noise, honest, atol=1e-4, rtol=1e-3)
    assert UpdatePrivacy(seed=7).figures(1).keys() == {"privacy/simulated_epsilon"}


def test_draws_of_privacy_are_uniform_and_of_more_than_32_bits():
    found = private_uniform("secret", 1_000_000, "a")
    assert 0 < float(found.min()) < 1e-5 < 1 - 1e-5 < float(found.max()) < 1
    counts = torch.histc(found, 100, 0, 1)
    assert float(((counts - 1e4).square() / 1e4).sum()) < 99 + 5 * math.sqrt(2 * 99)
    assert not torch.equal(private_uniform(5, 3), private_uniform(5 + 2**32, 3)), "as torch's generator would"
    assert not torch.equal(private_uniform(5, 3), private_uniform("5", 3))


def test_nothing_that_is_unprotected_is_sent():
    sent = UpdatePrivacy().send(update(), posterior(0), "", 0)
    assert (sent.client, sent.num_examples, sent.metrics, sent.buffers) == (0, 10, {}, {})
    with pytest.raises(FederationError, match=r"norm\.running_mean.*buffers='frozen'"):
        UpdatePrivacy().send(update(buffers={"norm.running_mean": torch.zeros(2)}), posterior(0), "", 0)


def test_another_network_is_refused_and_what_is_not_finite_is_sent_as_noise():
    strange = ClientUpdate(4, 10, GaussianPosterior.point_mass({"other": torch.zeros(2)}))
    with pytest.raises(FusionError, match="client 4"):
        UpdatePrivacy().send(strange, posterior(0), "", 0)
    before, broken = posterior(0, size=5_000), replace(update(), posterior=posterior(1, size=5_000))
    broken.posterior.mean["weight"][0, 0] = math.nan
    noise = step(UpdatePrivacy(1.0, 0.5).send(broken, before, "", 0).posterior, before)
    assert float(noise.std()) == pytest.approx(0.5, rel=5 / math.sqrt(2 * len(noise)))


test_arguments_are_checked_at_once = refusals(
    FederationError,
    ({"clip": 0.0}, "clip=0.0"),
    ({"clip": math.inf}, "clip=inf"),
    ({"noise_multiplier": -1.0}, "noise_multiplier"),
    ({"delta": 0.0}, "delta=0.0"),
    call=lambda options: UpdatePrivacy(**options),
)


HUGE = UpdatePrivacy(clip=1e6, noise_multiplier=0.0)


def run(module, privacy, rounds=2, clients=3, ckpt_path=None, callbacks=(), **options):
    federation = fb.FederatedBayes(fb.IIDPartition(clients), privacy=privacy, **options)
    return federate(module, federation, rounds, ckpt_path=ckpt_path, callbacks=callbacks), federation


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_no_noise_and_no_clipping_changes_nothing(engine):
    plain, private = bayesian(), bayesian()
    run(plain, None, engine=engine, fusion="rklb")
    run(private, HUGE, engine=engine)
    torch.testing.assert_close(parameters(private), parameters(plain), rtol=1e-4, atol=1e-6)


def test_the_engines_send_the_same_noise():
    modules = Plain(), Plain()
    for module, engine in zip(modules, ("sequential", "vectorized")):
        run(module, UpdatePrivacy(0.5, 0.3, seed=0), engine=engine)
    torch.testing.assert_close(*map(parameters, modules), rtol=1e-4, atol=1e-5)


def test_an_average_of_clipped_updates_is_no_longer_than_one_of_them():
    module = bayesian(learning_rate=0.5)
    before = read_posterior(module).clone()
    _, federation = run(module, UpdatePrivacy(0.01, 0.0), rounds=1, fusion="log_variance_average", engine="sequential")
    assert 0.005 < step(federation.posterior, before).norm() <= 0.01 * (1 + 1e-3)


def test_a_resumed_run_ends_like_one_that_was_not_interrupted(tmp_path):
    privacy = UpdatePrivacy(0.5, 0.2, widen_posterior=True)
    whole, resumed, path = bayesian(), bayesian(seed=1), tmp_path / "half.ckpt"
    half = LambdaCallback(on_train_epoch_start=lambda made, _: made.current_epoch == 2 and made.save_checkpoint(path))
    made, _ = run(whole, privacy, rounds=4, callbacks=[half])
    again, _ = run(resumed, privacy, rounds=4, ckpt_path=path)
    assert_equal(parameters(whole), parameters(resumed))
    assert again.callback_metrics["privacy/epsilon"] == made.callback_metrics["privacy/epsilon"]
    with pytest.raises(FederationError, match=r"privacy=None \(was UpdatePrivacy"):
        run(bayesian(), None, rounds=4, ckpt_path=path)


def test_adversaries_begin_with_what_they_would_have_sent():
    """A free rider sends the global posterior's means; its variances are protected as those of any client."""
    free_riders, privacy = ScaledUpdate(clients=1.0, factor=0.0), UpdatePrivacy(1.0, 1.0, seed=0)
    _, fed = run(bayesian(), privacy, rounds=1, adversaries=free_riders)
    _, honest = run(bayesian(), privacy, rounds=1, adversaries=None)
    _, unprotected = run(bayesian(), None, rounds=1, adversaries=None)
    torch.testing.assert_close(dict(fed.posterior.mean), dict(read_posterior(bayesian()).mean))
    torch.testing.assert_close(dict(fed.posterior.variance), dict(honest.posterior.variance))
    name = "network.2.weight"
    assert not torch.allclose(fed.posterior.variance[name], unprotected.posterior.variance[name], rtol=0.1)


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
