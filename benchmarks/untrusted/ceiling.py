"""Ceiling of logistic regression: its optimum on all training images at once, by strength of an L2 penalty.

    python -m benchmarks.untrusted.ceiling --data DIR [--out FOLDER]

DIR holds the folders mnist and fashion_mnist. There is no federation: one party has all 60,000 images, and L-BFGS
minimises the convex loss, mean cross-entropy + λ/2 ‖weights‖². The best test accuracy over the penalties is an
optimistic estimate, since it is chosen on the test images, of the accuracy that a fusion of logistic regressions can
reach.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn
from tqdm import tqdm

from benchmarks.untrusted.federation import Examples, accuracy, cross_entropy
from benchmarks.untrusted.images import DATASETS, FEATURES, examples
from benchmarks.untrusted.one_round import logistic_regression
from benchmarks.untrusted.report import options, write
from lightning_fedbayes.core.tables import markdown_table

PENALTIES = (1e-2, 1e-3, 1e-4, 1e-5, 0.0)
ITERATIONS = 300


def to_the_optimum(network: nn.Linear, examples: Examples, penalty: float) -> None:
    """Minimise the penalised loss, starting from the present parameters."""
    inputs, targets = examples
    optimizer = torch.optim.LBFGS(
        network.parameters(),
        max_iter=ITERATIONS,
        history_size=20,
        tolerance_change=1e-9,
        line_search_fn="strong_wolfe",
    )

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = cross_entropy(network(inputs), targets) + penalty / 2 * network.weight.square().sum()
        value.backward()
        return value

    optimizer.step(loss)  # pyright: ignore[reportArgumentType]


def main() -> None:
    arguments = options(__doc__, data=True, seeds=None).parse_args()
    torch.set_num_threads(1)
    rows = []
    for (name, title), features in tqdm(list(itertools.product(DATASETS.items(), FEATURES))):
        train, test = examples(arguments.data / name, features)
        network, scores = logistic_regression(test[0].shape[1]), []
        for penalty in PENALTIES:  # each from the optimum before, which is near
            to_the_optimum(network, train, penalty)
            with torch.no_grad():
                scores.append([float(accuracy(network(inputs), targets)) for inputs, targets in (test, train)])
        rows.append([title, FEATURES[features], *(f"{on_test:.4f} ({on_train:.4f})" for on_test, on_train in scores)])
    settings = (
        f"Accuracy on the 10,000 test images (and on the 60,000 training images) of logistic regression, at most "
        f"{ITERATIONS} iterations of L-BFGS per λ, from 0 and then from the optimum of the λ before."
    )
    heads = ["data", "of an image", *(f"λ = {penalty:g}" for penalty in PENALTIES)]
    write(arguments.out, "ceiling", settings, [markdown_table(heads, rows)], over_seeds=False)


if __name__ == "__main__":
    main()
