"""Settings of one cell of a study, and their text forms such as ``dirichlet(0.5)``."""

from __future__ import annotations

import ast
import types
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal, get_args, get_origin, get_type_hints

from lightning_fedbayes.core.errors import FederationError, nearest


@dataclass(frozen=True)
class Settings:
    """Settings of one federation. The defaults are those of [BA-BFL].

    Args:
        dataset: "fashion_mnist", "mnist", "cifar10" or "digits".
        examples: training images, stratified; None: all.
        validation_fraction: share of them that is held out and scored after every round; ``fusion: auto`` chooses by
            these scores; None: no validation.
        network: "lenet" or "resnet20"; digits (8×8 pixels) always use a fully connected 64-32-32-10.
        bayesian_last: the last n layers are Bayesian, or "all".
        dropout: rate of Monte Carlo dropout after every layer but the last; 0: none.
        estimator, prior_std, bayesian_bias: of the Bayesian layers.
        log_variance: initial log σ² of the Bayesian parameters; None: the default of the layers.
        kl_weight: β; the KL is divided by the client's number of examples.
        samples: Monte Carlo samples of a prediction.
        clients: number of clients.
        partition: "iid", "classes(m)", "dirichlet(α)" or "dirichlet_per_client(α)".
        fusion: name of a rule, with its arguments if any, such as "alpha_barycenter(alpha=0.25)"; or "auto".
        weighting, prior: of :class:`~lightning_fedbayes.FederatedBayes`.
        start: "fresh": no pre-training; "bayesian": the server pre-trains the network on ``start_share`` of the
            training images, until its validation accuracy has not risen for ten epochs; "moped": the server pre-trains
            the deterministic network in the same way and makes it Bayesian around its parameters.
        start_share: see ``start``.
        rounds, local_epochs, batch_size: of the federation.
        optimizer: "sgd", "adam" or "ivon", which gives a network without Bayesian layers a posterior.
        learning_rate, momentum, weight_decay: of the optimizer; Adam has no momentum. IVON has a prior, ``prior_std``,
            in place of weight decay; ``kl_weight`` is its temperature, and ``momentum`` its first decay.
        hessian_init, curvature_decay: first curvature of IVON as published, and its second decay. Without the first,
            IVON's defaults for both.
        decay_from: round after which the learning rate falls by 4 % per round, as in [FBDL]; None: never.
        seed: of network, partition, order of the examples and noise.
    """

    dataset: str = "digits"
    examples: int | None = None
    validation_fraction: float | None = None
    network: Literal["lenet", "resnet20"] = "lenet"
    bayesian_last: int | Literal["all"] = 3
    dropout: float = 0.0
    estimator: str = "local_reparameterization"
    prior_std: float = 1.0
    log_variance: float | None = -9.0
    bayesian_bias: bool = False
    kl_weight: float = 1.0
    samples: int = 10
    clients: int = 10
    partition: str = "dirichlet(0.5)"
    fusion: str = "weighted_average"
    weighting: str = "train_size"
    prior: str = "fixed"
    start: Literal["fresh", "bayesian", "moped"] = "fresh"
    start_share: float = 0.1
    rounds: int = 50
    local_epochs: int = 50
    batch_size: int = 64
    optimizer: Literal["sgd", "adam", "ivon"] = "sgd"
    learning_rate: float = 0.01
    momentum: float = 0.9
    weight_decay: float = 1e-5
    hessian_init: float | None = 1.0
    curvature_decay: float = 0.999
    decay_from: int | None = None
    seed: int = 0

    def but(self, **changes: Any) -> Settings:
        """Return these settings with some changed."""
        return replace(self, **changes)

    def as_dict(self) -> dict[str, Any]:
        """Return a mapping from name to value."""
        return asdict(self)


KEYS = tuple(field.name for field in fields(Settings))
_KINDS = get_type_hints(Settings)


def check_settings(values: Mapping[str, Any], where: str) -> None:
    """Raise FederationError for a key that is no setting, or a value of the wrong kind."""
    for key, value in values.items():
        if key not in KEYS:
            raise FederationError(f"{where}: unknown setting '{key}'; {nearest(key, KEYS)}")
        if not _fits(value, _KINDS[key]):
            hint = " (YAML reads 1e-3 as text; write 1.0e-3)" if _KINDS[key] is float and isinstance(value, str) else ""
            raise FederationError(f"{where}: {key}={value!r} has to be {_described(_KINDS[key])}{hint}")


def parse_call(text: str) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
    """Return name, positional and named arguments of ``name`` or ``name(0.5, key=1)``.

    >>> parse_call("alpha_barycenter(alpha=0.25)")
    ('alpha_barycenter', (), {'alpha': 0.25})
    """
    try:
        node = ast.parse(text, mode="eval").body
        if isinstance(node, ast.Name):
            return node.id, (), {}
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            named = {word.arg: ast.literal_eval(word.value) for word in node.keywords if word.arg is not None}
            return node.func.id, tuple(ast.literal_eval(value) for value in node.args), named
    except (SyntaxError, ValueError):
        pass
    raise FederationError(f"'{text}' cannot be read: write a name, or a name with arguments such as dirichlet(0.5)")


def called(make: Any, text: str, *positional: Any, **named: Any) -> Any:
    """Return ``make(*positional, **named)``; raise FederationError, which quotes ``text``, for wrong arguments."""
    try:
        return make(*positional, **named)
    except TypeError as error:
        raise FederationError(f"'{text}': {error}") from error


def _fits(value: Any, kind: Any) -> bool:
    """Return whether ``value`` is of the annotated ``kind``."""
    if get_origin(kind) in (types.UnionType, _Union):
        return any(_fits(value, each) for each in get_args(kind))
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


def _described(kind: Any) -> str:
    """Return a kind in words."""
    if get_origin(kind) in (types.UnionType, _Union):
        return " or ".join(_described(each) for each in get_args(kind))
    if get_origin(kind) is Literal:
        return " or ".join(repr(each) for each in get_args(kind))
    return {"NoneType": "null", "str": "text", "bool": "true or false", "int": "a whole number", "float": "a number"}[
        kind.__name__
    ]


_Union = get_origin(int | Literal["all"])
"""Type of ``int | Literal[...]``, which in some versions of Python is not types.UnionType."""
