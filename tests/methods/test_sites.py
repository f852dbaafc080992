"""Sites against the theory: conjugate posteriors, control variates, Price's theorem, and what must not change them."""

import math
from functools import partial

import lightning as L
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_fedbayes as fb
from lightning_fedbayes.clients import problems
from lightning_fedbayes.core.errors import FederationError, FusionError
from lightning_fedbayes.layers import Conv1dReparameterization, LinearReparameterization, mean_only
from lightning_fedbayes.layers.functional import ESTIMATORS
from lightning_fedbayes.methods import Participant, Report, Shared, Trained
from lightning_fedbayes.methods.method import split
from lightning_fedbayes.methods.sites import WIDTH
from tests.federations import assert_close, federate
from tests.methods.conjugate import GAUSSIAN, POINT, Conjugate, distance
from tests.refusals import refusals

PRIOR, TOLERANCE = (0.5, 2.0), (1e-8, 1e-8)
SIZES = (30, 20, 10, 3, 100)
COHORTS = {
    "all": (80, lambda number: range(5)),
    "the other way round": (80, lambda number: range(4, -1, -1)),
    "some": (250, lambda number: [number % 5, (number + 1 + number % 3) % 5]),
    "one by one": (400, lambda number: [number % 5]),
}


def served(clients: Conjugate, prior=PRIOR, **options) -> fb.Server:
    return fb.Server(clients.posterior(), fusion=fb.Sites(*prior), **options)


def by_hand(clients: Conjugate, method: fb.Method, cohorts, rounds: int, variance: float = 1.0) -> Shared:
    """The server's half without a server: weighted means of means, and sums of all else."""
    posterior = clients.posterior(variance=variance)
    shared = Shared(posterior, method.init(posterior), share=1 / len(clients.examples))
    for number in range(rounds):
        reports = {client: clients.train(method, shared, client) for client in cohorts(number)}
        clients.kept |= {client: dict(report.kept) for client, report in reports.items()}
        weights = {client: clients.examples[client] for client in reports}
        total = sum(weights.values())
        means = {
            name: sum(weights[client] / total * report.posterior.mean[name] for client, report in reports.items())
            for name in posterior.mean
        }
        fused = fb.GaussianPosterior.point_mass(means)
        sums = {name: sum(report.sent[name].double() for report in reports.values()) for name in method.sent}
        posterior, tensors = method.fuse(shared, fused, sums, len(reports) * shared.share)
        shared = Shared(posterior, tensors, shared.share, is_new=False)
    return shared


@pytest.mark.parametrize(("rounds", "cohorts"), COHORTS.values(), ids=COHORTS)
@pytest.mark.parametrize("has_server", [True, False])
def test_a_conjugate_model_ends_at_the_pooled_posterior(rounds, cohorts, has_server):
    """Whoever is heard when, deterministic parameters where all are; errors of float32 messages do not add up."""
    clients = Conjugate.drawn(SIZES, point=2 if len(cohorts(0)) == len(SIZES) else 0, effort=0.6)
    if has_server:
        server = served(clients)
        for number in range(rounds):
            clients.round(server, cohorts(number))
        found = server.posterior
    else:
        found = by_hand(clients, fb.Sites(*PRIOR), cohorts, rounds).posterior
    assert_close(found, clients.pooled(PRIOR), *TOLERANCE)


def test_nothing_moves_at_the_pooled_posterior():
    """And the gradient c of the pooled ELBO, which is in every client's slope, is 0."""
    clients, method = Conjugate.drawn(SIZES, point=2), fb.Sites(*PRIOR)
    posterior = clients.pooled(PRIOR)
    mean = posterior.flatten()[0]
    for client, count in enumerate(SIZES):
        clients.kept[client] = {
            "gradient": clients.curvatures[client] * (mean - clients.optima[client]),
            "precision": clients.curvatures[client, : clients.size],
            "examples": torch.tensor(float(count)).double(),
            "clients": torch.ones(()).double(),
        }
    totals = clients.totals()
    told = {"slope": totals["gradient"], "age": torch.ones(3).double(), "start": torch.zeros(1).double()}
    tensors = {**method.init(posterior), **totals, **told}
    shared = Shared(posterior, tensors, 1 / len(SIZES), is_new=False)
    slope, moved = torch.zeros_like(mean[: clients.size]), []
    for client in range(len(SIZES)):
        participant = Participant(client, SIZES[client], clients.kept[client])
        problem = method.problem(shared, participant)
        slope += clients.kept[client]["gradient"][: clients.size] - problem.prior.slope[GAUSSIAN]
        report = clients.train(method, shared, client)
        sent = {name: value.double() for name, value in report.posterior.mean.items()}  # travels in single precision
        torch.testing.assert_close(sent, dict(posterior.mean), rtol=1e-6, atol=1e-6)
        moved += [value.abs().max() for value in report.sent.values()]
    scale = (clients.curvatures[:, : clients.size] * (mean - clients.optima)[:, : clients.size]).abs().sum(0)
    assert bool((slope.abs() < 1e-6 * scale).all())
    assert float(torch.stack(moved).max()) < 1e-4
    figures = method.figures(shared, *method.fuse(shared, fb.GaussianPosterior.point_mass(posterior.mean), {}, 1.0))
    assert figures["sites/change"] < 1e-12


@pytest.mark.parametrize(("age", "part"), [(1.0, 1.0), (2.0, 0.5), (2.5, 2**-1.5), (10.0, 2**-9)])
def test_control_variates_of_deterministic_parameters_fade_where_clients_train_seldom(age, part):
    r""":math:`2^{1 - a} (g_k - w_k c)` beside Gaussian parameters, whose :math:`g_k - \gamma w_k c` does not fade."""
    clients, method, gain = Conjugate.drawn(SIZES, point=2), fb.Sites(*PRIOR), 0.25
    shared = by_hand(clients, method, lambda number: range(len(SIZES)), 3)
    told = {**shared.tensors, "age": torch.tensor([3.0, age, gain]).double()}
    later = Shared(shared.posterior, told, shared.share, False)
    problem = method.problem(later, Participant(1, SIZES[1], clients.kept[1]))
    weight, own = SIZES[1] / sum(SIZES), clients.kept[1]["gradient"]
    c = method.slope(shared)
    fading = problem.quadratic.slope[POINT] * SIZES[1]
    torch.testing.assert_close(fading, part * (own - weight * c)[4:], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(problem.prior.slope[GAUSSIAN], (own - gain * weight * c)[:4], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["one direction each", "a few directions each", "all directions"])
def test_clients_that_train_seldom_do_not_follow_an_old_gradient_to_its_end(kind):
    """A tenth of 30 clients in a round; whoever knows a direction is heard long after the others have moved there."""
    known = torch.eye(30) if kind == "one direction each" else torch.rand(30, 30) < 0.1
    curvatures = 10 * (torch.ones(30, 30) if kind == "all directions" else known)
    clients = Conjugate(curvatures, 1 + torch.randn(30, 30), [10] * 30)
    cohorts = [torch.randperm(30)[:3].tolist() for _ in range(200)]
    found = by_hand(clients, fb.Sites(*PRIOR), lambda number: cohorts[number], 200)
    assert distance(found.posterior, clients.pooled(PRIOR)) < 1e-3


def test_a_gradient_that_was_told_long_ago_is_brought_to_the_present_model():
    """By the curvature of all sites, as far as the model has moved since; a third of the clients is heard."""
    clients, method = Conjugate.drawn(SIZES[:3], point=2), fb.Sites(*PRIOR)
    shared = by_hand(clients, method, lambda number: range(3), 5)
    assert torch.equal(shared.tensors["slope"], shared.tensors["gradient"])  # all have just been heard
    assert not shared.tensors["_moves"].any()
    move, zeros = torch.tensor([0.3, -0.2, 0.1, 0.4, 0.5, -0.5]).double(), {}
    for name in method.sent:
        zeros[name] = torch.zeros_like(shared.tensors[name])
    for number in range(3):
        moved = shared.posterior.unflatten(shared.posterior.flatten()[0] + move, None)
        shared = Shared(*method.fuse(shared, moved, zeros, 1 / 3), shared.share, is_new=False)
        moves = move[:4] * sum((2 / 3) ** each for each in range(1, number + 2))
        torch.testing.assert_close(shared.tensors["_moves"], moves)
        behind = shared.tensors["slope"] - shared.tensors["gradient"]
        torch.testing.assert_close(behind[:4], shared.tensors["precision"] * moves)
        assert not behind[4:].any()


@pytest.mark.parametrize(("found", "gain"), [(1.5, 1.0), (1.0, 1.0), (0.25, 0.25), (0.0, 0.0), (-2.0, 0.0)])
@pytest.mark.parametrize(("heard", "new"), [(1 / 3, False), (1 / 3, True), (1.0, False)])
def test_clients_are_told_as_much_of_the_gradient_as_is_found(found, gain, heard, new):
    """By clients that are heard again, which send changes, or for the first time, which send all."""
    clients, method = Conjugate.drawn(SIZES[:3], point=2), fb.Sites(*PRIOR)
    shared = by_hand(clients, method, lambda number: range(3), 2)
    shared = Shared(clients.posterior(0.3), {**shared.tensors, "_found": torch.zeros(2).double()}, 1 / 3, False)
    changes = {name: torch.zeros_like(shared.tensors[name]) for name in method.sent}
    told = method.slope(shared)
    changes["gradient"] = heard * (found - 1) * told
    if new:
        changes["clients"] = changes["clients"] + 3 * heard
        changes["gradient"] = changes["gradient"] + heard * shared.tensors["slope"].float().double()
    for _ in range(200):  # the age grows to 3
        tensors = method.fuse(shared, fb.GaussianPosterior.point_mass(shared.posterior.mean), changes, heard)[1]
        kept = {name: tensors[name] for name in ("age", "_found")}
        shared = Shared(shared.posterior, {**shared.tensors, **kept}, 1 / 3, False)
    _, age, told = shared.tensors["age"].tolist()
    assert told == pytest.approx(1.0 if heard == 1 else gain ** (1 - 1 / age), rel=1e-6, abs=1e-4)
    participant, kept = Participant(0, SIZES[0], clients.kept[0]), clients.kept[0]["gradient"][:4]
    slope = kept - method.problem(shared, participant).prior.slope[GAUSSIAN]
    torch.testing.assert_close(slope, 30 / 60 * told * method.slope(shared)[:4], rtol=1e-5, atol=1e-5)


def test_what_is_found_of_the_gradient_is_in_standard_deviations():
    clients, method = Conjugate.drawn(SIZES[:3], point=2), fb.Sites(*PRIOR)
    shared = by_hand(clients, method, lambda number: range(3), 2)
    posterior = clients.posterior(0.3, torch.tensor([0.1, 0.2, 0.5, 2.0]))
    shared = Shared(posterior, {**shared.tensors, "_found": torch.zeros(2).double()}, 1 / 3, False)
    changes = {"gradient": torch.randn_like(shared.tensors["gradient"])}
    width = torch.ones(6, dtype=torch.float64)
    width[:4] = posterior.variance[GAUSSIAN]
    told = method.slope(shared)
    found = told + shared.tensors["gradient"] - shared.tensors["slope"] + 3 * changes["gradient"]
    products = method.fuse(shared, fb.GaussianPosterior.point_mass(posterior.mean), changes, 1 / 3)[1]["_found"]
    expected = torch.stack([(each * told * width).sum() for each in (found, told)])
    torch.testing.assert_close(products, expected, rtol=1e-5, atol=1e-5)


def test_figures_are_the_change_and_the_decrement_after_a_round():
    clients, method = Conjugate.drawn(SIZES[:3], point=2), fb.Sites(*PRIOR)
    before = by_hand(clients, method, lambda number: range(3), 1)
    after = by_hand(Conjugate.drawn(SIZES[:3], point=2), method, lambda number: range(3), 2)
    figures = method.figures(before, after.posterior, after.tensors)
    old, new = (
        torch.distributions.Normal(each.posterior.mean[GAUSSIAN], each.posterior.variance[GAUSSIAN].sqrt())
        for each in (before, after)
    )
    change = torch.distributions.kl_divergence(new, old).mean()
    decrement = (method.slope(after)[:4].square() * new.variance).mean() / 2
    assert figures["sites/change"] == pytest.approx(float(change), rel=1e-6)
    assert figures["sites/decrement"] == pytest.approx(float(decrement), rel=1e-4)


@pytest.mark.parametrize("wrong", [math.nan, math.inf, 1e300])
@pytest.mark.parametrize("field", ["gradients", "precisions"])
def test_a_site_that_is_not_finite_is_not_sent(field, wrong):
    """Nor one beyond single precision, in which it travels."""
    clients, method = Conjugate.drawn(SIZES[:3], point=2), fb.Sites(*PRIOR)
    shared = by_hand(clients, method, lambda number: range(3), 2)
    participant = Participant(0, SIZES[0], clients.kept[0], gaussian=frozenset({GAUSSIAN}))
    good, bad = clients.posterior(0.1).mean, {GAUSSIAN: torch.tensor([1.0, wrong, 1.0, 1.0]).double()}
    found = ({**good, **bad}, {}) if field == "gradients" else (good, bad)
    with pytest.raises(fb.FedBayesError, match="client 0: training has left the finite numbers"):
        method.report(shared, participant, Trained(clients.posterior(0.1), *found))


@pytest.mark.parametrize("std", [1e-3, 0.05, 0.5])
def test_draws_do_not_take_an_untrained_network_apart(std):
    """A first site is half of what was measured; half of the start's width stays, or of a tenth of the weights."""
    clients = Conjugate.drawn(SIZES)
    start = clients.posterior(0.1 * torch.tensor([1.0, -1.0, 1.0, -1.0]), std**2)
    server = fb.Server(start, fusion=fb.Sites(*PRIOR))
    clients.round(server)
    prior, begun = PRIOR[1] ** -2, min(std**-2, (WIDTH * 0.1) ** -2)
    for number in range(1, 4):
        known = prior + (1 - 2**-number) * clients.curvatures.sum(0)
        wanted = known + 2**-number * (begun - prior)
        torch.testing.assert_close(1 / server.posterior.variance[GAUSSIAN], wanted, rtol=1e-6, atol=0)
        clients.round(server)


@pytest.mark.parametrize("rounds", [1, 3])
def test_what_is_left_of_the_start_is_no_part_of_a_client_s_loss(rounds):
    """It narrows draws alone. What a client's own optimizer finds is under the prior that its loss has."""
    clients, method = Conjugate.drawn(SIZES), fb.Sites(*PRIOR)
    shared = by_hand(clients, method, lambda number: range(5), rounds, variance=1e-3)
    assert float(shared.tensors["start"]) > 100
    participant = Participant(0, SIZES[0], clients.kept[0])
    strength = method.problem(shared, participant).prior.strength[GAUSSIAN].double()
    known = PRIOR[1] ** -2 + (1 - 2**-rounds) * clients.curvatures.sum(0)
    torch.testing.assert_close(strength, SIZES[0] / sum(SIZES) * known, rtol=1e-4, atol=1e-4)
    found = Trained(clients.posterior(0.1, 1 / (7 + strength)), {GAUSSIAN: known})
    site = method.report(shared, participant, found).kept["precision"]
    torch.testing.assert_close(site, (clients.kept[0]["precision"] + 7) / 2, rtol=1e-4, atol=1e-3)


def test_what_stays_of_a_site_halves_with_every_round_since_it_was_measured():
    """A fifth of the clients in a round: 2 to the power of -5; of none before the first, by the rounds since."""
    clients, method = Conjugate.drawn(SIZES), fb.Sites(*PRIOR)
    shared = by_hand(clients, method, lambda number: [number % 5], 20)
    assert shared.tensors["age"].tolist()[:2] == pytest.approx([20, 5])
    everybody = by_hand(Conjugate.drawn(SIZES), method, lambda number: range(5), 20)
    assert everybody.tensors["age"].tolist() == pytest.approx([20, 1, 1])
    begun = float(method.init(Conjugate.drawn(SIZES).posterior())["start"])
    for found, left in ((shared, 1 - (1 - 2**-5) / 5), (everybody, 0.5)):
        assert float(found.tensors["start"]) == pytest.approx(begun * left**20)

    def site(number, age, kept):
        clients.kept[2] = kept
        tensors = {**shared.tensors, "age": shared.tensors["age"].new_tensor([number, age, 1.0])}
        return clients.train(method, Shared(shared.posterior, tensors, shared.share, False), 2).kept

    kept = dict(clients.kept[2])
    for name in ("gradient", "precision"):
        one, five, ten = (site(20, age, kept)[name] for age in (1, 5, 10))
        measured = 2 * one - kept[name]
        torch.testing.assert_close(five, torch.lerp(measured, kept[name], 2**-5), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(ten, torch.lerp(measured, kept[name], 2**-10), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(site(20, -3, kept)["gradient"], kept["gradient"])  # whatever a server says
    first, late = (site(number, 5, {})["precision"] for number in (0, 9))
    torch.testing.assert_close(late, 2 * (1 - 2**-10) * first, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("effort", [0.1, 0.3])
@pytest.mark.parametrize("sizes", [SIZES, (30, 20, 10)])
def test_the_decrement_is_the_divergence_that_is_left_where_curvature_is_diagonal(effort, sizes):
    clients = Conjugate.drawn(sizes, effort=effort)
    server, pooled = served(clients), clients.pooled(PRIOR)
    for number in range(80):
        found, true = clients.round(server)["sites/decrement"], distance(server.posterior, pooled)
        if number > 5 and true > 1e-8:
            assert true / 3 < found < 3 * true
    assert found < 0.02


@pytest.mark.parametrize("lies", [{}, {2: 1e3, 5: -30.0}], ids=["honest", "clipped"])
def test_what_clients_keep_adds_up_to_what_the_server_has(lies):
    """Bit by bit, and with prior and start the server's precision; of what is clipped, to the last bits of a sum."""
    clients = Conjugate.drawn((20, 30) * 4 + (20,), size=40, point=40)
    server, outlying = served(clients), 0.0

    def lie(factor):
        return lambda report, shared: Report(
            report.posterior, report.kept, {**report.sent, "gradient": factor * report.sent["gradient"]}
        )

    for number in range(8):
        cohort = None if number % 3 else [1, 2, 3, 4, 5, 7, 8]
        outlying += clients.round(server, cohort, {k: lie(v) for k, v in lies.items()})["outlying_clients"]
        tensors, totals = split(server.buffers)[1], clients.totals()
        tolerance = 1e-14 if lies else 0
        found = {name: tensors[name] for name in totals}
        torch.testing.assert_close(found, totals, rtol=tolerance, atol=tolerance)
        if len(clients.kept) == 9:
            precision = PRIOR[1] ** -2 + totals["precision"] + tensors["start"]
            torch.testing.assert_close(1 / precision, server.posterior.variance[GAUSSIAN], rtol=1e-14, atol=0)
    assert outlying > 0 or not lies
    assert totals["examples"] == sum(clients.examples)
    assert totals["clients"] == 9


@pytest.mark.parametrize("gone", [0, 3])
def test_without_a_client_it_is_the_posterior_of_the_others(gone):
    clients = Conjugate.drawn(SIZES)
    server = served(clients)
    for _ in range(60):
        clients.round(server)
    others = clients.pooled(PRIOR, [client for client in range(5) if client != gone])
    assert_close(fb.Sites.without(server.posterior, clients.kept[gone]), others, *TOLERANCE)
    removed = fb.remove_client(server, gone)
    assert_close(removed, others, *TOLERANCE)
    site = clients.kept[gone]
    with pytest.raises(FusionError, match="no positive precision"):
        fb.Sites.without(removed, {**site, "precision": site["precision"] + 1e9})
    with pytest.raises(FusionError, match="a site of 1 parameters"):
        fb.Sites.without(removed, {name: torch.ones(1).double() for name in site})
    with pytest.raises(FederationError, match="has no part of the posterior"):
        fb.remove_client(server, 17)


def test_a_client_in_two_halves_is_the_same():
    clients = Conjugate.drawn(SIZES, point=2)
    rows, halves = [0, 0, 1, 2, 3, 4], torch.tensor([0.5, 0.5, 1, 1, 1, 1])[:, None].double()
    split_up = Conjugate(clients.curvatures[rows] * halves, clients.optima[rows], (15, 15, 20, 10, 3, 100), 2)
    servers = served(clients), served(split_up)
    for _ in range(60):
        clients.round(servers[0])
        split_up.round(servers[1])
    assert_close(servers[0].posterior, servers[1].posterior, *TOLERANCE)
    for name in ("gradient", "precision"):
        halved = split_up.kept[0][name] + split_up.kept[1][name]
        torch.testing.assert_close(halved, clients.kept[0][name], rtol=1e-6, atol=1e-6)


test_a_prior_that_is_none_is_refused = refusals(
    FusionError,
    ({"prior_std": 0.0}, "prior_std=0.0"),
    ({"prior_std": {"w": -1.0}}, "prior_std=-1.0"),
    ({"prior_mean": float("nan")}, "prior_mean=nan"),
    ({"prior_std": float("inf")}, "prior_std=inf"),
    ({"prior_std": True}, "prior_std=True"),
    call=lambda options: fb.Sites(**options),
)


@pytest.mark.parametrize(
    ("weighting", "private", "says"),
    [
        ("train_size", True, "privacy="),
        ("max_discrepancy", False, "weighting='max_discrepancy'"),
        ("train_size", False, None),
        ("equal", False, None),
    ],
)
def test_settings_that_it_does_not_go_with(weighting, private, says):
    found = fb.Sites().conflict(weighting, private)
    assert (None if found is None else found[0]) == says


def test_a_network_without_a_posterior_has_no_prior_and_no_figures():
    clients = Conjugate.drawn(SIZES)
    posterior = fb.GaussianPosterior.point_mass({POINT: torch.zeros(3)})
    server = fb.Server(posterior, fusion="sites")
    server.begin(fb.RoundPlan(0, (0,)))
    counts = {"examples": torch.tensor(10.0), "clients": torch.ones(())}
    sent = {"gradient": torch.ones(3), "precision": torch.zeros(0), **counts}
    report = Report(fb.GaussianPosterior.point_mass({POINT: torch.ones(3)}), {}, sent)
    assert server.admit(report.update(0, 10)).error is None
    result = server.finish()
    assert not [name for name in result.figures if name.startswith("sites/")]
    assert result.posterior.is_point_mass
    assert server.method.counted(posterior) is None
    assert fb.Sites.without(result.posterior, server.sites[0]) is None
    prior = fb.Sites(*PRIOR).counted(clients.posterior())
    assert (prior.mean[GAUSSIAN].unique().item(), prior.variance[GAUSSIAN].unique().item()) == (0.5, 4.0)


class Remembers(fb.Sites):
    """Sites that remember what clients have trained and measured."""

    def __init__(self, *prior) -> None:
        super().__init__(*prior)
        self.seen: list[tuple[Shared, Participant, Trained]] = []

    def report(self, shared, client, trained):
        parts = ({n: value.clone() for n, value in part.items()} for part in (trained.gradients, trained.precisions))
        copy = Trained(trained.posterior.clone(), *parts)
        self.seen.append((shared, client, copy))
        return super().report(shared, client, trained)


class Net(L.LightningModule):
    """One Bayesian layer, whose outputs are means of Gaussian data, or logits."""

    def __init__(self, layer: nn.Module, is_logistic: bool = False, optimizer=None, kl_weight: float = 1.0) -> None:
        super().__init__()
        self.layer, self.is_logistic, self.kl_weight, self.count = layer.double(), is_logistic, kl_weight, 1
        self.optimizer = optimizer or partial(torch.optim.SGD, lr=0.0)

    def on_client_start(self, client) -> None:
        self.count = client.num_examples

    def training_step(self, batch, batch_idx) -> Tensor:
        x, y = batch
        outputs = self.layer(x).flatten(1)
        if self.is_logistic:
            loss = F.binary_cross_entropy_with_logits(outputs, y, reduction="none")
        else:
            loss = (y - outputs).square() / 2
        return loss.sum(1).mean() + self.kl_weight * fb.kl_divergence(self) / self.count

    def configure_optimizers(self):
        return self.optimizer(self.parameters())


def copies_of(data: TensorDataset, clients: int) -> DataLoader:
    return DataLoader(fb.ClientDatasets({str(k): data for k in range(clients)}), batch_size=16, shuffle=True)


def fit(module: L.LightningModule, method, data: DataLoader, rounds: int = 1, trainer=None, **options):
    federation = fb.FederatedBayes(fusion=method, **options)
    federate(module, federation, rounds, data, **(trainer or {}))
    return federation


LAYERS = {
    "linear": (lambda: LinearReparameterization(3, 2), (3,)),
    "conv": (lambda: Conv1dReparameterization(2, 1, 3), (2, 5)),
}


def expected_trace(layer: nn.Module, x: Tensor, is_logistic: bool) -> float:
    r"""Return :math:`\sum \sigma^2 E[\partial^2 \ell]`, of E[p(1 - p)] and squared inputs, by quadrature."""
    weight, bias = layer.gaussian_parameters()
    op = (lambda v, *w: F.linear(v, *w)) if x.dim() == 2 else (lambda v, *w: F.conv1d(v, *w))
    mean = op(x, weight.mean, bias.mean)
    variance = op(x.square(), weight.variance, bias.variance)
    nodes, weights = (torch.as_tensor(each) for each in np.polynomial.hermite_e.hermegauss(30))
    p = (mean + variance.sqrt() * nodes.view(-1, *[1] * mean.dim())).sigmoid()
    curvature = (weights @ (p * (1 - p)).flatten(1) / weights.sum()).view(mean.shape) if is_logistic else 1.0
    return float((curvature * variance).sum().detach())


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize(("make", "shape"), LAYERS.values(), ids=LAYERS)
@pytest.mark.parametrize("is_logistic", [False, True], ids=["quadratic", "logistic"])
def test_the_trace_of_what_is_measured_is_that_of_the_expected_hessian(make, shape, estimator, is_logistic, engine):
    """Price's theorem, within four standard errors, which are small, over the clients."""
    layer, x = make(), torch.randn(64, *shape).double()
    layer.estimator = estimator
    start = fb.read_posterior(layer)
    variances = {name: torch.full_like(value, 0.3**2) for name, value in start.variance.items()}
    fb.load_posterior(layer, fb.GaussianPosterior(start.mean, variances))
    with torch.no_grad():
        outputs = layer.double()(x).flatten(1)
    draws = torch.randn_like(outputs)
    y = (outputs + draws.sign()).sign().clamp_min(0) if is_logistic else outputs + 1.5 * draws
    method, module = Remembers(), Net(layer, is_logistic)
    expected = expected_trace(layer, x, is_logistic)
    fit(module, method, copies_of(TensorDataset(x, y), 12), engine=engine, local_epochs=12, seed=3)
    assert len(method.seen) == 12
    variance = method.seen[0][0].posterior.variance
    traces = torch.zeros(12, dtype=torch.float64)
    for number, (_, _, trained) in enumerate(method.seen):
        for name, value in trained.precisions.items():
            traces[number] += float((value * variance[name]).sum())
    error = float(traces.std()) / 12**0.5
    assert abs(float(traces.mean()) - expected) < 4 * error
    assert error < 0.1 * expected


@pytest.mark.parametrize("terms", [[1.0, 1.5, 2.0], [-0.3, -0.1, 0.2, 0.1], [5.0, -4.0], [9.0, 8.0, 9.0, 8.5]])
def test_the_factor_of_squares_is_the_mode_between_the_ratio_and_that_of_a_true_model(terms):
    """Of exp(-(r - ratio)² / 2v) exp(-r) over log r, by search; v is that of the sum, told by its terms."""
    d, count = torch.tensor(terms, dtype=torch.float64) / len(terms), len(terms)
    variance = count * d.var() * (count + 1) / (count - 1)
    grid = torch.linspace(-12, 4, 400_001, dtype=torch.float64)
    height = grid - grid.exp() - (grid.exp() - d.sum()).square() / 2 / variance
    found = problems.factor_of(float(d.sum()), float(d.square().sum()), count)
    assert found == pytest.approx(float(grid[height.argmax()].exp()), rel=1e-4)
    assert problems.factor_of(float(d.sum()), float(d.square().sum()), 1) == 1.0


@pytest.fixture
def squares_alone(monkeypatch):
    """Nothing is drawn, so nothing is known of the factor of the squares."""
    monkeypatch.setattr(problems, "factor_of", lambda *trace: 1.0)


class MeanOnly(Net):
    def training_step(self, batch, batch_idx) -> Tensor:
        with mean_only(self):
            return super().training_step(batch, batch_idx)


KINDS = {
    "means": lambda **options: MeanOnly(LinearReparameterization(3, 2), True, **options),
    "deterministic": lambda **options: Net(nn.Linear(3, 2), True, **options),
    "conv": lambda **options: MeanOnly(Conv1dReparameterization(3, 2, 1), True, **options),
}


def logistic_data(examples: int = 60, dims: int = 0) -> TensorDataset:
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(examples, 3, *[1] * dims, generator=generator, dtype=torch.float64)
    y = (x.flatten(1)[:, :2] + torch.randn(examples, 2, generator=generator, dtype=torch.float64) > 0).double()
    return TensorDataset(x, y)


def clients_of(data: TensorDataset, sizes=(30, 20, 10)) -> DataLoader:
    """The next examples each, in batches without shuffling."""
    parts = zip(*(each.split(sizes) for each in data.tensors))
    return DataLoader(fb.ClientDatasets({str(k): TensorDataset(*part) for k, part in enumerate(parts)}), batch_size=10)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("trainer", [{}, {"gradient_clip_val": 0.01}], ids=str)
def test_engines_measure_the_same_without_noise(kind, trainer):
    seen = []
    for engine in ("sequential", "vectorized"):
        torch.manual_seed(0)
        method = Remembers()
        module = KINDS[kind](optimizer=partial(torch.optim.Adam, lr=0.03))
        fit(module, method, clients_of(logistic_data(dims=kind == "conv")), 3, trainer, engine=engine, local_epochs=2)
        seen.append(sorted(method.seen, key=lambda each: (len(each[0].notes), each[1].number)))
    assert len(seen[0]) == 9
    for (_, _, one), (_, _, other) in zip(*seen, strict=True):
        torch.testing.assert_close(one.gradients, other.gradients, rtol=1e-6, atol=1e-8)
        torch.testing.assert_close(one.precisions, other.precisions, rtol=1e-6, atol=1e-8)
    assert bool(seen[0][0][2].precisions) == (kind != "deterministic")


WAYS = [
    ("sequential", {"accumulate_grad_batches": 2}),
    *((engine, each) for engine in ("sequential", "vectorized") for each in ({}, {"gradient_clip_val": 1e-3})),
]


@pytest.mark.usefixtures("squares_alone")
@pytest.mark.parametrize(("engine", "trainer"), WAYS, ids=str)
@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_what_is_measured_is_of_the_data_alone(engine, trainer, scale):
    """Sums over the examples of gradients and their squares over τ, whatever the method adds or the scale."""

    class Scaled(MeanOnly):
        def training_step(self, batch, batch_idx) -> Tensor:
            return scale * super().training_step(batch, batch_idx)

    method, data = Remembers(), clients_of(logistic_data())
    module = Scaled(LinearReparameterization(3, 2), True, kl_weight=0.25)
    fit(module, method, data, 2, trainer, engine=engine, local_epochs=2)
    for shared, client, trained in method.seen:
        x, y = (torch.stack(each) for each in zip(*data.dataset.datasets[client.number]))
        weight, bias = (shared.posterior.mean[f"layer.{name}"].double() for name in ("weight", "bias"))
        residuals = F.linear(x, weight, bias).sigmoid() - y
        of_each = {"layer.weight": residuals[:, :, None] * x[:, None], "layer.bias": residuals}
        for name, value in of_each.items():
            gradient, squares = trained.gradients[name].double(), trained.precisions[name]
            torch.testing.assert_close(gradient, value.sum(0) / 0.25, rtol=1e-6, atol=1e-6)
            torch.testing.assert_close(squares, scale * value.square().sum(0) / 0.25, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_what_is_measured_is_divided_by_the_kl_weight(engine):
    """The tempered posterior's, of the same draws."""
    seen = []
    for tau in (1.0, 0.25):
        torch.manual_seed(0)
        method = Remembers()
        module = Net(LinearReparameterization(3, 2), True, kl_weight=tau)
        fit(module, method, clients_of(logistic_data()), engine=engine)
        seen.append(sorted(method.seen, key=lambda each: each[1].number))
    for (_, _, one), (_, _, other) in zip(*seen, strict=True):
        for part in ("gradients", "precisions"):
            for name, value in getattr(one, part).items():
                torch.testing.assert_close(4 * value, getattr(other, part)[name])
                assert value.any()


OPTIMIZERS = {
    "AdamW": partial(torch.optim.AdamW, lr=0.1, weight_decay=0.1),
    "SGD": partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1),
}


@pytest.mark.parametrize(("engine", "trainer"), WAYS, ids=str)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_widths_stay_bit_by_bit_while_clients_train(optimizer, engine, trainer):
    """They are those of a client that does not train at all; its means are not."""
    trained = []
    for made in (OPTIMIZERS[optimizer], None):
        torch.manual_seed(0)
        method, module = Remembers(), Net(LinearReparameterization(3, 2), True, made)
        fit(module, method, clients_of(logistic_data()), 1, trainer, engine=engine, local_epochs=3)
        trained.append([each.posterior for _, _, each in sorted(method.seen, key=lambda each: each[1].number)])
    for one, still in zip(*trained, strict=True):
        for name, variance in still.variance.items():
            assert torch.equal(one.variance[name], variance)
            assert not torch.equal(one.mean[name], still.mean[name])


ENDS = {"max_iter": 100, "tolerance_grad": 1e-12, "tolerance_change": 1e-15}
LBFGS = partial(torch.optim.LBFGS, line_search_fn="strong_wolfe", **ENDS)


class Exact(Net):
    """Linear regression whose expected loss is in closed form, so that training draws nothing."""

    def training_step(self, batch, batch_idx) -> Tensor:
        (x, y), gaussian = batch, next(self.layer.gaussian_parameters())
        expected = (y[:, :1] - x @ gaussian.mean.T).square() + x.square() @ gaussian.variance.T
        return expected.sum(1).mean() / 2 + self.kl_weight * fb.kl_divergence(self) / self.count


def exact(kl_weight: float = 1.0, **prior) -> Exact:
    torch.manual_seed(0)
    return Exact(LinearReparameterization(3, 1, bias=False, **prior), optimizer=LBFGS, kl_weight=kl_weight)


def whole(data: DataLoader) -> DataLoader:
    return DataLoader(data.dataset, batch_size=100)


@pytest.mark.slow
@pytest.mark.parametrize("tau", [0.1, 1.0, 4.0])
def test_a_kl_weight_is_the_temperature_of_the_posterior(tau):
    """The means, and the trace of the data's precision."""
    module, (x, y) = exact(tau), logistic_data().tensors
    federation = fit(module, "sites", whole(copies_of(logistic_data(), 3)), 60, engine="sequential", local_epochs=2)
    posterior = fb.read_posterior(module)
    precision = torch.eye(3, dtype=torch.float64) + 3 * x.T @ x / tau
    mean = torch.linalg.solve(precision, 3 * x.T @ y[:, 0] / tau)
    torch.testing.assert_close(posterior.mean["layer.weight"][0], mean, rtol=1e-5, atol=1e-6)
    variance = posterior.variance["layer.weight"][0]
    trace = ((precision.diagonal() - 1) * variance).sum()
    torch.testing.assert_close((1 - variance).sum(), trace, rtol=1e-5, atol=0)
    assert federation.history[-1]["sites/change"] < 1e-9


class Two(L.LightningModule):
    """Two layers beside each other with priors of their own; the loss is in closed form."""

    def __init__(self) -> None:
        super().__init__()
        self.first = LinearReparameterization(2, 1, bias=False, prior_mean=1.0, prior_std=0.3).double()
        self.second = LinearReparameterization(1, 1, bias=False, prior_std=2.0).double()
        self.count = 1

    on_client_start = Net.on_client_start

    def training_step(self, batch, batch_idx) -> Tensor:
        x, y = batch
        one, other = (next(each.gaussian_parameters()) for each in (self.first, self.second))
        mean, variance = torch.cat([one.mean, other.mean], 1), torch.cat([one.variance, other.variance], 1)
        expected = (y[:, :1] - x @ mean.T).square() + x.square() @ variance.T
        return expected.mean() / 2 + fb.kl_divergence(self) / self.count

    def configure_optimizers(self):
        return LBFGS(self.parameters())


PRIORS = {"first.weight": 1.0, "second.weight": 0.0}, {"first.weight": 0.3, "second.weight": 2.0}


@pytest.mark.slow
@pytest.mark.parametrize("fusion", [None, fb.Sites(*PRIORS)], ids=["default", "given"])
def test_every_tensor_s_own_prior_counts_once(fusion):
    x, y = logistic_data().tensors
    module, strengths = Two(), torch.tensor([0.3, 0.3, 2.0]).double() ** -2
    federation = fit(module, fusion, whole(clients_of(logistic_data())), 60, engine="sequential", local_epochs=2)
    method = federation.federation.server.method
    assert (method.prior_mean, method.prior_std) == PRIORS
    precision = strengths.diag() + x.T @ x
    posterior = fb.read_posterior(module)
    mean, variance = (
        torch.cat([part[f"{name}.weight"] for name in ("first", "second")], 1)[0]
        for part in (posterior.mean, posterior.variance)
    )
    for rows in (slice(0, 2), slice(2, 3)):  # a factor each
        trace = ((precision.diagonal() - strengths) * variance)[rows].sum()
        torch.testing.assert_close((1 - strengths * variance)[rows].sum(), trace, rtol=1e-5, atol=0)
    wanted = torch.linalg.solve(precision, x.T @ y[:, 0] + strengths * torch.tensor([1.0, 1.0, 0.0]).double())
    torch.testing.assert_close(mean, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("method", "says"),
    [
        (fb.Sites(), "'first.weight' has the prior NormalPrior"),
        (fb.Sites(PRIORS[0], {**PRIORS[1], "second.weight": 1.0}), "'second.weight' has the prior NormalPrior"),
        (fb.Sites({"first.weight": 1.0}, PRIORS[1]), "no prior of 'second.weight'"),
    ],
    ids=["common", "other", "missing"],
)
def test_priors_that_are_not_the_network_s_are_refused(method, says):
    with pytest.raises(FederationError, match=says):
        fit(Two(), method, clients_of(logistic_data()))


class Squares(Net):
    def training_step(self, batch, batch_idx) -> Tensor:
        return (batch[1] - self.layer(batch[0])).square().sum(1).mean() / 2


def squares(**options) -> Squares:
    torch.manual_seed(0)
    return Squares(nn.Linear(3, 2), optimizer=partial(torch.optim.SGD, lr=0.05), **options)


def unlike() -> TensorDataset:
    """Examples in the order of the first column, with targets that no linear map fits."""
    x, _ = logistic_data().tensors
    x = x[x[:, 0].argsort()]
    return TensorDataset(x, torch.stack([x[:, 0].square(), x[:, 1] * x[:, 0]], 1))


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.parametrize("fraction", [1.0, 0.67])
def test_without_a_posterior_it_ends_at_the_optimum_of_the_pooled_data(engine, fraction):
    """As SCAFFOLD does, whose control variates these are; averages of the same clients end elsewhere."""
    errors, rounds = {}, 60 if fraction == 1 else 120
    x, y = unlike().tensors
    optimum = torch.linalg.lstsq(torch.cat([x, torch.ones(len(x), 1)], 1), y).solution
    for method in ("sites", "scaffold", "weighted_average"):
        module, data = squares(), whole(clients_of(unlike(), (20, 20, 20)))
        fit(module, method, data, rounds, engine=engine, fraction=fraction, local_epochs=5)
        found = torch.cat([module.layer.weight, module.layer.bias[:, None]], 1).detach().T
        errors[method] = float((found - optimum).abs().max())
    assert errors["sites"] < 1e-4
    assert errors["scaffold"] < 1e-2
    assert errors["weighted_average"] > 0.05


def test_the_gradients_of_a_deterministic_network_are_scaffold_s_second_option():
    r""":math:`(m - \theta_k) / S \eta` less the correction is the mean gradient along S steps of SGD."""
    method = Remembers()
    fit(squares(), method, whole(clients_of(unlike())), 3, engine="sequential", local_epochs=5)
    for shared, client, trained in method.seen:
        assert (client.steps, client.rate) == (5, 0.05)
        quadratic = method.problem(shared, client).quadratic
        for name, mean in shared.posterior.mean.items():
            slope = quadratic.slope[name] if quadratic is not None else torch.zeros_like(mean)
            steps = (mean - trained.posterior.mean[name]) / 5 / 0.05
            expected = client.num_examples * (steps + slope)
            torch.testing.assert_close(trained.gradients[name], expected, rtol=1e-8, atol=1e-10)
