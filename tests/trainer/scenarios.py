"""Federations that are run by one, two and three processes: ``python scenarios.py DEVICES FOLDER NAME...``."""

import os
import sys
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import lightning_fedbayes as fb
from lightning_fedbayes.callbacks.trainer import collective_of
from lightning_fedbayes.core.quiet import quietly
from lightning_fedbayes.fusion import FusionRule
from lightning_fedbayes.methods import FedProx

SIZES = (40, 9, 25, 14, 31)
FEATURES, CLASSES = 6, 3


def turned(round):
    """Client 2 sends ten times its update in the opposite direction."""

    def send(update):
        if update is None:
            return
        if update.client == 2:
            start, sent = round.posterior.mean, update.posterior
            mean = {name: start[name] - 10 * (value - start[name]) for name, value in sent.mean.items()}
            update = replace(update, posterior=fb.GaussianPosterior(mean, sent.variance), kept=None)
        yield update

    return send


class Broken(Dataset):
    """A client that cannot read its data."""

    def __len__(self):
        return 12

    def __getitem__(self, index):
        raise OSError("the disk is gone")


class Killed(L.Callback):
    """Ends one process in the second round."""

    sees_stacks = True

    def __init__(self, rank):
        self.rank = rank

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_rank == self.rank and trainer.current_epoch == 1:
            os._exit(3)


def classes(count, seed):
    """Examples of three classes, given by a random linear map."""
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(count, FEATURES, generator=random)
    return TensorDataset(x, (x @ torch.randn(FEATURES, CLASSES, generator=torch.Generator().manual_seed(99))).argmax(1))


def incomes(count, seed):
    """Examples whose targets are of the order of a thousand, and of another mean and spread at each client."""
    inputs, _ = classes(count, seed).tensors
    noise = torch.randn(count, generator=torch.Generator().manual_seed(seed + 200))
    return TensorDataset(inputs, 1000 + 30 * seed + 100 * inputs[:, 0] + (5 + seed) * noise)


def clients(sizes=SIZES, broken=False, data=classes):
    parts = {f"c{k}": data(size, k) for k, size in enumerate(sizes)}
    return fb.ClientDatasets(parts | ({"broken": Broken()} if broken else {}))


def network(norm=False):
    # no bias before a norm: its gradient is rounding error alone, which Adam makes steps of full size of
    first = nn.Linear(FEATURES, 8, bias=not norm)
    return nn.Sequential(first, *([nn.BatchNorm1d(8)] if norm else []), nn.ReLU(), nn.Linear(8, CLASSES))


class Features(nn.Module):
    """A network with a buffer that no checkpoint has, and one that is not contiguous in memory."""

    def __init__(self):
        super().__init__()
        self.register_buffer("projection", torch.randn(FEATURES, 8), persistent=False)
        self.register_buffer("table", torch.arange(24.0).view(3, 8).T)
        self.output = nn.Linear(8, CLASSES)

    def forward(self, x):
        return self.output(torch.tanh(x @ self.projection)) + 0 * self.table.sum()


def line():
    return nn.Sequential(nn.Linear(FEATURES, 4), nn.Tanh(), nn.Linear(4, 1))


class Hooked(fb.HybridBayesianClassifier):
    """A module that looks into its batches."""

    def on_after_batch_transfer(self, batch, dataloader_idx):
        inputs, targets = batch
        return inputs, targets


LEARNED = partial(fb.HybridBayesianClassifier, optimizer=partial(fb.IVON, lr=0.01, hessian_init=1.0))
"""A network without Bayesian layers, whose posterior comes from its optimizer."""
SURE = partial(fb.HybridBayesianClassifier, optimizer=partial(fb.IVON, lr=0.01, hessian_init=1e20))
"""Its draws are too near to the mean to matter: those of a stack depend on the clients in it."""
DESCENDS = partial(fb.HybridBayesianClassifier, optimizer=partial(torch.optim.SGD, lr=0.1))


def of_the_page():
    """What docs/extend.md defines."""
    page = (Path(__file__).parents[2] / "docs" / "extend.md").read_text()
    space = {"__name__": "page"}
    code = page.split("```python\n")[1].split("# -- use it")[0].replace('@fb.register_method("my_feddyn")\n', "")
    exec(compile(code, "page", "exec", dont_inherit=True), space)
    return space


class Drawn(FusionRule):
    """A user's rule that draws: one of the clients."""

    def fuse(self, posteriors, weights, previous):
        return posteriors[int(torch.multinomial(weights, 1))]


class Stops(L.Callback):
    """Ends the run inside the second round; only the second process knows."""

    sees_stacks = True

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        trainer.should_stop |= trainer.global_rank == 1 and trainer.current_epoch == 1


class Tolerates(L.Callback):
    """Lets a fit that has trained nothing end, which it would not by itself."""

    def on_train_epoch_end(self, trainer, pl_module):
        next(each for each in trainer.callbacks if isinstance(each, fb.FederatedBayes)).federation.result = None


class Calls(L.Callback):
    """Counts collective calls from the start of a round to its validation, and the examples of this process."""

    sees_stacks = True

    def __init__(self):
        self.rounds = []
        self.examples = 0

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if isinstance(batch, list) and len(batch) == 2 and isinstance(batch[1], torch.Tensor):  # one client's batch
            self.examples += len(batch[1])

    def on_train_epoch_start(self, trainer, pl_module):
        self.before = collective_of(trainer).calls

    def on_validation_start(self, trainer, pl_module):
        if not trainer.sanity_checking:
            self.rounds.append(collective_of(trainer).calls - self.before)


def scenario(bayesian, fusion, engine="sequential", **options):
    return {"bayesian": bayesian, "fusion": fusion, "engine": engine, **options}


REGRESSION = {"make": line, "data": incomes, "kind": fb.HybridBayesianRegressor}
SCENARIOS = {
    "bayesian": scenario(2, "reverse_kl_barycenter", fraction=0.8),
    "stacked": scenario(0, "weighted_average", weighting="max_discrepancy", engine="vectorized"),
    "failing": scenario(2, "coordinate_median", broken=True),
    "idle": scenario(0, "gaussian_fit", sizes=(30, 12), norm=True, keep=["optimizer"], buffers="local", kind=Hooked),
    "idle_stacked": scenario(0, "icov_vb", sizes=(30, 12, 12), norm=True, fraction=0.67, engine="vectorized"),
    "chosen": scenario(2, "auto", shuffled=True),
    "none_valid": scenario(
        *(0, "geometric_median"), broken=True, safeguards=fb.Safeguards(6, 9), callbacks=[Tolerates()]
    ),
    "buffers": scenario(0, Drawn(), sizes=(30, 12), make=Features),
    "sites": scenario(1, "sites", fraction=0.8),
    "bounded": scenario(1, "sites", sizes=(18,) * 8, adversaries=turned),
    "bounded_on_disk": scenario(1, "sites", sizes=(18,) * 8, disk=True, adversaries=turned),
    "ivon": scenario(0, "sites", kind=LEARNED, fraction=0.8, keep=["posterior"], local_parameters=["*2.bias"]),
    "ivon_stacked": scenario(0, "reverse_kl_barycenter", kind=SURE, keep=["posterior"], engine="vectorized"),
    "laplace": scenario(0, "sites", posterior=fb.Laplace(), norm=True),
    "laplace_stacked": scenario(0, "reverse_kl_barycenter", posterior=fb.Laplace(), fraction=0.8, engine="vectorized"),
    "swag": scenario(0, "reverse_kl_barycenter", posterior=fb.SWAG()),
    "swag_stacked": scenario(0, FedProx(0.3, "weighted_average"), posterior=fb.SWAG(), engine="vectorized"),
    "scaffold": scenario(0, "scaffold", kind=DESCENDS, fraction=0.8),
    "scaffold_stacked": scenario(0, "scaffold", kind=DESCENDS, engine="vectorized"),
    "fednova": scenario(1, "fednova"),
    "ditto": scenario(0, "ditto", fraction=0.8),
    "ditto_stacked": scenario(0, "ditto", engine="vectorized"),
    "own_method": scenario(1, of_the_page()["MyFedDyn"](0.1), fraction=0.8),
    "on_disk": scenario(1, "sites", fraction=0.8, disk=True),
    "on_disk_stacked": scenario(0, "ditto", norm=True, disk=True, engine="vectorized"),
    "scaled": scenario(1, "sites", **REGRESSION, broken=True),
    "scaled_stacked": scenario(0, "weighted_average", **REGRESSION, fraction=0.8, engine="vectorized"),
    "stopped": scenario(0, "weighted_average", callbacks=[Stops()]),
    "split": scenario(
        2, "conflation", sizes=(36, 12, 24), batch_size=12, estimator="reparameterization", strategy="ddp"
    ),
}
"""Name → arguments of :func:`run`."""


def rank():
    """Number of this process; Lightning starts the others with it in the environment."""
    return int(os.environ.get("LOCAL_RANK", 0))


def run(
    devices,
    folder,
    bayesian,
    sizes=SIZES,
    broken=False,
    norm=False,
    make=None,
    kind=fb.HybridBayesianClassifier,
    batch_size=8,
    estimator="flipout",
    strategy="fedbayes",
    shuffled=False,
    callbacks=(),
    resume=None,
    disk=False,
    data=classes,
    **options,
):
    """Train, and return the result of this process."""
    L.seed_everything(rank(), verbose=False)  # all processes take over the weights of the first
    module = kind(make() if make else network(norm), bayesian_last=bayesian, estimator=estimator)
    if disk:
        options["keep"] = fb.Kept(["optimizer", "posterior"], Path(folder) / "clients")
    federation = fb.FederatedBayes(seed=3, **options)
    calls = Calls()
    best = {"monitor": "val/accuracy", "mode": "max"} if data is classes else {"monitor": "val/rmse", "mode": "min"}
    checkpoint = ModelCheckpoint(folder, **best, save_last=True, filename="{epoch}-{step}")
    trainer = L.Trainer(
        max_epochs=3,
        accelerator="cpu",
        devices=devices,
        strategy=strategy if devices > 1 else "auto",
        callbacks=[federation, checkpoint, EarlyStopping(**best, patience=5), calls, *callbacks],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    held_out = DataLoader(data(48, 77), batch_size=16, shuffle=shuffled)
    loader = DataLoader(clients(sizes, broken, data), batch_size=batch_size, shuffle=True)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        trainer.fit(module, loader, held_out, ckpt_path=resume)
    states = federation.federation.engine.states
    return {
        "warnings": [str(warning.message) for warning in told],
        "posterior": federation.posterior.state_dict(),
        "buffers": dict(module.named_buffers()),
        "statistics": trainer.train_dataloader.statistics,
        "history": federation.history,
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "steps": trainer.global_step,
        "best": Path(checkpoint.best_model_path).name,
        "states": {each: vars(states.of(each)) for each in range(len(sizes))} if disk else states.state_dict(),
        "calls": calls.rounds,
        "examples": calls.examples,
    }


def main(devices, folder, names):
    """Run scenarios; ``NAME:killed1`` is one whose process 1 dies, ``NAME:resumed`` the rest of it."""
    torch.set_num_threads(1)
    for each in names:
        name, _, how = each.partition(":")
        resume = str(folder / name / "last.ckpt") if how == "resumed" else None
        settings = dict(SCENARIOS[name])
        if how.startswith("killed"):
            settings["callbacks"] = [Killed(int(how.removeprefix("killed")))]
        result = run(devices, str(folder / name), resume=resume, **settings)
        torch.save(result, folder / f"{name}.{rank()}.pt")


if __name__ == "__main__":
    with quietly():
        main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
