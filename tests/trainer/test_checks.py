"""Bad input is refused before training starts, with its value, the rule and the remedy."""

from __future__ import annotations

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import (
    GradientAccumulationScheduler,
    LearningRateFinder,
    StochasticWeightAveraging,
)
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, WeightedRandomSampler

import lightning_fedbayes as fb
from lightning_fedbayes.core.errors import FederationError
from tests.federations import Plain, assert_equal, blobs, federate, loader, parameters, trainer


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fusion": "reverse_kl"}, "unknown fusion rule 'reverse_kl': did you mean 'reverse_kl_barycenter'"),
        ({"weighting": "train-size"}, "weighting='train-size': did you mean 'train_size'"),
        ({"fraction": 0.0}, r"fraction=0.0.*\(0, 1\]"),
        ({"fraction": 1.5}, r"fraction=1.5"),
        ({"fraction": "0.5"}, r"fraction='0.5'"),
        ({"local_epochs": 0}, "local_epochs=0: give at least 1"),
        ({"local_epochs": 1.5}, "local_epochs=1.5: give a whole number"),
        ({"safeguards": {"min_clients": 2}}, "safeguards=.*give fb.Safeguards"),
        ({"engine": "sequental"}, "engine='sequental': did you mean 'sequential'"),
        ({"engine": 0}, "engine=0: give at least 1"),
        ({"engine": 2.5}, "engine=2.5"),
        ({"keep": ["optimiser"]}, "keep='optimiser': did you mean 'optimizer'"),
        ({"buffers": "mean"}, "buffers='mean'"),
    ],
)
def test_arguments(options, message):
    with pytest.raises(fb.FedBayesError, match=message):
        fb.FederatedBayes(fb.IIDPartition(3), **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"val_check_interval": 1}, "val_check_interval=1"),
        ({"max_steps": 5}, "max_steps=5.*max_epochs"),
        ({"val_check_interval": 0.5}, "val_check_interval=0.5.*check_val_every_n_epoch"),
        ({"overfit_batches": 2}, "overfit_batches=2"),
    ],
)
def test_trainer_options_that_cut_across_rounds(options, message):
    made = trainer(2, [fb.FederatedBayes(fb.IIDPartition(3))], **options)
    with pytest.raises(FederationError, match=f"(?s)cannot run a federation.*{message}"):
        made.fit(Plain(), loader())


def test_a_limit_that_leaves_a_client_without_batches_is_refused():
    made = trainer(1, [fb.FederatedBayes(fb.SizesPartition((80, 10)))], limit_train_batches=0.4)
    with pytest.raises(FederationError, match=r"limit_train_batches=0.4 leaves no batch to the clients 1 \(10\)"):
        made.fit(Plain(), loader())
    assert made.limit_train_batches == 0.4


@pytest.mark.parametrize(
    ("callback", "message"),
    [
        (StochasticWeightAveraging(1e-2), "StochasticWeightAveraging averages the weights of different clients"),
        (GradientAccumulationScheduler({1: 2}), "GradientAccumulationScheduler"),
        (LearningRateFinder(), "LearningRateFinder trains on part of a round"),
    ],
)
def test_callbacks_that_cut_across_rounds(callback, message):
    made = trainer(2, [fb.FederatedBayes(fb.IIDPartition(3)), callback])
    with pytest.raises(FederationError, match=message):
        made.fit(Plain(), loader())


def test_the_tuner_is_refused_before_any_step():
    """Lightning leaves its LearningRateFinder in that Trainer; with a new one the module trains."""
    from lightning.pytorch.tuner import Tuner

    module, federation = Plain(), fb.FederatedBayes(fb.IIDPartition(3))
    before = parameters(module)
    with pytest.raises(FederationError, match=r"LearningRateFinder trains on part of a round"):
        Tuner(trainer(2, [federation])).lr_find(module, loader())
    assert_equal(before, parameters(module))
    federate(module, federation)
    assert len(federation.history) == 2


def test_all_reasons_are_named_at_once():
    made = trainer(2, [fb.FederatedBayes(fb.IIDPartition(3))], max_steps=5, overfit_batches=2)
    with pytest.raises(FederationError, match=r"(?s)overfit_batches=2.*max_steps=5"):
        made.fit(Plain(), loader())


def test_manual_optimization_is_refused():
    module = Plain()
    module.automatic_optimization = False
    with pytest.raises(FederationError, match=r"automatic_optimization is False.*use automatic optimization"):
        federate(module, fb.FederatedBayes(fb.IIDPartition(3)))


@pytest.mark.filterwarnings("ignore:.*dataloader_iter.*")
def test_a_step_that_fetches_its_own_batches_is_refused():
    class Greedy(Plain):
        def training_step(self, dataloader_iter):
            raise AssertionError

    with pytest.raises(FederationError, match=r"dataloader_iter"):
        federate(Greedy(), fb.FederatedBayes(fb.IIDPartition(3)))


class TestFinishedTrainers:
    def test_a_trainer_that_has_finished_is_refused(self):
        module, federation = Plain(), fb.FederatedBayes(fb.IIDPartition(3))
        made = federate(module, federation)
        with pytest.raises(FederationError, match=r"has finished: 2 of max_epochs=2 rounds.*max_epochs"):
            made.fit(module, loader())

    def test_even_with_its_own_checkpoint(self, tmp_path):
        module = Plain()
        made = federate(module, fb.FederatedBayes(fb.IIDPartition(3)))
        made.save_checkpoint(tmp_path / "done.ckpt")
        with pytest.raises(FederationError, match=r"has finished: 2 of max_epochs=2"):
            made.fit(module, loader(), ckpt_path=tmp_path / "done.ckpt")

    def test_a_new_trainer_loads_a_complete_federation_and_trains_nothing(self, tmp_path, caplog):
        first = fb.FederatedBayes(fb.IIDPartition(3))
        trained = Plain()
        federate(trained, first).save_checkpoint(tmp_path / "done.ckpt")
        module, again = Plain(lr=0.3), fb.FederatedBayes(fb.IIDPartition(3))
        with caplog.at_level("INFO"):
            federate(module, again, ckpt_path=tmp_path / "done.ckpt")
        assert any("federation is complete: 2 rounds are done" in line for line in caplog.messages)
        assert_equal(parameters(trained), parameters(module))
        assert_equal(dict(first.posterior.mean), dict(again.posterior.mean))
        assert again.history == first.history


class TestData:
    def refuse(self, train, message, partition="three", **options):
        partition = fb.IIDPartition(3) if partition == "three" else partition
        module = Plain()
        before = parameters(module)["net.0.weight"]
        with pytest.raises(fb.FedBayesError, match=message):
            federate(module, fb.FederatedBayes(partition, **options), train=train)
        assert torch.equal(before, module.net[0].weight)

    def test_iterable_without_length(self):
        class Stream(IterableDataset):
            def __iter__(self):
                return iter(blobs())

        self.refuse(DataLoader(Stream(), batch_size=8), "Stream is iterable and has no length.*map-style")

    def test_more_clients_than_examples(self):
        self.refuse(loader(), "91 clients cannot share 90 examples.*fewer clients", fb.IIDPartition(91))

    def test_no_partition_and_no_parts(self):
        self.refuse(loader(), "who are the clients.*DirichletPartition", None)

    def test_a_client_with_no_example(self):
        empty = TensorDataset(torch.zeros(0, 6), torch.zeros(0, dtype=torch.int64))
        parts = fb.ClientDatasets({"north": blobs(), "south": empty})
        self.refuse(loader(parts, shuffle=True), "clients without an example: south", None)

    def test_a_sampler_of_ones_own(self):
        sampler = WeightedRandomSampler([1.0] * 90, 90)
        self.refuse(loader(shuffle=False, sampler=sampler), "WeightedRandomSampler.*shuffle=")

    def test_complex_parameters(self):
        module = Plain()
        module.phase = torch.nn.Parameter(torch.zeros(2, dtype=torch.complex64))
        with pytest.raises(FederationError, match=r"complex parameters cannot be fused: phase.*view_as_real"):
            federate(module, fb.FederatedBayes(fb.IIDPartition(3)))

    def test_more_clients_needed_than_come(self):
        self.refuse(
            loader(),
            "min_clients=3, but a round has only 1 of 3",
            safeguards=fb.Safeguards(min_clients=3),
            fraction=0.3,
        )

    def test_local_parameters_that_match_nothing(self):
        self.refuse(loader(), r"pattern 'head\.\*' matches no parameter", local_parameters=["head.*"])

    def test_a_refusal_leaves_data_loaders_as_they_were(self):
        before = DataLoader.__init__
        self.refuse(loader(), "91 clients", fb.IIDPartition(91))
        assert DataLoader.__init__ is before

    def test_mistakes_are_found_before_the_sanity_validation(self):
        class Spy(L.Callback):
            validated = False

            def on_validation_batch_start(self, *_):
                self.validated = True

        spy = Spy()
        with pytest.raises(fb.FedBayesError, match=r"cannot share"):
            federate(Plain(), fb.FederatedBayes(fb.IIDPartition(91)), val=loader(shuffle=False), callbacks=[spy])
        assert not spy.validated


def test_validate_test_and_predict_are_left_alone():
    class Full(Plain):
        def test_step(self, batch, batch_idx):
            self.validation_step(batch, batch_idx)

        def predict_step(self, batch, batch_idx):
            return self(batch[0])

    module, made, plain = Full(), trainer(1, [fb.FederatedBayes(fb.IIDPartition(3))]), trainer(1)
    data = loader(shuffle=False)
    for fit in (False, True):
        if fit:
            made.fit(module, loader())
        before = parameters(module)
        assert made.validate(module, data, verbose=False) == plain.validate(module, data, verbose=False)
        assert made.test(module, data, verbose=False) == plain.test(module, data, verbose=False)
        for first, second in zip(made.predict(module, data), plain.predict(module, data), strict=True):
            assert torch.equal(first, second)
        assert_equal(before, parameters(module))
    assert made.current_epoch == 1
