"""Federated Bayesian deep learning inside one Lightning Trainer."""

from lightning_fedbayes.posterior import GaussianPosterior

__all__ = ["GaussianPosterior"]
