"""Sums of a head: those that no examples have, or that stand out, are left out by name, and others count to the bit."""

from dataclasses import replace

import pytest
import torch

import lightning_fedbayes as fb
from lightning_fedbayes.core.errors import FederationError
from lightning_fedbayes.modules.linear_regression import LinearStatistics
from lightning_fedbayes.transport.one_shot import bounded, claim_of

NOTHING = fb.GaussianPosterior.point_mass({})
HEAD, NAMES, LIAR = fb.BayesianHead(3, "one_hot"), ("gram", "moment", "square"), 3


def examples(count, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 4, generator=generator, dtype=torch.float64).relu()
    y = (x[:, :3] + 0.3 * torch.randn(count, 3, generator=generator)).argmax(1)
    return x, y


def clients(sizes=(40,) * 10):
    return {k: HEAD.sums(*examples(size, k)) for k, size in enumerate(sizes)}


def scaled(sums, **factors):
    return {name: getattr(sums, name) * factors.get(name, 1.0) for name in NAMES} | {"examples": sums.num_examples}


def changed(sums, name, value):
    return {name: getattr(sums, name) for name in NAMES} | {"examples": sums.num_examples, name: value}


EYE = torch.eye(5).double()
LIES = {
    "negative": lambda s: changed(s, "gram", s.gram - 100 * EYE),
    "a little negative": lambda s: changed(s, "gram", s.gram - 10 * EYE),
    "asymmetric": lambda s: changed(s, "gram", s.gram + EYE.roll(1, 0)),
    "correlated by more than 1": lambda s: changed(s, "gram", s.gram * (3 - 2 * EYE)),
    "too large moments": lambda s: scaled(s, moment=-20.0),
    "moments of no features": lambda s: changed(s, "moment", s.moment + 9),
    "no squares": lambda s: scaled(s, square=0.0),
    "many squares": lambda s: scaled(s, square=1e6),
    "somewhat larger squares": lambda s: scaled(s, square=1.1),
    "another count": lambda s: changed(s, "gram", s.gram + 1e9 * torch.diag(EYE[4])),
    "no count": lambda s: changed(s, "examples", 0),
    "huge": lambda s: scaled(s, **dict.fromkeys(NAMES, 1e30)),
    "opposite": lambda s: scaled(s, **dict.fromkeys(NAMES, -1.0)),
    "one feature too large": lambda s: changed(s, "gram", s.gram + 1e4 * torch.diag(EYE[1])),
    "opposite moments": lambda s: scaled(s, moment=-1.0),
    "one class too many": lambda s: changed(s, "moment", s.moment * torch.tensor([1.0, 1.0, 0.9])),
    "a square of another class": lambda s: changed(s, "square", s.square.roll(1)),
}


def fused(sent, bound=2.0, rounds=1):
    zeros = {f"sums.{name}": torch.zeros_like(getattr(HEAD.sums(*examples(1, 0)), name)) for name in NAMES}
    start = fb.GaussianPosterior.point_mass(zeros)
    server = fb.Server(start, fusion="sums", weighting="equal", safeguards=fb.Safeguards(max_influence=bound))
    for round in range(rounds):
        server.begin(fb.RoundPlan(round, tuple(sent), clients=len(sent)))
        for client, each in sent.items():
            before = server.sites.get(client, zeros)
            mean = {f"sums.{n}": server.posterior.mean[f"sums.{n}"] + each[n] - before[f"sums.{n}"] for n in NAMES}
            server.admit(fb.ClientUpdate(client, each["examples"], fb.GaussianPosterior.point_mass(mean)))
        result = server.finish()
    return server, result


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("honest_before", [False, True])
def test_one_liar_of_ten_is_left_out_by_name(lie, honest_before):
    honest = {client: scaled(sums) for client, sums in clients().items()}
    sent = honest | {LIAR: LIES[lie](clients()[LIAR])}
    server, _ = fused(honest if honest_before else sent)
    before = server.posterior
    if honest_before:  # the change since is what it sends
        server.begin(fb.RoundPlan(1, tuple(sent), clients=10))
        for client, each in sent.items():
            old = server.sites[client]
            mean = {f"sums.{n}": before.mean[f"sums.{n}"] + each[n] - old[f"sums.{n}"] for n in NAMES}
            server.admit(fb.ClientUpdate(client, each["examples"], fb.GaussianPosterior.point_mass(mean)))
        result = server.finish()
    else:
        server, result = fused(sent)
    assert str(result.outcomes[LIAR].error).startswith("client 3: ")
    assert [each.client for each in result.outcomes if each.error] == [LIAR]
    assert result.figures["outlying_clients"] == 1
    kept = [sums for client, sums in clients().items() if honest_before or client != LIAR]
    for name in NAMES:
        total = sum(getattr(sums, name) for sums in kept)
        torch.testing.assert_close(server.posterior.mean[f"sums.{name}"], total, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("sizes", [(3, 300, 5, 17, 40, 120, 9, 30, 80), (1,) * 30, (10, 9, 3000), (500, *[30] * 9)])
def test_honest_clients_of_any_size_are_added_to_the_bit(sizes):
    sent = {client: scaled(sums) for client, sums in clients(sizes).items()}
    _, result = fused(sent, rounds=2)
    assert not any(each.error for each in result.outcomes)
    for name, total in fused(sent)[0].posterior.mean.items():
        assert torch.equal(total, fused(sent, bound=None)[0].posterior.mean[name])


def test_one_class_for_each_client_is_no_lie():
    sent = {k: scaled(HEAD.sums(examples(40, k)[0], torch.full((40,), k % 3))) for k in range(9)}
    assert not any(each.error for each in fused(sent)[1].outcomes)


SPOILT = {
    "loss": lambda v: v - 1e9,
    "slope": lambda v: v * 1e6,
    "spread": lambda v: -v,
    "curvature": lambda v: v * 1e6,
    "num_examples": lambda v: v * 2,
}


@pytest.mark.parametrize("name", SPOILT)
@pytest.mark.parametrize("inference", ["variational", "laplace"])
def test_slopes_that_no_probabilities_have(name, inference):
    head = fb.BayesianHead(3, inference=inference)
    x, y = examples(40, 0)
    sums = head.sums(x, y)
    fit = head.fit(sums)
    for _ in range(3):
        found = head.slopes(fit, x, y)
        fit = head.step(fit, found)
        slopes = {**vars(found), "num_examples": torch.tensor(float(found.num_examples))}
        assert replace(claim_of(sums, -1), slopes=slopes).is_possible
        assert not replace(claim_of(sums, -1), slopes={**slopes, name: SPOILT[name](slopes[name])}).is_possible


def test_without_rounds():
    sent = clients()
    assert bounded(HEAD, sent, 2.0, NOTHING).keys() == sent.keys()
    lie = replace(sent[LIAR], moment=-20 * sent[LIAR].moment)
    assert bounded(HEAD, sent | {LIAR: lie}, 2.0, NOTHING).keys() == sent.keys() - {LIAR}
    assert bounded(HEAD, sent | {LIAR: lie}, None, NOTHING).keys() == sent.keys()
    for each in (lie, replace(lie, gram=sent[LIAR].gram - 10 * EYE, moment=0 * lie.moment)):
        with pytest.raises(FederationError, match="client 3: its sums are of no examples"):
            bounded(HEAD, {LIAR: each}, 2.0, NOTHING)
    schools = {k: LinearStatistics.of(x, x[:, 0] + k) for k, (x, _) in ((k, examples(12, k)) for k in range(8))}
    assert bounded(fb.HierarchicalLinearRegression(), schools, 2.0, NOTHING).keys() == schools.keys()


def test_sites_of_one_exchange():
    """Moves and curvatures within those of the others; honest ones are the same objects."""
    method, start = fb.KroneckerLaplace(), torch.nn.Linear(4, 3)
    begun = fb.read_posterior(start).clone()

    def site(client, move):
        x, y = examples(40, client)
        torch.nn.init.normal_(start.weight, std=move, generator=torch.Generator().manual_seed(client))
        return method.site(start, [(x.float(), y)])

    sent = {client: site(client, 1.0) for client in range(9)}
    assert all(each is sent[client] for client, each in bounded(method, sent, 2.0, begun).items())
    far, sure = site(LIAR, 1e3), replace(sent[LIAR], outputs={"": 1e6 * sent[LIAR].outputs[""]})
    for lie in (far, sure):
        kept = bounded(method, sent | {LIAR: lie}, 2.0, begun)
        assert [client for client in sent if kept[client] is not sent[client]] == [LIAR]
        assert float((kept[LIAR].mean["weight"] - begun.mean["weight"]).norm()) < 30
        assert float(kept[LIAR].outputs[""].norm() / sent[LIAR].outputs[""].norm()) < 10
    negative = replace(sent[LIAR], outputs={"": sent[LIAR].outputs[""] - torch.eye(3)})
    assert bounded(method, sent | {LIAR: negative}, 2.0, begun).keys() == sent.keys() - {LIAR}
