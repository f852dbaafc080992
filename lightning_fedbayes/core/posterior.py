"""The mean-field Gaussian posterior: clients send it, rules fuse it and a network is loaded with it."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import repeat
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_fedbayes.core import errors
from lightning_fedbayes.core.errors import FedBayesError, PosteriorError, check_kind, check_strings, listed, shown

PIECE = 2**17
"""Entries of a piece of a large posterior: in double precision they fit into a usual second-level cache."""
POINT_PIECE = 2**18
"""Entries of a piece of point masses, which few operations read: fewer pieces cost less than the cache saves."""
MOST_AT_ONCE = 2**22
"""Entries of a stack up to which its rows are flattened at once, which takes 64 MiB."""
FILE = "posterior.pt"
"""File of a posterior in a W&B artifact."""
Cuts = list[list[tuple[str, int, int]]]
"""Pieces of a posterior, each a list of (name of a tensor, start, stop)."""


@dataclass(frozen=True, eq=False)
class GaussianPosterior:
    r"""Independent Gaussians over named parameters, :math:`q(\theta) = \prod_i N(\theta_i; \mu_i, \sigma_i^2)`.

    A variance of exactly 0 is a point mass: a deterministic parameter. Zeros take the memory of one (:meth:`point_mass`
    expands it). Raises PosteriorError if names or shapes differ, a value is not a dense floating-point tensor, or a
    variance is negative.

    Args:
        mean: parameter name → tensor of means :math:`\mu`, any shape.
        variance: the same names → tensors of variances :math:`\sigma^2` of the same shapes, none negative.
        linearised: the variances hold for the network linearised at the mean, as in a Laplace approximation:
            predictions linearise it, too, and do not draw parameters.

    >>> q = GaussianPosterior({"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([0.25, 0.0])})
    >>> q.num_parameters, q.names
    (2, ('w',))
    """

    mean: Mapping[str, Tensor]
    variance: Mapping[str, Tensor]
    linearised: bool = False
    _flat: ClassVar[tuple[Tensor, Tensor] | None] = None  # result of flatten, for a row of a stack

    def __post_init__(self) -> None:
        check_moments(self.mean, self.variance)
        self._check_not_negative()

    def _check_not_negative(self) -> None:
        for name, variance in self.variance.items():
            if not is_zero(variance) and (variance < 0).any():
                raise PosteriorError(
                    f"variance of '{name}' is negative at {int((variance < 0).sum())} of {variance.numel()} entries "
                    f"(minimum {variance.min():.3g}); a variance is at least 0, and 0 means deterministic"
                )

    def __repr__(self) -> str:
        gaussian = sum(not is_zero(variance) for variance in self.variance.values())
        types = sorted({f"{str(mean.dtype).removeprefix('torch.')} on {mean.device}" for mean in self.mean.values()})
        kind = "Gaussian, linearised" if self.linearised else "Gaussian"
        return (
            f"GaussianPosterior({self.num_parameters:,} parameters in {len(self.mean)} tensors, {gaussian} of them "
            f"{kind}; {', '.join(types)})"
        )

    @classmethod
    def point_mass(cls, mean: Mapping[str, Tensor]) -> "GaussianPosterior":
        """The deterministic parameters ``mean`` as a posterior of variance 0."""
        check_parameters("mean", mean)
        zeros = {name: zeros_like(value) for name, value in mean.items()}
        return cls._of_checked(dict(mean), zeros, is_point_mass=True)

    @classmethod
    def _of_checked(
        cls, mean: Mapping[str, Tensor], variance: Mapping[str, Tensor], **known: Any
    ) -> "GaussianPosterior":
        """Return a posterior of checked tensors, with ``known`` attributes."""
        posterior = object.__new__(cls)
        vars(posterior).update(mean=mean, variance=variance, **known)
        return posterior

    @cached_property
    def is_point_mass(self) -> bool:
        """True if every parameter is known to be deterministic, without reading all of the variances."""
        return all(is_zero(variance) for variance in self.variance.values())

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the parameters, in the order in which :meth:`flatten` lays them out."""
        return tuple(self.mean)

    @cached_property
    def num_parameters(self) -> int:
        """Number of scalar parameters P."""
        return sum(value.numel() for value in self.mean.values())

    @cached_property
    def num_bytes(self) -> int:
        """Bytes that a message with this posterior carries: deterministic tensors send no variance."""
        sent = [*self.mean.values()]
        if not self.is_point_mass:
            sent += [value for value in self.variance.values() if not is_zero(value)]
        return sum(value.numel() * value.element_size() for value in sent)

    def clone(self) -> "GaussianPosterior":
        """A copy that shares no memory with this posterior."""
        variance = {name: zeros_like(v) if is_zero(v) else v.detach().clone() for name, v in self.variance.items()}
        mean = {name: value.detach().clone() for name, value in self.mean.items()}
        return self._of_checked(mean, variance, linearised=self.linearised)

    def marked(self, linearised: bool) -> "GaussianPosterior":
        """This posterior, with another value of ``linearised``. It shares its tensors."""
        return self if linearised == self.linearised else self._of_checked(**{**vars(self), "linearised": linearised})

    def flattened(self, flat: tuple[Tensor, Tensor] | None = None) -> "GaussianPosterior":
        """This posterior with its present result of :meth:`flatten`, or ``flat``, even if its tensors change later."""
        if self._flat is not None and flat is None:
            return self
        names = "is_point_mass", "num_parameters", "linearised"
        known = {name: getattr(self, name) for name in names}
        return self._of_checked(self.mean, self.variance, _flat=flat or self.flatten(), **known)

    def owned(self) -> "GaussianPosterior":
        """A copy of this posterior, made of the stored result of :meth:`flatten` if there is one."""
        return self if self._flat is None else self.unflatten(*self._flat)

    def cuts(self) -> Cuts:
        """Return where :meth:`pieces` are cut: lists of (name, start, stop) in the order of :meth:`flatten`.

        A large tensor is cut, small neighbours share a piece. Pieces have up to :data:`PIECE` entries, or
        :data:`POINT_PIECE` if their tensors are known to be deterministic. A small posterior is one piece.
        """
        if self.num_parameters <= PIECE:
            return [[(name, 0, value.numel()) for name, value in self.mean.items()]]
        cuts: Cuts = []
        size = room = 0
        for name, value in self.mean.items():
            known = POINT_PIECE if is_zero(self.variance[name]) else PIECE
            size, room = known, room if known == size else 0
            for start in range(0, max(value.numel(), 1), size):
                stop = min(start + size, value.numel())
                if not cuts or stop - start > room:
                    cuts.append([])
                    room = size
                room -= stop - start
                cuts[-1].append((name, start, stop))
        return cuts

    def pieces(self, cuts: Cuts | None = None) -> "list[GaussianPosterior]":
        """This posterior in views that fit into a cache, by ``cuts`` (None: its :meth:`cuts`) of :meth:`flatten`."""
        cuts = self.cuts() if cuts is None else cuts
        if len(cuts) == 1:
            return [self]
        both = [{n: value.detach().reshape(-1) for n, value in each.items()} for each in (self.mean, self.variance)]
        groups = [[{n: vectors[n][start:stop] for n, start, stop in cut} for vectors in both] for cut in cuts]
        known = {"is_point_mass": True} if self.is_point_mass else {}
        if self._flat is None:
            return [self._of_checked(*group, **known) for group in groups]
        lengths = [sum(stop - start for _, start, stop in cut) for cut in cuts]
        flat = zip(*(vector.split(lengths) for vector in self._flat))
        return [self._of_checked(*group, _flat=pair, **known) for group, pair in zip(groups, flat)]

    def joined(self, pieces: "Iterable[GaussianPosterior]") -> "GaussianPosterior":
        """The inverse of :meth:`pieces`, with this posterior's names, shapes and dtypes. Takes pieces one by one."""
        means = {n: torch.empty_like(like, memory_format=torch.contiguous_format) for n, like in self.mean.items()}
        variances = {name: zeros_like(value) for name, value in means.items()}
        filled = dict.fromkeys(self.mean, 0)
        for piece in pieces:
            for name, part in piece.mean.items():
                start, stop = filled[name], filled[name] + part.numel()
                means[name].view(-1)[start:stop] = part
                if not is_zero(piece.variance[name]):
                    if is_zero(variances[name]):
                        variances[name] = torch.zeros_like(means[name])
                    variances[name].view(-1)[start:stop] = piece.variance[name]
                filled[name] = stop
        return self._of_checked(means, variances, linearised=self.linearised)

    def unbind(self) -> "Iterator[GaussianPosterior]":
        """Yield the posteriors of clients from a stack of them, as views. Small ones are flattened together."""
        count = len(next(iter(self.mean.values())))
        size = self.num_parameters // count
        together = POINT_PIECE // max(1, size)
        if count > together > 0:
            for start in range(0, count, together):
                rows = slice(start, start + together)
                parts = [{n: value[rows] for n, value in each.items()} for each in (self.mean, self.variance)]
                yield from self._of_checked(*parts, linearised=self.linearised).unbind()
            return
        means = zip(*(each.unbind(0) for each in self.mean.values()))
        if self.is_point_mass:
            variances = repeat([zeros_like(self.mean[name][0]) for name in self.variance])
        else:
            variances = zip(*(each.unbind(0) for each in self.variance.values()))
        known = {
            "num_bytes": self.num_bytes // count,
            "is_point_mass": self.is_point_mass,
            "num_parameters": size,
            "linearised": self.linearised,
        }
        flat: Iterable[Any] = repeat(None)
        double = all(mean.device.type != "mps" for mean in self.mean.values())
        if double and self.num_parameters <= MOST_AT_ONCE:
            sides = [self.mean] if self.is_point_mass else [self.mean, self.variance]
            both = [torch.cat([s[n].reshape(count, -1).to(torch.float64) for n in self.mean], 1) for s in sides]
            flat = zip(both[0], zeros_like(both[0]) if self.is_point_mass else both[1])
        for mean, variance, pair in zip(means, variances, flat):
            own = dict(zip(self.mean, mean)), dict(zip(self.variance, variance))
            yield self._of_checked(*own, _flat=pair, **known)

    def to(self, device: torch.device | str) -> "GaussianPosterior":
        """This posterior on another device."""
        mean = {name: value.to(device) for name, value in self.mean.items()}
        variance = {n: zeros_like(mean[n]) if is_zero(v) else v.to(device) for n, v in self.variance.items()}
        return self._of_checked(mean, variance, linearised=self.linearised)

    def flatten(self, dtype: torch.dtype = torch.float64, room: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Mean and variance as two vectors of shape (P,), in the order of :attr:`names`. Not to be written into.

        The mean may be written into ``room``, a vector of ``dtype`` and at least P entries. None: a new one.
        """
        if self._flat is not None and dtype == torch.float64:
            return self._flat
        mean = flatten(self.mean.values(), dtype, room)
        if self.is_point_mass:
            return mean, zeros_like(mean)
        return mean, flatten((self.variance[name] for name in self.mean), dtype)

    def ordered(self, names: Sequence[str]) -> "GaussianPosterior":
        """This posterior with its parameters in the order of ``names``, so that flat vectors of two of them align."""
        names = check_strings("names", names, "give each name once", error=PosteriorError)
        if self.names == names:
            return self
        if set(self.names) != set(names):
            raise PosteriorError(f"names={shown(names)}: give each of {listed(self.names)} once")
        mean, variance = {n: self.mean[n] for n in names}, {n: self.variance[n] for n in names}
        return self._of_checked(mean, variance, linearised=self.linearised)

    def unflatten(self, mean: Tensor, variance: Tensor | None) -> "GaussianPosterior":
        """The inverse of :meth:`flatten`, with this posterior's names, shapes and dtypes. Vectors are of shape (P,).

        A tensor with variances that are all 0 takes no memory. None: a point mass. Raise PosteriorError if a vector has
        another shape, or a variance is negative.
        """
        vectors = {"mean": mean} if variance is None else {"mean": mean, "variance": variance}
        for kind, vector in vectors.items():
            check_tensor(kind, vector)
            if vector.shape != (self.num_parameters,):
                raise PosteriorError(f"{kind} has shape {tuple(vector.shape)}; give one of ({self.num_parameters},)")
        parts = mean.split([like.numel() for like in self.mean.values()])
        means = {
            name: part.view(like.shape).to(like.dtype, copy=True).to(like.device)
            for (name, like), part in zip(self.mean.items(), parts)
        }
        if variance is None or is_zero(variance):
            known = self.is_point_mass
            zeros = dict(self.variance) if known else {name: zeros_like(value) for name, value in means.items()}
            return self._of_checked(means, zeros, is_point_mass=True, linearised=self.linearised)
        variances = {
            name: part.view(like.shape).to(like.dtype, copy=True).to(like.device) if part.any() else zeros_like(like)
            for (name, like), part in zip(means.items(), variance.split([like.numel() for like in means.values()]))
        }
        posterior = self._of_checked(means, variances, linearised=self.linearised)
        posterior._check_not_negative()
        return posterior

    def kl(self, other: "GaussianPosterior") -> Tensor:
        r"""Kullback–Leibler divergence :math:`\mathrm{KL}(q\|p)` of this posterior q from ``other`` p, in nats.

        .. math:: \tfrac12 \sum_i \log\frac{s_i^2}{\sigma_i^2} + \frac{\sigma_i^2 + (\mu_i - m_i)^2}{s_i^2} - 1

        summed over the probabilistic parameters, a float64 scalar. A parameter that is deterministic in both has no
        density and is left out. One that is deterministic in only one of them makes the divergence infinite.
        """
        check_posterior(other, "the other")
        check_same_structure(self.mean, other.mean, "this posterior", "the other")
        mean, variance = self.flatten()
        other_mean, other_variance = other.ordered(self.names).flatten()
        return gaussian_kl(mean, variance, other_mean, other_variance)

    def sample(self, draws: int | None = None, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        r"""Draw all parameters independently, :math:`\theta \sim N(\mu, \mathrm{diag}(\sigma^2))`.

        Args:
            draws: number of draws: name → shape (draws, \*shape). Deterministic parameters are views, the same in each.
                None: one, name → tensor of the parameter's shape.
            generator: source of the noise. None: the global one.
        """
        check_kind("generator", generator, torch.Generator | None, "give a torch.Generator", error=PosteriorError)
        if draws is not None:
            errors.check_at_least("draws", draws, 1, error=PosteriorError)
        drawn = {}
        for name, mean in self.mean.items():
            values = mean.clone() if draws is None else mean.expand(draws, *mean.shape)
            if is_random(self.variance[name]):
                noise = torch.randn(values.shape, generator=generator, dtype=mean.dtype, device=mean.device)
                values = mean + self.variance[name].sqrt() * noise
            drawn[name] = values
        return drawn

    def state_dict(self) -> dict[str, Any]:
        """Return a state for :meth:`from_state_dict`. Deterministic tensors store no variance."""
        variance = {name: value for name, value in self.variance.items() if not is_zero(value)}
        kind = {"linearised": True} if self.linearised else {}
        return {"mean": dict(self.mean), "variance": variance, **kind}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> "GaussianPosterior":
        """The posterior that :meth:`state_dict` stored. Raise PosteriorError, with the wrong part, for others."""
        if not isinstance(state, Mapping) or not {"mean", "variance"} <= state.keys():
            raise PosteriorError(f"{shown(state)} is not a state of a posterior: give what state_dict() returned")
        mean, stored = state["mean"], state["variance"]
        check_parameters("mean", mean)
        check_kind("variance", stored, Mapping, "give name → tensor", error=PosteriorError)
        variance = {name: stored[name] if name in stored else zeros_like(m) for name, m in mean.items()}
        return cls(dict(mean), variance, bool(state.get("linearised", False)))

    def to_wandb(self, run: Any, name: str = "posterior") -> Any:
        """Log this posterior as an artifact of a W&B run, such as ``trainer.logger.experiment``. Return the artifact.

        W&B then shows which run has made it. :meth:`from_wandb` reads it again.
        """
        import wandb

        about = {"parameters": self.num_parameters, "tensors": len(self.mean), "linearised": self.linearised}
        artifact = wandb.Artifact(name, "posterior", metadata=about)
        with artifact.new_file(FILE, "wb") as file:
            torch.save(self.clone().state_dict(), file)
        return run.log_artifact(artifact)

    @classmethod
    def from_wandb(cls, artifact: Any) -> "GaussianPosterior":
        """The posterior that :meth:`to_wandb` has logged, from an artifact or its name, "USER/PROJECT/NAME:latest".

        Inside a W&B run, as of predictions, that run is shown as one that uses it. Raise PosteriorError if the
        artifact holds no posterior.
        """
        import wandb

        if isinstance(artifact, str):
            artifact = wandb.Api().artifact(artifact) if wandb.run is None else wandb.run.use_artifact(artifact)
        with errors.raised_as(PosteriorError, f"artifact {artifact.name} holds no posterior", "give one of to_wandb()"):
            state = torch.load(artifact.get_entry(FILE).download(), map_location="cpu", weights_only=True)
        return cls.from_state_dict(state)


def gaussian_kl(mean: Tensor, variance: Tensor, other_mean: Tensor, other_variance: Tensor) -> Tensor:
    """Return the scalar KL divergence of flat mean-field Gaussians, shape (P,), see :meth:`GaussianPosterior.kl`."""
    random, other_random = variance > 0, other_variance > 0
    if bool((random != other_random).any()):
        return mean.new_full((), float("inf"))
    v, s = variance[random], other_variance[random]
    terms = torch.log(s) - torch.log(v) + (v + (mean[random] - other_mean[random]) ** 2) / s - 1
    return terms.sum().clamp_min(0) / 2


def zeros_like(tensor: Tensor) -> Tensor:
    """Zeros of the shape of ``tensor`` that take the memory of one."""
    return torch.zeros((), dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)


def is_zero(variance: Tensor) -> bool:
    """Return True if ``variance`` is known to be all zero without reading all of it (see :func:`zeros_like`)."""
    if variance.numel() == 0:
        return True
    return not any(variance.stride()) and variance.as_strided((), ()).item() == 0


def at_least_float32(tensor: Tensor) -> Tensor:
    """Return ``tensor``, in float32 if it has fewer bits: squares and logarithms of half floats are too coarse."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def is_random(variance: Tensor) -> bool:
    """Return True if ``variance`` is not all zero. It is read if need be."""
    return not is_zero(variance) and bool(variance.any())


def flatten(tensors: Iterable[Tensor], dtype: torch.dtype, room: Tensor | None = None) -> Tensor:
    """The entries of ``tensors`` one after the other, as one detached vector of ``dtype``, shape (P,).

    The vector lies where the tensors lie, but on the CPU for MPS, which has no float64; or at the start of ``room``.
    """
    parts = [tensor.detach().reshape(-1) for tensor in tensors]
    if len(parts) == 1 and room is None and parts[0].device.type != "mps":
        return parts[0].to(dtype, copy=True)
    if any(part.device.type == "mps" for part in parts):
        parts = [part.cpu() for part in parts]
    if len({part.dtype for part in parts}) > 1:  # each is exact in the result, but not in each other
        parts = [part.to(dtype) for part in parts]
    if not parts:
        return torch.zeros(0, dtype=dtype)
    lengths = [part.numel() for part in parts]
    if len(parts) > 1 and sum(lengths) <= PIECE and room is None:
        return torch.cat(parts).to(dtype)
    if room is None:
        room = torch.empty(sum(lengths), dtype=dtype, device=parts[0].device)  # no copy in the other dtype
    vector = room[: sum(lengths)]
    for target, part in zip(vector.split(lengths), parts):
        target.copy_(part)
    return vector


def check_tensor(name: str, value: Any, *, error: type[FedBayesError] = PosteriorError) -> None:
    """Raise ``error`` unless an argument is a dense tensor with values: not sparse, not on "meta"."""
    if not isinstance(value, Tensor):
        raise error(f"{name}={shown(value)}: give a torch.Tensor")
    if not is_dense(value):
        raise error(f"{name} is a tensor of layout {value.layout} on {value.device}: give a dense one that has values")


def is_dense(value: Any) -> bool:
    """Return whether ``value`` is a dense tensor that has its values."""
    return isinstance(value, Tensor) and value.layout is torch.strided and not value.is_meta


def check_parameters(kind: str, values: Any, *, error: type[FedBayesError] = PosteriorError) -> None:
    """Raise ``error`` unless ``values`` maps names to dense floating-point tensors on one device."""
    if not isinstance(values, Mapping):
        raise error(f"{kind}={shown(values)}: give a dict, parameter name → tensor")
    for name, value in values.items():
        if not isinstance(name, str):
            raise error(f"{kind}: {shown(name)} is not a parameter name: give a string")
        if not is_dense(value) or not value.is_floating_point():  # the message is written only if it is needed
            check_tensor(f"{kind} of '{name}'", value, error=error)
            raise error(f"{kind} of '{name}' is of {value.dtype}: give real floating-point numbers")


def check_moments(mean: Any, variance: Any, who: str = "", *, error: type[FedBayesError] = PosteriorError) -> None:
    """Raise ``error`` unless two mappings hold tensors of the same names and shapes on one device."""
    prefix = who and f"{who}: "
    check_parameters(f"{prefix}mean", mean, error=error)
    check_parameters(f"{prefix}variance", variance, error=error)
    check_same_structure(mean, variance, f"{prefix}mean", f"{prefix}variance", error=error)
    devices = {value.device for each in (mean, variance) for value in each.values()}
    if len(devices) > 1:
        raise error(f"{prefix}tensors are on {', '.join(sorted(map(str, devices)))}: bring all to one device")


def check_posterior(posterior: Any, who: str, *, error: type[FedBayesError] = PosteriorError) -> None:
    """Raise ``error`` unless ``posterior``, from outside, is a GaussianPosterior as it was made. It is not read."""
    if not isinstance(posterior, GaussianPosterior):
        raise error(f"{who}: {shown(posterior)} is not a GaussianPosterior: make one of mean and variance")
    check_moments(posterior.mean, posterior.variance, who, error=error)


def check_same_structure(
    first: Mapping[str, Tensor],
    second: Mapping[str, Tensor],
    first_name: str,
    second_name: str,
    *,
    error: type[FedBayesError] = PosteriorError,
) -> None:
    """Raise ``error`` unless two mappings have the same names and, under each name, the same shape."""
    if first.keys() != second.keys():
        missing, extra = sorted(first.keys() - second.keys()), sorted(second.keys() - first.keys())
        raise error(
            f"{first_name} and {second_name} name different parameters: "
            f"only {first_name} has {listed(missing) or 'none'}, only {second_name} has {listed(extra) or 'none'}; "
            "all clients must train the same network"
        )
    for name, value in first.items():
        if value.shape != second[name].shape:
            raise error(
                f"'{name}' has shape {tuple(value.shape)} in {first_name} but {tuple(second[name].shape)} in "
                f"{second_name}; all clients must train the same network"
            )
