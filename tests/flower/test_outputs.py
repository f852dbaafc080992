"""What a network may put out, over Flower: trained and calibrated as in one process."""

import pytest
import torch
from torch.utils.data import DataLoader

import lightning_fedbayes as fb
from lightning_fedbayes.core.errors import FederationError
from lightning_fedbayes.flower import FusionStrategy, client_app
from tests.federations import Plain, federate, network
from tests.flower.clients import run
from tests.flower.grid import LocalGrid
from tests.test_likelihoods import OUTPUTS, Own, data_of
from tests.transport.federation import BlobData

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

    def app():
        return client_app(make(), OwnData(output), trainer={"accelerator": "cpu"})

    strategy = FusionStrategy("weighted_average", wait_for=CLIENTS, seed=3)
    grid = LocalGrid([app() for _ in range(CLIENTS)])
    result = run(grid, strategy, rounds=2, make=make)
    remote = both()
    strategy.calibrate(grid, result.arrays, remote, timeout=1)
    data, module, here = OwnData(output), make(), both()
    federation = fb.FederatedBayes(engine="sequential", fusion="weighted_average", seed=3)
    federate(module, federation, 2, data.train_dataloader(), data.val_dataloader())
    held_out, options = data.val_dataloader().dataset, {"batch_size": 16, "seed": 3}
    here[0].fit_from(module, held_out, **options)
    here[1].fit_from(module, held_out, temperature=here[0].temperature, **options)
    assert remote[0].temperature == pytest.approx(here[0].temperature, rel=1e-6)
    assert remote[1].threshold == pytest.approx(here[1].threshold, rel=1e-5)


class Mute(fb.HybridBayesianClassifier):
    """Draws, but its own step returns nothing."""

    def validation_step(self, batch, batch_idx):
        self.log("val/acc", 0.5)

    def on_validation_epoch_end(self):
        """Log no scores: the step has collected none."""


@pytest.mark.filterwarnings("ignore:the temperature")
@pytest.mark.parametrize(
    ("kind", "by"),
    [
        (Mute, "draws/"),
        (fb.HybridBayesianClassifier, ""),
        (lambda net, **_: Plain(net, optimizer=fb.IVON), ""),
    ],
)
def test_figures_of_a_client_s_callbacks_say_whose_they_are(kind, by, tmp_path):
    """The user's own module is predicted by its forward, at the mean: a client holds no callback with its posterior."""

    def make():
        return kind(network(), bayesian_last=1, samples=3)

    apps = [
        client_app(
            make(),
            BlobData(),
            keep=["posterior"],
            state_folder=tmp_path / str(number),
            trainer={"accelerator": "cpu", "callbacks": [fb.FederatedTemperature()]},
        )
        for number in range(CLIENTS)
    ]
    strategy = FusionStrategy(wait_for=CLIENTS, evaluate=True)
    run(LocalGrid(apps), strategy, rounds=1, make=make)
    found = {name for name in strategy.client_scores.values if "scaled" in name}
    assert found == {f"val/{by}scaled/temperature", f"personal/val/{by}scaled/temperature"}


def test_a_client_refuses_before_training_what_its_callbacks_cannot_use(caplog):
    """Its Trainer validates nothing while it trains, and the server's first question after that would find it."""

    class Untrained(Plain):
        def training_step(self, batch, batch_idx):
            pytest.fail("training has begun")

        def validation_step(self, batch, batch_idx):
            pass

    def make():
        return Untrained(torch.nn.Linear(6, 1))

    app = client_app(
        make(), BlobData(), share_errors=True, trainer={"accelerator": "cpu", "callbacks": [fb.FederatedTemperature()]}
    )
    strategy = FusionStrategy(wait_for=CLIENTS, evaluate=True, safeguards=fb.Safeguards(max_failed_rounds=1))
    with caplog.at_level("INFO"), pytest.raises(FederationError, match="in a row"):
        run(LocalGrid([app] * CLIENTS), strategy, rounds=2, make=make)
    assert "client 0 failed in training: FedBayesError: Untrained: outputs (8, 1) and targets (8,)" in caplog.text
