"""The network of the digits, and the server that federates it."""

import torch

import lightning_fedbayes as fb
from lightning_fedbayes.modules import mlp
from lightning_fedbayes.nvflare import FusionController


def network():
    torch.manual_seed(0)  # the same at every client and at the server
    return fb.HybridBayesianClassifier(mlp(64, 10), bayesian_last=1)


class Digits(FusionController):
    """FLARE builds it at the server, from its name: it needs no arguments."""

    def __init__(self):
        super().__init__(network(), "conflation", num_rounds=5, checkpoint="federation.pt")
