"""Metrics live on through Lightning's loops, of which some run in inference mode."""

import lightning as L

import lightning_fedbayes as fb
from lightning_fedbayes.modules import mlp


def test_a_module_may_be_validated_between_two_fits():
    module, data = fb.HybridBayesianClassifier(mlp(64, 10), bayesian_last=1), fb.DigitsDataModule()
    for _ in range(2):
        trainer = L.Trainer(
            max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, datamodule=data)
        trainer.validate(module, datamodule=data, verbose=False)
        trainer.test(module, datamodule=data, verbose=False)
