"""A ready deterministic network."""

from collections.abc import Sequence
from itertools import pairwise

from torch import nn

from lightning_fedbayes.core.errors import FedBayesError, check_at_least, check_kind


def mlp(features: int, outputs: int, hidden: Sequence[int] = (50,)) -> nn.Sequential:
    """Fully connected network with ReLUs. ``hidden`` has the width of each hidden layer.

    >>> [layer.out_features for layer in mlp(64, 10) if isinstance(layer, nn.Linear)]
    [50, 10]
    """
    check_kind("hidden", hidden, Sequence, "give the width of each hidden layer, such as (50,)", error=FedBayesError)
    widths = [features, *hidden]
    for name, width in (("features", features), ("outputs", outputs), *(("a hidden width", each) for each in hidden)):
        check_at_least(name, width, 1, error=FedBayesError)
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(widths[-1], outputs))
