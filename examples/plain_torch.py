"""Five clients train a plain PyTorch network on handwritten digits; ``fb.Server`` fuses. No Trainer, no Lightning.

Run it with ``python examples/plain_torch.py``. Prints the accuracy of the global network on held-out digits by round.
"""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import lightning_fedbayes as fb

CLIENTS, ROUNDS, LOCAL_EPOCHS = 5, 10, 2


def train(network: nn.Module, x: Tensor, y: Tensor) -> None:
    """Train on one client's data, in place: any loop, any loss, any optimizer."""
    optimizer = torch.optim.SGD(network.parameters(), lr=0.3)
    for _ in range(LOCAL_EPOCHS):
        for batch in torch.randperm(len(y)).split(32):
            optimizer.zero_grad()
            nn.functional.cross_entropy(network(x[batch]), y[batch]).backward()
            optimizer.step()


def main() -> list[float]:
    """Run the federation and return the accuracy after each round."""
    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images / 16).float(), torch.tensor(labels)
    held_out, *clients = torch.randperm(len(y)).chunk(1 + CLIENTS)
    network = nn.Sequential(nn.Linear(64, 50), nn.ReLU(), nn.Linear(50, 10))
    quorum = fb.Safeguards(min_clients=3)
    server = fb.Server(fb.read_posterior(network).clone(), fusion="weighted_average", safeguards=quorum)
    accuracies = []
    for round in range(ROUNDS):
        server.begin(fb.RoundPlan(round, cohort=tuple(range(CLIENTS))))
        for number, own in enumerate(clients):
            fb.load_posterior(network, server.posterior)  # every client starts from the global posterior
            train(network, x[own], y[own])
            server.admit(fb.ClientUpdate(number, len(own), fb.read_posterior(network)))
        result = server.finish()
        fb.load_posterior(network, result.posterior)
        accuracies.append((network(x[held_out]).argmax(1) == y[held_out]).float().mean().item())
        print(f"round {round + 1}: accuracy {accuracies[-1]:.3f}, {result.figures['valid_clients']:.0f} clients")
    return accuracies


if __name__ == "__main__":
    main()
