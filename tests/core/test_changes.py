"""Changes in half precision: how exact they are, that sites lose nothing by them, and messages that hold them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_fedbayes import FusionError, GaussianPosterior, RoundPlan, Server
from lightning_fedbayes.core.changes import coded, decoded
from lightning_fedbayes.fusion import Sites
from lightning_fedbayes.methods import Participant, SiteMethod, Trained
from lightning_fedbayes.transport.messages import posterior_in, tensors_of

double = torch.float64


@settings(deadline=None, max_examples=200)
@given(unit=st.floats(1e-6, 1e6), width=st.floats(1e-6, 1e3), seed=st.integers(0, 2**31))
def test_a_change_is_rounded_by_its_own_size_whatever_the_units(unit, width, seed):
    draws = torch.Generator().manual_seed(seed)
    change, growth = (torch.randn(50, generator=draws, dtype=double) * 10 ** (k * 0.5) for k in (-1, -2))
    base = unit * torch.randn(50, generator=draws, dtype=double), torch.full((50,), (unit * width) ** 2, dtype=double)
    sigma = base[1].sqrt()
    new = base[0] + sigma * change, base[1] * growth.exp()
    mean, variance = decoded(coded(new, base), base)
    rounding = 1e-15 * (base[0].abs() + sigma)
    assert bool(((mean - new[0]).abs() <= sigma * (2**-11 * change.abs() + 2**-25) + rounding).all())
    assert bool(((variance / new[1]).log().abs() <= 2**-11 * growth.abs() + 2**-25 + 1e-12).all())


def test_what_stays_is_exact_and_a_variance_of_0_stays_one():
    base = torch.tensor([1.0, -3.0, 2.0], dtype=double), torch.tensor([0.1, 7.0, 0.0], dtype=double)
    for found, wanted in zip(decoded(coded(base, base), base), base):
        assert torch.equal(found, wanted)


LIKELIHOODS = [(3.0, 1.0), (0.1, -2.0), (20.0, -9.0)]
"""Precision and shift of each client's likelihood: a conjugate model."""


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("start", [1e-4, 1.0, 100.0])
def test_sites_end_at_the_pooled_posterior_to_the_last_digits(half, start):
    """A change that ends at 0 is rounded less and less: only what is below 2⁻²⁵ of σ stays away."""
    method = SiteMethod(Sites(1.0, 0.3, "pvi", 0.5, 2.0, half=half))
    posterior = GaussianPosterior({"w": torch.tensor([9.0], dtype=double)}, {"w": torch.tensor([start], dtype=double)})
    server, kept, sent = Server(posterior, fusion=method), {}, []
    for round in range(250):
        shared = server.begin(RoundPlan(round, (0, 1, 2)))
        for client, likelihood in enumerate(LIKELIHOODS):
            who = Participant(client, 1, kept.get(client, {}), gaussian=frozenset("w"), takes_gradients=False)
            cavity = method.problem(shared, who).cavity
            base = method.rule.natural_of(cavity.base, torch.zeros(0))
            own = [kept[client][name] if client in kept else 0.0 for name in ("precision", "shift")]
            precision, shift = (b - o + new for b, o, new in zip(base, own, likelihood))  # ρ = 1
            solution = GaussianPosterior({"w": shift / precision}, {"w": 1 / precision})
            report = method.report(shared, who, Trained(solution))
            kept[client] = report.kept
            sent.append(report.posterior)
            assert server.admit(report.update(client, 1)).error is None
        result = server.finish()
        counted = [sum(each[name] for each in kept.values()) for name in ("precision", "shift")]
        prior = method.rule.natural_of(method.rule.base(posterior, {}), torch.zeros(0))
        for own, name, first in zip(counted, ("precision", "shift"), prior):
            assert torch.equal(server.rule_state[name], first + own)  # server and clients count the same
        assert result.figures["sites/held_back"] == 0
    precision, shift = (prior + sum(each) for prior, each in zip((0.25, 0.125), zip(*LIKELIHOODS)))
    tolerance = 1e-6 if half else 1e-8
    assert float(1 / server.posterior.variance["w"]) == pytest.approx(precision, rel=tolerance)
    assert float(server.posterior.mean["w"]) == pytest.approx(shift / precision, rel=tolerance)
    assert {each.num_bytes for each in sent} == {4 if half else 16}


def test_a_site_does_not_go_beyond_its_bound_by_rounding():
    """A hundred clients whose data say nothing take exactly their part of the prior away, not a digit more."""
    rule = Sites(1.0, 1.0, "pvi", half=True)
    method, size = SiteMethod(rule), 400
    posterior = GaussianPosterior({"w": torch.zeros(size)}, {"w": torch.linspace(0.1, 30.0, size)})
    shared = Server(posterior, fusion=method).begin(RoundPlan(0, tuple(range(100))))
    who = Participant(0, 1, gaussian=frozenset("w"), takes_gradients=False)
    wide = GaussianPosterior({"w": torch.zeros(size)}, {"w": torch.full((size,), 1e6)})
    report = method.report(shared, who, Trained(wide))
    least = rule.least_site(shared.share)
    assert bool((report.kept["precision"] >= least - 1e-7).all())
    assert bool((report.kept["precision"] <= least + 2**-9 * 4).all())  # a change of at most log 30


def changed() -> tuple[GaussianPosterior, GaussianPosterior]:
    """Return a posterior of a Gaussian and a deterministic tensor, and one that travels as its change."""
    zero = torch.zeros(1)
    about = GaussianPosterior({"w": torch.randn(2, 3), "b": zero + 1}, {"w": torch.rand(2, 3), "b": zero})
    base = about.mean["w"].double(), about.variance["w"].double()
    both = coded((base[0] + 0.1, 0.9 * base[1]), base)
    mean, variance = (each.float() for each in decoded(both, base))
    after = GaussianPosterior({"w": mean, "b": zero}, {"w": variance, "b": zero})
    return about, after.travelling({"w": both})


def test_a_message_holds_the_change_and_gives_the_same_to_the_bit():
    about, after = changed()
    tensors = tensors_of(after, {})
    assert {key: value.dtype for key, value in tensors.items()} == {
        "mean/b": torch.float32, "variance/b": torch.float32, "change/w": torch.float16, "growth/w": torch.float16
    }
    found, _ = posterior_in(tensors, "client 0", about)
    for name in after.mean:
        assert torch.equal(found.mean[name], after.mean[name])
        assert torch.equal(found.variance[name], after.variance[name])


@pytest.mark.parametrize(("change", "said"), [
    ({"growth/w": None}, "'w' comes as change"),
    ({"change/w": None}, "'w' comes as growth"),
    ({"mean/w": torch.zeros(2, 3)}, "'w' comes as mean and change and growth"),
    ({"change/v": torch.zeros(3).half(), "growth/v": torch.zeros(3).half()}, "'v' comes as change and growth"),
    ({"change/w": torch.zeros(6).half()}, "another shape than its mean"),
    ({"growth/w": torch.zeros(2, 3)}, r"'growth/w' is torch\.float32; changes"),
], ids=range(6))
def test_what_is_no_change_is_refused(change, said):
    about, after = changed()
    tensors = {key: value for key, value in {**tensors_of(after, {}), **change}.items() if value is not None}
    with pytest.raises(FusionError, match=f"client 3: .*{said}"):
        posterior_in(tensors, "client 3", about)
    with pytest.raises(FusionError, match="a change is that of what the client was sent"):
        posterior_in(tensors_of(after, {}), "client 3")
