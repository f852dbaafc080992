"""The errors this package raises: each message names the value, the rule it breaks and the remedy."""

import difflib
from collections.abc import Iterable


class FedBayesError(ValueError):
    """Base of every error this package raises on purpose."""


class PosteriorError(FedBayesError):
    """A posterior whose keys, shapes or values cannot be a mean-field Gaussian."""


class FusionError(FedBayesError):
    """Posteriors, weights or a rule that cannot be fused."""


class PartitionError(FedBayesError):
    """Examples that cannot be dealt out to clients as asked."""


class ConversionError(FedBayesError):
    """A layer that cannot be made Bayesian."""


class FederationError(FedBayesError):
    """A Trainer, module, data set or round that a federation cannot run with."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Half a sentence that helps after an unknown ``name``: the nearest known name and all of them.

    >>> nearest("reverse_kl", ["reverse_kl_barycenter", "conflation"])
    "did you mean 'reverse_kl_barycenter'? Known: conflation, reverse_kl_barycenter"
    """
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.4)
    guess = f"did you mean '{close[0]}'? " if close else ""
    return f"{guess}Known: {', '.join(names)}"
