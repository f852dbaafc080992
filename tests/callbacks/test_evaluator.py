"""Each validation predicts once, whatever reads it; what is calibrated and scored are those predictions."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import ConcatDataset, DataLoader, RandomSampler, default_collate

import lightning_fedbayes as fb
from lightning_fedbayes.callbacks.evaluator import evaluator_of
from tests.clients.test_evaluation import clients
from tests.federations import Plain, assert_equal, bayesian, blobs, federate, loader, network, parameters, trainer

EXAMPLES = 56
pytestmark = [
    pytest.mark.filterwarnings("ignore:the temperature ends at its limit"),
    pytest.mark.filterwarnings("ignore:Your `val_dataloader`'s sampler has shuffling enabled"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`"),
    pytest.mark.filterwarnings("ignore:clients? .* calibration examples were trained on"),
]


def held_out(**options):
    return DataLoader(clients(16, 40), **{"batch_size": 8, **options})


def everything(folder=None):
    """All that reads a validation."""
    saver = [] if folder is None else [ModelCheckpoint(folder, monitor="val/clients/nll")]
    return [
        fb.UncertaintyReport(10),
        fb.ClientReport(),
        fb.FederatedTemperature(),
        fb.FederatedConformal(0.8),
        fb.FederatedConformal(0.8, kind="aps"),
        *saver,
    ]


def deterministic(seed=0):
    return fb.HybridBayesianClassifier(network(seed), bayesian_last=0)


def counted(module, part="network"):
    """Note how many examples the network sees in each validation."""
    seen = []

    def note(_, inputs):
        if module.trainer.validating and not module.trainer.sanity_checking:
            seen.append(len(inputs[0]))

    getattr(module, part).register_forward_pre_hook(note)
    return seen


def rounds_of(module, callbacks, val=None, part="network", **options):
    seen, federation = counted(module, part), fb.FederatedBayes(seed=3)
    made = federate(
        module,
        federation,
        2,
        loader(clients(40, 30)),
        held_out() if val is None else val,
        callbacks=callbacks,
        **options,
    )
    return sum(seen), made, federation


@pytest.mark.parametrize("make", [bayesian, deterministic])
def test_every_example_is_predicted_once_with_everything_at_once(make, tmp_path):
    alone, made, _ = rounds_of(make(), [])
    together, with_all, _ = rounds_of(make(), everything(tmp_path), enable_checkpointing=True)
    assert together == alone
    if make is deterministic:
        assert together == 2 * EXAMPLES
    assert_equal(parameters(made.lightning_module), parameters(with_all.lightning_module))
    figures = with_all.callback_metrics
    assert {"val/clients/nll", "val/scaled/temperature", "val/lac_80/threshold", "val/aps_80/threshold"} <= set(figures)
    assert float(with_all.checkpoint_callback.best_model_score) > 0


def test_draws_of_the_parameters_are_one_further_pass(monkeypatch):
    drawn, sample = [], fb.PosteriorPredictive.sample

    def noting(self, inputs, samples=None):
        drawn.append((len(inputs), samples))
        return sample(self, inputs, samples)

    monkeypatch.setattr(fb.PosteriorPredictive, "sample", noting)
    alone, plain, _ = rounds_of(Plain(optimizer=fb.IVON), [], part="net")
    assert alone == 2 * EXAMPLES
    assert not drawn
    _, made, _ = rounds_of(Plain(optimizer=fb.IVON), everything(), part="net")
    assert sum(examples for examples, _ in drawn) == 2 * EXAMPLES
    assert {samples for _, samples in drawn} == {10}
    assert_equal(parameters(made.lightning_module), parameters(plain.lightning_module))
    assert {"val/draws/clients/nll", "val/draws/scaled/temperature", "val/draws/aps_80/threshold"} <= set(
        made.callback_metrics
    )


def test_a_regressor_is_predicted_once_too():
    data = fb.ClientDatasets(
        {name: torch.utils.data.TensorDataset(torch.randn(20, 3), torch.randn(20)) for name in ("a", "b")}
    )
    counts = []
    for callbacks in ([], [fb.ClientReport(), fb.FederatedConformal(0.8, kind="interval")]):
        torch.manual_seed(0)
        module = fb.HybridBayesianRegressor(torch.nn.Linear(3, 1), bayesian_last=1, samples=3)
        seen = counted(module)
        made = federate(module, fb.FederatedBayes(), 2, loader(data), DataLoader(data, 8), callbacks=callbacks)
        counts.append(sum(seen))
    assert counts[0] == counts[1]
    assert {"val/clients/coverage", "val/interval_80/threshold"} <= set(made.callback_metrics)


def calibrated(callbacks, module):
    """Temperature and thresholds, with other callbacks beside those that find them."""
    scaling, sets = fb.FederatedTemperature(), fb.FederatedConformal(0.8, per_client=True)
    rounds_of(module, [*callbacks, scaling, sets], part="network" if hasattr(module, "network") else "net")
    return scaling.temperature, sets.threshold, sets.thresholds


@pytest.mark.parametrize("make", [bayesian, lambda: Plain(optimizer=fb.IVON), Plain])
def test_what_is_calibrated_does_not_depend_on_reports(make):
    alone = calibrated([], make())
    for beside in ([fb.UncertaintyReport()], [fb.UncertaintyReport(4)], [fb.UncertaintyReport(23), fb.ClientReport()]):
        assert calibrated(beside, make()) == alone


@pytest.mark.parametrize("make", [bayesian, lambda: Plain(optimizer=fb.IVON), Plain])
def test_thresholds_alone_do_not_depend_on_reports(make):
    found = []
    for beside in ([], [fb.UncertaintyReport(4)], [fb.UncertaintyReport(23), fb.ClientReport()]):
        module, sets = make(), fb.FederatedConformal(0.8, bins=4000)
        rounds_of(module, [*beside, sets], part="network" if hasattr(module, "network") else "net")
        found.append(sets.threshold)
    assert len(set(found)) == 1


def test_scores_and_calibration_are_those_of_a_pass_of_their_own():
    """Of a network without draws, whose batches are each of one client."""
    report, scaling, sets = fb.ClientReport(), fb.FederatedTemperature(), fb.FederatedConformal(0.8, per_client=True)
    module = deterministic()
    rounds_of(module, [report, scaling, sets])
    own = clients(16, 40)
    assert report.scores["val"].rows() == fb.evaluate_clients(module, own, batch_size=8).rows()
    alone = fb.FederatedTemperature().fit_from(module, own, batch_size=8)
    assert scaling.temperature == alone.temperature
    expected = fb.FederatedConformal(0.8, per_client=True)
    expected.fit_from(module, own, temperature=alone.temperature, batch_size=8)
    assert (sets.threshold, sets.thresholds) == (expected.threshold, expected.thresholds)


def reversed_batches(examples):
    return default_collate(examples[::-1])


@pytest.mark.parametrize(
    ("loaded", "options"),
    [
        ({"shuffle": True}, {}),
        ({"drop_last": True, "batch_size": 9}, {}),
        ({}, {"limit_val_batches": 0.5}),
        ({"collate_fn": reversed_batches, "batch_size": 9}, {}),
        ({"batch_size": 9}, {}),
        ({"sampler": RandomSampler(range(EXAMPLES), replacement=True)}, {}),
    ],
)
def test_nobody_gets_the_examples_of_others(loaded, options):
    """Where positions do not tell whose an example is, the clients' data are predicted once more."""
    report, scaling = fb.ClientReport(), fb.FederatedTemperature()
    module = deterministic()
    seen, _, _ = rounds_of(module, [report, scaling], held_out(**loaded), **options)
    expected = fb.evaluate_clients(module, clients(16, 40), batch_size=8)
    assert seen <= 4 * EXAMPLES
    assert (seen == 2 * EXAMPLES) == (loaded == {"batch_size": 9})
    for figure, values in expected.values.items():
        torch.testing.assert_close(report.scores["val"].values[figure], values, rtol=1e-6, atol=1e-6)
    alone = fb.FederatedTemperature().fit_from(module, clients(16, 40), batch_size=8)
    assert scaling.temperature == pytest.approx(alone.temperature)


def test_draws_of_a_shuffled_validation_are_one_pass_too(monkeypatch):
    drawn, sample = [], fb.PosteriorPredictive.sample
    monkeypatch.setattr(
        fb.PosteriorPredictive, "sample", lambda self, x, samples=None: drawn.append(len(x)) or sample(self, x, samples)
    )
    _, made, federation = rounds_of(Plain(optimizer=fb.IVON), everything(), held_out(shuffle=True), part="net")
    assert sum(drawn) == 2 * EXAMPLES
    assert {f"val/draws/{name}" for name in ("clients/nll", "retained_area_entropy", "scaled/temperature")} <= set(
        made.callback_metrics
    )
    assert "sites/elbo" in federation.history[-1]


def test_one_number_for_each_question():
    """The estimate from class shares is logged where the truth is not."""
    _, made, _ = rounds_of(deterministic(), [])
    assert "val/clients/accuracy_worst" in made.callback_metrics
    assert not any("client_accuracy" in name for name in made.callback_metrics)
    several = [DataLoader(part, 8) for part in clients(16, 40).datasets]
    _, loaders, _ = rounds_of(deterministic(), [], several)
    assert not any("client_accuracy" in name for name in loaders.callback_metrics)
    for name in ("accuracy", "accuracy_worst", "ece"):
        assert loaders.callback_metrics[f"val/clients/{name}"] == made.callback_metrics[f"val/clients/{name}"]
    for other in (blobs(30), ConcatDataset([blobs(30), blobs(20)])):
        _, one, _ = rounds_of(bayesian(), [], DataLoader(other, 8))
        assert {"val/client_accuracy", "val/worst_client_accuracy"} <= set(one.callback_metrics)
        assert not any("clients/" in name for name in one.callback_metrics)


def test_the_accuracies_of_the_clients_are_those_of_their_own_data():
    uncertainty, report = fb.UncertaintyReport(), fb.ClientReport()
    rounds_of(deterministic(), [uncertainty, report])
    assert torch.equal(uncertainty.client_accuracy, report.scores["val"].values["accuracy"])
    rounds_of(deterministic(), [uncertainty, report], DataLoader(fb.ClientDatasets({"c1": blobs(20)}), 8))
    assert uncertainty.client_accuracy.isnan().tolist() == [True, False]


def test_a_module_that_cannot_be_scored_says_so_once(caplog):
    with caplog.at_level("INFO"):
        rounds_of(Plain(), [], part="net")
    assert caplog.text.count("There are no scores of each client: Plain returns no predictions from its steps") == 1


def test_own_probabilities_are_scored_and_kept_apart_where_nobody_knows_whose_they_are(caplog):
    class Probs(Plain):
        def validation_step(self, batch, batch_idx):
            return {"probs": self(batch[0]).softmax(-1), "target": batch[1]}

    module = Probs()
    seen, made, _ = rounds_of(module, [fb.FederatedConformal(0.8)], part="net")
    assert seen == 2 * EXAMPLES
    predictive = fb.PosteriorPredictive(module, fb.read_posterior(module), 1)
    expected = fb.evaluate_clients(predictive, clients(16, 40), batch_size=8)
    assert float(made.callback_metrics["val/clients/nll"]) == pytest.approx(expected.mean("nll"), rel=1e-5)
    with caplog.at_level("INFO"):
        _, shuffled, _ = rounds_of(Probs(), [], held_out(shuffle=True), part="net")
    assert caplog.text.count("cannot map the examples of a batch to clients") == 1
    assert "val/worst_client_accuracy" in shuffled.callback_metrics


def test_a_validation_leaves_the_global_generators_alone():
    ends = []
    for callbacks in ([], everything()):
        rounds_of(Plain(optimizer=fb.IVON), callbacks, part="net")
        torch.manual_seed(1)
        trainer(1, callbacks).validate(deterministic(), held_out(), verbose=False)
        ends.append(torch.rand(3))
    assert torch.equal(*ends)


def test_logits_are_kept_for_a_temperature_alone():
    class Watch(fb.ClientReport):
        def on_validation_epoch_end(self, trainer, pl_module):
            if not trainer.sanity_checking:
                found = evaluator_of(trainer).predictions(trainer, pl_module)
                self.kept = {name: tuple(value.shape) for name, value in found["c0"].items()}
            super().on_validation_epoch_end(trainer, pl_module)

    for callbacks, shape in (
        ([], None),
        ([fb.FederatedConformal(0.8)], (16, 3)),
        ([fb.FederatedTemperature()], (3, 16, 3)),
    ):
        watch = Watch()
        rounds_of(bayesian(), [watch, *callbacks])
        rows = {"target": (16,), "counts": (16,), "probs": (16, 3)}
        assert watch.kept == rows | ({"logits": shape} if shape else {})


def test_a_test_predicts_once_too():
    callbacks = everything()
    module = deterministic()
    rounds_of(module, callbacks)
    seen = []
    module.network.register_forward_pre_hook(lambda _, inputs: seen.append(len(inputs[0])))
    tested = trainer(1, callbacks).test(module, held_out(), verbose=False)[0]
    assert sum(seen) == EXAMPLES
    scaling = callbacks[2].evaluate(module, clients(16, 40), batch_size=8)
    assert tested["test/scaled/nll"] == pytest.approx(scaling.mean("nll"))
    assert {"test/clients/nll", "test/lac_80/coverage", "test/aps_80/set_size"} <= set(tested)


def test_a_linearised_posterior_is_calibrated_by_the_same_draws():
    found = []
    for beside in ([], [fb.UncertaintyReport(300)]):
        scaling = fb.FederatedTemperature()
        federation = fb.FederatedBayes(posterior=fb.Laplace(), seed=3)
        federate(Plain(), federation, 1, loader(clients(40, 30)), held_out(), callbacks=[*beside, scaling])
        found.append(scaling.temperature)
    assert found[0] == found[1]


def test_own_probabilities_without_logits_have_scores_and_sets_but_no_temperature():
    class Probs(Plain):
        forward = torch.nn.Module.forward  # none

        def training_step(self, batch, batch_idx):
            return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def validation_step(self, batch, batch_idx):
            return {"probs": self.net(batch[0]).softmax(-1), "target": batch[1]}

    for steps in (0, 2):
        with pytest.raises(fb.FedBayesError, match='no logits are known: return "logits"'):
            rounds_of(Probs(), [fb.FederatedTemperature()], part="net", num_sanity_val_steps=steps)
    _, made, _ = rounds_of(Probs(), [fb.FederatedConformal(0.8)], part="net")
    assert {"val/clients/nll", "val/lac_80/threshold"} <= set(made.callback_metrics)


def test_nothing_is_kept_after_a_validation():
    _, made, _ = rounds_of(bayesian(), everything())
    assert evaluator_of(made)._found is None
    assert not evaluator_of(made)._kept


def test_a_checkpoint_of_a_federation_is_calibrated_by_its_own_posterior(tmp_path):
    """And not by the last one of the federation that still runs."""
    saver = ModelCheckpoint(tmp_path, save_top_k=-1, filename="{epoch}")
    scaling = fb.FederatedTemperature()
    found = []

    class Notes(fb.ClientReport):
        def on_validation_end(self, trainer, pl_module):
            if not trainer.sanity_checking:
                found.append(scaling.temperature)
            super().on_validation_end(trainer, pl_module)

    module, federation = Plain(optimizer=fb.IVON), fb.FederatedBayes(seed=3)
    made = federate(
        module,
        federation,
        2,
        loader(clients(40, 30)),
        held_out(),
        num_sanity_val_steps=0,
        callbacks=[scaling, Notes(), saver],
        enable_checkpointing=True,
    )
    made.validate(module, held_out(), ckpt_path=tmp_path / "epoch=0.ckpt", verbose=False)
    fresh = fb.FederatedTemperature()
    again = trainer(1, [fb.FederatedBayes(seed=3), fresh])
    again.validate(Plain(optimizer=fb.IVON), held_out(), ckpt_path=tmp_path / "epoch=0.ckpt", verbose=False)
    assert found[0] != found[1]
    assert found[2] == found[0] == fresh.temperature
