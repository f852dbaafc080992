"""Each validation predicts once, whatever reads it; what is calibrated and scored are those predictions."""

import csv

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import ConcatDataset, DataLoader, RandomSampler, TensorDataset, default_collate

import lightning_fedbayes as fb
from lightning_fedbayes.callbacks.evaluator import evaluator_of
from lightning_fedbayes.cli import main
from tests import federations
from tests.federations import Plain, bayesian, blobs, clients, federate, loader, network, parameters, trainer

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
    saver = [] if folder is None else [ModelCheckpoint(folder, monitor="val/clients/nll")]
    sets = fb.FederatedConformal(0.8), fb.FederatedConformal(0.8, kind="aps")
    return [fb.UncertaintyReport(10), fb.ClientReport(), fb.FederatedTemperature(), *sets, *saver]


def deterministic(seed=0):
    return fb.HybridBayesianClassifier(network(seed), bayesian_last=0)


def counted(module):
    """Note how many examples the network sees in each validation."""
    seen = []

    def note(_, inputs):
        if module.trainer.validating and not module.trainer.sanity_checking:
            seen.append(len(inputs[0]))

    getattr(module, "network", getattr(module, "net", None)).register_forward_pre_hook(note)
    return seen


def rounds_of(module, callbacks, val=None, posterior=None, **options):
    """Fit two rounds; the number of examples that validations have predicted, the Trainer and the federation."""
    seen, federation = counted(module), fb.FederatedBayes(seed=3, posterior=posterior)
    val = held_out() if val is None else val
    made = federate(module, federation, 2, loader(clients(40, 30)), val, callbacks=callbacks, **options)
    return sum(seen), made, federation


@pytest.mark.parametrize("make", [bayesian, deterministic])
def test_every_example_is_predicted_once_with_everything_at_once(make, tmp_path):
    alone, made, _ = rounds_of(make(), [])
    together, with_all, _ = rounds_of(make(), everything(tmp_path), enable_checkpointing=True)
    assert together == alone
    if make is deterministic:
        assert together == 2 * EXAMPLES
    federations.assert_equal(parameters(made.lightning_module), parameters(with_all.lightning_module))
    figures = with_all.callback_metrics
    assert {"val/clients/nll", "val/scaled/temperature", "val/lac_80/threshold", "val/aps_80/threshold"} <= set(figures)
    assert float(with_all.checkpoint_callback.best_model_score) > 0
    assert evaluator_of(with_all)._found is None
    assert not evaluator_of(with_all)._kept


@pytest.mark.parametrize("shuffle", [False, True])
def test_draws_of_the_parameters_are_one_further_pass(monkeypatch, shuffle):
    drawn, sample = [], fb.PosteriorPredictive.sample

    def noting(self, inputs, samples=None):
        drawn.append((len(inputs), samples))
        return sample(self, inputs, samples)

    monkeypatch.setattr(fb.PosteriorPredictive, "sample", noting)
    alone, plain, _ = rounds_of(Plain(optimizer=fb.IVON), [])
    assert alone == 2 * EXAMPLES
    assert not drawn
    _, made, federation = rounds_of(Plain(optimizer=fb.IVON), everything(), held_out(shuffle=shuffle))
    assert sum(examples for examples, _ in drawn) == 2 * EXAMPLES
    assert {samples for _, samples in drawn} == {10}
    federations.assert_equal(parameters(made.lightning_module), parameters(plain.lightning_module))
    names = {f"val/draws/{name}" for name in ("clients/nll", "scaled/temperature", "aps_80/threshold")}
    assert names <= set(made.callback_metrics)
    assert "sites/elbo" in federation.history[-1]


def test_a_regressor_is_predicted_once_too():
    data = fb.ClientDatasets({name: TensorDataset(torch.randn(20, 3), torch.randn(20)) for name in "ab"})
    counts = []
    for callbacks in ([], [fb.ClientReport(), fb.FederatedConformal(0.8, kind="interval")]):
        torch.manual_seed(0)
        module = fb.HybridBayesianRegressor(torch.nn.Linear(3, 1), bayesian_last=1, samples=3)
        seen = counted(module)
        made = federate(module, fb.FederatedBayes(), 2, loader(data), DataLoader(data, 8), callbacks=callbacks)
        counts.append(sum(seen))
    assert counts[0] == counts[1]
    assert {"val/clients/coverage", "val/interval_80/threshold"} <= set(made.callback_metrics)


@pytest.mark.parametrize("scaling", [True, False])
@pytest.mark.parametrize(
    ("make", "posterior"),
    [(bayesian, None), (lambda: Plain(optimizer=fb.IVON), None), (Plain, None), (Plain, fb.Laplace())],
)
def test_what_is_calibrated_does_not_depend_on_reports(make, posterior, scaling):
    found = []
    for beside in ([], [fb.UncertaintyReport(4)], [fb.UncertaintyReport(23), fb.ClientReport()]):
        calibrations = [fb.FederatedConformal(0.8, per_client=True, bins=4000)]
        calibrations[:0] = [fb.FederatedTemperature()] * scaling
        rounds_of(make(), [*beside, *calibrations], posterior=posterior)
        found.append([{**each.state_dict(), "_secret": ""} for each in calibrations])
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize(
    ("loaded", "options"),
    [
        ({"shuffle": True}, {}),
        ({"drop_last": True, "batch_size": 9}, {}),
        ({}, {"limit_val_batches": 0.5}),
        ({"collate_fn": lambda rows: default_collate(rows[::-1]), "batch_size": 9}, {}),
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


def test_own_probabilities_are_scored_and_kept_apart_where_nobody_knows_whose_they_are(caplog):
    module = Own("probs", torch.optim.SGD)
    seen, made, _ = rounds_of(module, [fb.FederatedConformal(0.8)])
    assert seen == 2 * EXAMPLES
    predictive = fb.PosteriorPredictive(module, fb.read_posterior(module), 1)
    expected = fb.evaluate_clients(predictive, clients(16, 40), batch_size=8)
    assert float(made.callback_metrics["val/clients/nll"]) == pytest.approx(expected.mean("nll"), rel=1e-5)
    with caplog.at_level("INFO"):
        _, shuffled, _ = rounds_of(Own("probs", torch.optim.SGD), [], held_out(shuffle=True))
    assert caplog.text.count("cannot map the examples of a batch to clients") == 1
    assert "val/worst_client_accuracy" in shuffled.callback_metrics


def test_a_validation_leaves_the_global_generators_alone():
    ends = []
    for callbacks in ([], everything()):
        rounds_of(Plain(optimizer=fb.IVON), callbacks)
        torch.manual_seed(1)
        trainer(1, callbacks).validate(deterministic(), held_out(), verbose=False)
        ends.append(torch.rand(3))
    assert torch.equal(*ends)


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


def test_own_probabilities_without_logits_have_scores_and_sets_but_no_temperature():
    module = type("NoForward", (Own,), {"forward": torch.nn.Module.forward})
    module.training_step = lambda self, batch, _: torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])
    module.validation_step = lambda self, batch, _: {"probs": self.net(batch[0]).softmax(-1), "target": batch[1]}
    for steps in (0, 2):
        with pytest.raises(fb.FedBayesError, match='no logits are known: return "logits"'):
            rounds_of(module(), [fb.FederatedTemperature()], num_sanity_val_steps=steps)
    _, made, _ = rounds_of(module(), [fb.FederatedConformal(0.8)])
    assert {"val/clients/nll", "val/lac_80/threshold"} <= set(made.callback_metrics)


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
    options = {"callbacks": [scaling, Notes(), saver], "enable_checkpointing": True, "num_sanity_val_steps": 0}
    made = federate(module, federation, 2, loader(clients(40, 30)), held_out(), **options)
    made.validate(module, held_out(), ckpt_path=tmp_path / "epoch=0.ckpt", verbose=False)
    fresh = fb.FederatedTemperature()
    again = trainer(1, [fb.FederatedBayes(seed=3), fresh])
    again.validate(Plain(optimizer=fb.IVON), held_out(), ckpt_path=tmp_path / "epoch=0.ckpt", verbose=False)
    assert found[0] != found[1]
    assert found[2] == found[0] == fresh.temperature


class Own(Plain):
    """Scores itself at the mean; its steps return "none", "probs" or "probs and logits"."""

    def __init__(self, returns="none", optimizer=fb.IVON):
        super().__init__(optimizer=optimizer)
        self.returns = returns

    def validation_step(self, batch, batch_idx):
        logits = self(batch[0])
        self.log("val/acc", (logits.argmax(1) == batch[1]).float().mean())
        if self.returns != "none":
            found = {"probs": logits.softmax(-1), "target": batch[1]}
            return found | ({"logits": logits} if "logits" in self.returns else {})
        return None


def reports():
    return [fb.UncertaintyReport(5), fb.ClientReport(), fb.FederatedTemperature(), fb.FederatedConformal(0.8)]


def figures_of(module, val=None, callbacks=None, **options):
    """Names of what the reports have logged in a fit, behind "val/"."""
    federation, train = fb.FederatedBayes(seed=3, **options), loader(clients(40, 30))
    callbacks = reports() if callbacks is None else callbacks
    made = federate(module, federation, 2, train, held_out() if val is None else val, callbacks=callbacks)
    return {name.partition("/")[2] for name in made.callback_metrics if name.startswith("val/")}


BY_BATCH = {f"retained_area_{name}" for name in ("entropy", "epistemic", "kwon_aleatoric", "kwon_epistemic")}
BY_CLIENT = {f"clients/{name}{end}" for name in ("accuracy", "nll", "ece") for end in ("", "_worst", "_spread")}
CALIBRATED = {"scaled/temperature", "lac_80/threshold"}


def drawn(names):
    return {f"draws/{name}" for name in names}


def test_figures_by_draws_stand_beside_the_module_s_own_at_the_mean():
    """A report that is given asks for predictions; what no step returns is drawn."""
    assert figures_of(Own()) == {"acc"} | drawn(BY_BATCH | BY_CLIENT | CALIBRATED)
    assert figures_of(Own(), callbacks=[fb.ClientReport()]) == {"acc"} | drawn(BY_BATCH | BY_CLIENT)
    assert figures_of(Own(optimizer=torch.optim.SGD), callbacks=[fb.ClientReport()]) == {"acc"} | BY_BATCH | BY_CLIENT
    assert figures_of(Own(), callbacks=[]) == {"acc"}
    assert figures_of(Own(), DataLoader(blobs(30), 8), [fb.ClientReport()]) == {"acc"}
    by_shares = figures_of(Own(), DataLoader(blobs(30), 8), [fb.UncertaintyReport(5)])
    assert by_shares == {"acc"} | drawn({*BY_BATCH, "client_accuracy", "worst_client_accuracy"})


@pytest.mark.parametrize(
    ("module", "own"),
    [
        (lambda: Own(optimizer=torch.optim.SGD), {"acc"}),  # a point: there is nothing to draw from
        (lambda: Own("probs and logits"), {"acc"}),
        (bayesian, None),
    ],
)
@pytest.mark.parametrize("shuffle", [False, True])
def test_figures_of_other_predictions_have_no_such_word(module, own, shuffle):
    made = module()
    found = figures_of(made, held_out(shuffle=shuffle))
    clients_ = BY_CLIENT | CALIBRATED
    if shuffle and isinstance(made, Own) and made.returns != "none":  # its clients are predicted once more, by draws
        assert found == own | BY_BATCH | drawn(clients_)
    elif own is not None:
        assert found == own | BY_BATCH | clients_
    else:
        assert BY_BATCH | clients_ <= found
        assert not any("draws" in name for name in found)


def test_logits_alone_may_be_drawn():
    """Where a step returns probabilities at the mean, and a temperature needs logits."""
    assert figures_of(Own("probs")) == {"acc"} | BY_BATCH | BY_CLIENT | drawn(CALIBRATED)
    found = figures_of(Own("probs"), callbacks=[fb.FederatedConformal(0.8)])
    assert found == {"acc", "lac_80/threshold"} | BY_BATCH | BY_CLIENT


def test_a_ready_module_whose_step_is_the_user_s_is_drawn():
    class Mute(fb.HybridBayesianClassifier):
        def validation_step(self, batch, batch_idx):
            self.log("val/acc", 0.5)

    assert figures_of(Mute(network(), bayesian_last=1, samples=3)) == {"acc"} | drawn(BY_BATCH | BY_CLIENT | CALIBRATED)


@pytest.mark.parametrize(("returns", "by"), [("none", "draws/"), ("probs and logits", "")])
def test_each_client_s_own_posterior_is_drawn(returns, by):
    """Also where the module's steps return predictions: those are of the global one, at its mean."""
    found = figures_of(Own(returns), keep=["posterior"])
    assert {f"{by}clients/nll", "draws/personal/nll"} <= found
    assert "personal/nll" not in found
    assert "personal/nll" in figures_of(bayesian(), keep=["posterior"])


@pytest.mark.parametrize(
    ("targets", "factor", "likelihood"),
    [((1, 8, 8), 1, fb.Bernoulli()), ((1, 8, 8), 64, fb.Bernoulli()), ((6,), 1, fb.Bernoulli()), ((8, 8), 1, None)],
)
def test_a_loss_that_is_a_mean_over_an_example_s_targets_is_told_once(caplog, targets, factor, likelihood):
    class Pixels(Plain):
        def training_step(self, batch, batch_idx):
            return factor * self.loss(self.net(batch[0]), batch[1])

        def configure_optimizers(self):
            return fb.IVON(self.parameters())

    size = (2, *targets) if likelihood is None else targets
    module = Pixels(torch.nn.Sequential(torch.nn.Linear(4, torch.Size(size).numel()), torch.nn.Unflatten(1, size)))
    loss = torch.nn.functional.binary_cross_entropy_with_logits if likelihood else torch.nn.functional.cross_entropy
    module.loss, module.likelihood = loss, likelihood
    labels = torch.randint(2, (40, *targets))
    data = DataLoader(TensorDataset(torch.randn(40, 4), labels.float() if likelihood else labels), 8)
    with caplog.at_level("INFO"):
        federate(module, fb.FederatedBayes(fb.IIDPartition(2)), 3, data, data, callbacks=[fb.UncertaintyReport(4)])
    said = f"multiply the loss by {torch.Size(targets).numel()}."
    assert caplog.text.count(said) == (factor == 1)


def rows_in(path):
    with open(path) as file:
        return list(csv.DictReader(file))


def test_tables_curves_pictures_and_the_page_say_so_too(tmp_path):
    logger, saver = CSVLogger(tmp_path), ModelCheckpoint(tmp_path / "saved", monitor="val/draws/clients/nll")
    federation = fb.FederatedBayes(seed=3, keep=["posterior"])
    options = {"logger": logger, "callbacks": [*reports(), saver], "enable_checkpointing": True}
    federate(Own(), federation, 2, loader(clients(40, 30)), held_out(), **options)
    assert float(saver.best_model_score) > 0
    home = tmp_path / "lightning_logs" / "version_0"
    tables = {path.stem for path in home.glob("*.csv")}
    assert {"val_draws_clients", "val_draws_personal", "federation_clients"} <= tables
    pictures = {"val_draws_calibration", "val_draws_accuracy_retained"}
    assert {path.stem for path in home.glob("val_*.png")} == pictures
    own = {row["client"]: float(row["accuracy"]) for row in rows_in(home / "val_draws_clients.csv")}
    shown = {row["client"]: float(row["draws/accuracy"]) for row in rows_in(home / "federation_clients.csv")}
    assert shown == pytest.approx(own)
    columns = {name for row in rows_in(home / "metrics.csv") for name, value in row.items() if value}
    assert {"draws/client_accuracy/c0", "draws/client_accuracy/c1", "val/acc"} <= columns
    assert main(["report", str(home)]) == 0
    page = (home / "report.html").read_text()
    for text in ("accuracy of each client, by draws", "<th>accuracy, by draws</th>", "val/draws/clients/accuracy"):
        assert text in page, text
