"""Our side of a comparison with other authors' code: a federation on a split that their code has dealt.

    python -m benchmarks.posterior.peers SPLIT.npz --rule sites --rounds 10 --local-epochs 10 --batch 32

SPLIT.npz holds ``inputs`` (n, features) and ``labels`` (n,) of the training examples, ``client`` (n,), the number of
the client that has each, and ``test_inputs`` and ``test_labels``. ``--validate`` scores a fifth of each client's
training examples, held out, in place of the test examples: settings are chosen there. The result is a line of JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from itertools import pairwise

import lightning as L
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_fedbayes as fb
from benchmarks.posterior.images import STD, scores

SAMPLES = 32
HIDDEN = (200, 100)


def network(features: int, classes: int) -> nn.Sequential:
    """Return a fully connected network with sigmoids."""
    widths = (features, *HIDDEN)
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), nn.Sigmoid()]
    return nn.Sequential(*layers, nn.Linear(widths[-1], classes))


def load(file: str, validate: bool) -> tuple[dict[str, TensorDataset], TensorDataset]:
    """Return each client's training examples, and the examples to score. Inputs are scaled to at most 1."""
    arrays = np.load(file)
    scale = arrays["inputs"].max()
    inputs, labels, client = (torch.from_numpy(arrays[name]) for name in ("inputs", "labels", "client"))
    inputs, order = inputs / scale, torch.from_numpy(np.random.default_rng(0).permutation(len(labels)))
    kept, left_out = {}, []
    for number in client.unique().tolist():
        own = order[client[order] == number]
        count = len(own) // 5 if validate else 0
        left_out.append(own[:count])
        kept[str(number)] = TensorDataset(*(each[own[count:].sort().values] for each in (inputs, labels)))
    if validate:
        return kept, TensorDataset(*(each[torch.cat(left_out)] for each in (inputs, labels)))
    test = torch.from_numpy(arrays["test_inputs"] / scale), torch.from_numpy(arrays["test_labels"])
    return kept, TensorDataset(*test)


def run(options: argparse.Namespace) -> dict[str, float]:
    """Train a federation on the split and score its global posterior."""
    clients, test = load(options.split, options.validate)
    features = next(iter(clients.values())).tensors[0].shape[1]
    L.seed_everything(options.seed, verbose=False)
    module = fb.HybridBayesianClassifier(
        network(features, 10),
        bayesian_last=len(HIDDEN) + 1,
        posterior_std=STD,
        learning_rate=options.rate,
        samples=SAMPLES,
        kl_weight=options.kl_weight,
    )
    federation = fb.FederatedBayes(local_epochs=options.local_epochs, fusion=options.rule, seed=options.seed)
    trainer = L.Trainer(
        max_epochs=options.rounds,
        accelerator="cpu",
        logger=False,
        callbacks=[federation],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    start = time.perf_counter()
    trainer.fit(module, DataLoader(fb.ClientDatasets(clients), batch_size=options.batch, shuffle=True))
    seconds = time.perf_counter() - start
    return {**scores(module.eval(), test), "seconds": seconds}


def main() -> None:
    """Print the options and the scores."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("split", metavar="SPLIT.npz")
    parser.add_argument("--rule", default="sites")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--local-epochs", type=int, default=10)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rate", type=float, default=0.01)
    parser.add_argument("--kl-weight", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--validate", action="store_true")
    options = parser.parse_args()
    print(json.dumps({**vars(options), **run(options)}))


if __name__ == "__main__":
    main()
