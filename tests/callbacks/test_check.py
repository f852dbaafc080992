"""Everything that speaks against a fit, told at once and without training."""

import lightning as L
import pytest
import torch

import lightning_fedbayes as fb
from lightning_fedbayes.core.errors import FederationError
from tests.federations import Plain, assert_equal, bayesian, loader, parameters, trainer


class BySteps(Plain):
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        scheduler = {"scheduler": plateau, "interval": "step", "monitor": "val/nll"}
        return {"optimizer": optimizer, "lr_scheduler": scheduler}


@pytest.mark.parametrize("make", [Plain, bayesian])
def test_a_fit_that_was_checked_is_the_fit(make):
    def fitted(checks: int) -> L.LightningModule:
        L.seed_everything(1, verbose=False)
        module, made = make(), trainer(2, [fb.FederatedBayes(fb.IIDPartition(3))])
        for _ in range(checks):
            before = parameters(module)
            assert fb.check(made, module, loader()) == []
            assert_equal(parameters(module), before)
        made.fit(module, loader(), loader(shuffle=False))
        assert made.current_epoch == 2
        return module

    assert_equal(parameters(fitted(0)), parameters(fitted(2)))


def test_all_reasons_are_told_at_once():
    made = trainer(2, [fb.FederatedBayes(fb.IIDPartition(3), fusion="auto")], max_steps=3, val_check_interval=0.5)
    module = BySteps()
    before = parameters(module)
    reasons = fb.check(made, module, loader())
    for word in ("max_steps=3", "val_check_interval=0.5", "interval='step'", "fusion='auto' chooses a rule"):
        assert sum(word in reason for reason in reasons) == 1, (word, reasons)
    assert_equal(parameters(module), before)
    with pytest.raises(FederationError, match="max_steps=3"):
        made.fit(module, loader())


def test_data_and_engine_are_checked_too():
    class OwnStep(Plain):
        def training_step(self, batch, batch_idx):
            self.seen = [batch_idx]
            return super().training_step(batch, batch_idx)

    made = trainer(2, [fb.FederatedBayes(fb.IIDPartition(3), engine="vectorized")])
    (reason,) = fb.check(made, OwnStep(), loader())
    assert "engine='vectorized' cannot be used" in reason
    (reason,) = fb.check(trainer(2, [fb.FederatedBayes(fb.IIDPartition(3000))]), Plain(), loader())
    assert "3000" in reason
    (reason,) = fb.check(trainer(2, [fb.FederatedBayes()]), Plain(), loader())
    assert "who are the clients" in reason
    with pytest.raises(FederationError, match="has no FederatedBayes"):
        fb.check(trainer(2), Plain(), loader())
