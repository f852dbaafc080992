"""Errors of this package. Each message names the value, the rule that it breaks and the remedy."""

import difflib
import math
import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from functools import cache
from numbers import Integral, Number, Rational, Real
from os import PathLike
from pathlib import Path
from types import UnionType
from typing import Any

MOST_CHARACTERS, MOST_TEXT, MOST_ITEMS, MOST_BITS = 80, 1000, 20, 256
"""Limits of a value in an error message."""
MOST_LISTED, MOST_KNOWN, EXAMPLES = 5, 100, 3
"""Limits of a list in a message: most items that are all named, most to choose from, examples of a longer list."""
LARGEST = 2**63 - 1
"""Largest whole number that tensors can count with."""


class FedBayesError(ValueError):
    """An argument, module or data set that cannot be used as it is. Base class of all errors of this package."""


class PosteriorError(FedBayesError):
    """Keys, shapes or values that are no mean-field Gaussian."""


class FusionError(FedBayesError):
    """Posteriors, weights or a fusion rule that cannot be used."""


class PartitionError(FedBayesError):
    """A partition that is impossible, alone or with the given examples."""


class ConversionError(FedBayesError):
    """A layer that cannot be made Bayesian."""


class FederationError(FedBayesError):
    """A Trainer, module, data set or round that a federation cannot run with."""


class NotSent(FederationError):
    """The client's privacy forbids to send what it was asked for."""


class ClientMismatch(FederationError):
    """The client's method, network, frozen weights or version are not the server's."""


class LostState(FederationError):
    """The client has lost its kept state: bring its folder back, or remove it from the server's checkpoint."""


class CannotVectorize(FederationError):
    """A module, optimizer or Trainer that the vectorized engine cannot train. The message says why."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the end of an error message about an unknown ``name``: the nearest known name, and all of them.

    >>> nearest("reverse_kl", ["reverse_kl_barycenter", "conflation"])
    "did you mean 'reverse_kl_barycenter'? Known: conflation, reverse_kl_barycenter"
    """
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.4)
    guess = f"did you mean '{close[0]}'? " if close else ""
    return f"{guess}Known: {listed(names, MOST_KNOWN)}"


def listed(items: Iterable[Any], most: int = MOST_LISTED) -> str:
    """Return a list as messages show it: all items if there are at most ``most``, else a few and the number of others.

    >>> listed(["b", "a"]), listed(range(4315))
    ('b, a', '0, 1, 2 and 4,312 others')
    """
    names = [_cut(str(each), MOST_CHARACTERS) for each in items]
    others = f" and {len(names) - EXAMPLES:,} others" if len(names) > most else ""
    return ", ".join(names[:EXAMPLES] if others else names) + others


def told_failures(failures: Mapping[str, Exception]) -> list[str]:
    """Return a line for each kind of error that clients have failed with, whatever their number.

    >>> told_failures({"a": OSError("torn")})
    ['client a is left out: OSError: torn']
    >>> told_failures({str(client): OSError("torn") for client in range(9)})
    ['clients 0, 1, 2 and 6 others are left out; the first: OSError: torn']
    """
    by_kind: dict[str, list[str]] = {}
    for name, error in failures.items():
        by_kind.setdefault(type(error).__name__, []).append(name)
    lines = []
    for kind, names in by_kind.items():
        are = f"clients {listed(names)} are left out; the first" if names[1:] else f"client {listed(names)} is left out"
        lines.append(f"{are}: {kind}: {_cut(str(failures[names[0]]), MOST_TEXT)}")
    return lines


def shown(value: Any, most: int = MOST_CHARACTERS) -> str:
    """Return ``value`` as messages show it: at most ``most`` characters, an array or tensor by its shape.

    >>> shown("mean"), shown(float("nan"))
    ("'mean'", 'nan')
    """
    if not isinstance(value, Number | type) and isinstance(getattr(value, "shape", None), tuple):
        return f"{type(value).__name__} of shape {tuple(value.shape)}"
    if isinstance(value, int) and value.bit_length() > MOST_BITS:  # Python refuses to print the longest
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, list | tuple | dict | set) and len(value) > MOST_ITEMS:
        return f"a {type(value).__name__} of {len(value)}"
    return _cut(repr(value), most)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


def is_whole(value: Any) -> bool:
    """Return whether ``value`` is a whole number. A bool, a float or a tensor is not."""
    return type(value) is int or (isinstance(value, Integral) and not isinstance(value, bool))


def is_number(value: Any) -> bool:
    """Return whether ``value`` is a finite real number that torch takes. A bool, a fraction or a tensor is not."""
    if is_whole(value):
        return abs(value) <= LARGEST
    return isinstance(value, Real) and not isinstance(value, Rational) and math.isfinite(value)


def check_at_least(
    name: str,
    value: Any,
    least: int,
    most: int = LARGEST,
    *,
    error: type[FedBayesError] = FederationError,
    why: str = "",
) -> None:
    """Raise ``error`` unless an argument is a whole number from ``least`` to ``most``.

    >>> check_at_least("rounds", 0, 1)
    Traceback (most recent call last):
    lightning_fedbayes.core.errors.FederationError: rounds=0: give at least 1
    """
    if type(value) is int and least <= value <= most:  # nearly always
        return
    if not is_whole(value):
        rule = "a whole number"
    elif least <= value <= most:
        return
    else:
        rule = f"at least {least}" if value < least else f"at most {most}"
    raise error(f"{name}={shown(value)}: give {rule}{why and f'; {why}'}")


def check_number(
    name: str, value: Any, interval: str = "(-inf, inf)", *, error: type[FedBayesError] = FederationError, why: str = ""
) -> None:
    """Raise ``error`` unless an argument is a finite number in ``interval``, neither a bool nor a tensor.

    >>> check_number("fraction", 2, "(0, 1]", why="the share of clients in a round")
    Traceback (most recent call last):
    lightning_fedbayes.core.errors.FederationError: fraction=2: give a finite number in (0, 1]; the share of clients ...
    """
    low, high, closed = _ends(interval)
    if type(value) is float and low < value < high:  # nearly always
        return
    if not is_number(value) or not (low < float(value) < high or float(value) in closed):
        words = {"(-inf, inf)": "", "(0, inf)": " above 0", "[0, inf)": " of at least 0"}
        inside = words.get(interval, f" in {interval}")
        raise error(f"{name}={shown(value)}: give a finite number{inside}{why and f'; {why}'}")


@cache
def _ends(interval: str) -> tuple[float, float, tuple[float, ...]]:
    """Return both ends of an interval, and the ends that it contains."""
    low, high = map(float, interval[1:-1].split(","))
    return low, high, tuple(end for end, bracket in ((low, interval[0]), (high, interval[-1])) if bracket in "[]")


def check_choice(
    name: str, value: Any, choices: Iterable[str], *, error: type[FedBayesError] = FederationError
) -> None:
    """Raise ``error``, with the nearest choice, unless an argument is one of ``choices``."""
    known = tuple(choices)
    if not isinstance(value, str) or value not in known:
        remedy = nearest(value, known) if isinstance(value, str) else f"give one of {listed(known, MOST_KNOWN)}"
        raise error(f"{name}={shown(value)}: {remedy}")


def check_flag(name: str, value: Any, *, error: type[FedBayesError] = FederationError) -> None:
    """Raise ``error`` unless an argument is True or False."""
    if not isinstance(value, bool):
        raise error(f"{name}={shown(value)}: give True or False")


def check_kind(
    name: str, value: Any, kind: type | UnionType, remedy: str, *, error: type[FedBayesError] = FederationError
) -> None:
    """Raise ``error`` with the ``remedy``, such as "give a module", unless an argument has the right type."""
    is_scalar = kind is Iterable and getattr(value, "ndim", 1) == 0  # arrays without dimensions say that they are one
    if is_scalar or not isinstance(value, kind):
        raise error(f"{name}={shown(value)}: {remedy}")


def check_strings(
    name: str, value: Any, remedy: str, *, error: type[FedBayesError] = FederationError
) -> tuple[str, ...]:
    """Return one string, or several, as a tuple. Raise ``error`` with the ``remedy`` for anything else."""
    values = (value,) if isinstance(value, str) else value
    if not isinstance(values, Sequence | Set) or not all(isinstance(each, str) for each in values):
        raise error(f"{name}={shown(value)}: {remedy}")
    return tuple(values)


def check_path(name: str, value: Any, *, error: type[FedBayesError] = FederationError) -> Path:
    """Return the path that an argument names. Raise ``error`` if the system cannot have such a path."""
    if not isinstance(value, str | PathLike):
        raise error(f"{name}={shown(value)}: give a path")
    path = Path(value)
    try:
        path.exists()
    except (OSError, ValueError) as problem:  # too long a name, a character that no name has
        raise error(f"{name}={shown(value)} is not a path: {problem}; give another") from None
    return path


@contextmanager
def raised_as(error: type[FedBayesError], what: str, remedy: str) -> Iterator[None]:
    """Inside, errors of foreign code become an ``error`` that says ``what`` failed, why, and the ``remedy``.

    >>> with raised_as(FederationError, "the network cannot take this batch", "give tensors"):
    ...     raise KeyError("x")
    Traceback (most recent call last):
    lightning_fedbayes.core.errors.FederationError: the network cannot take this batch: KeyError: 'x'; give tensors
    """
    try:
        yield
    except FedBayesError:
        raise
    except Exception as problem:
        raise error(f"{what}: {type(problem).__name__}: {problem}; {remedy}") from problem


def sendable(error: Exception) -> Exception:
    """Return ``error``, or a RuntimeError with its text if it cannot be pickled and read again."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
