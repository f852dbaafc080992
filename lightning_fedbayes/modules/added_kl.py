"""The KL divergence in the loss of a LightningModule that was written without one."""

import copy
import functools
from collections.abc import Mapping
from typing import Any

import lightning as L
from torch import Tensor

from lightning_fedbayes.core.errors import FedBayesError, check_kind, check_number
from lightning_fedbayes.layers import kl_divergence


def with_kl(module: L.LightningModule, kl_weight: float = 1.0) -> L.LightningModule:
    r"""Return a copy of ``module`` that adds the KL divergence of its Bayesian layers to its training loss.

    .. math:: \mathcal L + \frac{\beta}{n}\, KL(q\|p)

    with the loss :math:`\mathcal L` that ``training_step`` returns, a mean over the batch, and n the number of training
    examples, in a federation the present client's. The copy's class is a subclass of the module's class.

    When to use it: after :func:`~lightning_fedbayes.bayesianize` of your module, if you do not want to change its
    ``training_step``. Save the copy's ``state_dict``: its class is made here, and cannot be pickled. For a warm-up or a
    logged KL, write :func:`~lightning_fedbayes.kl_divergence` into your loss.

    Args:
        module: its ``training_step`` returns the loss, or a dict with "loss".
        kl_weight: tempering factor β. 1 is the ELBO, smaller a cold posterior.

    Raises FedBayesError: ``kl_weight`` is negative, or ``module`` adds its KL already. In training, data without a
    length, or a ``training_step`` that returns something else.
    Source: [BA-BFL] eq. (3); [FBDL] eq. (6).

    >>> class Own(L.LightningModule):
    ...     def training_step(self, batch, batch_idx):
    ...         return batch.mean()
    >>> type(with_kl(Own())).__name__
    'OwnWithKL'
    """
    check_kind("module", module, L.LightningModule, "give a LightningModule", error=FedBayesError)
    check_number("kl_weight", kl_weight, "[0, inf)", error=FedBayesError)
    if hasattr(module, "kl_examples"):
        raise FedBayesError(f"{type(module).__name__} has the KL divergence in its loss already")
    kind: Any = type(module)

    class WithKL(kind):
        @functools.wraps(kind.training_step)  # Lightning reads the names of its arguments
        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            return _plus_kl(self, super().training_step(*args, **kwargs))

        def on_train_start(self) -> None:
            dataset: Any = getattr(self.trainer.train_dataloader, "dataset", None)
            self.kl_examples = len(dataset) if hasattr(dataset, "__len__") else None
            super().on_train_start()

        def on_client_start(self, client: Any) -> None:
            self.kl_examples = client.num_examples
            own = getattr(super(), "on_client_start", None)
            if own is not None:
                own(client)

    WithKL.__name__ = WithKL.__qualname__ = f"{kind.__name__}WithKL"
    changed: Any = copy.deepcopy(module)
    changed.__class__ = WithKL
    changed.kl_weight, changed.kl_examples = kl_weight, None
    return changed


def _plus_kl(module: Any, output: Any) -> Any:
    """Add the KL per example to the output of a ``training_step``. None stays None."""
    if output is None:
        return None
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if not isinstance(loss, Tensor):
        what = f"training_step of {type(module).__name__} returns {type(output).__name__} without a loss"
        raise FedBayesError(f'{what} to add the KL divergence to: return the loss, or a dict with "loss"')
    if module.kl_examples is None:
        what = f"{type(module).__name__} does not know the number of training examples that the KL is divided by"
        remedy = "train on a data set with a length, or add fb.kl_divergence(self) / n to the loss yourself"
        raise FedBayesError(f"{what}: {remedy}")
    loss = loss + module.kl_weight / module.kl_examples * kl_divergence(module)
    return {**output, "loss": loss} if isinstance(output, Mapping) else loss
