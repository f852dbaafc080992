"""Cross-site evaluation: each client's own model on every client's data, and the clients that stand out."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning as L
import torch
from torch import Tensor

from lightning_fedbayes.clients.evaluation import ClientScores, evaluate_clients, sign_of
from lightning_fedbayes.core import errors
from lightning_fedbayes.core.errors import FedBayesError
from lightning_fedbayes.core.posterior import check_tensor
from lightning_fedbayes.core.tables import Row, html_table, markdown_table, sample, write_csv
from lightning_fedbayes.data.clients import ClientDatasets

if TYPE_CHECKING:
    from matplotlib.figure import Figure

USUAL_FIGURE = "nll"
TRIALS, CELLS = 20_000, 10_000_000
"""Simulated federations behind a threshold, and the most numbers that they may take together."""


@dataclass(frozen=True)
class CrossScores:
    """Scores of each client's own model (rows) on every client's data (columns).

    A row that stands out is of a model that serves the others badly, or well. A column, of data that are unlike the
    others', or have other labels. The diagonal is each client's model on its data.

    Args:
        names: of the clients, in the order of rows and columns.
        values: figure → matrix of shape (clients, clients) with entry [i, j] for model i on data j. Figures as in
            :class:`~lightning_fedbayes.clients.evaluation.ClientScores`.

    >>> nll = torch.tensor([[0.2, 0.3, 2.1], [0.3, 0.2, 2.0], [2.2, 2.1, 0.2]])
    >>> scores = CrossScores(("north", "south", "east"), {"nll": nll})
    >>> print(scores.markdown())
    | nll: model on data of | north | south | east | the others |
    |---|---|---|---|---|
    | north | 0.2 | 0.3 | 2.1 | 1.2 |
    | south | 0.3 | 0.2 | 2 | 1.15 |
    | east | 2.2 | 2.1 | 0.2 | 2.15 |
    | the others | 1.25 | 1.2 | 2.05 | 1.5 |
    """

    names: tuple[str, ...]
    values: Mapping[str, Tensor]

    def __post_init__(self) -> None:
        errors.check_strings("names", self.names, "give the name of each client", error=FedBayesError)
        need = "give a dict, figure → matrix (models, data)"
        errors.check_kind("values", self.values, Mapping, need, error=FedBayesError)
        if not self.values:
            raise FedBayesError(f"values is empty: {need}")
        for figure, values in self.values.items():
            check_tensor(f"values['{figure}']", values, error=FedBayesError)
            if values.shape != (len(self.names),) * 2:
                raise FedBayesError(
                    f"'{figure}' is of shape {tuple(values.shape)}, and there are {len(self.names)} names: give a row "
                    "for each client's model and a column for each client's data"
                )

    @classmethod
    def of(cls, rows: Mapping[str, ClientScores]) -> "CrossScores":
        """Return the table: name of each model's client → scores. Raise FedBayesError if figures or clients differ."""
        first = next(iter(rows.values()))
        for name, row in rows.items():
            if row.names != tuple(rows) or row.values.keys() != first.values.keys():
                raise FedBayesError(
                    f"the model of client {name} has {list(row.values)} of {list(row.names)}, and that of client "
                    f"{next(iter(rows))} {list(first.values)} of {list(rows)}: score models of one task, each on the "
                    "data of all clients"
                )
        figures = {name: torch.stack([row.values[name] for row in rows.values()]) for name in first.values}
        return cls(tuple(rows), figures)

    def _of(self, figure: str | None) -> tuple[str, Tensor]:
        """Return a figure and its matrix in float64. For None the NLL, or else the first figure."""
        if figure is None:
            names = (name for name in self.values if name.rpartition("/")[2] == USUAL_FIGURE)
            figure = next(names, next(iter(self.values)))
        errors.check_choice("figure", figure, tuple(self.values), error=FedBayesError)
        return figure, self.values[figure].detach().cpu().double()

    def others(self, figure: str | None = None) -> tuple[Tensor, Tensor]:
        """Return the means off the diagonal: of each row (model), and of each column (data). Shape (clients,) each.

        NaN for a single client. ``figure`` and errors as in :meth:`table`.
        """
        off = _without_diagonal(self._of(figure)[1])
        return off.sum(1) / (len(off) - 1), off.sum(0) / (len(off) - 1)

    def effects(self, figure: str | None = None) -> tuple[Tensor, Tensor]:
        r"""Return by how much each model, and each client's data, raise a figure. Shape (clients,) each.

        They are the row and column means off the diagonal, made comparable: a row lacks the client's data, so the
        mean of a client with hard data is over easier ones. Effects are the least squares fit of
        :math:`v_{ij} = m + a_i + b_j` to the entries off the diagonal (Griffing's method 3), with
        :math:`\sum a_i = \sum b_j = 0`,

        .. math:: a_i = \frac{(K-1) R_i + C_i - G}{K (K-2)}, \qquad b_j = \frac{(K-1) C_j + R_j - G}{K (K-2)}

        with the sums R of the rows, C of the columns, and G of all. If all models are the same, :math:`a_i = 0`.
        ``figure`` as in :meth:`table`. Raise FedBayesError if it is unknown, or there are fewer than three clients.
        """
        off, number = _without_diagonal(self._of(figure)[1]), len(self.names)
        if number < 3:
            raise FedBayesError(f"there are {number} clients: models and data can be told apart from 3 on")
        rows, columns, scale = off.sum(1), off.sum(0), number * (number - 2)
        return ((number - 1) * rows + columns - off.sum()) / scale, ((number - 1) * columns + rows - off.sum()) / scale

    def outlying(self, figure: str | None = None, *, rate: float = 0.05) -> dict[str, tuple[str, ...]]:
        """Return the clients that stand out: name → ("model",), ("data",) or ("model", "data").

        A client stands out if its effect (:meth:`effects`) is further from the median than t times the median
        absolute deviation (MAD) of the clients' effects, on either side.

        The threshold t depends on the number of clients, since the MAD of few is uncertain: with ``rate`` 0.05 it is
        about 110 for 3 clients, 33 for 5, 19 for 10, 16 for 30 and 17 for 100. Among clients with independent effects
        from one exponential distribution, as the losses of models with two weights have it, some client is named with
        probability ``rate`` at most (half of it for models, half for data, simulated once). With more weights it is
        less; with a single one it is more (0.13 of 10 clients), as if the clients' numbers of examples differ much.

        A client with scores off the diagonal that are not finite always stands out. If the effects of more than half of
        the clients are equal, such as accuracies of few examples, or there are fewer than three clients, no other does.
        ``figure`` as in :meth:`table`. Raise FedBayesError if it is unknown, or ``rate`` is not in (0, 1).
        """
        errors.check_number("rate", rate, "(0, 1)", error=FedBayesError)
        values, left = self._of(figure)[1], list(range(len(self.names)))
        found: dict[int, list[str]] = {}
        while True:  # the client with the most entries that are not finite goes first
            bad = _without_diagonal((~values[left][:, left].isfinite()).double())
            if not bad.any():
                break
            counts = torch.stack([bad.sum(1), bad.sum(0)])
            worst = int(counts.amax(0).argmax())
            found[left[worst]] = [w for w, c in zip(("model", "data"), counts[:, worst]) if c == counts.max()]
            del left[worst]
        if len(left) >= 3:
            kept = _without_diagonal(values[left][:, left])
            among = CrossScores(tuple(self.names[client] for client in left), {"": kept})
            for what, effects in zip(("model", "data"), among.effects(), strict=True):
                far = (effects - effects.quantile(0.5)).abs()
                mad = float(far.quantile(0.5))
                if mad > 1e-9 * float(kept.abs().max()):  # equal up to rounding
                    for position in (far > threshold(len(left), float(rate)) * mad).nonzero().flatten().tolist():
                        found.setdefault(left[position], []).append(what)
        return {self.names[client]: tuple(found[client]) for client in sorted(found)}

    def rows(self) -> list[dict[str, Any]]:
        """Return a dict for each pair: "model" and "data", names of clients, and the figures."""
        return [
            {"model": model, "data": data, **{figure: float(values[i, j]) for figure, values in self.values.items()}}
            for i, model in enumerate(self.names)
            for j, data in enumerate(self.names)
        ]

    def table(self, figure: str | None = None) -> tuple[list[str], list[Row]]:
        """Return head and rows of one figure: a row for each model, a column for each client's data.

        ``figure`` None: the NLL, or else the first one. Of more than 100 clients the table shows 100, at equal
        distances. Raise FedBayesError if the figure is unknown.
        """
        figure, values = self._of(figure)
        shown = sample(len(self.names))
        names = [self.names[client] for client in shown]
        lines = values[shown][:, shown].tolist()
        return [f"{figure}: model on data of", *names], [[name, *line] for name, line in zip(names, lines)]

    def markdown(self, figure: str | None = None) -> str:
        """Return the table in Markdown, with the means over the other clients. Arguments as in :meth:`table`."""
        return markdown_table(*self._lines(figure))

    def _repr_html_(self) -> str:
        return html_table(*self._lines())

    def _lines(self, figure: str | None = None) -> tuple[list[str], list[Row]]:
        head, lines = self.table(figure)
        models, data = (each[sample(len(each))].tolist() for each in self.others(figure))
        mean = float(self.others(figure)[0].mean())
        lines = [[*line, own] for line, own in zip(lines, models)]
        return [*head, "the others"], [*lines, ["the others", *data, mean]]

    def to_csv(self, path: str | Path) -> None:
        """Write all figures as a CSV file with a head: a line for each pair of model and data."""
        rows = [list(row.values()) for row in self.rows()]
        write_csv(errors.check_path("path", path), [["model", "data", *self.values], *rows])

    def plot(self, figure: str | None = None) -> "Figure":
        """Return a heat map of one figure, the darker the worse. Arguments and clients as in :meth:`table`."""
        from lightning_fedbayes.core.plots import cross_heatmap

        figure, values = self._of(figure)
        return cross_heatmap(values, self.names, figure, higher_is_better=sign_of(figure) > 0)


def evaluate_across(modules: Mapping[str, L.LightningModule], clients: ClientDatasets, **options: Any) -> CrossScores:
    """Score each client's model on the data of every client (cross-site evaluation).

    It takes as many passes over all data as there are clients. A client with a row or column that stands out has other
    data: other labels, another device, another population. Then personal posteriors, or a model for each group of
    clients, serve better than one for all.

    ::

        own = {name: fb.PosteriorPredictive(model, callback.posterior_of(name)) for name in held_out.names}
        scores = fb.evaluate_across(own, held_out)
        print(scores.markdown(), scores.outlying())
        scores.plot().savefig("across.png")

    The diagonal equals :func:`~lightning_fedbayes.evaluate_clients` of the same modules. Use data that the models have
    not trained on, or the diagonal is too good. Raise FedBayesError if a client lacks examples or a module, a module
    has no client, or the predictions are not of this package.

    Args:
        modules: name of a client → the module of its model, for each of ``clients``, and for no others.
        clients, options: data and options of :func:`~lightning_fedbayes.evaluate_clients`.
    """
    errors.check_kind("modules", modules, Mapping, "give a dict, name of the client → module", error=FedBayesError)
    errors.check_kind("clients", clients, ClientDatasets, "give a ClientDatasets of their data", error=FedBayesError)
    wrong = sorted({*map(str, modules)} ^ {*clients.names})
    if wrong:
        why = "give a module for each client that has data, and for no other"
        raise FedBayesError(f"modules and clients have different names, such as '{wrong[0]}': {why}")
    return CrossScores.of({name: evaluate_clients(modules[name], clients, **options) for name in clients.names})


def _without_diagonal(values: Tensor) -> Tensor:
    return values.masked_fill(torch.eye(len(values), dtype=torch.bool), 0)


@cache
def threshold(clients: int, rate: float) -> float:
    """Return how many MADs from the median one of ``clients`` stands out. See :meth:`CrossScores.outlying`."""
    chance = torch.Generator().manual_seed(0)
    trials = min(TRIALS, max(1000, CELLS // clients))
    draws = torch.empty(trials, clients, dtype=torch.float64).exponential_(generator=chance)
    far = (draws - draws.quantile(0.5, dim=1, keepdim=True)).abs()
    return float((far.amax(1) / far.quantile(0.5, dim=1)).quantile(1 - rate / 2))
