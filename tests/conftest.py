"""The same examples in every run, what is slow, and what every test gives back."""

import functools
import logging
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from lightning.fabric.utilities import registry
from torch.utils.data import BatchSampler, DataLoader

settings.register_profile("repeatable", derandomize=True)
settings.load_profile("repeatable")  # new examples: pytest --hypothesis-profile default

TESTS = Path(__file__).parent
FITS = {"callbacks", "clients", "flower", "nvflare", "sources", "trainer", "zoo"}
"""Folders whose cases are fits: of the cases of a test the fast part takes one, or an eighth, spread evenly."""
LOGGERS = ("lightning.pytorch", "lightning.fabric", "lightning.pytorch.utilities.rank_zero")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark cases as slow, but for tests that are marked "whole"."""
    cases = defaultdict(list)
    for item in items:
        if "benchmarks" in item.path.parts:
            item.add_marker(pytest.mark.slow)
        if item.get_closest_marker("whole") is None and FITS.intersection(item.path.relative_to(TESTS.parent).parts):
            cases[item.path, getattr(item, "originalname", item.name)].append(item)
    for each in cases.values():
        fast = each[:: len(each) // max(1, len(each) // 8)]
        for item in set(each) - set(fast):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session", autouse=True)
def _entry_points_are_read_once() -> Iterator[None]:
    """Each new Trainer reads the metadata of all installed packages, for longer than all else that it does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "entry_points", functools.cache(registry.entry_points))
        yield


@pytest.fixture(autouse=True)
def _draws_are_the_same_alone_and_in_the_run() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """No account of W&B and none of its folders but those in this one."""
    from tests.callbacks.wandb_file import go_offline

    folder = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        go_offline(patch, folder)
        yield folder


@pytest.fixture
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _loggers_speak_again() -> Iterator[None]:
    """Commands that run quietly set the level of Lightning's loggers for the rest of the process."""
    levels = {name: logging.getLogger(name).level for name in LOGGERS}
    yield
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


@pytest.fixture(autouse=True)
def _loaders_are_as_torch_made_them() -> Iterator[None]:
    """Lightning leaves these classes patched where a hook raises that makes loaders: it has no ``finally`` there."""
    names = "__init__", "__setattr__", "__delattr__"
    before = {(cls, name): getattr(cls, name) for cls in (DataLoader, BatchSampler) for name in names}
    yield
    for (cls, name), method in before.items():
        if getattr(cls, name) is not method:
            setattr(cls, name, method)


@pytest.fixture(autouse=True)
def _no_run_of_wandb_is_left_open() -> Iterator[None]:
    """A logger of the next test would go on with it."""
    yield
    wandb = sys.modules.get("wandb")
    if wandb is not None and getattr(wandb, "run", None) is not None:
        wandb.finish()
