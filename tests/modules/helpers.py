"""Small random data, and a KL divergence by torch."""

import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_fedbayes.layers import gaussian_parameters


def labelled(examples, features=6, classes=3):
    return TensorDataset(torch.randn(examples, features), torch.randint(0, classes, (examples,)))


def numbered(targets):
    """Examples whose input is their number."""
    return TensorDataset(torch.arange(len(targets)).float().unsqueeze(1), targets)


def looked_up(model, draws):
    """The model with outputs ``draws``, shape (samples, examples, ...), of numbered examples."""
    model.sample = lambda inputs, samples=None: draws[:, inputs[:, 0].long()]
    return model


def loader(dataset, batch_size=8, **options):
    return DataLoader(dataset, batch_size, **options)


@torch.no_grad()
def summed_kl(network, prior_std=1.0):
    """KL of all Gaussian parameters from N(0, prior_std²), by torch.distributions."""
    prior = torch.distributions.Normal(0.0, prior_std)
    posteriors = (torch.distributions.Normal(each.mean, each.std) for each in gaussian_parameters(network).values())
    return sum(float(torch.distributions.kl_divergence(each, prior).double().sum()) for each in posteriors)
