"""Temperature and conformal sets as callbacks of a Trainer: what is found, kept, scored, used and refused."""

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader, TensorDataset

import lightning_fedbayes as fb
from lightning_fedbayes.core.errors import FedBayesError
from tests.federations import Plain, bayesian, blobs, clients, federate, loader, network, trainer

pytestmark = [
    pytest.mark.filterwarnings("ignore:the temperature ends at its limit"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`"),
]


def batches(data, size=8):
    return DataLoader(data, batch_size=size)


def both(**options):
    return [fb.FederatedTemperature(), fb.FederatedConformal(0.8, **options)]


def deterministic():
    """A module of this package without draws: a pass of its own finds the same."""
    return fb.HybridBayesianClassifier(network(), bayesian_last=0, learning_rate=0.03)


def fitted(callbacks, module=None, rounds=2, val=None, **options):
    """A module after some rounds, with the Trainer that has trained it."""
    module = bayesian(learning_rate=0.03) if module is None else module
    val, train = batches(clients(30, 40)) if val is None else val, loader(clients(40, 30))
    return module, federate(module, fb.FederatedBayes(seed=3), rounds, train, val, callbacks=callbacks, **options)


def regressor(last=1):
    torch.manual_seed(0)
    return fb.HybridBayesianRegressor(torch.nn.Linear(3, 1), bayesian_last=last, samples=3)


def regression(*sizes):
    random = torch.Generator().manual_seed(0)
    parts = {}
    for number, size in enumerate(sizes):
        x = torch.randn(size, 3, generator=random)
        parts[f"c{number}"] = TensorDataset(x, x.sum(1) + torch.randn(size, generator=random))
    return fb.ClientDatasets(parts)


def test_a_fit_finds_what_the_same_weights_give_on_their_own():
    scaling, conformal = both(per_client=True)
    module, made = fitted([scaling, conformal], deterministic())
    held_out = clients(30, 40)
    alone = fb.FederatedTemperature().fit_from(module, held_out, batch_size=8, seed=3)
    sets = fb.FederatedConformal(0.8, per_client=True)
    sets.fit_from(module, held_out, temperature=alone.temperature, batch_size=8, seed=3)
    assert scaling.temperature == pytest.approx(alone.temperature, rel=1e-5)
    assert scaling.temperature != 1
    assert (conformal.threshold, conformal.thresholds) == (sets.threshold, sets.thresholds)
    assert list(conformal.thresholds) == ["c0", "c1"]
    figures = made.callback_metrics
    assert float(figures["val/scaled/temperature"]) == pytest.approx(alone.temperature)
    assert float(figures["val/lac_80/threshold"]) == pytest.approx(sets.threshold)
    assert float(figures["val/lac_80/threshold_largest"]) == pytest.approx(max(sets.thresholds.values()))


@pytest.mark.slow
def test_a_checkpoint_holds_the_calibration_of_its_own_weights(tmp_path):
    saver = ModelCheckpoint(tmp_path, save_top_k=-1, filename="{epoch}")
    module, _ = fitted([*both(), saver], deterministic(), rounds=3, enable_checkpointing=True)
    found = []
    for epoch in range(3):
        scaling, conformal = both()
        made = trainer(1, [scaling, conformal], logger=CSVLogger(tmp_path))
        tested = made.test(module, batches(clients(20, 25)), ckpt_path=tmp_path / f"epoch={epoch}.ckpt", verbose=False)
        alone = fb.FederatedTemperature().fit_from(module, clients(30, 40), batch_size=8, seed=3)
        assert scaling.temperature == pytest.approx(alone.temperature, rel=1e-5)
        expected = scaling.evaluate(module, clients(20, 25), batch_size=8)
        assert tested[0]["test/scaled/nll"] == pytest.approx(expected.mean("nll"))
        assert tested[0]["test/scaled/ece_worst"] == pytest.approx(expected.worst("ece"))
        covered = conformal.evaluate(module, clients(20, 25), batch_size=8)
        assert tested[0]["test/lac_80/coverage"] == pytest.approx(covered.mean("coverage"))
        assert tested[0]["test/lac_80/set_size"] == pytest.approx(covered.mean("set_size"))
        found.append(scaling.temperature)
    assert len(set(found)) == 3
    assert (tmp_path / "lightning_logs" / "version_0" / "test_lac_80.csv").read_text().startswith("client,examples,cov")


def test_predictions_are_scaled_and_have_their_sets_and_other_scales_are_refused():
    scaling, conformal = both()
    module, _ = fitted([scaling, conformal])
    examples = batches(blobs(20))
    torch.manual_seed(5)
    predicted = trainer(1, [scaling, conformal]).predict(module, examples)
    torch.manual_seed(5)
    plain = trainer(1).predict(module, examples)
    torch.manual_seed(5)
    for each, unscaled, found, (x, _) in zip(predicted, plain, conformal.predictions, examples, strict=True):
        with torch.no_grad():
            probs = (module.sample(x) / scaling.temperature).softmax(-1).mean(0)
        assert torch.equal(each.probs, probs)
        assert not torch.equal(each.probs, unscaled.probs)
        assert torch.equal(each.label, probs.argmax(-1))
        assert torch.equal(found, conformal.sets(probs))
    assert "sample" not in vars(module)
    with pytest.raises(FedBayesError, match="thresholds are of logits scaled by T = "):
        trainer(1, [conformal]).predict(module, batches(blobs(20)))
    with pytest.raises(FedBayesError, match="there is no temperature yet"):
        trainer(1, [fb.FederatedTemperature()]).predict(module, batches(blobs(20)))
    with pytest.raises(FedBayesError, match="there is no threshold yet"):
        trainer(1, [fb.FederatedConformal()]).predict(module, batches(blobs(20)))
    plain = Plain()
    plain.predict_step = lambda batch: plain(batch[0])
    scaled, own = (torch.cat(trainer(1, each).predict(plain, batches(blobs(20)))) for each in ([scaling], []))
    torch.testing.assert_close(scaled * scaling.temperature, own)


def test_standard_deviations_of_a_regressor_are_scaled_by_the_closed_form():
    scaling, held_out = fb.FederatedTemperature(max_influence=None), regression(32, 40)
    module = regressor(0)
    federate(module, fb.FederatedBayes(), 2, loader(regression(40, 30)), batches(held_out), callbacks=[scaling])
    z = torch.cat([*fb.FederatedConformal(kind="interval").scores_of(module, held_out, 1.0, 8).values()])
    assert scaling.temperature == pytest.approx(float(z.square().mean().sqrt()), rel=1e-6)
    before = trainer(1, []).predict(module, batches(held_out))[0]
    torch.manual_seed(0)
    after = trainer(1, [scaling]).predict(module, batches(held_out))[0]
    torch.testing.assert_close(after.aleatoric, before.aleatoric * scaling.temperature**2)
    found = trainer(1, [scaling]).test(module, batches(held_out), verbose=False)[0]
    assert 0 < found["test/scaled/coverage"] <= 1


def test_intervals_of_a_regressor():
    conformal, held_out = fb.FederatedConformal(0.8, kind="interval"), regression(32, 40)
    module = regressor(0)
    federate(module, fb.FederatedBayes(), 2, loader(regression(40, 30)), batches(held_out), callbacks=[conformal])
    alone = fb.FederatedConformal(0.8, kind="interval").fit_from(module, held_out, batch_size=8)
    assert conformal.threshold == alone.threshold
    tested = trainer(1, [conformal]).test(module, batches(regression(50, 60)), verbose=False)[0]
    expected = conformal.evaluate(module, regression(50, 60), batch_size=8)
    assert tested["test/interval_80/coverage"] == pytest.approx(expected.mean("coverage"))
    assert tested["test/interval_80/width"] == pytest.approx(expected.mean("width"))
    predicted = trainer(1, [conformal]).predict(module, batches(held_out))
    assert [tuple(each.shape) for each in conformal.predictions] == [(*each.mean.shape, 2) for each in predicted]
    ends = conformal.predictions[0]
    middle, half = ends.mean(-1), (ends[..., 1] - ends[..., 0]) / 2
    torch.testing.assert_close(middle, predicted[0].mean.double())
    torch.testing.assert_close(half, conformal.threshold * predicted[0].variance.sqrt().double())


def test_the_users_own_module_is_calibrated_by_its_forward_or_its_posterior():
    module, scaling = Plain(), fb.FederatedTemperature()
    fitted([scaling], module)
    alone = fb.FederatedTemperature().fit_from(module, clients(30, 40))
    assert scaling.temperature == pytest.approx(alone.temperature, rel=1e-5)
    module, scaling = Plain(), fb.FederatedTemperature()
    callback = fb.FederatedBayes(fusion="gaussian_fit", seed=3)
    federate(module, callback, 2, loader(clients(40, 30)), batches(clients(30, 40)), callbacks=[scaling])
    drawn = fb.PosteriorPredictive(module, callback.posterior, 10)
    alone = fb.FederatedTemperature().fit_from(drawn, clients(30, 40), batch_size=8, seed=3)
    assert scaling.temperature == pytest.approx(alone.temperature, rel=0.1)


PRIVATE = [lambda: fb.FederatedBayes(privacy=fb.UpdatePrivacy(1.0, 1.0)), lambda: fb.ExamplePrivacy(1.0, 1.0)]


@pytest.mark.parametrize("private", PRIVATE)
def test_exact_sums_and_counts_are_refused_beside_privacy(private):
    for callback, remedy in ((fb.FederatedTemperature(), "exactly"), (fb.FederatedConformal(), "epsilon=")):
        with pytest.raises(FedBayesError, match=remedy):
            trainer(1, [private(), callback]).validate(bayesian(), batches(clients(30, 40)), verbose=False)


@pytest.mark.slow
def test_noisy_thresholds_are_taken_once_after_the_last_round():
    times = []

    class Counts(fb.FederatedConformal):
        def fit(self, clients, **options):
            times.append(len(clients))
            return super().fit(clients, **options)

    conformal = Counts(0.8, epsilon=2.0, bins=16)
    module, callback = bayesian(), fb.FederatedBayes(privacy=fb.UpdatePrivacy(1.0, 1.0), seed=3)
    held_out = batches(clients(60, 70))
    made = federate(module, callback, 3, loader(clients(40, 30)), held_out, callbacks=[conformal])
    assert times == [2]
    assert float(made.callback_metrics["val/lac_80/epsilon"]) == 2.0
    exact = fb.FederatedConformal(0.8, bins=16).fit_from(module, clients(60, 70), batch_size=8, seed=3)
    assert conformal.threshold != exact.threshold or conformal.threshold == pytest.approx(exact.threshold, abs=0.5)
    again = fb.FederatedConformal(0.8, bins=16, epsilon=2.0)
    assert again.fit_from(module, clients(60, 70), batch_size=8, seed=3).threshold == conformal.threshold
    for spent in (4.0, 6.0):  # every further validation sends noisy counts anew
        validating = trainer(1, [conformal])
        validating.validate(module, held_out, verbose=False)
        assert float(validating.callback_metrics["val/lac_80/epsilon"]) == spent
