"""The result of a partition: which examples each client holds, and how that looks by class."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

from lightning_fedbayes import plots
from lightning_fedbayes.errors import PartitionError

MAX_ROWS, MAX_COLUMNS = 20, 12


@dataclass(frozen=True, eq=False)
class Split:
    """The examples of each client. Printing it shows a table clients × classes.

    Args:
        indices: one int64 vector per client, sorted; no example is in two of them.
        counts: examples per client and class, int64, shape (clients, classes); None without class labels.
        classes: the labels that head the columns of ``counts``.

    >>> split = Split.from_indices([[0, 3], [2, 1]], torch.tensor([7, 7, 4, 4]))
    >>> split.indices
    (tensor([0, 3]), tensor([1, 2]))
    >>> print(split)
    client |  4  7 | total
         0 |  1  1 |     2
         1 |  1  1 |     2
     total |  2  2 |     4
    """

    indices: tuple[Tensor, ...]
    counts: Tensor | None = None
    classes: tuple[int, ...] = ()

    @classmethod
    def from_indices(cls, indices: Sequence[Any], labels: Tensor | None = None) -> Split:
        """A split from any sequence of index lists; it counts classes if the labels are integers."""
        ordered = tuple(torch.as_tensor(client, dtype=torch.int64).sort().values for client in indices)
        if labels is None or not is_class_label(labels):
            return cls(ordered)
        return cls(ordered, *counts_table(ordered, labels))

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of examples of each client."""
        return tuple(len(client) for client in self.indices)

    def __str__(self) -> str:
        totals = torch.tensor(self.sizes).unsqueeze(1)
        parts = totals if self.counts is None else torch.cat([self.counts, totals], dim=1)
        body = torch.cat([parts, parts.sum(0, keepdim=True)]).tolist()
        rows = [*map(str, range(len(self.sizes))), "total"]
        columns = _abbreviate(list(map(str, self.classes)), MAX_COLUMNS)
        table = [["client", *columns, "total"]]
        table += [
            [name, *_abbreviate(list(map(str, row[:-1])), MAX_COLUMNS), str(row[-1])] for name, row in zip(rows, body)
        ]
        table = [table[0], *_abbreviate(table[1:-1], MAX_ROWS), table[-1]]
        return _align(table)

    def plot(self) -> Figure:
        """Heat map clients × classes; of the sizes alone where there are no class labels."""
        if self.counts is None:
            return plots.client_heatmap(torch.tensor(self.sizes).unsqueeze(1), ("all",))
        return plots.client_heatmap(self.counts, self.classes)


def counts_table(indices: Sequence[Tensor], labels: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """Examples per client and class.

    Args:
        indices: one int64 vector per client.
        labels: integers, shape (examples,); gaps between the labels are fine.

    Returns:
        counts of shape (clients, classes), and the classes that occur in ``labels``, ascending.

    >>> counts_table([torch.tensor([0, 1]), torch.tensor([2])], torch.tensor([5, 9, 9]))
    (tensor([[1, 1],
            [0, 1]]), (5, 9))
    """
    if not is_class_label(labels):
        raise PartitionError(
            f"labels have dtype {labels.dtype} and shape {tuple(labels.shape)}; counting needs one integer per example"
        )
    classes, inverse = torch.unique(labels.detach().cpu(), return_inverse=True)
    counts = [torch.bincount(inverse[client], minlength=len(classes)) for client in indices]
    return torch.stack(counts), tuple(classes.tolist())


def is_class_label(labels: Tensor) -> bool:
    """Whether ``labels`` holds one integer (or bool) per example."""
    return labels.ndim == 1 and not labels.is_floating_point() and not labels.is_complex()


def _abbreviate(items: list[Any], limit: int) -> list[Any]:
    """``items`` with the middle left out when there are more than ``limit``."""
    if len(items) <= limit:
        return items
    gap = ["…"] * len(items[0]) if isinstance(items[0], list) else "…"
    return [*items[: limit - 4], gap, *items[-3:]]


def _align(table: list[list[str]]) -> str:
    """Text table of equal-width classes between rules; the first and last column stand apart."""
    width = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    inner = max([3, *(w + 1 for w in width[1:-1])])
    lines = []
    for row in table:
        cells = "".join(cell.rjust(inner) for cell in row[1:-1])
        middle = f"{cells} | " if cells else ""
        lines.append(f"{row[0].rjust(width[0])} |{'' if cells else ' '}{middle}{row[-1].rjust(width[-1])}")
    return "\n".join(lines)
