"""Worker: FedAvg written by hand in plain PyTorch, once as fast as possible and once as most people write it.

``foreach=True`` and ``fused=True`` of torch's SGD make none of these networks faster on the CPU, so it is used plainly.
Mean-field networks are made of bayesian-torch's layers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from importlib.metadata import version

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.speed import workloads
from benchmarks.speed.gate import Gate, start
from benchmarks.speed.settings import WORKLOADS, Order, Workload


def mean_field(workload: Workload) -> nn.Module:
    """The workload's network with bayesian-torch's layers, which return their output and their KL."""
    from bayesian_torch.layers import LinearReparameterization

    class MeanField(nn.Module):
        def __init__(self, features: int, hidden: int, outputs: int) -> None:
            super().__init__()
            self.first = LinearReparameterization(features, hidden)
            self.last = LinearReparameterization(hidden, outputs)

        def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
            hidden, kl_first = self.first(inputs)
            outputs, kl_last = self.last(hidden.relu())
            return outputs, kl_first + kl_last

    network = MeanField(*workload.widths)
    workloads.set_means(network, workloads.network(workload).parameters())
    return network


def train(network: nn.Module, workload: Workload, batches: Iterable[workloads.Examples]) -> None:
    """Train a client: one pass over its ``batches`` with a new SGD."""
    optimizer = torch.optim.SGD(network.parameters(), lr=workload.rate)
    kl_factor = workloads.KL_WEIGHT / workload.examples
    for inputs, targets in batches:
        if workload.bayesian:
            outputs, kl = network(inputs)
            loss = workloads.loss(outputs, targets) + kl_factor * kl
        else:
            loss = workloads.loss(network(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def fast_round(network: nn.Module, workload: Workload, clients: list[workloads.Examples]) -> Callable[[], None]:
    """Return a round with one reused client network, sliced tensors, and a running sum of the parameters."""
    client = copy.deepcopy(network)
    pairs = list(zip(network.parameters(), client.parameters(), strict=True))

    def run() -> None:
        sums = [torch.zeros_like(parameter) for parameter, _ in pairs]
        for inputs, targets in clients:
            with torch.no_grad():
                for parameter, own in pairs:
                    own.copy_(parameter)
            train(client, workload, workloads.batches(inputs, targets, workload.batch))
            with torch.no_grad():
                for total, (_, own) in zip(sums, pairs, strict=True):
                    total.add_(own, alpha=1 / workload.clients)
        with torch.no_grad():
            for total, (parameter, _) in zip(sums, pairs, strict=True):
                parameter.copy_(total)

    return run


def usual_round(network: nn.Module, workload: Workload, clients: list[workloads.Examples]) -> Callable[[], None]:
    """Return a round with a copy of the network and a DataLoader per client, and a mean over all copies."""
    device = next(network.parameters()).device
    loaders = [DataLoader(TensorDataset(*each), workload.batch, shuffle=True) for each in clients]

    def run() -> None:
        states = []
        for loader in loaders:
            client = copy.deepcopy(network)
            train(client, workload, ((inputs.to(device), targets.to(device)) for inputs, targets in loader))
            states.append(client.state_dict())
        network.load_state_dict({name: torch.stack([s[name] for s in states]).mean(0) for name in states[0]})

    return run


def main(order: Order) -> None:
    """Run rounds until the gate returns False."""
    workload = WORKLOADS[order.workload]
    network = (mean_field(workload) if workload.bayesian else workloads.network(workload)).to(order.device)
    clients = workloads.client_data(order.workload, order.data)
    if order.side == "loop":
        run = fast_round(network, workload, [(x.to(order.device), y.to(order.device)) for x, y in clients])
    else:
        run = usual_round(network, workload, clients)
    gate = Gate(order, {"bayesian-torch": version("bayesian-torch")} if workload.bayesian else {})
    while gate(lambda: workloads.means(network)):
        run()


if __name__ == "__main__":
    main(start())
