"""Bad input is refused before training starts, with its value, the rule and the remedy."""

import pytest
import torch
from lightning.pytorch.callbacks import (
    GradientAccumulationScheduler,
    LambdaCallback,
    LearningRateFinder,
    StochasticWeightAveraging,
)
from torch.utils.data import DataLoader, TensorDataset

import lightning_fedbayes as fb
from lightning_fedbayes.core.errors import FederationError
from tests.federations import Plain, assert_equal, blobs, federate, loader, parameters, trainer
from tests.zoo.case import Net, net


def test_a_limit_that_leaves_a_client_without_batches_is_refused():
    made = trainer(1, [fb.FederatedBayes(fb.SizesPartition((80, 10)))], limit_train_batches=0.4)
    with pytest.raises(FederationError, match=r"limit_train_batches=0.4 leaves no batch to the clients 1 \(10\)"):
        made.fit(Plain(), loader())
    assert made.limit_train_batches == 0.4


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


class Scheduled(Plain):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        plateau = {"scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer), "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": {**plateau, "monitor": "val/nll"}}


NONE = {"partition": None}
MANUAL, COMPLEX = net(automatic_optimization=False), torch.nn.Linear(6, 3, dtype=torch.complex64)
PARTS = {"north": blobs(), "south": TensorDataset(torch.zeros(0, 6), torch.zeros(0, dtype=torch.int64))}


@pytest.mark.filterwarnings("ignore:.*dataloader_iter.*")
@pytest.mark.parametrize(
    ("message", "options", "federation"),
    [
        ("val_check_interval=1", {"val_check_interval": 1}, {}),
        ("val_check_interval=0.5.*check_val_every_n_epoch", {"val_check_interval": 0.5}, {}),
        ("(?s)cannot run a federation.*max_steps=5.*max_epochs", {"max_steps": 5}, {}),
        ("(?s)overfit_batches=2.*max_steps=5", {"max_steps": 5, "overfit_batches": 2}, {}),
        ("StochasticWeightAveraging averages the weights of", {"callbacks": [StochasticWeightAveraging(1e-2)]}, {}),
        ("GradientAccumulationScheduler", {"callbacks": [GradientAccumulationScheduler({1: 2})]}, {}),
        ("LearningRateFinder trains on part of a round", {"callbacks": [LearningRateFinder()]}, {}),
        ("automatic_optimization is False.*use automatic optimization", {"module": MANUAL}, {}),
        ("dataloader_iter", {"module": net(training_step=lambda self, dataloader_iter: None)}, {}),
        ("ReduceLROnPlateau with interval='step'.*interval='epoch'", {"module": Scheduled}, {}),
        (
            "complex parameters cannot be fused: net.0.*view_as_real",
            {"module": lambda: Net(torch.nn.Sequential(COMPLEX))},
            {},
        ),
        ("who are the clients.*DirichletPartition", {}, NONE),
        ("clients without an example: south", {"train": loader(fb.ClientDatasets(PARTS))}, NONE),
        ("min_clients=3, but a round has only 1 of 3", {}, {"safeguards": fb.Safeguards(3), "fraction": 0.3}),
        (r"pattern 'head\.\*' matches no parameter", {}, {"local_parameters": ["head.*"]}),
    ],
)
def test_what_cuts_across_rounds_is_refused_before_any_step_and_leaves_loaders_alone(message, options, federation):
    module = {"module": Plain, **options}["module"]()
    rest = {name: value for name, value in options.items() if name != "module"}
    before, made = parameters(module)["net.0.weight"], DataLoader.__init__
    with pytest.raises(fb.FedBayesError, match=message):
        federate(module, fb.FederatedBayes(**{"partition": fb.IIDPartition(3), **federation}), **rest)
    assert torch.equal(before, module.net[0].weight)
    assert DataLoader.__init__ is made


def test_mistakes_are_found_before_the_sanity_validation():
    spy = LambdaCallback(on_validation_batch_start=lambda *_: pytest.fail("validated"))
    with pytest.raises(fb.FedBayesError, match=r"91 clients cannot share 90 examples.*fewer clients"):
        federate(Plain(), fb.FederatedBayes(fb.IIDPartition(91)), val=loader(shuffle=False), callbacks=[spy])


def test_a_finished_federation_is_refused_in_its_trainer_and_complete_in_a_new_one(tmp_path, caplog):
    trained, first = Plain(), fb.FederatedBayes(fb.IIDPartition(3))
    made = federate(trained, first)
    made.save_checkpoint(tmp_path / "done.ckpt")
    for path in (None, tmp_path / "done.ckpt"):
        with pytest.raises(FederationError, match=r"has finished: 2 of max_epochs=2 rounds.*max_epochs"):
            made.fit(trained, loader(), ckpt_path=path)
    module, again = Plain(lr=0.3), fb.FederatedBayes(fb.IIDPartition(3))
    with caplog.at_level("INFO"):
        federate(module, again, ckpt_path=tmp_path / "done.ckpt")
    assert any("federation is complete: 2 rounds are done" in line for line in caplog.messages)
    assert_equal(parameters(trained), parameters(module))
    assert_equal(dict(first.posterior.mean), dict(again.posterior.mean))
    assert again.history == first.history


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
