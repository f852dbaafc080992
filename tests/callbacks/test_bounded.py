"""Whatever the number of clients and classes, what people read is bounded: lines, tables, settings and pictures."""

import warnings

import lightning as L
import pytest
import torch
import yaml
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from matplotlib.figure import Figure
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

import lightning_fedbayes as fb
from lightning_fedbayes.callbacks.calibration.predictions import check_apart
from lightning_fedbayes.core.errors import FederationError
from lightning_fedbayes.data.clients import Clients, check_classes, clients_of
from lightning_fedbayes.server.plan import Batching, check_batches
from lightning_fedbayes.trainer.checks import check_same_federation
from tests import federations

SIZES = {"small": (100, 10), "large": (10_000, 1_000)}
LONGER = 100
"""Most characters by which the longest line of the large federation may exceed that of the small one."""


def data_of(clients, classes):
    """One example or two for each client; every seventh cannot be trained on, and every tenth stands out."""
    torch.manual_seed(0)
    parts = {}
    for client in range(clients):
        inputs = torch.randn(1 + client % 2, 2) * (30.0 if client % 10 == 3 else 1.0)
        inputs[0, 0] = torch.nan if client % 7 == 0 else inputs[0, 0]
        parts[f"clinic {client}"] = TensorDataset(inputs, (torch.arange(len(inputs)) * 5 + client) % classes)
    return fb.ClientDatasets(parts)


class Softmax(L.LightningModule):
    """A classifier whose training diverges from the second round on."""

    def __init__(self, classes):
        super().__init__()
        self.layer = nn.Linear(2, classes)

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.layer(batch[0]), batch[1]) + 100 * self.current_epoch

    def validation_step(self, batch, batch_idx):
        return {"probs": self.layer(batch[0]).softmax(-1), "target": batch[1]}

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def federate(folder, clients, classes):
    """Two rounds of a federation that logs into ``folder``."""
    torch.manual_seed(0)
    loggers = [CSVLogger(folder, name="", version=""), TensorBoardLogger(folder, name="", version="events")]
    callbacks = [fb.FederatedBayes(fusion="weighted_average", engine="vectorized")]
    run = federations.trainer(2, callbacks, logger=loggers, num_sanity_val_steps=0)
    held_out = TensorDataset(torch.randn(classes, 2), torch.arange(classes))
    run.fit(Softmax(classes), DataLoader(data_of(clients, classes), 2), DataLoader(held_out, 256))


def watched(folder, clients, classes):
    """Folder, lines, pictures and texts for TensorBoard of a federation."""
    lines, figures, texts = [], [], {}
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for module in ("callbacks.report", "callbacks.federated_bayes", "clients.setup", "clients.federation"):
            patch.setattr(f"lightning_fedbayes.{module}.rank_zero_info", lines.append)
        patch.setattr(Figure, "savefig", lambda figure, *_, **__: figures.append(figure))
        writer = "torch.utils.tensorboard.SummaryWriter"
        patch.setattr(f"{writer}.add_text", lambda _, tag, text, **__: texts.update({tag: text}))
        federate(folder, clients, classes)
    return folder, [*lines, *(str(each.message) for each in said)], figures, texts


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return {name: watched(tmp_path_factory.mktemp(name), *size) for name, size in SIZES.items()}


def test_no_line_of_the_log_grows_with_clients_and_classes(runs):
    small, large = (runs[name][1] for name in SIZES)
    assert max(map(len, large)) <= max(map(len, small)) + LONGER
    assert len(large) <= len(small)
    for lines in (small, large):
        for text in ("are left out; the first: FusionError", "stand out", "has diverged"):
            assert any(text in line for line in lines)


def test_settings_hold_the_sizes_of_few_clients_and_a_summary_of_many(runs):
    small, large = (
        yaml.safe_load((runs[name][0] / "hparams.yaml").read_text())["federation"]["client_sizes"] for name in SIZES
    )
    assert small == [1, 2] * 50
    assert {key: large[key] for key in ("smallest", "median", "largest", "total")} == {
        "smallest": 1,
        "median": 1.5,
        "largest": 2,
        "total": 15_000,
    }
    assert len(large) == 5
    for name in SIZES:
        assert all(len(line) < 1_000 for line in runs[name][3]["federation/settings"].splitlines())


# -- reports that a run of many clients would take long for ------------------------------------------------------------


def trainer(folder=None):
    """A Trainer that logs into ``folder``."""
    logger = False if folder is None else CSVLogger(folder, name="", version="")
    return L.Trainer(logger=logger, accelerator="cpu", enable_progress_bar=False, enable_checkpointing=False)


# -- the sizes of the clients ------------------------------------------------------------------------------------------


def settings_of(sizes):
    """What a checkpoint says of a federation."""
    clients = Clients((), tuple(map(range, sizes)))
    return {
        "seed": 0,
        "clients": len(clients),
        "client_sizes": clients.described_sizes,
        "privacy": "None",
        "local_parameters": [],
        "posterior": "None",
    }


@pytest.mark.parametrize("clients", [3, 100, 101, 10_000])
def test_a_federation_with_one_client_of_another_size_is_another(clients):
    sizes = [2] * clients
    check_same_federation(trainer(), settings_of(sizes), settings_of(list(sizes)))
    for other in ([3, *sizes[1:]], [*sizes[:-2], 1, 3], [*sizes[:-2], 3, 1], [*sizes, 2]):  # two of them of equal sum
        with pytest.raises(FederationError, match="client_sizes"):
            check_same_federation(trainer(), settings_of(sizes), settings_of(other))


# -- lines of a round --------------------------------------------------------------------------------------------------


# -- warnings and errors -----------------------------------------------------------------------------------------------


def clinics(clients):
    return [f"clinic {client}" for client in range(clients)]


def empty(clients, classes):
    clients_of(fb.ClientDatasets({name: TensorDataset(torch.zeros(0, 1)) for name in clinics(clients)}), None, 0)


def absent(clients, classes):
    counts = torch.zeros(1, classes, dtype=torch.int64)
    check_classes(Clients(("a",), (TensorDataset(torch.zeros(1)),), counts, tuple(range(classes))))


def gaps(clients, classes):
    known = tuple(range(0, 2 * classes - 1, 2))
    check_classes(Clients(("a",), (TensorDataset(torch.zeros(1)),), torch.ones(1, classes), known))


def idle(clients, classes):
    check_batches(clinics(clients), [1] * clients, Batching(batch_size=2, drop_last=True))


def other_parameters(clients, classes):
    sides = [{f"{side}{number}": torch.zeros(1) for number in range(classes)} for side in "ab"]
    fb.fuse("weighted_average", [fb.GaussianPosterior.point_mass(side) for side in sides])


def other_sizes(clients, classes):
    check_same_federation(trainer(), settings_of([1] * clients), settings_of([1] * (clients - 1) + [2]))


def sizes_that_sum_to_too_much(clients, classes):
    fb.SizesPartition((3,) * clients).split(None, 0, num_examples=clients)


def shards_of_classes(clients, classes):
    fb.ClassPartition(2 * clients, classes_per_client=classes).split(torch.arange(classes), 0)


def few_held_out(clients, classes):
    fb.FederatedConformal(per_client=True).fit({name: torch.rand(2) for name in clinics(clients)})


def trained_on(clients, classes):
    data = TensorDataset(torch.zeros(2 * clients, 1))
    parts = {name: Subset(data, [2 * k, 2 * k + 1]) for k, name in enumerate(clinics(clients))}
    check_apart(parts, fb.ClientDatasets(parts))


def unknown_threshold(clients, classes):
    conformal = fb.FederatedConformal(per_client=True)
    conformal.threshold, conformal.thresholds = 1.0, dict.fromkeys(clinics(clients), 1.0)
    conformal.threshold_of("clinic")


@pytest.mark.parametrize(
    "act",
    [
        empty,
        absent,
        gaps,
        idle,
        other_parameters,
        other_sizes,
        trained_on,
        sizes_that_sum_to_too_much,
        shards_of_classes,
        few_held_out,
        unknown_threshold,
    ],
)
def test_no_warning_and_no_error_grows_with_clients_and_classes(act):
    longest = {}
    for name, size in SIZES.items():
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            try:
                act(*size)
            except fb.FedBayesError as error:
                longest[name] = len(str(error))
        assert len(said) <= 1
        longest.setdefault(name, max((len(str(each.message)) for each in said), default=0))
    assert 0 < longest["large"] <= longest["small"] + LONGER
