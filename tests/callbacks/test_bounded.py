"""Whatever the number of clients and classes, what people read is bounded: lines, tables, settings and pictures."""

import csv
import warnings

import pytest
import torch
import yaml
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from matplotlib.figure import Figure
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

import lightning_fedbayes as fb
from lightning_fedbayes.callbacks.calibration.callback import check_apart
from lightning_fedbayes.callbacks.report import FederationReport
from lightning_fedbayes.callbacks.trainer.checks import check_same_federation
from lightning_fedbayes.callbacks.uncertainty import UncertaintyReport
from lightning_fedbayes.clients.evaluation import ClientScores
from lightning_fedbayes.core.errors import FederationError, told_failures
from lightning_fedbayes.core.tables import MOST_ROWS
from lightning_fedbayes.data.clients import Clients, check_classes, clients_of
from lightning_fedbayes.methods import Ditto
from lightning_fedbayes.server import RoundResult
from lightning_fedbayes.server.aggregation import Aggregate
from lightning_fedbayes.server.plan import Batching, check_batches
from tests.federations import Plain
from tests.federations import federate as fit
from tests.federations import trainer as made

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


class Softmax(Plain):
    """A classifier whose training diverges from the second round on."""

    def __init__(self, classes):
        super().__init__(nn.Linear(2, classes))

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) + 100 * self.current_epoch

    def validation_step(self, batch, batch_idx):
        return {"probs": self(batch[0]).softmax(-1), "target": batch[1]}


def logged(folder, clients, classes):
    """Two rounds of a federation that logs into ``folder``."""
    torch.manual_seed(0)
    loggers = [CSVLogger(folder, name="", version=""), TensorBoardLogger(folder, name="", version="events")]
    federation, train = fb.FederatedBayes(fusion="weighted_average", engine="vectorized"), data_of(clients, classes)
    held_out = DataLoader(TensorDataset(torch.randn(classes, 2), torch.arange(classes)), 256)
    fit(Softmax(classes), federation, 2, DataLoader(train, 2), held_out, logger=loggers, num_sanity_val_steps=0)


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
        logged(folder, clients, classes)
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


def test_tables_hold_a_hundred_rows_the_failing_clients_first(runs):
    for name, (clients, _) in SIZES.items():
        folder, _, _, texts = runs[name]
        head, *rows = csv.reader((folder / "federation_clients.csv").read_text().splitlines())
        assert len(rows) == MOST_ROWS
        assert texts["federation/clients"].count("\n") == MOST_ROWS + 1  # and the head with its rule
        failures = [row[head.index("failures")] for row in rows]
        if name == "small":
            assert [row[0] for row in rows] == [f"clinic {client}" for client in range(clients)]
        else:
            assert failures[:-1] == ["2"] * 99
            assert rows[-1][0] == "9,901 others, no worse"


def test_settings_hold_the_sizes_of_few_clients_and_a_summary_of_many(runs):
    small, large = (
        yaml.safe_load((runs[name][0] / "hparams.yaml").read_text())["federation"]["client_sizes"] for name in SIZES
    )
    assert small == [1, 2] * 50
    assert [large[key] for key in ("smallest", "median", "largest", "total")] == [1, 1.5, 2, 15_000]
    assert len(large) == 5
    for name in SIZES:
        assert all(len(line) < 1_000 for line in runs[name][3]["federation/settings"].splitlines())


def test_curves_and_axes_do_not_grow(runs):
    small, large = (next(csv.reader((runs[name][0] / "metrics.csv").read_text().splitlines())) for name in SIZES)
    assert small == large


def test_pictures_hold_a_hundred_rows_and_say_so(runs):
    for name in SIZES:
        heat_map, *others = runs[name][2]
        assert heat_map.axes[0].images[0].get_array().shape == ((100, 10) if name == "small" else (100, 100))
        for axes in [axes for figure in (heat_map, *others) for axes in figure.axes]:
            assert len(axes.get_xticks()) <= MOST_ROWS
            assert len(axes.get_yticks()) <= MOST_ROWS
    assert runs["large"][2][0].axes[0].get_title().endswith("\n100 of 10,000 clients, 100 of 1,000 classes")
    assert runs["small"][2][0].axes[0].get_title() == "Examples per client and class"


def trainer(folder=None):
    """A Trainer that logs into ``folder``."""
    return made(logger=False if folder is None else CSVLogger(folder, name="", version=""))


def result_of(clients):
    """A round whose rule has inferred the reliability of each client, and left every hundredth out."""
    shares = {client: client / clients**2 for client in range(clients)}
    q = fb.GaussianPosterior.point_mass({"w": torch.zeros(1)})
    aggregate = Aggregate(q, {}, shares, {}, True, dict.fromkeys(range(0, clients, 100), "far"), {}, ())
    return RoundResult(0, q, {}, aggregate, None, (), {})


@pytest.mark.parametrize("clients", [100, 10_000])
def test_reliabilities_are_a_hundred_rows(clients, tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: figures.append(figure))
    report = FederationReport()
    report.set_clients(Clients(tuple(map(str, range(clients))), (TensorDataset(torch.zeros(1)),) * clients))
    report.fused(result_of(clients))
    report.finish(trainer(tmp_path), UncertaintyReport(None), [])
    _, *rows = csv.reader((tmp_path / "federation_reliability_by_round.csv").read_text().splitlines())
    assert len(rows) == MOST_ROWS
    assert figures[0].axes[0].images[0].get_array().shape == (100, 1)
    if clients > MOST_ROWS:
        assert {row[3] for row in rows[:-1]} == {"far"}  # 100 are
        assert rows[-1] == ["nan", "9,901 others, no worse", "nan", ""]
        assert "100 of 10,000 clients" in figures[0].axes[0].get_title()


def scores_of(clients):
    """Scores of clients, the worst of which is the last but one; the last has none."""
    accuracy = torch.linspace(1, 0.5, clients)
    accuracy[-1] = torch.nan
    names = tuple(map(str, range(clients)))
    return ClientScores(names, (3,) * clients, {"accuracy": accuracy, "nll": torch.ones(clients)})


def test_scores_of_many_clients_show_the_worst_and_a_file_holds_all(tmp_path):
    scores = scores_of(10_000)
    head, rows = scores.table()
    assert head == ["client", "examples", "accuracy", "nll"]
    assert [row[0] for row in rows] == [*map(str, range(9_998, 9_899, -1)), "9,901 others, no worse"]
    assert scores.markdown().count("\n") == 1 + MOST_ROWS + 3  # and mean, worst and spread
    assert scores._repr_html_().count("<tr>") == 1 + MOST_ROWS + 3
    scores.to_csv(tmp_path / "scores.csv")
    assert len((tmp_path / "scores.csv").read_text().splitlines()) == 10_001
    assert len(ClientScores(scores.names, scores.num_examples, {}).table()[1]) == MOST_ROWS
    hostile = ClientScores(("=cmd()", "@a", "n" * 10_000), (3,) * 3, {"nll": -torch.ones(3)})
    hostile.to_csv(tmp_path / "scores.csv")
    lines = (tmp_path / "scores.csv").read_text().splitlines()
    assert [line.split(",")[0][:6] for line in lines[1:]] == ["'=cmd(", "'@a", "nnnnnn"], (
        "no spreadsheet evaluates a name"
    )
    assert lines[1].endswith("-1.0")
    failures = told_failures({hostile.names[2]: OSError("x" * 10_000)})
    assert len(failures[0]) < 1_200
    few = scores_of(100)
    assert [row[0] for row in few.table()[1]] == [str(client) for client in range(100)]


class Remembering(nn.Linear):
    """A layer that keeps a list of its own, as those of Hugging Face keep a configuration."""

    def __init__(self):
        super().__init__(1, 1)
        self.seen = []

    def forward(self, inputs):
        self.seen.append(len(inputs))
        return super().forward(inputs)


class Regression(Plain):
    def training_step(self, batch, batch_idx):
        if bool(batch[1].isnan().any()):
            raise OSError("torn")
        return self(batch[0]).square().mean()


def lines_of(net, method, targets):
    """Lines of one round of a federation of a client for each target, whose error ends it."""
    parts = {str(k): TensorDataset(torch.ones(1, 1), target.view(1, 1)) for k, target in enumerate(targets)}
    safeguards = fb.Safeguards(max_failed_rounds=1, min_clients=1)
    federation = fb.FederatedBayes(fusion=method, engine="sequential", safeguards=safeguards)
    lines = []
    with pytest.MonkeyPatch.context() as patch:
        for place in ("clients.sequential.rank_zero_info", "callbacks.report.rank_zero_info"):
            patch.setattr(f"lightning_fedbayes.{place}", lines.append)
        patch.setattr("lightning_fedbayes.clients.federation.rank_zero_warn", lines.append)
        try:
            fit(Regression(net, 1e-3), federation, 1, DataLoader(fb.ClientDatasets(parts), 1))
        except FederationError as error:
            lines.append(str(error))
    return lines


@pytest.mark.parametrize("layers", [1, 3, 300])
def test_attributes_that_clients_share_are_named_up_to_a_few(layers):
    net = nn.Sequential(*(Remembering() for _ in range(layers)))
    (line,) = lines_of(net, "weighted_average", torch.zeros(2))
    names = "self.net.0.seen" + {1: "", 3: ", self.net.1.seen, self.net.2.seen"}.get(
        layers, ", self.net.1.seen, self.net.10.seen and 297 others"
    )
    assert line == f"Clients share {names}, which training changes and which cannot be put back."


def test_clients_that_fail_are_one_line_also_where_they_end_the_run():
    failed = "Round 1: clients 0, 1, 2 and 6 others are left out; the first: OSError: torn"
    own, lines = lines_of(nn.Linear(1, 1), Ditto(0.1), torch.tensor([torch.nan] * 9 + [0.0]))
    assert "failed: 0, 1, 2 and 6 others; the first: torn" in own
    assert lines == failed
    lines, end = lines_of(nn.Linear(1, 1), "weighted_average", torch.full((9,), torch.nan))
    assert lines == failed
    assert "1 round in a row had fewer than min_clients=1 valid updates" in end


def test_a_failure_is_told_again_only_if_it_is_new(monkeypatch):
    report, lines = FederationReport(), []
    monkeypatch.setattr("lightning_fedbayes.callbacks.report.rank_zero_info", lines.append)
    for round, text in enumerate(["torn", "torn", "wet", None, "wet"]):
        report._failures = {"north": OSError(text)} if text else {}
        report.tell_failures(round)
    assert [line[:8] + line[-4:] for line in lines] == ["Round 1:torn", "Round 3: wet", "Round 5: wet"]


def settings_of(sizes):
    clients = Clients((), tuple(map(range, sizes)))
    sizes = {"clients": len(clients), "client_sizes": clients.described_sizes}
    return {"seed": 0, **sizes, "privacy": "None", "local_parameters": [], "posterior": "None"}


@pytest.mark.parametrize("clients", [3, 100, 101, 10_000])
def test_a_federation_with_one_client_of_another_size_is_another(clients):
    sizes = [2] * clients
    check_same_federation(trainer(), settings_of(sizes), settings_of(list(sizes)))
    for other in ([3, *sizes[1:]], [*sizes[:-2], 1, 3], [*sizes[:-2], 3, 1], [*sizes, 2]):  # two of them of equal sum
        with pytest.raises(FederationError, match="client_sizes"):
            check_same_federation(trainer(), settings_of(sizes), settings_of(other))


def one_client(counts, classes):
    return Clients(("a",), (TensorDataset(torch.zeros(1)),), counts, tuple(classes))


def trained_on(clients):
    data = TensorDataset(torch.zeros(2 * len(clients), 1))
    parts = {name: Subset(data, [2 * k, 2 * k + 1]) for k, name in enumerate(clients)}
    check_apart(parts, fb.ClientDatasets(parts))


def other_parameters(classes):
    sides = [{f"{side}{number}": torch.zeros(1) for number in range(classes)} for side in "ab"]
    fb.fuse("weighted_average", [fb.GaussianPosterior.point_mass(side) for side in sides])


ACTS = {  # of the clients' names and the number of classes
    "empty": lambda names, _: clients_of(fb.ClientDatasets(dict.fromkeys(names, TensorDataset(NOTHING))), None, 0),
    "absent": lambda _, classes: check_classes(one_client(torch.zeros(1, classes).long(), range(classes))),
    "gaps": lambda _, classes: check_classes(one_client(torch.ones(1, classes), range(0, 2 * classes - 1, 2))),
    "idle": lambda names, _: check_batches(names, [1] * len(names), Batching(batch_size=2, drop_last=True)),
    "other parameters": lambda _, classes: other_parameters(classes),
    "too much": lambda names, _: fb.SizesPartition((3,) * len(names)).split(None, 0, num_examples=len(names)),
    "shards": lambda names, k: fb.ClassPartition(2 * len(names), k).split(torch.arange(k), 0),
    "few": lambda names, _: fb.FederatedConformal(per_client=True).fit({name: torch.rand(2) for name in names}),
    "trained on": lambda names, _: trained_on(names),
}
NOTHING = torch.zeros(0, 1)


@pytest.mark.parametrize("act", ACTS.values(), ids=ACTS)
def test_no_warning_and_no_error_grows_with_clients_and_classes(act):
    longest = {}
    for name, (clients, classes) in SIZES.items():
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            try:
                act([f"clinic {client}" for client in range(clients)], classes)
            except fb.FedBayesError as error:
                longest[name] = len(str(error))
        assert len(said) <= 1
        longest.setdefault(name, max((len(str(each.message)) for each in said), default=0))
    assert 0 < longest["large"] <= longest["small"] + LONGER
