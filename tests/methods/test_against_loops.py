"""SCAFFOLD, FedNova and Ditto beside hand-written loops, on both engines, and resumed."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

import lightning_fedbayes as fb
from lightning_fedbayes.core.errors import FederationError
from lightning_fedbayes.methods import Ditto, FedNova, Participant, Scaffold, Trained
from lightning_fedbayes.server.plan import STRIDE, Batching, choose_cohort, client_batches
from tests.federations import Plain, assert_equal, blobs, federate, loader, parameters, quiet_checkpoints, saving

SIZES, EPOCHS, RATE, ROUNDS, SEED, CLIENTS = (50, 26, 14), 2, 0.1, 3, 5, 3
METHODS = {"scaffold": Scaffold(), "fednova": FedNova(), "ditto": Ditto(0.5)}
FRACTIONS = [1.0, 0.67]


def by_hand(name: str, fraction: float):
    """The algorithm as its paper has it, with plain SGD. Returns the global parameters, and the clients' own."""
    batching = Batching(8, local_epochs=EPOCHS, fraction=fraction, seed=SEED)
    examples = blobs()
    partition = fb.SizesPartition(SIZES)
    parts = fb.data.clients.clients_of(examples, partition, SEED).datasets
    module = Plain(lr=RATE)
    globally = {n: p.detach().clone() for n, p in module.named_parameters()}
    zeros = {n: torch.zeros_like(p) for n, p in globally.items()}
    control, controls, personal = zeros, [dict(zeros) for _ in SIZES], {}

    def trained(start, client, round, term):
        module.load_state_dict(start)
        steps = client_batches(round, client, SIZES[client % STRIDE], batching)
        for rows in steps:
            part = parts[client % STRIDE]
            x, y = map(torch.stack, zip(*[part[int(row)] for row in rows], strict=True))
            loss = nn.functional.cross_entropy(module(x), y) + term(dict(module.named_parameters()))
            module.zero_grad()
            loss.backward()
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter -= RATE * parameter.grad
        return {n: p.detach().clone() for n, p in module.named_parameters()}, len(steps)

    for round in range(ROUNDS):
        cohort = choose_cohort(round, CLIENTS, fraction, SEED)
        total = sum(SIZES[client] for client in cohort)
        moves, lengths, changes = {}, {}, {}
        for client in cohort:
            own = controls[client]

            def slope(parameters, own=own, control=control):
                return sum(((control[n] - own[n]) * p).sum() for n, p in parameters.items())

            after, lengths[client] = trained(
                globally, client, round, slope if name == "scaffold" else lambda _: torch.zeros(())
            )
            moves[client] = {n: after[n] - globally[n] for n in globally}
            if name == "scaffold":
                new = {n: own[n] - control[n] - moves[client][n] / (lengths[client] * RATE) for n in own}
                changes[client] = {n: new[n] - own[n] for n in own}
                controls[client] = new
            if name == "ditto":

                def pull(parameters, centre=globally):
                    return 0.25 * sum((p - centre[n]).square().sum() for n, p in parameters.items())

                personal[client], _ = trained(personal.get(client, globally), client + STRIDE, round, pull)
        shares = {client: SIZES[client] / total for client in cohort}
        if name == "fednova":
            mean_length = sum(shares[client] * lengths[client] for client in cohort)
            globally = {
                n: globally[n]
                + mean_length * sum(shares[client] * moves[client][n] / lengths[client] for client in cohort)
                for n in globally
            }
        else:
            globally = {n: globally[n] + sum(shares[c] * moves[c][n] for c in cohort) for n in globally}
        if name == "scaffold":
            control = {
                n: control[n] + len(cohort) / CLIENTS * sum(shares[c] * changes[c][n] for c in cohort) for n in control
            }
    return globally, personal


def ours(name: str, engine: str, fraction: float, **options):
    module = Plain(lr=RATE)
    settings = {"local_epochs": EPOCHS, "seed": SEED, "safeguards": fb.Safeguards(max_influence=None)}
    settings |= {"fusion": METHODS.get(name, name), "engine": engine, "fraction": fraction}
    made = fb.FederatedBayes(fb.SizesPartition(SIZES), **settings)
    federate(module, made, options.pop("rounds", ROUNDS), loader(), **options)
    return module, made


@pytest.mark.parametrize("fraction", FRACTIONS)
@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.parametrize("name", METHODS)
def test_each_is_the_loop_of_its_paper(name, engine, fraction):
    expected, personal = by_hand(name, fraction)
    module, made = ours(name, engine, fraction)
    torch.testing.assert_close(parameters(module), expected, rtol=1e-6, atol=1e-6)
    for client, values in personal.items():
        torch.testing.assert_close(dict(made.posterior_of(client).mean), values, rtol=1e-6, atol=1e-6)
        assert not any(torch.equal(value, expected[path]) for path, value in values.items())
    assert made.described()["fusion"].startswith(name)


def test_the_global_model_of_ditto_is_that_of_averaging():
    (one, _), (other, _) = (ours(name, "sequential", 1.0) for name in ("ditto", "weighted_average"))
    assert_equal(parameters(one), parameters(other))


@quiet_checkpoints
@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.parametrize("name", METHODS)
def test_each_resumes_bit_by_bit(name, engine, tmp_path):
    whole, made = ours(name, engine, 0.67)
    ours(name, engine, 0.67, rounds=2, **saving(tmp_path, save_last=True))
    again, resumed = ours(name, engine, 0.67, ckpt_path=tmp_path / "last.ckpt")
    assert_equal(parameters(whole), parameters(again))
    for client in range(CLIENTS) if name == "ditto" else ():
        assert_equal(dict(made.posterior_of(client).mean), dict(resumed.posterior_of(client).mean))


@pytest.mark.parametrize("optimizer", [torch.optim.Adam, lambda p, lr: torch.optim.SGD(p, lr, momentum=0.9)])
def test_scaffold_needs_plain_sgd(optimizer):
    with pytest.raises(FederationError, match="plain SGD only"):
        federate(Plain(optimizer=optimizer), fb.FederatedBayes(fb.IIDPartition(3), fusion="scaffold"), 1)


def test_what_is_sent_beside_a_posterior_has_no_noise():
    for name in ("scaffold", "fednova"):
        with pytest.raises(FederationError, match="Take a method that sends no more"):
            fb.FederatedBayes(fb.IIDPartition(3), fusion=name, privacy=fb.UpdatePrivacy())


def test_a_plain_loop_has_the_same_server():
    """As ``fb.Server`` says it: the hooks of its method at the clients, updates to the server."""
    server = fb.Server(fb.GaussianPosterior.point_mass({"w": torch.zeros(2)}), fusion="fednova")
    shared = server.begin(fb.RoundPlan(0, (0, 1)))
    for client, (steps, to) in enumerate(((1, 1.0), (3, 6.0))):
        who = Participant(client, 10, steps=steps)
        trained = Trained(fb.GaussianPosterior.point_mass({"w": torch.full((2,), to)}))
        report = server.method.report(shared, who, trained)
        assert server.admit(report.update(client, 10)).error is None
    posterior = server.finish().posterior
    torch.testing.assert_close(posterior.mean["w"], torch.full((2,), 2 * (1 / 1 + 6 / 3) / 2))
    assert copy.deepcopy(server.state_dict()).keys() >= {"posterior", "buffers"}


def lies(name, change, rounds=8, clients=10):
    """Errors in rounds in which client 0 changes what it sends beside its posterior; how far off means are; the server.

    Client k has the loss |θ − o_k|² / 2, in nine steps of rate 0.1. The unit of lengths is that of client 0's optimum.
    """
    optima = torch.randn(clients, 300, generator=torch.Generator().manual_seed(3))
    start, rate, steps = fb.GaussianPosterior.point_mass({"w": torch.zeros(300)}), 0.1, 9
    server = fb.Server(start, fusion=name)
    kept, errors = [{} for _ in range(clients)], set()
    for round in range(rounds):
        shared = server.begin(fb.RoundPlan(round, tuple(range(clients))))
        for client in range(clients):
            who = Participant(client, 10, steps=steps, rate=rate, kept=kept[client])
            at = shared.posterior.mean["w"].clone()
            slope = server.method.problem(shared, who).quadratic.slope if name == "scaffold" else None
            for _ in range(steps):
                at -= rate * (at - optima[client] - (slope["w"] if slope else 0.0))
            report = server.method.report(shared, who, Trained(fb.GaussianPosterior.point_mass({"w": at})))
            sent = {n: change(value, shared.tensors[n]) if client == 0 else value for n, value in report.sent.items()}
            outcome = server.admit(replace(report, sent=sent).update(client, 10))
            if outcome.error is None:
                kept[client] = report.kept
            errors |= {(client, str(outcome.error)[:60])} if outcome.error else set()
        server.finish()
        for client in server.untold:
            kept[client] = dict(server.sites[client])
    return errors, float((server.posterior.mean["w"] - optima.mean(0)).norm() / optima[0].norm()), server


CASES = [(name, factor) for name in ("scaffold", "fednova") for factor in (1e30, -1.0, -10.0, 0.0)]


@pytest.mark.parametrize(("name", "factor"), [*CASES, ("fednova", 1e6)])
def test_what_a_client_sends_beside_its_posterior_is_bounded_or_refused(name, factor):
    """The mean of all optima is a tenth of a length off without the liar."""
    honest, off, _ = lies(name, lambda sent, _: sent)
    assert not honest
    assert off < 1e-3
    errors, off, _ = lies(name, lambda sent, _: factor * sent)
    assert {client for client, _ in errors} <= {0}
    assert off < 0.12
    told = {
        "fednova": f"client 0: it says that it has made {9 * factor:g} steps",
        "scaffold": "client 0: what it adds to",
    }
    if factor <= 0:
        assert all(why.startswith((told[name], "client 0: it answers")) for _, why in errors)
        assert errors


@pytest.mark.parametrize("length", [1.0, 0.1, 0.01, 1e-6])
def test_a_control_variate_is_bounded_as_a_whole_and_c_is_the_mean_of_what_is_counted(length):
    """A client that lies about the length of its way alone, in every round: its lies do not add up."""
    errors, off, server = lies("scaffold", lambda change, control: (change + control) / length - control, rounds=60)
    assert {client for client, _ in errors} <= {0}
    counted = torch.stack([server.sites[client]["w"] for client in range(10)])
    torch.testing.assert_close(counted.mean(0), server.buffers["method/w"], atol=1e-4, rtol=1e-4)
    sizes, most = counted.norm(dim=1), 2 * (1 + 2 / 300**0.5)
    assert float(sizes.max() / sizes.quantile(0.5)) <= most * 1.01
    assert off < (most + 1) * 1.1 / 10
    assert server.history[-1]["outlying_clients"] + server.history[-1]["failed_clients"] == (length < 1)
