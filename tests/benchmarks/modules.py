"""Benchmarks are scripts beside one another: their modules have plain names, and different folders the same ones."""

import contextlib
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@contextlib.contextmanager
def modules_of(folder: str) -> Iterator[dict[str, ModuleType]]:
    """The modules of ``benchmarks/folder`` by name, importable meanwhile."""
    path = BENCHMARKS / folder
    names = [file.stem for file in path.glob("*.py")]
    others = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    sys.path.insert(0, str(path))
    threads = torch.get_num_threads()
    try:
        yield {name: importlib.import_module(name) for name in names}
    finally:
        torch.set_num_threads(threads)
        sys.path.remove(str(path))
        for name in names:
            sys.modules.pop(name, None)
        sys.modules.update(others)
