"""Methods by name: federated algorithms, and every fusion rule as the method that averages by it."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any, TypeVar

from lightning_fedbayes.core.errors import FusionError, check_kind, nearest, shown
from lightning_fedbayes.fusion.auto import AutoFusion
from lightning_fedbayes.fusion.registry import ALGORITHMS, available_fusions, get_rule
from lightning_fedbayes.fusion.rule import FusionRule
from lightning_fedbayes.methods.averaging import Averaging
from lightning_fedbayes.methods.ditto import Ditto
from lightning_fedbayes.methods.fednova import FedNova
from lightning_fedbayes.methods.fedprox import FedProx
from lightning_fedbayes.methods.method import Method
from lightning_fedbayes.methods.population import Population
from lightning_fedbayes.methods.scaffold import Scaffold
from lightning_fedbayes.methods.sites import Sites
from lightning_fedbayes.methods.sums import Sums

M = TypeVar("M", bound=type[Method])

_METHODS: dict[str, type[Method]] = {
    each.registered: each for each in (Ditto, FedNova, FedProx, Population, Scaffold, Sites, Sums)
}


def register_method(name: str) -> Callable[[M], M]:
    """Decorate a :class:`~lightning_fedbayes.Method` that can be made without arguments, for ``fusion="name"``.

    Raises:
        FusionError: the name is taken, or what is decorated is no method.
    """
    check_kind("name", name, str, "give a string, the name by which users choose the method", error=FusionError)

    def register(method: M) -> M:
        if not isinstance(method, type) or not issubclass(method, Method):
            raise FusionError(f"cannot register {shown(method)} as '{name}': a method is a Method subclass")
        if vars(method).get("registered"):
            raise FusionError(f"{method.__name__} is registered as '{method.registered}' already; register a subclass")
        needed = [
            each.name
            for each in signature(method).parameters.values()
            if each.default is each.empty and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
        ]
        if needed:
            raise FusionError(f"'{name}' is to be made without arguments: give {', '.join(needed)} a default")
        if name in available_methods():
            raise FusionError(f"'{name}' is registered already; choose another name")
        _METHODS[name] = method
        method.registered = name
        return method

    return register


def unregister_method(name: str) -> None:
    """Remove the method ``name``; raise FusionError if there is none; the message gives the nearest."""
    if name not in _METHODS:
        raise FusionError(f"name={shown(name)}: {nearest(str(name), _METHODS)}")
    _METHODS.pop(name).registered = ""


def available_methods() -> list[str]:
    """Return all names that ``fusion=`` takes: methods, and fusion rules with their aliases, sorted.

    >>> {"scaffold", "sites", "rklb"} <= set(available_methods())
    True
    """
    return sorted([*_METHODS, *available_fusions(aliases=True)])


def every_method() -> list[type[Method]]:
    """Return the classes of all methods that do more than average."""
    return [*_METHODS.values()]


def get_method(method: Any) -> Method:
    """Return the method for a name, a method, a fusion rule, its function or an ``AutoFusion``.

    Raises:
        FusionError: there is none of that name; the message gives the nearest.
    """
    if isinstance(method, Method):
        if not hasattr(method, "rule"):
            raise FusionError(f"{type(method).__name__} has no rule: call super().__init__('weighted_average'), say")
        return method
    if isinstance(method, type) and issubclass(method, Method):
        raise FusionError(f"{method.__name__} is a class: give an object, {method.__name__}()")
    if isinstance(method, AutoFusion):
        return Averaging(method)
    if isinstance(method, str):
        if method == "auto":
            return Averaging(method)
        if method in _METHODS:
            return _METHODS[method]()  # pyright: ignore[reportCallIssue]
        known = available_methods()
        if method not in known and method.lower().replace("-", "").replace("_", "") not in ALGORITHMS:
            raise FusionError(f"unknown fusion rule '{method}': {nearest(method, known)}")
    rule: FusionRule = get_rule(method)
    return Averaging(rule)
