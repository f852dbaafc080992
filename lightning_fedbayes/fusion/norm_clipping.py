"""Clipping of the updates' norms before another rule."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor

from lightning_fedbayes.errors import FusionError
from lightning_fedbayes.fusion.gram import Gram
from lightning_fedbayes.fusion.preaggregation import Preaggregation
from lightning_fedbayes.fusion.registry import register_fusion
from lightning_fedbayes.fusion.rule import FusionRule


@register_fusion("norm_clipping")
class NormClipping(Preaggregation):
    r"""Updates longer than a radius are shortened to it; then a rule fuses.

    .. math:: \mu_k' = \mu_o + \min\Bigl(1, \frac{r}{\|\mu_k - \mu_o\|}\Bigr) (\mu_k - \mu_o), \qquad
              {\sigma_k'}^2 = \sigma_k^2

    with :math:`\mu_o` the mean of the previous global posterior and the norm over all parameters.

    When to use it: no client shall move the global posterior further than the others do, at almost no loss when all
    are honest: scaled updates, as of a model replacement. It does not turn a wrong direction; for that let a robust
    rule follow. Variances are left as they are.

    Args:
        then: the rule that fuses: a name, an alias or a rule object.
        radius: r, in units of the parameters. None: the median of the norms, so that half of the clients are clipped
            and fewer than half of them cannot raise it beyond the norms of honest clients.

    Raises:
        FusionError: no previous posterior, a radius that is not positive, or no rule of the name ``then``.

    Source: Sun, Kairouz, Suresh and McMahan 2019, "Can you really backdoor federated learning?", §3. The radius from
    the median is ours.
    """

    needs_previous: ClassVar[bool] = True

    def __init__(self, then: str | FusionRule = "weighted_average", radius: float | None = None) -> None:
        super().__init__(then)
        if radius is not None and not (radius > 0 and math.isfinite(radius)):
            raise FusionError(
                f"norm_clipping: radius must be positive and finite, got {radius}; None takes the median of the norms"
            )
        self.radius = radius

    def mix(self, gram: Gram) -> tuple[Tensor, Tensor]:
        """See :meth:`Preaggregation.mix`."""
        squares = gram.products.diagonal()
        norms = (squares[:-1] + squares[-1] - 2 * gram.products[:-1, -1]).clamp_min(0).sqrt()
        radius = norms.quantile(0.5) if self.radius is None else self.radius
        kept = torch.where(norms > radius, radius / norms, 1.0)
        return torch.cat([kept.diag(), 1 - kept[:, None]], 1), torch.eye(len(kept), dtype=kept.dtype)
