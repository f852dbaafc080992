"""Errors of this package. Each message names the value, the rule that it breaks and the remedy."""

import difflib
import pickle
from collections.abc import Iterable
from numbers import Integral


class FedBayesError(ValueError):
    """Base class of all errors that this package raises on purpose."""


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


class CannotVectorize(FederationError):
    """A module, optimizer or Trainer that the vectorized engine cannot train; the message says why."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the end of an error message about an unknown ``name``: the nearest known name, and all of them.

    >>> nearest("reverse_kl", ["reverse_kl_barycenter", "conflation"])
    "did you mean 'reverse_kl_barycenter'? Known: conflation, reverse_kl_barycenter"
    """
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.4)
    guess = f"did you mean '{close[0]}'? " if close else ""
    return f"{guess}Known: {', '.join(names)}"


def check_at_least(name: str, value: int, least: int) -> None:
    """Raise FederationError unless an argument is a whole number and not smaller than ``least``."""
    if not isinstance(value, Integral):
        raise FederationError(f"{name}={value!r}: give a whole number")
    if value < least:
        raise FederationError(f"{name}={value}: give at least {least}")


def check_choice(name: str, value: str, choices: Iterable[str]) -> None:
    """Raise FederationError, with the nearest choice, unless an argument is one of ``choices``."""
    if value not in choices:
        raise FederationError(f"{name}='{value}': {nearest(str(value), choices)}")


def sendable(error: Exception) -> Exception:
    """Return ``error``, or its text as a RuntimeError where it would not survive the way to another process."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
