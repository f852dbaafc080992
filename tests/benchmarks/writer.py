"""A process that writes into a store, and imports nothing else."""

from pathlib import Path

from benchmarks.images.settings import Settings
from benchmarks.images.store import Store


def put_many(file: Path, first: int) -> None:
    for seed in range(first, first + 40):
        Store(file).put(Settings(seed=seed), {"by_round": [seed] * 2000})
