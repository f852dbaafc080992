"""One client after another and all at once give one posterior: every kind of module with every kind of round.

Noise is 0, so that the engines differ by rounding alone.
"""

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import lightning_fedbayes as fb
from lightning_fedbayes.core.errors import FederationError
from tests.federations import FEATURES, Plain, bayesian, blobs, federate, loader, network


class Own(Plain):
    """By the optimizer that a function makes of its parameters."""

    def __init__(self, optimizer: Callable[[Any], Any], **options: Any) -> None:
        super().__init__(network(**options))
        self.make = optimizer

    def configure_optimizers(self) -> Any:
        return self.make(self)


class ManyLabels(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        return F.binary_cross_entropy_with_logits(self(x), F.one_hot(y, 3).float())


class SkipsABatch(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx == 1 else super().training_step(batch, batch_idx)


def ivon(module: Any, **options: Any) -> fb.IVON:
    return fb.IVON(module.parameters(), **options)


def half_ivon(module: Any) -> fb.IVON:
    groups = {"params": module.net[0].parameters()}, {"params": module.net[2].parameters(), "posterior": False}
    return fb.IVON([groups[0], {**groups[1], "lr": 0.01}])


def scheduled(module: Any) -> Any:
    made = torch.optim.Adam(module.parameters(), lr=0.02)
    return {"optimizer": made, "lr_scheduler": torch.optim.lr_scheduler.StepLR(made, 2, 0.5)}


def frozen(module: Any) -> Any:
    module.net[0].weight.requires_grad_(False)
    return torch.optim.AdamW(module.parameters(), lr=0.02, weight_decay=0.0)


def convolution() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(6, 3))


def regressor(**options: Any) -> fb.HybridBayesianRegressor:
    torch.manual_seed(0)
    return fb.HybridBayesianRegressor(nn.Sequential(nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, 1)), **options)


MODULES: dict[str, Callable[[], Any]] = {
    "SGD with momentum": partial(Plain, optimizer=partial(torch.optim.SGD, momentum=0.9), lr=0.05),
    "Adam": partial(Plain, optimizer=torch.optim.Adam, lr=0.02),
    "schedule": partial(Own, scheduled),
    "frozen": partial(Own, frozen),
    "many labels": partial(ManyLabels, optimizer=torch.optim.RMSprop, lr=0.01),
    "skips a batch": SkipsABatch,
    "IVON": partial(Own, ivon),
    "IVON, two draws": partial(Own, partial(ivon, samples=2)),
    "IVON, batch norm": partial(Own, ivon, batch_norm=True),
    "half IVON": partial(Own, half_ivon),
    "last layer": bayesian,
    "convolution, flipout": lambda: fb.HybridBayesianClassifier(convolution(), bayesian_last=2, estimator="flipout"),
    "regressor": regressor,
    "regressor, IVON": partial(regressor, bayesian_last=0, optimizer=fb.IVON),
}
ROUNDS: dict[str, dict[str, Any]] = {
    "all": {},
    "some, kept optimizer": {"fraction": 0.67, "keep": ["optimizer"]},
    "Laplace": {"posterior": fb.Laplace()},
    "SWAG": {"posterior": fb.SWAG()},
    "local biases": {"local_parameters": ["*bias"]},
    "without rounds": {"schedule": fb.Asynchronous(buffer=2)},
}
CELLS = list(product(MODULES, ("sites", "reverse_kl_barycenter", "ditto"), ROUNDS))
QUICK = [(module, "sites", rounds) for module in MODULES for rounds in ("all", "Laplace")]


def trained(engine: str, module: str, fusion: str, rounds: str, sizes: tuple[int, ...]) -> Any:
    """Return the posterior, or the text of a refusal."""
    settings = {"fusion": fusion, "local_epochs": 2, "seed": 1, **ROUNDS[rounds]}
    made = fb.FederatedBayes(fb.SizesPartition(sizes), engine=engine, **settings)
    x, y = blobs().tensors
    data = TensorDataset(x, x[:, :2].sum(1, keepdim=True) if module.startswith("regressor") else y)
    try:
        federate(MODULES[module](), made, 3, loader(data))
    except FederationError as error:
        return str(error)
    assert not any(each["failed_clients"] for each in made.history)
    return made.posterior


@pytest.mark.parametrize(
    "cell", [pytest.param(c, marks=() if c in QUICK else pytest.mark.slow) for c in CELLS], ids=str
)
def test_both_engines_give_one_posterior(cell, monkeypatch):
    monkeypatch.setattr(torch, "randn_like", torch.zeros_like)
    sizes = (30, 30, 30) if sum(divmod(CELLS.index(cell), len(ROUNDS))) % 2 else (40, 31, 19)
    one, other = (trained(engine, *cell, sizes) for engine in ("sequential", "vectorized"))
    if isinstance(one, str) or isinstance(other, str):
        assert one == other
        assert "3 rounds in a row" not in one  # it is refused before training
        return
    for first, second in ((one.mean, other.mean), (one.variance, other.variance)):
        torch.testing.assert_close(dict(first), dict(second), rtol=2e-3, atol=5e-5)
