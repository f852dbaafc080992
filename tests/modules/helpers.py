"""Small random data, and a KL divergence by torch."""

import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_fedbayes.layers import BayesianLayer


def labelled(examples, features=6, classes=3):
    return TensorDataset(torch.randn(examples, features), torch.randint(0, classes, (examples,)))


def loader(dataset, batch_size=8, **options):
    return DataLoader(dataset, batch_size, **options)


@torch.no_grad()
def summed_kl(network, prior_std=1.0):
    """KL of all Gaussian parameters from N(0, prior_std²), by torch.distributions."""
    total = 0.0
    for layer in network.modules():
        if isinstance(layer, BayesianLayer):
            for each in layer.gaussian_parameters():
                posterior = torch.distributions.Normal(each.mean, each.std)
                prior = torch.distributions.Normal(0.0, prior_std)
                total += float(torch.distributions.kl_divergence(posterior, prior).double().sum())
    return total
