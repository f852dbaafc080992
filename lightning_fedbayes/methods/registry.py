"""Methods by name: federated algorithms, and every fusion rule as the method that averages by it."""

from collections.abc import Callable, Mapping
from inspect import signature
from typing import Any, TypeVar

from lightning_fedbayes.core import errors
from lightning_fedbayes.core.errors import FederationError, FusionError, check_kind, raised_as, shown
from lightning_fedbayes.core.posterior import GaussianPosterior
from lightning_fedbayes.core.store import Store
from lightning_fedbayes.fusion.registry import ALGORITHMS, available_fusions
from lightning_fedbayes.methods.averaging import Averaging, FedNova, FedProx, Scaffold
from lightning_fedbayes.methods.method import Method
from lightning_fedbayes.methods.personal import Ditto, Population
from lightning_fedbayes.methods.sites import Sites
from lightning_fedbayes.methods.sums import Sums

M = TypeVar("M", bound=type[Method])

_METHODS: dict[str, type[Method]] = {
    each.registered: each for each in (Ditto, FedNova, FedProx, Population, Scaffold, Sites, Sums)
}


def register_method(name: str) -> Callable[[M], M]:
    """Decorate a :class:`~lightning_fedbayes.Method` that needs no arguments, for ``fusion="name"``, free so far."""
    check_kind("name", name, str, "give a string, the name by which users choose the method", error=FusionError)

    def register(method: M) -> M:
        if not isinstance(method, type) or not issubclass(method, Method):
            raise FusionError(f"cannot register {shown(method)} as '{name}': a method is a Method subclass")
        if vars(method).get("registered"):
            raise FusionError(f"{method.__name__} is registered as '{method.registered}' already; register a subclass")
        given = [each for each in signature(method).parameters.values() if each.default is each.empty]
        needed = [each.name for each in given if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
        if needed:
            raise FusionError(f"'{name}' is to be made without arguments: give {', '.join(needed)} a default")
        if name in available_methods():
            raise FusionError(f"'{name}' is registered already; choose another name")
        _METHODS[name] = method
        method.registered = name
        return method

    return register


def unregister_method(name: str) -> None:
    """Remove the method ``name``. Raise FusionError, with the nearest name, if there is none."""
    errors.check_choice("name", name, _METHODS, error=FusionError)
    _METHODS.pop(name).registered = ""


def available_methods() -> list[str]:
    """Return all names that ``fusion=`` takes: methods, and fusion rules with their aliases, sorted.

    >>> {"scaffold", "sites", "rklb"} <= set(available_methods())
    True
    """
    return sorted([*_METHODS, *available_fusions(aliases=True)])


def get_method(method: Any) -> Method:
    """Return the method for a name, method, fusion rule, function or ``AutoFusion``. Else raise FusionError."""
    if isinstance(method, Method):
        if not hasattr(method, "rule"):
            raise FusionError(f"{type(method).__name__} has no rule: call super().__init__('weighted_average'), say")
        return method
    if isinstance(method, type) and issubclass(method, Method):
        raise FusionError(f"{method.__name__} is a class: give an object, {method.__name__}()")
    if isinstance(method, str) and method != "auto":
        if method in _METHODS:
            return _METHODS[method]()  # pyright: ignore[reportCallIssue]
        known = available_methods()
        if method not in known and method.lower().replace("-", "").replace("_", "") not in ALGORITHMS:
            raise FusionError(f"unknown fusion rule '{method}': {errors.nearest(method, known)}")
    return Averaging(method)  # pyright: ignore[reportArgumentType]


def remove_client(federation: Any, client: int) -> GaussianPosterior:
    """Return the global posterior without a client's part, as the server has counted it.

    When to use it: a client leaves ``fusion="sites"`` and takes its data with it, or has lied. The result is exact for
    conjugate models. For others train the remaining clients from it (``fb.load_posterior(module, posterior)``).
    Parameters without variance stay. The sums of a :class:`~lightning_fedbayes.HeadModule` become the others' sums.

    Raise FederationError if there is no such federation, it is damaged, or it has no site of that client, and
    FusionError if the other clients' sites give no posterior.

    Args:
        federation: a :class:`~lightning_fedbayes.FederatedBayes` that has trained, or the content of a checkpoint
            (``torch.load(path, weights_only=False)``), also of Flower's or FLARE's server. A
            :class:`~lightning_fedbayes.Server`, or what ``load_checkpoint`` returns.
        client: its number.
    """
    errors.check_at_least("client", client, 0)
    with raised_as(FederationError, "the state of the federation cannot be read", "give that of another checkpoint"):
        state = _state_of(federation)
        kept = state["sites"].get(client) or Store.state_in(state.get("clients", {}), client).get("kept", {})
        posterior = GaussianPosterior.from_state_dict(state["posterior"])
        for method in _METHODS.values():
            without = method.without(posterior, kept)
            if without is not None:
                return without
        why = "it has trained in no federation by fusion='sites' or 'sums', which keep its part"
        raise FederationError(f"client {shown(client)} has no part of the posterior: {why}")


def _state_of(federation: Any) -> Mapping[str, Any]:
    stored = getattr(federation, "server", None)  # of Flower's checkpoint
    if isinstance(federation, Mapping):
        callbacks = federation.get("callbacks")
        states = list(callbacks.values()) if isinstance(callbacks, Mapping) else [federation, federation.get("server")]
    elif isinstance(stored, Mapping):
        states = [stored]
    else:
        states = [federation.state_dict()] if hasattr(federation, "state_dict") else []
    for state in states:
        if isinstance(state, Mapping) and {"rule_states", "sites", "posterior"} <= state.keys():
            return state
    raise FederationError(f"{shown(federation)}: give a FederatedBayes that has trained, or a checkpoint's content")
