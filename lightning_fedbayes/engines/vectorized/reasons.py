"""Why a module cannot be trained for several clients at once."""

from lightning_fedbayes.errors import FederationError


class CannotVectorize(FederationError):
    """The vectorized engine cannot train this module; the message says why."""
