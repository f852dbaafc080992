"""Training steps, memory and predictions of the Bayesian layers against torch's own layers and bayesian-torch's.

    python -m benchmarks.layers.run [--repeats 15] [--threads 2]

All contestants of a table take turns in one process, a few calls each; a figure is the median over the repeats, a
ratio the median of the repeats' ratios, so that a machine that slows down slows them all. A training step is forward,
KL divergence, backward of mean(y²) + 0.001 KL; the KL is left out of the deterministic layer, which has none.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
import warnings
from collections.abc import Callable, Mapping
from functools import partial

import bayesian_torch
import bayesian_torch.layers as peer
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from benchmarks.networks import lenet, resnet20
from lightning_fedbayes import layers
from lightning_fedbayes.clients.learned import PathPosterior
from lightning_fedbayes.core.tables import markdown_table
from lightning_fedbayes.layers import (
    ESTIMATORS,
    bayesianize,
    kl_divergence,
    mean_only,
    read_posterior,
    with_mc_dropout,
)
from lightning_fedbayes.modules import PosteriorPredictive, mlp, sample_outputs
from lightning_fedbayes.modules.sources.curvature import SWAG, Curvature, KroneckerLaplace, Laplace
from lightning_fedbayes.modules.sources.ivon import IVON

SUFFIX = {
    "reparameterization": "Reparameterization",
    "local_reparameterization": "LocalReparameterization",
    "flipout": "Flipout",
}

Contestants = Mapping[str, Callable[[], object]]


def take_turns(contestants: Contestants, repeats: int, seconds: float = 0.1) -> dict[str, list[float]]:
    """Seconds per call of every contestant, once per repeat; a turn takes about ``seconds``."""
    calls = {}
    for name, run in contestants.items():
        run()
        start = time.perf_counter()
        run()
        calls[name] = max(1, round(seconds / (time.perf_counter() - start)))
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(repeats):
        for name, run in contestants.items():
            start = time.perf_counter()
            for _ in range(calls[name]):
                run()
            times[name].append((time.perf_counter() - start) / calls[name])
    return times


def ratio(times: dict[str, list[float]], slower: str, faster: str) -> str:
    """Return the median ratio of the times of ``slower`` and ``faster``."""
    return f"{statistics.median(a / b for a, b in zip(times[slower], times[faster], strict=True)):.2f}"


def microseconds(times: dict[str, list[float]], name: str) -> str:
    """Median time of a call."""
    return f"{1e6 * statistics.median(times[name]):.0f}"


def training_step(layer: nn.Module, inputs: Tensor) -> Callable[[], None]:
    """Return a function that takes a step: forward, KL and backward of one layer."""

    def step() -> None:
        for parameter in layer.parameters():
            parameter.grad = None
        output = layer(inputs)
        if isinstance(output, tuple):
            output, kl = output
        else:
            kl = layer.kl_loss() if isinstance(layer, layers.BayesianLayer) else 0.0
        (output.square().mean() + 1e-3 * kl).backward()

    return step


def by_hand(x: Tensor, outputs: int, flipout: bool) -> Callable[[], Tensor]:
    """Return a function that takes the step of a linear layer without autograd, in place: what cannot be left out."""
    mean, rho = torch.randn(outputs, x.shape[1]) / 20, torch.full((outputs, x.shape[1]), -3.0)
    noise, std, change, rest, slope = (torch.empty_like(mean) for _ in range(5))
    bias, weight = torch.zeros(outputs), 1e-3

    def step() -> Tensor:
        noise.normal_()
        torch.log1p(torch.exp(rho, out=std), out=std)
        signed, out_signs = x, 1.0
        if flipout:
            in_signs, out_signs = (torch.randint(0, 2, (len(x), n), dtype=x.dtype) * 2 - 1 for n in mean.T.shape)
            signed = x * in_signs
            y = torch.addmm(bias, x, mean.T).addcmul_(signed @ torch.mul(std, noise, out=change).T, out_signs)
        else:
            y = torch.addmm(bias, x, torch.addcmul(mean, std, noise, out=change).T)
        gradient = y * (2 / y.numel())
        kl = (mean.square().sum() + std.square().sum() - mean.numel()) / 2 - torch.log(std, out=rest).sum()
        of_mean = gradient.T @ x
        of_std = (gradient * out_signs).T @ signed if flipout else of_mean.clone()
        of_mean.add_(mean, alpha=weight)
        of_std.mul_(noise).add_(std, alpha=weight).sub_(torch.reciprocal(std, out=rest), alpha=weight)
        of_std.mul_(torch.sigmoid(rho, out=slope))
        return y.square().mean() + weight * kl

    return step


def layer_steps(repeats: int) -> list[list[str]]:
    """Rows of the table of training steps."""
    rows = []
    inputs = torch.randn(32, 784)
    ours = {e: getattr(layers, f"Linear{suffix}")(784, 400) for e, suffix in SUFFIX.items()}
    theirs = {"reparameterization": peer.LinearReparameterization(784, 400), "flipout": peer.LinearFlipout(784, 400)}
    hand = {"reparameterization": by_hand(inputs, 400, False), "flipout": by_hand(inputs, 400, True)}
    rows += contest("linear 784→400, batch 32", nn.Linear(784, 400), ours, theirs, inputs, repeats, hand)
    inputs = torch.randn(32, 16, 16, 16)
    ours = {e: getattr(layers, f"Conv2d{suffix}")(16, 32, 3, padding=1) for e, suffix in SUFFIX.items()}
    theirs = {
        "reparameterization": peer.Conv2dReparameterization(16, 32, 3, padding=1),
        "flipout": peer.Conv2dFlipout(16, 32, 3, padding=1),
    }
    rows += contest("conv 16→32, 3×3, 16×16, batch 32", nn.Conv2d(16, 32, 3, padding=1), ours, theirs, inputs, repeats)
    return rows


def contest(
    what: str,
    plain: nn.Module,
    ours: Mapping[str, nn.Module],
    theirs: Mapping[str, nn.Module],
    inputs: Tensor,
    repeats: int,
    hand: Mapping[str, Callable[[], object]] | None = None,
) -> list[list[str]]:
    """A row per estimator: times, and ratios to the deterministic layer, bayesian-torch's and a step by hand."""
    hand = hand or {}
    contestants = {"deterministic": training_step(plain, inputs)}
    contestants |= {f"ours {name}": training_step(layer, inputs) for name, layer in ours.items()}
    contestants |= {f"theirs {name}": training_step(layer, inputs) for name, layer in theirs.items()}
    contestants |= {f"hand {name}": step for name, step in hand.items()}
    times = take_turns(contestants, repeats)
    rows = []
    for name, layer in ours.items():
        peer_name = name if name in theirs else "reparameterization"  # bayesian-torch has no local reparameterisation
        rows.append(
            [
                what,
                name,
                microseconds(times, "deterministic"),
                microseconds(times, f"ours {name}"),
                microseconds(times, f"theirs {peer_name}"),
                ratio(times, f"ours {name}", "deterministic"),
                ratio(times, f"theirs {peer_name}", f"ours {name}"),
                ratio(times, f"ours {name}", f"hand {name}") if name in hand else "",
                f"{size(layer) / size(theirs[peer_name]):.2f}",
            ]
        )
    return rows


def size(layer: nn.Module) -> int:
    """Bytes of parameters and buffers."""
    return sum(tensor.nbytes for tensor in (*layer.parameters(), *layer.buffers()))


@torch.no_grad()
def predictions(samples: int, repeats: int) -> list[list[str]]:
    """Rows of the table of predictions: a LeNet whose last layers are Bayesian, 128 images."""
    rows = []
    inputs = torch.randn(128, 1, 28, 28)
    for last in (1, 2, 3):
        plain = lenet().eval()
        network = bayesianize(plain, last=last)
        assert isinstance(network, nn.Sequential)
        start = next(i for i, layer in enumerate(network) if isinstance(layer, layers.BayesianLayer))
        head, tail = network[:start], network[start:]
        hidden = head(inputs)

        def all_samples(network: nn.Module = network) -> Tensor:
            return sample_outputs(network, inputs, samples)

        def parts(head: nn.Module = head, tail: nn.Module = tail, hidden: Tensor = hidden) -> None:
            head(inputs)
            for _ in range(samples):
                tail(hidden)

        def mean(network: nn.Module = network) -> Tensor:
            with mean_only(network):
                return network(inputs)

        def naive(network: nn.Module = network) -> None:
            for _ in range(samples):
                network(inputs)

        times = take_turns(
            {
                "samples": all_samples,
                "parts": parts,
                "naive": naive,
                "mean": mean,
                "plain": lambda plain=plain: plain(inputs),
            },
            repeats,
        )
        rows.append(
            [
                str(last),
                microseconds(times, "samples"),
                ratio(times, "samples", "parts"),
                ratio(times, "samples", "naive"),
                microseconds(times, "mean"),
                ratio(times, "mean", "plain"),
            ]
        )
    return rows


def optimizer_steps(repeats: int) -> list[list[str]]:
    """Rows of the table of whole steps of deterministic networks, under Adam and under IVON."""
    rows = []
    for what, network, inputs in (
        ("LeNet, 32 of 28×28", lenet(), torch.randn(32, 1, 28, 28)),
        ("LeNet, 64 of 28×28", lenet(), torch.randn(64, 1, 28, 28)),
        ("ResNet-20, 32 of 32×32×3", resnet20(3, 10), torch.randn(32, 3, 32, 32)),
    ):
        labels, networks = torch.arange(len(inputs)) % 10, [network, copy.deepcopy(network)]
        adam, ivon = torch.optim.Adam(networks[0].parameters()), IVON(networks[1].parameters(), 1e-3, num_examples=1000)

        def step(
            network: nn.Module, optimizer: torch.optim.Optimizer, inputs: Tensor = inputs, labels: Tensor = labels
        ) -> None:
            def closure() -> Tensor:
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(network(inputs), labels)
                loss.backward()
                return loss

            optimizer.step(closure)  # pyright: ignore

        turns = {"Adam": partial(step, networks[0], adam), "IVON": partial(step, networks[1], ivon)}
        times = take_turns(turns, repeats)
        rows.append([what, microseconds(times, "Adam"), microseconds(times, "IVON"), ratio(times, "IVON", "Adam")])
    return rows


def posterior_sources(samples: int, repeats: int) -> list[list[str]]:
    """Rows of the table of where a posterior can come from: a LeNet, batches of 32 images, 128 images to predict."""
    inputs, labels, many = torch.randn(32, 1, 28, 28), torch.arange(32) % 10, torch.randn(128, 1, 28, 28)
    plain, members = lenet(), 5
    size = sum(p.nbytes for p in plain.parameters())

    def step(network: nn.Module, make: Callable[..., torch.optim.Optimizer] = torch.optim.Adam) -> Callable[[], None]:
        optimizer = make(network.parameters(), lr=1e-3)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(network(inputs), labels) + 1e-3 * kl_divergence(network)
            loss.backward()
            return loss

        return lambda: optimizer.step(closure)  # pyright: ignore

    def path(network: nn.Module) -> Callable[[], None]:
        optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)
        along = PathPosterior(SWAG(start=0.0), network, [optimizer])

        def one() -> None:
            optimizer.zero_grad()
            nn.functional.cross_entropy(network(inputs), labels).backward()
            optimizer.step()
            along.observe(optimizer, [1.0])

        return one

    def passes(curvature: Curvature) -> Callable[[], object]:
        source = Laplace(curvature=curvature)
        return lambda: source.posterior(plain, [(inputs, labels)])

    laplace, factors = Laplace().posterior(plain, [(inputs, labels)]), KroneckerLaplace()
    one_shot = factors.fuse([factors.site(plain, [(inputs, labels)])])
    layered = {"layers, the last three": bayesianize(lenet(), last=3), "layers, all": bayesianize(lenet(), last=5)}
    dropout, ivon = with_mc_dropout(lenet()), partial(IVON, num_examples=1000)
    drawn = PosteriorPredictive(plain, laplace, samples=samples, predictive="draws")
    linearised, by_factors = PosteriorPredictive(plain, laplace), PosteriorPredictive(plain, one_shot)
    steps = {
        "Adam alone": step(copy.deepcopy(plain)),
        **{name: step(each) for name, each in layered.items()},
        "IVON": step(copy.deepcopy(plain), ivon),
        "SWAG": path(copy.deepcopy(plain)),
        "dropout": step(dropout),
        "pass of ggn": passes("ggn"),
        "pass of empirical": passes("empirical"),
        "pass of K-FAC": lambda: factors.site(plain, [(inputs, labels)]),
    }
    predictions = {
        "Adam alone": lambda: plain(many),
        "draws": lambda: drawn.sample(many),
        "linearised": lambda: linearised.sample(many),
        "Kronecker": lambda: by_factors.sample(many),
        **{name: partial(sample_outputs, each.eval(), many, samples) for name, each in layered.items()},
        "dropout": partial(sample_outputs, dropout.eval(), many, samples),
        "ensemble": lambda: [plain(many) for _ in range(members)],
    }
    with torch.enable_grad():
        trained = take_turns(steps, repeats)
    with torch.no_grad():
        predicted = take_turns(predictions, repeats)
    rows = []
    for name, predictor, network in (
        *((name, name, network) for name, network in layered.items()),
        ("IVON", "draws", None),
        ("pass of ggn", "linearised", None),
        ("pass of empirical", "linearised", None),
        ("pass of K-FAC", "Kronecker", None),
        ("SWAG", "draws", None),
        ("dropout", "dropout", dropout),
        ("ensemble", "ensemble", None),
    ):
        sent = 2 * size if network is None else read_posterior(network).num_bytes
        if name == "ensemble":
            name, cost, sent = f"ensemble of {members}", str(members), members * size
        else:
            cost = ratio(trained, name, "Adam alone")
        rows.append(
            [
                name,
                f"1 + {cost} / local epochs" if name.startswith("pass") else cost,
                ratio(predicted, predictor, "Adam alone"),
                f"{sent / size:.2f}",
            ]
        )
    return rows


class Objective(nn.Module):
    """Squared error plus KL of a network, as one module for ``functional_call``."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, inputs: Tensor, targets: Tensor, with_kl: bool) -> Tensor:
        loss = (self.network(inputs) - targets).square().mean()
        return loss + 1e-3 * kl_divergence(self.network) if with_kl else loss


def stacked_networks(clients: int, repeats: int) -> list[list[str]]:
    """Rows of the table of many small networks trained at once, under vmap and one by one."""
    rows = []
    inputs, targets = torch.randn(clients, 16, 13), torch.randn(clients, 16, 1)
    for estimator in ESTIMATORS:
        objective = Objective(bayesianize(mlp(13, 1), last=2, estimator=estimator))
        stack = {
            name: parameter.detach().expand(clients, *parameter.shape).clone().requires_grad_()
            for name, parameter in objective.named_parameters()
        }
        alone = copy.deepcopy(objective)

        def together(with_kl: bool, objective: nn.Module = objective, stack: dict[str, Tensor] = stack) -> None:
            for parameter in stack.values():
                parameter.grad = None
            one = lambda p, x, y: functional_call(objective, p, (x, y, with_kl))  # noqa: E731
            vmap(one, randomness="different")(stack, inputs, targets).sum().backward()

        def in_turn(alone: nn.Module = alone) -> None:
            for x, y in zip(inputs, targets):
                for parameter in alone.parameters():
                    parameter.grad = None
                alone(x, y, True).backward()

        times = take_turns(
            {"with": lambda: together(True), "without": lambda: together(False), "turn": in_turn}, repeats
        )
        rows.append(
            [
                str(clients),
                estimator,
                microseconds(times, "with"),
                ratio(times, "with", "without"),
                ratio(times, "turn", "with"),
            ]
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(arguments.threads)
    repeats = arguments.repeats

    print(
        f"torch {torch.__version__}, bayesian-torch {getattr(bayesian_torch, '__version__', '0.5.0')}, "
        f"{torch.get_num_threads()} threads, medians of {repeats}\n"
    )
    print(
        markdown_table(
            (
                "training step",
                "estimator",
                "deterministic, µs",
                "ours, µs",
                "bayesian-torch, µs",
                "ours / deterministic",
                "bayesian-torch / ours",
                "ours / by hand",
                "memory, ours / bayesian-torch",
            ),
            layer_steps(repeats),
        )
    )
    print()
    print(
        markdown_table(
            (
                "Bayesian layers of LeNet",
                "100 samples, µs",
                "/ (beginning once + 100 × the rest)",
                "/ 100 passes",
                "mean_only, µs",
                "mean_only / deterministic",
            ),
            predictions(100, repeats),
        )
    )
    print()
    print(
        markdown_table(("forward, backward and step", "Adam, µs", "IVON, µs", "IVON / Adam"), optimizer_steps(repeats))
    )
    print()
    print(
        markdown_table(
            ("posterior of a LeNet", "training / Adam's", "20 draws / one prediction", "bytes / FedAvg's"),
            posterior_sources(20, repeats),
        )
    )
    print()
    print(
        markdown_table(
            ("networks 13-50-1 at once", "estimator", "step, µs", "step with KL / without", "one by one / at once"),
            [*stacked_networks(10, repeats), *stacked_networks(100, repeats)],
        )
    )


if __name__ == "__main__":
    main()
