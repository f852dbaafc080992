"""Small federations that tests of engines and callbacks share."""

from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import lightning_fedbayes as fb

FEATURES, CLASSES = 6, 3


def blobs(examples: int = 90, seed: int = 0) -> TensorDataset:
    """Three Gaussian classes in six dimensions."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(examples) % CLASSES
    centres = 2 * torch.eye(CLASSES, FEATURES)
    return TensorDataset(centres[labels] + torch.randn(examples, FEATURES, generator=generator), labels)


class Made(Dataset):
    """Examples by a function of their numbers."""

    def __init__(self, make, first=0, count=3):
        self.make, self.first, self.count = make, first, count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return self.make(self.first + index)


def loader(dataset: Any = None, batch_size: int = 8, shuffle: bool = True, **options: Any) -> DataLoader:
    return DataLoader(blobs() if dataset is None else dataset, batch_size=batch_size, shuffle=shuffle, **options)


def clients(*sizes: int) -> fb.ClientDatasets:
    """Clients c0, c1, … with the next so many of the blobs each."""
    x, y = blobs(sum(sizes)).tensors
    parts = zip(x.split(sizes), y.split(sizes))
    return fb.ClientDatasets({f"c{k}": TensorDataset(*part) for k, part in enumerate(parts)})


def network(seed: int = 0, batch_norm: bool = False) -> nn.Sequential:
    torch.manual_seed(seed)
    norm = [nn.BatchNorm1d(5)] if batch_norm else []
    return nn.Sequential(nn.Linear(FEATURES, 5), *norm, nn.ReLU(), nn.Linear(5, CLASSES))


class Plain(L.LightningModule):
    """A user's own module, which knows nothing of federations."""

    def __init__(self, net: nn.Module | None = None, lr: float = 0.1, optimizer: Any = torch.optim.SGD) -> None:
        super().__init__()
        self.net = network() if net is None else net
        self.lr, self.optimizer_class = lr, optimizer

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self(x), y)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val/nll", nn.functional.cross_entropy(self(x), y))

    def configure_optimizers(self) -> Any:
        return self.optimizer_class(self.parameters(), lr=self.lr)


def bayesian(seed: int = 0, **options: Any) -> fb.HybridBayesianClassifier:
    torch.manual_seed(seed)
    return fb.HybridBayesianClassifier(network(seed), bayesian_last=1, samples=3, **options)


def of_bayesian_torch(net: nn.Module, kind: str = "Reparameterization", rho: float = -3.0) -> nn.Module:
    """``net`` with the layers of bayesian-torch."""
    from bayesian_torch.models.dnn_to_bnn import dnn_to_bnn

    prior = {"prior_mu": 0.0, "prior_sigma": 1.0, "posterior_mu_init": 0.0, "posterior_rho_init": rho}
    dnn_to_bnn(net, {**prior, "type": kind, "moped_enable": False, "moped_delta": 0.5})
    return net


def trainer(rounds: int = 2, callbacks: Any = (), **options: Any) -> L.Trainer:
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return L.Trainer(max_epochs=rounds, callbacks=list(callbacks), **{**defaults, **options})


def federate(
    module: L.LightningModule,
    federation: fb.FederatedBayes,
    rounds: int = 2,
    train: Any = None,
    val: Any = None,
    ckpt_path: Any = None,
    **options: Any,
) -> L.Trainer:
    """Fit ``module`` for some rounds and return the Trainer."""
    made = trainer(rounds, [federation, *options.pop("callbacks", [])], **options)
    made.fit(module, loader() if train is None else train, val, ckpt_path=ckpt_path)
    return made


class Crash(Exception):
    """The end of a run that is to be resumed."""


def crash() -> None:
    raise Crash


class Interrupt(L.Callback):
    """Ends a run inside a round."""

    sees_stacks = True

    def __init__(self, round: int, batch: int, how: Any = crash) -> None:
        self.round, self.batch, self.how = round, batch, how

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (trainer.current_epoch, batch_idx) == (self.round, self.batch):
            self.how()


def saving(folder: Any, *callbacks: L.Callback, **options: Any) -> dict[str, Any]:
    """Options of :func:`federate` that write checkpoints into ``folder``."""
    return {"enable_checkpointing": True, "callbacks": [ModelCheckpoint(dirpath=folder, **options), *callbacks]}


quiet_checkpoints = pytest.mark.filterwarnings("ignore:.*exists and is not empty", "ignore:.*callbacks used to create")


def hears(module: nn.Module) -> list[fb.GaussianPosterior]:
    """The posteriors of the clients of the last round, as a module hears them."""
    sent = []

    def hear(self: Any, posterior: fb.GaussianPosterior, clients: Any) -> None:
        sent[:] = [each.clone() for each in clients]

    hooks = {"needs_client_posteriors": True, "on_round_end": hear}
    module.__class__ = type("Hears", (type(module),), hooks)
    return sent


def models_after_rounds(into: list[dict[str, Tensor]]) -> L.Callback:
    """A callback that keeps the parameters after every round."""
    return LambdaCallback(on_train_epoch_end=lambda trainer, module: into.append(parameters(module)))


def around(module: nn.Module, std: float = 0.3, start: str = "", zero: Any = torch.zeros_like) -> fb.GaussianPosterior:
    """A posterior about the parameters of ``module``; those whose names do not begin with ``start`` are certain."""
    mean = parameters(module)
    variance = {n: torch.full_like(p, std**2) if n.startswith(start) else zero(p) for n, p in mean.items()}
    return fb.GaussianPosterior(mean, variance)


def parameters(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def assert_equal(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    """Bit by bit."""
    assert first.keys() == second.keys()
    for name in first:
        assert torch.equal(first[name], second[name]), name


def assert_close(first: fb.GaussianPosterior, second: fb.GaussianPosterior, rtol: float = 0, atol: float = 0) -> None:
    """Means and variances; bit by bit without tolerances."""
    for ours, theirs in ((first.mean, second.mean), (first.variance, second.variance)):
        torch.testing.assert_close(dict(ours), dict(theirs), rtol=rtol, atol=atol)


def rule_state(federation: fb.FederatedBayes) -> dict[str, Any]:
    """The state of the federation's fusion rule; of several candidates, by their names."""
    states = federation.federation.server.state_dict()["rule_states"]
    return states if len(states) > 1 else next(iter(states.values()))
