"""``fedbayes doctor``: which versions are here, and which engines and extras work with them."""

import platform
from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, requires, version
from re import match
from typing import Any

from lightning_fedbayes.cli.messages import Options

EXTRAS = {
    "flower": ("a federation over Flower", "flwr", "lightning_fedbayes.transport.flower"),
    "nvflare": ("a federation over NVIDIA FLARE", "nvflare", "lightning_fedbayes.transport.nvflare"),
    "cli": ("fedbayes fit, validate, test, predict and compare", "jsonargparse", "lightning_fedbayes.cli.federation"),
    "privacy": ("differential privacy", "opacus", "opacus"),
    "download": ("image data that are not on the disk", "torchvision", "torchvision"),
}
"""Extra → what it is for, its package, and the module that has to be importable."""
ENGINES = ("sequential", "vectorized")


def doctor(arguments: list[str]) -> int:
    """Print what works, and the reason of what does not. Return 1 if no federation can run, else 0."""
    Options("doctor", "Print versions, and which engines and extras work here.").parse(arguments)
    name = "lightning-fedbayes"
    packages = [match(r"[\w-]+", each) for each in requires(name) or () if "extra ==" not in each]
    print(f"{name} {version(name)}, Python {platform.python_version()}, {platform.system()} {platform.machine()}")
    found = [f"{each[0]} {_version(each[0]) or 'missing'}" for each in packages if each]
    print(f"packages: {', '.join(found)}")
    works = [_told(f"engine {engine}", partial(_round, engine)) for engine in ENGINES]
    for extra, (purpose, package, module) in EXTRAS.items():
        if (has := _version(package)) is None:
            print(f"{extra}: not installed; for {purpose}: pip install {name}[{extra}]")
        else:
            _told(f"{extra} ({package} {has}), {purpose}", partial(import_module, module))
    return 0 if any(works) else 1


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _told(what: str, attempt: Callable[[], Any]) -> bool:
    """Print whether an attempt succeeds, and its result or error. Return whether it does."""
    try:
        said = attempt()
    except Exception as error:  # whatever is wrong here is the answer
        print(f"{what}: does not work: {type(error).__name__}: {' '.join(str(error).split())[:300]}")
        return False
    print(f"{what}: works{said if isinstance(said, str) else ''}")
    return True


def _round(engine: Any) -> str:
    """Train two clients for a round. Return on which device."""
    import lightning as L
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    from lightning_fedbayes.callbacks import FederatedBayes
    from lightning_fedbayes.core.quiet import quietly
    from lightning_fedbayes.data import ClientDatasets
    from lightning_fedbayes.modules import HybridBayesianClassifier, mlp

    parts = {name: TensorDataset(torch.zeros(4, 2), torch.zeros(4, dtype=torch.long)) for name in ("a", "b")}
    federation = FederatedBayes(engine=engine)
    quiet: dict[str, Any] = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    with quietly():
        trainer = L.Trainer(max_epochs=1, accelerator="auto", logger=False, callbacks=[federation], **quiet)
        module = HybridBayesianClassifier(mlp(2, 2, hidden=[2]), bayesian_last=1)
        trainer.fit(module, DataLoader(ClientDatasets(parts), batch_size=2))
    return f" on {trainer.strategy.root_device}"
