"""What a network may put out, over Flower: trained and calibrated as in one process."""

import pytest
import torch
from torch.utils.data import DataLoader

import lightning_fedbayes as fb
from lightning_fedbayes.transport.flower import FusionStrategy
from tests.flower.clients import client_apps, run
from tests.flower.grid import LocalGrid
from tests.test_likelihoods import OUTPUTS, Own, data_of
from tests.transport.federation import BlobData, calibrated

pytestmark = pytest.mark.slow

CLIENTS = 2


class OwnData(BlobData):
    """Training and validation data of both clients."""

    def __init__(self, output):
        super().__init__(data_of(output))
        self.output = output

    def val_dataloader(self):
        return DataLoader(data_of(self.output, (40, 44), 1), 16)


@pytest.mark.filterwarnings("ignore:the temperature")  # targets are noise
@pytest.mark.parametrize("output", ["segmentation", "labels", "mean and variance", "pixels"])
def test_an_output_is_calibrated_over_flower_as_in_one_process(output):
    kind = "lac" if OUTPUTS[output][2].of_classes else "interval"

    def both():
        return fb.FederatedTemperature(), fb.FederatedConformal(kind=kind)

    def make():
        torch.manual_seed(7)
        return Own(output, "layers")

    strategy = FusionStrategy("weighted_average", wait_for=CLIENTS, seed=3)
    grid = LocalGrid(client_apps(CLIENTS, make, data=lambda: OwnData(output), partition=None))
    result = run(grid, strategy, rounds=2, make=make)
    remote = both()
    strategy.calibrate(grid, result.arrays, remote, timeout=1)
    here = both()
    calibrated(make, OwnData(output), here, "weighted_average")
    assert remote[0].temperature == pytest.approx(here[0].temperature, rel=1e-6)
    assert remote[1].threshold == pytest.approx(here[1].threshold, rel=1e-5)
