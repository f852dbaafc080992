"""What ``estimated_stepping_batches`` means in a federation: a client's own steps, as the other positions."""

from __future__ import annotations

import lightning as L
import pytest

import lightning_fedbayes as fb
from tests.clients.test_evaluation import clients
from tests.federations import Plain, loader, trainer


class Asks(Plain):
    """Notes what the Trainer estimates, and counts its own steps."""

    def configure_optimizers(self):
        self.at_first, self.inside, self.taken = self.trainer.estimated_stepping_batches, {}, {}
        return super().configure_optimizers()

    def on_client_start(self, client):
        self.client = client.name

    def training_step(self, batch, batch_idx):
        self.inside[self.client] = self.trainer.estimated_stepping_batches
        return super().training_step(batch, batch_idx)

    def on_before_optimizer_step(self, optimizer):
        self.taken[self.client] = self.taken.get(self.client, 0) + 1

    def on_validation_epoch_end(self):
        self.between = self.trainer.estimated_stepping_batches


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("epochs", [1, 2])
def test_they_are_the_steps_that_a_client_takes_in_all_rounds(accumulate, epochs):
    federation, module = fb.FederatedBayes(local_epochs=epochs, engine="sequential"), Asks()
    made = trainer(3, [federation], accumulate_grad_batches=accumulate)
    made.fit(module, loader(clients(40, 25)), loader(clients(9), shuffle=False))
    assert module.inside == module.taken
    assert module.at_first == module.between == max(module.taken.values())
    assert made.global_step == sum(module.taken.values())
    assert type(made) is L.Trainer


def test_a_trainer_is_what_it_was_after_an_error():
    class Fails(Plain):
        def on_train_start(self):
            raise RuntimeError("no")

    class Mine(L.Trainer):
        pass

    made = Mine(
        max_epochs=1,
        callbacks=[fb.FederatedBayes(fb.IIDPartition(3))],
        logger=False,
        accelerator="cpu",
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with pytest.raises(RuntimeError, match="no"):
        made.fit(Fails(), loader())
    assert type(made) is Mine
