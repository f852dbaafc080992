"""Mean and standard deviation of all clients' data by one exchange of sums, and numbers in these units."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn
from torch.utils.data import DataLoader, default_collate

from lightning_fedbayes.core.batches import unpacked
from lightning_fedbayes.core.errors import FedBayesError, FederationError, check_at_least, listed, raised_as, shown
from lightning_fedbayes.core.loading import tensors_of
from lightning_fedbayes.core.messages import SCALE
from lightning_fedbayes.core.tables import Row, badness_of, markdown_table, worst_rows

FARTHEST, FEWEST = 30.0, 3
"""Multiple of the median client's distance at which examples count at most. Fewest clients whose median tells."""
ROWS = 256
"""Examples that are added up at once."""
LARGEST = 1e150
"""Mean or root of a sum of squares beyond which squares overflow."""
MOST_COLUMNS, MOST_CLASSES = 4, 20
"""Entries of an example, and classes, up to which the table shows each."""

UNITS = ("input_units", "target_units")
"""Buffers of a scaler: of a mean and a standard deviation, or empty."""

Table = tuple[list[str], list[Row]]


@dataclass(frozen=True, eq=False)
class ScaleSums:
    r"""Sums over the ``num_examples`` of one client: all that a client sends for a common scale.

    ``moments`` are stream → :math:`n = \sum_i 1`, :math:`m = \frac1n \sum_i x_i` and :math:`s = \sum_i (x_i - m)^2` for
    each entry of an example, without NaN and infinite values: float64, shape (3, \*example), (3, 1) for numbers.
    Streams are "inputs", "targets" and, if a target is one integer, "classes" 0 to 19 as zeros and ones. Sums of parts
    add up exactly, also far from 0 (Chan, Golub and LeVeque 1983). Raises FedBayesError for impossible values.
    """

    num_examples: int
    moments: Mapping[str, Tensor]

    def __post_init__(self) -> None:
        check_at_least("num_examples", self.num_examples, 0, error=FedBayesError)
        for stream, each in self.moments.items():
            fits = each.dtype == torch.float64 and each.ndim > 1 and len(each) == 3
            limits = torch.tensor([self.num_examples, LARGEST, LARGEST**2], dtype=torch.float64)
            limits = limits.view(3, *[1] * (each.ndim - 1))
            if not fits or not ((each.abs() <= limits).all() and (each[::2] >= 0).all()):
                form = f"float64 of shape (3, *example), counts in [0, {self.num_examples}], means and roots of sums of"
                remedy = f"give {form} squares up to {LARGEST:g}; leave out what is broken"
                raise FedBayesError(f"sums of {stream}: {remedy}")

    @classmethod
    def of(cls, dataset: Any, collate: Callable | None = None, module: nn.Module | None = None) -> "ScaleSums":
        """Return the sums of a client's tensors of real numbers, in one pass. Random generators stay as they are."""
        known = tensors_of(dataset) if collate in (None, default_collate) else None
        batches: Iterable[Any] = DataLoader(dataset, ROWS, collate_fn=collate)
        if known is not None:  # in memory
            batches = zip(*(each.split(ROWS) if known[1] is None else each[known[1]].split(ROWS) for each in known[0]))
        total, sums = 0, dict[str, Tensor]()
        with isolate_rng():
            for batch in batches:
                streams = _streams(*unpacked(batch, module))
                total += max(map(len, streams.values()), default=0)
                for stream, values in streams.items():
                    new = _moments(values.detach().cpu())
                    sums[stream] = _merged(torch.stack([sums.get(stream, torch.zeros_like(new)), new], 1))
        return cls(total, sums)

    @property
    def shapes(self) -> dict[str, torch.Size]:
        """Shapes of an example, by stream."""
        return {stream: each.shape[1:] for stream, each in self.moments.items()}

    def units(self, stream: str, least: float = 1.0) -> Tensor:
        r"""Mean and standard deviation (divisor n) of a stream, shape (2, \*example); ``least`` where all is one."""
        count, mean, square = self.moments[stream]
        std = (square / count.clamp_min(1)).sqrt()
        return torch.stack([mean, torch.where(std > 1e-12 * mean.abs(), std, least)])

    def scale(self) -> dict[str, Tensor]:
        """Return the scale under the names in a server's message."""
        return {f"{SCALE}{stream[:-1]}_units": self.units(stream) for stream in self.moments if stream != "classes"}


def _streams(inputs: Any, targets: Any) -> dict[str, Tensor]:
    pairs = (("inputs", inputs), ("targets", targets))
    found = {name: each for name, each in pairs if isinstance(each, Tensor) and each.ndim and not each.is_complex()}
    if "targets" in found and targets.ndim == 1 and not targets.is_floating_point():
        found["classes"] = targets[:, None] == torch.arange(MOST_CLASSES, device=targets.device)
    return found


def _moments(values: Tensor) -> Tensor:
    """Return count, mean and sum of squared deviations of the finite values, over the first dimension."""
    values = values.reshape(len(values), *(values.shape[1:] or (1,))).double()
    known = values.isfinite()
    count = known.sum(0).double()
    mean = values.where(known, 0.0).sum(0) / count.clamp_min(1)
    deviations = (values - mean).where(known, 0.0)
    rest = deviations.sum(0) / count.clamp_min(1)  # the rounding error of a sum of large numbers
    return torch.stack([count, mean + rest, (deviations - rest).where(known, 0.0).square().sum(0)])


def _merged(parts: Tensor) -> Tensor:
    r"""Return the moments of a union from those of its parts, shape (3, parts, \*)."""
    count, mean, square = parts
    centre = mean.gather(0, count.argmax(0, keepdim=True))[0]
    whole = centre + (count * (mean - centre)).sum(0) / count.sum(0).clamp_min(1)
    return torch.stack([count.sum(0), whole, square.sum(0) + (count * (mean - whole).square()).sum(0)])


def pooled(clients: Mapping[Any, ScaleSums]) -> ScaleSums:
    r"""Return the sums of all clients' examples, with a bound on how far a client's examples can lie.

    Of three or more clients, examples at a distance :math:`d_k` from the median of the clients' means, with d the
    median of the distances that are not 0, are brought back along the line to it, and the log names the client, so that

    .. math:: d_k^2 = s_k / n_k + (m_k - \operatorname{med} m)^2 \;\le\; (30\, d)^2

    A client with other shapes of examples than most is left out. Raises FederationError without clients.
    """
    if not clients:
        raise FederationError("no client has sent the sums that a FederatedScaler needs: see the log for their reasons")
    shapes = [sums.shapes for sums in clients.values()]
    usual = max(shapes, key=shapes.count)
    kept = {name: sums for name, sums in clients.items() if sums.shapes == usual}
    far, found = dict[str, None](), dict[str, Tensor]()
    for stream in usual:
        count, mean, square = torch.stack([each.moments[stream] for each in kept.values()], 1)
        centre = mean.where(count > 0, math.nan).nanmedian(0).values
        distance = (square / count.clamp_min(1) + (mean - centre).square()).sqrt()
        limit = FARTHEST * distance.where((count > 0) & (distance > 0), math.nan).nanmedian(0).values
        beyond = (count > 0) & (distance > limit) & (len(kept) >= FEWEST)
        part = torch.where(beyond, limit / distance, 1.0)
        far |= {str(name): None for name, each in zip(kept, beyond) if bool(each.any())}
        mean = torch.where(beyond, centre + part * (mean - centre), mean)
        found[stream] = _merged(torch.stack([count, mean, part.square() * square]))
    others = [f"{name} (other shapes)" for name in clients if name not in kept]
    if far or others:
        far_out = f"Those that lie more than {FARTHEST:g} times as far out as the median client's count as if they lay"
        whose = f"examples of {listed([*far, *others])}"
        rank_zero_info(f"Scale: {whose} do not count as they are. {far_out} there: are their units others?")
    return ScaleSums(sum(each.num_examples for each in kept.values()), found)


def compared(clients: Mapping[Any, ScaleSums]) -> tuple[ScaleSums, Table]:
    r"""Return the pooled sums, and columns and rows of a table that compares the clients' data. The log has it too.

    A row for all, then one for each client, the least alike first: examples, missing values, and for inputs and targets
    "shift", the root mean square over their entries of :math:`(m_k - m) / s`, mean and standard deviation of their
    first four entries, and shares of up to twenty classes. Raises FederationError without clients.
    """
    whole = pooled(clients)
    streams = [stream for stream in ("inputs", "targets") if stream in whole.moments]

    def cells(name: str, own: ScaleSums) -> dict[str, str | float]:
        counts = {stream: own.moments[stream][0] for stream in streams}
        missing = sum(int((own.num_examples - count).sum()) for count in counts.values())
        found: dict[str, str | float] = {"client": name, "examples": own.num_examples, "missing": missing}
        units = {each: own.units(each, 0.0).where(n > 0, math.nan).flatten(1) for each, n in counts.items()}
        for stream, (mean, _) in units.items():
            centre, unit = whole.units(stream).flatten(1)
            found[f"{stream} shift"] = float(((mean - centre) / unit).square().nanmean().sqrt())
        for stream, pairs in units.items():
            for entry, (mean, std) in enumerate(pairs[:, :MOST_COLUMNS].T.tolist()):
                found |= {f"{stream} {entry} mean": mean, f"{stream} {entry} std": std}
        shares = own.moments["classes"][1].tolist() if "classes" in own.moments else ()
        return found | {f"class {k}": share for k, share in enumerate(shares) if whole.moments["classes"][1][k]}

    def shift(row: Row) -> float:
        return max((badness_of(float(each)) for each in row[3 : 3 + len(streams)]), default=0.0)

    everyone = cells("all", whole)
    alike = {str(name): own for name, own in clients.items() if own.num_examples and own.shapes == whole.shapes}
    rows: list[Row] = sorted(([*cells(*own).values()] for own in alike.items()), key=shift, reverse=True)
    rows = [[*everyone.values()], *worst_rows(rows, shift)]
    table = markdown_table([*everyone], rows[:10])
    rank_zero_info(f"Data of {len(clients)} clients, the least alike first:\n{table}")
    return whole, ([*everyone], rows)


class FederatedScaler(nn.Module):
    r"""Inputs and targets in units of their mean and standard deviation over the examples of all clients.

    .. math:: z = (x - m) / s

    for each entry of an example. A federation fills it before its first round, in one exchange of
    :class:`~lightning_fedbayes.layers.scaler.ScaleSums`. A :class:`~lightning_fedbayes.BayesianModule` without a
    federation fills it when the fit begins. For any other module call :meth:`fit`. Then it is fixed.

    When to use it: units are far from 1, or differ between inputs. The regressors of this package have one for their
    targets, unless ``scaler=False``. In your module, give :meth:`targets` to the loss. As the attribute ``scaler`` it
    also tells the module's :class:`~lightning_fedbayes.Gaussian` likelihood the units of the outputs. Inputs go through
    the scaler itself. Clients send exact sums: under ``privacy`` give it numbers that are known without data.

    Args:
        targets, inputs: known mean and standard deviation, numbers or tensors of the shape of an example. With either,
            nothing is exchanged, and the other is not scaled.

    Attributes:
        input_units, target_units: mean and standard deviation, float64, shape (2, \*example); (0,) if not filled.

    Raises FedBayesError: means are not finite or standard deviations not positive. A training step uses it unfilled.

    >>> scaler = FederatedScaler(targets=(1e4, 500.0))
    >>> scaler.targets(torch.tensor([10500.0]))
    tensor([1.])
    """

    input_units: Tensor
    target_units: Tensor

    def __init__(self, targets: tuple[Any, Any] | None = None, inputs: tuple[Any, Any] | None = None) -> None:
        super().__init__()
        self.is_given = targets is not None or inputs is not None
        for buffer, name, given in zip(UNITS, ("inputs", "targets"), (inputs, targets)):
            units = torch.zeros(0, dtype=torch.float64)
            if given is not None:
                why = "give finite means and positive standard deviations"
                with raised_as(FedBayesError, f"{name}={shown(given)}", why):
                    mean, std = (torch.as_tensor(each, dtype=torch.float64).detach() for each in given)
                    units = torch.stack(torch.broadcast_tensors(mean, std, torch.zeros(1))[:2])
                if not (units.isfinite().all() and (units[1] > 0).all()):
                    raise FedBayesError(f"{name}={shown(given)}: {why}")
            self.register_buffer(buffer, units)

    @property
    def is_filled(self) -> bool:
        """True if it has a scale."""
        return bool(self.input_units.numel() or self.target_units.numel())

    def fit(self, loader: DataLoader, module: nn.Module | None = None) -> None:
        """Fill it, unless it is filled, from the map-style data set of a ``loader``. See :meth:`ScaleSums.of`."""
        if not self.is_filled:
            load_scale(self, pooled({"": ScaleSums.of(loader.dataset, loader.collate_fn, module)}).scale())

    def forward(self, inputs: Tensor) -> Tensor:
        r"""Inputs, shape (batch, \*), in standard units."""
        return self._standard(inputs, self.input_units)

    def targets(self, values: Tensor) -> Tensor:
        r"""Targets, shape (batch,) or (batch, \*), in standard units."""
        return self._standard(values, self.target_units)

    def _standard(self, values: Tensor, units: Tensor) -> Tensor:
        if self.training and not self.is_filled:
            raise FedBayesError("this FederatedScaler is not filled: train in a federation, or call its fit(loader)")
        dtype = values.dtype if values.is_floating_point() else torch.get_default_dtype()
        return ((values - units[0]) / units[1]).to(dtype) if units.numel() else values

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "FederatedScaler":
        """Move the buffers. They keep double precision where the device has it."""
        device = fn(torch.zeros(1)).device
        dtype = torch.float32 if device.type == "mps" else torch.float64
        self._buffers.update({name: each.to(device, dtype) for name, each in self.named_buffers()})
        return self

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *_: Any, **__: Any) -> None:  # pyright: ignore
        """Load buffers of any shape. Older checkpoints may lack them."""
        for name, old in list(self.named_buffers()):
            if prefix + name in state_dict:
                setattr(self, name, state_dict[prefix + name].detach().to(old.device, old.dtype, copy=True))


def asking(module: nn.Module) -> list[FederatedScaler]:
    """Return the scalers in a module that the clients' data fill."""
    return [each for each in module.modules() if isinstance(each, FederatedScaler) and not each.is_given]


def scale_of(module: nn.Module) -> dict[str, Tensor]:
    """Return a module's scale under the names in a server's message; {} without a scaler that data fill."""
    return {SCALE + name: value for each in asking(module)[:1] for name, value in each.named_buffers()}


def load_scale(module: nn.Module, buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Fill a module's scalers from a server's buffers, if a scale is among them. Return the other buffers."""
    for each in asking(module):
        each._load_from_state_dict(buffers, SCALE)
    return {name: value for name, value in buffers.items() if not name.startswith(SCALE)}
