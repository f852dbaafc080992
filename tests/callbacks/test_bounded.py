"""Whatever the number of clients and classes, what people read is bounded: lines, tables, settings and pictures."""

import warnings

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import Subset, TensorDataset

import lightning_fedbayes as fb
from lightning_fedbayes.callbacks.calibration.callback import check_apart
from lightning_fedbayes.core.errors import FederationError
from lightning_fedbayes.data.clients import Clients, check_classes, clients_of
from lightning_fedbayes.server.plan import Batching, check_batches
from lightning_fedbayes.trainer.checks import check_same_federation

SIZES = {"small": (100, 10), "large": (10_000, 1_000)}
LONGER = 100
"""Most characters by which the longest line of the large federation may exceed that of the small one."""


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


@pytest.mark.slow
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
