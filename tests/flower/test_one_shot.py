"""Federations without rounds over Flower: the result is that of the same calls in one process."""

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import lightning_fedbayes as fb
from lightning_fedbayes.core.errors import FederationError
from lightning_fedbayes.transport.flower import client_app
from tests.federations import Plain, federate, hears
from tests.flower.clients import client_apps, one_shot
from tests.transport.federation import BlobData

pytestmark = pytest.mark.slow

SCHOOLS = 5


def schools():
    generator = torch.Generator().manual_seed(4)
    parts = {}
    for school in range(SCHOOLS):
        inputs = torch.randn(12 + school, 2, generator=generator)
        offset = torch.randn((), generator=generator)
        noise = 0.3 * torch.randn(len(inputs), generator=generator)
        parts[f"s{school}"] = TensorDataset(inputs, offset + inputs @ torch.tensor([2.0, -1.0]) + noise)
    return parts


class Schools(L.LightningDataModule):
    def train_dataloader(self):
        return DataLoader(fb.ClientDatasets(schools()), batch_size=4, shuffle=True)


def test_a_linear_mixed_model_is_that_of_one_process():
    method = fb.HierarchicalLinearRegression(random=[0])
    apps = [client_app(Plain(), Schools(), one_shot=method)] * SCHOOLS
    found = one_shot(apps, method, Plain)
    alone = method.fit(
        {str(number): fb.modules.LinearStatistics.of(*part.tensors) for number, part in enumerate(schools().values())}
    )
    assert sorted(found.clients) == [str(number) for number in range(SCHOOLS)]
    for field in ("fixed", "fixed_covariance", "random_covariance", "noise_variance", "log_likelihood"):
        torch.testing.assert_close(
            torch.as_tensor(getattr(found, field)), torch.as_tensor(getattr(alone, field)), rtol=1e-9, atol=1e-9
        )


def test_one_shot_with_kronecker_factors_is_that_of_one_process():
    """Clients train as in the first round, and what they send is fused as where all of it is in one process."""
    parts = fb.DirichletPartition(clients=3, alpha=1.0)
    method = fb.KroneckerLaplace(fb.Laplace(prior_std=1.0))
    data = BlobData()
    apps = client_apps(3, Plain, partition=parts, one_shot=method)
    found = one_shot(apps, method, Plain)

    module = Plain()
    heard = hears(module)
    made = fb.FederatedBayes(parts, fusion="rklb", engine="sequential")
    federate(module, made, 1, data.train_dataloader())
    sites = []
    for trained, dataset in zip(heard, made.clients.datasets, strict=True):
        own = Plain()
        own.load_state_dict({**own.state_dict(), **trained.mean})
        sites.append(method.site(own, DataLoader(dataset, 16)))
    expected = method.fuse(sites)
    torch.testing.assert_close(dict(found.mean), dict(expected.mean), rtol=1e-5, atol=1e-6)
    rows = torch.randn(4, 6)
    torch.manual_seed(0)
    draws = fb.PosteriorPredictive(Plain(), found, 5).sample(rows)
    torch.manual_seed(0)
    torch.testing.assert_close(draws, fb.PosteriorPredictive(Plain(), expected, 5).sample(rows), rtol=1e-3, atol=1e-4)


def spoilt(value):
    def change(reply):
        if "arrays" in reply.content:
            arrays = reply.content["arrays"]
            name = next(key for key in arrays if key.startswith("mean/") and key.endswith("0.weight"))
            arrays[name] = type(arrays[name])(value(arrays[name].numpy()))
        return reply

    return {1: change}


@pytest.mark.parametrize("value", [lambda v: v * float("nan"), lambda v: v[:3].copy()])
def test_a_client_that_cannot_be_used_is_left_out(value, caplog):
    caplog.set_level("INFO")
    method = fb.KroneckerLaplace(fb.Laplace(prior_std=1.0))
    apps = client_apps(3, Plain, partition=fb.IIDPartition(3), one_shot=method)
    found = one_shot(apps, method, Plain, spoilt(value))
    assert all(bool(mean.isfinite().all()) for mean in found.mean.values())
    assert "Client 1 is left out: FusionError: client 1: its weights" in caplog.text


def test_a_client_sends_once_only_what_it_has_been_told_and_its_privacy_allows(caplog, tmp_path):
    method = fb.HierarchicalLinearRegression(random=[0])
    other = fb.HierarchicalLinearRegression(random=[1])
    private = {"privacy": fb.UpdatePrivacy(), "state_folder": tmp_path}
    of_examples = {"trainer": {"callbacks": [fb.ExamplePrivacy(1.0, 1.0)]}, "state_folder": tmp_path}
    for options, error in (
        ({}, "ClientMismatch"),
        ({"one_shot": other}, "ClientMismatch"),
        ({"one_shot": method, **private}, "NotSent"),
        ({"one_shot": method, **of_examples}, "NotSent"),
    ):
        with pytest.raises(FederationError, match=f"client 0 failed in training: {error}"):
            one_shot([client_app(Plain(), Schools(), **options)] * SCHOOLS, method, Plain)
    assert "sums over its examples, for a linear model, exactly" in caplog.text
    allowed = client_app(Plain(), Schools(), one_shot=method, exact=["statistics"], **private)
    assert len(one_shot([allowed] * SCHOOLS, method, Plain).clients) == SCHOOLS
    with pytest.raises(FederationError, match=r"give an fb\.KroneckerLaplace, an"):
        one_shot([allowed] * SCHOOLS, "kronecker", Plain)
    with pytest.raises(FederationError, match="exact='statistic': did you mean 'statistics'"):
        client_app(Plain(), Schools(), exact=["statistic"])
