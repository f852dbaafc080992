"""The model that a federation over a network starts from."""

from __future__ import annotations

from collections.abc import Sequence

import lightning as L
import torch
from torch import Tensor

from lightning_fedbayes.clients.learned import learned_posterior
from lightning_fedbayes.clients.model import ResidentModel, frozen_names
from lightning_fedbayes.clients.settings import BufferPolicy, FederationSettings, Source
from lightning_fedbayes.core.errors import check_kind
from lightning_fedbayes.layers.scaler import scale_of
from lightning_fedbayes.trainer import optimizers_of
from lightning_fedbayes.transport.messages import tensors_of


def initial_model(
    module: L.LightningModule,
    *,
    buffers: BufferPolicy = "average",
    local_parameters: Sequence[str] = (),
    posterior: Source | None = None,
) -> dict[str, Tensor]:
    """Return what a federation starts from: posterior and buffers of ``module``, of what is frozen a digest.

    For the arguments see :func:`~lightning_fedbayes.flower.initial_arrays`.
    """
    check_kind("module", module, L.LightningModule, "give a LightningModule")
    FederationSettings(buffers=buffers, local_parameters=local_parameters, posterior=posterior)  # for its checks
    learned = learned_posterior(optimizers_of(module), module, posterior)
    model = ResidentModel(module, local_parameters, buffers, learned, frozen=frozen_names(module))
    frozen = model.digest()
    tensors = tensors_of(model.read_posterior(), {**model.federated_buffers, **scale_of(module)})
    return tensors | ({f"frozen/{frozen}": torch.ones(1)} if frozen else {})
