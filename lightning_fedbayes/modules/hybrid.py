"""A network whose last layers are Bayesian, from the arguments that the ready modules share."""

from __future__ import annotations

from typing import Literal

from torch import nn

from lightning_fedbayes.errors import ConversionError
from lightning_fedbayes.layers import Estimator, Prior, bayesianize

Init = Literal["fresh", "pretrained"]


def hybrid(
    network: nn.Module,
    bayesian_last: int | None,
    estimator: Estimator,
    prior_std: float | None,
    prior: Prior | None,
    init: Init,
    posterior_std: float | None,
) -> nn.Module:
    """``network`` itself if ``bayesian_last`` is None, else what :func:`bayesianize` makes of its last layers.

    Raises:
        ConversionError: arguments of a conversion without a conversion; or see :func:`bayesianize`.
    """
    if bayesian_last is not None:
        return bayesianize(
            network,
            last=bayesian_last,
            estimator=estimator,
            prior_std=prior_std,
            prior=prior,
            init=init,
            posterior_std=posterior_std,
        )
    given = {"prior_std": prior_std, "prior": prior, "posterior_std": posterior_std}
    ignored = [f"{name}={value}" for name, value in given.items() if value is not None]
    ignored += [f"init='{init}'"] if init != "fresh" else []
    if ignored:
        raise ConversionError(
            f"{', '.join(ignored)} without bayesian_last: the network is taken as it is, so they would change nothing. "
            "Give bayesian_last=n, or make the layers Bayesian yourself"
        )
    return network
