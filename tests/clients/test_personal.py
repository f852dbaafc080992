"""What a client keeps of its own posterior, and the personal posterior between that and the global one."""

import pytest
import torch

import lightning_fedbayes as fb
from lightning_fedbayes.core.errors import FederationError
from tests.federations import Plain, assert_close, bayesian, federate, loader


def federation(**options) -> fb.FederatedBayes:
    made = fb.FederatedBayes(fb.SizesPartition((40, 30, 20)), keep=["posterior"], **options)
    federate(bayesian(), made, 2, loader())
    return made


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_the_ends_are_the_global_posterior_and_the_one_that_the_client_has_sent(engine):
    partition, sent = fb.SizesPartition((40, 30, 20)), []
    made = fb.FederatedBayes(partition, fusion="rklb", keep=["posterior"], engine=engine)

    class Sees(fb.HybridBayesianClassifier):
        needs_client_posteriors = True

        def on_round_end(self, posterior, clients):
            sent[:] = clients

    module = Sees(bayesian().network, samples=3)
    federate(module, made, 2, loader())
    for number, own in enumerate(sent):
        for personal, end in ((made.posterior_of(number), own), (made.posterior_of(number, 0.0), made.posterior)):
            assert_close(personal, end)


def test_between_the_ends_natural_parameters_are_interpolated():
    made = federation()
    own, shared, personal = made.posterior_of("1"), made.posterior, made.posterior_of(1, 0.3)
    for name, variance in personal.variance.items():
        precision = torch.zeros_like(variance)
        if not variance.any():
            torch.testing.assert_close(personal.mean[name], 0.7 * shared.mean[name] + 0.3 * own.mean[name])
            continue
        shift = torch.zeros_like(variance)
        for part, weight in ((shared, 0.7), (own, 0.3)):
            precision += weight / part.variance[name]
            shift += weight * part.mean[name] / part.variance[name]
        torch.testing.assert_close(variance, 1 / precision, rtol=1e-5, atol=0)
        torch.testing.assert_close(personal.mean[name], shift / precision, rtol=1e-4, atol=1e-6)


def test_with_sites_the_own_posterior_is_that_of_the_local_problem():
    """Not the means alone that are sent: those that it has trained, with the width of the global one it began with."""
    module = bayesian()
    before = fb.read_posterior(module)
    made = fb.FederatedBayes(fb.SizesPartition((40, 30, 20)), keep=["posterior"], fusion="sites", engine="sequential")
    federate(module, made, 1, loader())
    own = made.posterior_of(0)
    for name, variance in own.variance.items():
        torch.testing.assert_close(variance, before.variance[name], rtol=1e-5, atol=0)
        assert not torch.equal(own.mean[name], before.mean[name])
        assert not torch.equal(own.mean[name], made.posterior.mean[name])


@pytest.mark.parametrize("kind", [Plain, bayesian])
def test_local_parameters_are_the_clients_own(kind):
    module = kind()
    made = fb.FederatedBayes(fb.SizesPartition((40, 30, 20)), keep=["posterior"], local_parameters=["net*.2.*"])
    federate(module, made, 2, loader())
    whole = fb.read_posterior(module)
    assert made.posterior_of(0).names == whole.names
    heads = [name for name in whole.names if ".2." in name]
    assert heads
    assert made.posterior.mean.keys().isdisjoint(heads)
    for name in heads:
        values = {float(made.posterior_of(k, 0.5).mean[name].flatten()[0]) for k in range(3)}
        assert len(values) == 3, "a head of its own, whatever the weight"
        assert bool(whole.variance[name].any()) == bool(made.posterior_of(0).variance[name].any())
    fb.load_posterior(module, made.posterior_of(2))


def test_a_client_that_has_not_trained_has_the_global_posterior():
    made = fb.FederatedBayes(fb.SizesPartition((40, 30, 20)), keep=["posterior"], fraction="turns")
    federate(bayesian(), made, 2, loader())
    torch.testing.assert_close(dict(made.posterior_of(2).mean), dict(made.posterior.mean), rtol=0, atol=0)
    name = made.posterior.names[0]
    assert not torch.equal(made.posterior_of(0).mean[name], made.posterior.mean[name])


@pytest.mark.parametrize(
    ("client", "weight", "says"),
    [
        (3, 1.0, "client=3: give a number below 3 or a name"),
        ("nobody", 1.0, "Known: 0, 1, 2"),
        (0, 1.5, "weight=1.5"),
        (True, 0.5, "client=True"),
    ],
)
def test_what_is_no_client_or_weight_is_refused(client, weight, says):
    with pytest.raises(FederationError, match=says):
        federation().posterior_of(client, weight)


def test_clients_that_keep_nothing_have_no_posterior_of_their_own():
    made = fb.FederatedBayes(fb.IIDPartition(3))
    federate(bayesian(), made, 1, loader())
    with pytest.raises(FederationError, match=r"keep=\['posterior'\]"):
        made.posterior_of(0)


@pytest.mark.parametrize(("on_disk", "engine"), [(False, "vectorized"), (True, "sequential")])
def test_a_checkpoint_of_a_complete_federation_holds_them(engine, on_disk, tmp_path):
    keep = fb.Kept(("posterior",), tmp_path / "clients") if on_disk else ["posterior"]

    def callback():
        return fb.FederatedBayes(fb.IIDPartition(3), engine=engine, keep=keep)

    first, again, longer = callback(), callback(), callback()
    federate(bayesian(), first, 2).save_checkpoint(tmp_path / "done.ckpt")
    module = bayesian(seed=1)
    federate(module, again, 2, ckpt_path=tmp_path / "done.ckpt").save_checkpoint(tmp_path / "again.ckpt")
    assert_close(first.posterior_of(1, 0.5), again.posterior_of(1, 0.5))
    with again.holding(1) as held:
        assert_close(first.posterior_of(1, 1.0), held)
    federate(bayesian(), longer, 3, ckpt_path=tmp_path / "again.ckpt")
    assert longer.history[:2] == first.history
