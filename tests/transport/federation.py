"""A small federation that needs no transport: its data, its network, and the same in one process."""

from typing import Any

import lightning as L

import lightning_fedbayes as fb
from tests.federations import bayesian, blobs, federate, loader, network

PARTITION = fb.DirichletPartition(clients=4, alpha=1.0)


class BlobData(L.LightningDataModule):
    """Data that all clients have in common, dealt out by a partition; or one client's own."""

    def __init__(self, dataset: Any = None) -> None:
        super().__init__()
        self.dataset = blobs() if dataset is None else dataset

    def train_dataloader(self) -> Any:
        return loader(self.dataset, drop_last=True)  # BatchNorm cannot train on one example

    def val_dataloader(self) -> Any:
        return loader(self.dataset, shuffle=False)


def hybrid(**options: Any) -> fb.HybridBayesianClassifier:
    model = bayesian(**options)
    model.network = fb.bayesianize(network(0, batch_norm=True), last=1)
    return model


def in_process(rounds: int = 3, make: Any = hybrid, **settings: Any) -> fb.FederatedBayes:
    """The same federation in one process."""
    federation = fb.FederatedBayes(PARTITION, engine="sequential", **{"fusion": "rklb", **settings})
    federate(make(), federation, rounds, BlobData().train_dataloader())
    return federation


def calibrated(make: Any, data: Any, callbacks: Any, fusion: str = "rklb") -> Any:
    """The module that is trained in one process, after calibration of a temperature and of conformal sets."""
    module, (scaling, conformal) = make(), callbacks
    federation = fb.FederatedBayes(engine="sequential", fusion=fusion, seed=3)
    federate(module, federation, 2, data.train_dataloader(), data.val_dataloader())
    held_out, options = data.val_dataloader().dataset, {"batch_size": 16, "seed": 3}
    scaling.fit_from(module, held_out, **options)
    conformal.fit_from(module, held_out, temperature=scaling.temperature, **options)
    return module


def assert_same_calibration(over: Any, alone: Any) -> None:
    """A temperature and conformal sets over a network are those of one process, to the bit."""
    assert over[0].temperature == alone[0].temperature != 1
    assert over[1].threshold == alone[1].threshold
    assert list(over[1].thresholds.values()) == list(alone[1].thresholds.values())


def assert_restored(fresh: Any, calibrated: Any, state: Any) -> None:
    """A server's checkpoint holds what its callbacks have found."""
    for made, found in zip(fresh, calibrated, strict=True):
        made.load_state_dict(state.calibration[made.state_key])
        assert made.state_dict() == found.state_dict()
