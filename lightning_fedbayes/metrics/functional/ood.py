"""Detection of out-of-distribution examples by their uncertainty."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lightning_fedbayes.core.errors import FedBayesError, check_number
from lightning_fedbayes.metrics.functional.utilities import check_not_nan, check_numbers, sum_by_value


def ood_auroc(uncertainty_in: Tensor, uncertainty_out: Tensor) -> Tensor:
    r"""Area under the ROC curve of an uncertainty u as a detector of out-of-distribution examples.

    .. math:: P(u_{out} > u_{in}) + \tfrac12 P(u_{out} = u_{in})

    for one example drawn from each side; ties count half. 1 if every out-of-distribution example is more uncertain than
    every other one, 0.5 if the uncertainty tells nothing. Use it to compare measures of uncertainty: it needs no
    threshold, and neither the scale of u nor the ratio of both numbers of examples changes it. (torchmetrics' binary
    AUROC passes scores outside [0, 1] through a sigmoid, which makes large ones equal.)

    Args:
        uncertainty_in: of in-distribution examples, any unit, shape (examples in,); infinity is allowed.
        uncertainty_out: of out-of-distribution examples, in the same unit, shape (examples out,).

    Returns: a scalar in [0, 1].

    Raises:
        FedBayesError: an argument is no vector, is empty or holds NaN.

    Source: Hanley and McNeil (1982); Hendrycks and Gimpel (2017).

    >>> ood_auroc(torch.tensor([0.1, 0.2]), torch.tensor([0.2, 0.9]))  # 3 pairs of 4, and a tie
    tensor(0.8750)
    """
    _check_sides(uncertainty_in, uncertainty_out)
    is_out = torch.cat([torch.zeros(len(uncertainty_in)), torch.ones(len(uncertainty_out))])
    counts, out = sum_by_value(torch.cat([uncertainty_in, uncertainty_out]), is_out)
    inside = counts - out
    below = inside.cumsum(0) - inside
    return ((out * (below + inside / 2)).sum() / (inside.sum() * out.sum())).float().to(uncertainty_in.device)


def ood_fpr(uncertainty_in: Tensor, uncertainty_out: Tensor, recall: float = 0.95) -> Tensor:
    r"""False-positive rate where the detector finds a share ``recall`` of out-of-distribution examples (FPR95).

    Out-of-distribution is the positive class: an example is called so if its uncertainty is at least a threshold τ.

    .. math:: \frac{1}{N_{in}} \sum_n [u^{in}_n \ge \tau], \qquad
              \tau = \max \Bigl\{t : \frac{1}{N_{out}} \sum_n [u^{out}_n \ge t] \ge \mathrm{recall}\Bigr\}

    All examples with an uncertainty of exactly τ are called out-of-distribution, so ties count against the detector,
    and nothing is interpolated: the value is that of the first point of the ROC curve that reaches ``recall``. Use it
    for the cost of a detector that must not miss much. Papers whose score is a confidence, such as the source, take
    in-distribution as the positive class; their number is another one.

    Args:
        uncertainty_in: of in-distribution examples, any unit, shape (examples in,); infinity is allowed.
        uncertainty_out: of out-of-distribution examples, in the same unit, shape (examples out,).
        recall: share of out-of-distribution examples to be found, above 0 and at most 1.

    Returns: a scalar in [0, 1]; 0 is best.

    Raises:
        FedBayesError: an argument is no vector, is empty or holds NaN; ``recall`` is outside (0, 1].

    Source: Liang, Li and Srikant (2018), with the classes exchanged.

    >>> ood_fpr(torch.tensor([0.1, 0.2, 0.3, 0.4]), torch.tensor([0.3, 0.5]))  # both are found from 0.3
    tensor(0.5000)
    """
    check_number("recall", recall, "(0, 1]", error=FedBayesError, why="it is the share of examples to be found")
    _check_sides(uncertainty_in, uncertainty_out)
    # 0.95 · 100 may be a little more than 95 in floating point, but means 95 examples
    found = max(1, math.ceil(recall * len(uncertainty_out) - 1e-9))
    threshold = uncertainty_out.sort(descending=True).values[found - 1]
    return (uncertainty_in >= threshold).float().mean()


def _check_sides(uncertainty_in: Tensor, uncertainty_out: Tensor) -> None:
    """Raise FedBayesError unless both are vectors of one example or more, without NaN."""
    check_numbers(uncertainty_in=uncertainty_in, uncertainty_out=uncertainty_out)
    for name, side in (("uncertainty_in", uncertainty_in), ("uncertainty_out", uncertainty_out)):
        if side.ndim != 1 or not len(side):
            raise FedBayesError(
                f"{name} has shape {tuple(side.shape)}, but one number for each of at least one example is needed; "
                "flatten it, or give examples of both sides"
            )
    check_not_nan(uncertainty_in=uncertainty_in, uncertainty_out=uncertainty_out)
