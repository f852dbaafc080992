"""Six shops read what customers write: adapters of a pretrained transformer travel, in place of the whole network.

    python examples/gallery/text.py [--output DIR]

Reviews made on the spot. A transformer is pretrained here on public reviews of one opinion (a good, "is" or "is not",
an adjective). Shops have goods of their own, and few or many content customers; they learn from three opinions who is
content. Rates were chosen on reviews of another seed. Look at each shop's NLL, and at the accuracy (opinions are mixed:
0.90 is the best without a look at the shop), beside what a shop sends in a round.
"""

import argparse
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn.functional import silu
from torch.utils.data import DataLoader, TensorDataset

import lightning_fedbayes as fb
from lightning_fedbayes.core import plots
from lightning_fedbayes.core.quiet import quietly
from lightning_fedbayes.core.tables import markdown_table


def reviews(number: int, content: float, goods: tuple[int, int], opinions: int = 3) -> TensorDataset:
    """Return words (0 to 29 goods, 30 to 39 praise, 40 to 49 blame, 50 "is", 51 "is not"), and who is content."""
    target = (torch.rand(number) < content).long()
    praise, negated = torch.rand(number, opinions) < 0.2 + 0.6 * target[:, None], torch.rand(number, opinions) < 0.3
    adjectives = torch.where(praise ^ negated, 30, 40) + torch.randint(10, praise.shape)
    words = torch.stack([torch.randint(*goods, praise.shape), 50 + negated.long(), adjectives], 2)
    return TensorDataset(words.flatten(1), target)


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 64, 0.0, silu, batch_first=True)  # ReLU's shortcut skips LoRA
        self.embed, self.encoder = nn.Embedding(52, 32), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.place, self.head = nn.Parameter(0.1 * torch.randn(9, 32)), nn.Linear(32, 2)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(words) + self.place[: words.shape[1]]).mean(1))


class LowRank(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.reduce = base, nn.Linear(base.in_features, 4, bias=False).requires_grad_(False)
        self.expand = nn.Parameter(torch.zeros(4, base.out_features))

    def forward(self, states: Tensor) -> Tensor:
        return self.base(states) + self.reduce(states) @ self.expand


def main(output: Path, rounds: int = 15) -> dict[str, float]:
    L.seed_everything(0, verbose=False)
    shops = {f"shop {k}": (0.1 + 0.16 * k, (5 * k, 5 * k + 5)) for k in range(6)}
    known, new = (fb.ClientDatasets({name: reviews(size, *of) for name, of in shops.items()}) for size in (60, 500))
    public, adam = fb.HybridBayesianClassifier(Reader(), 0, learning_rate=0.003), torch.optim.Adam
    L.Trainer(max_epochs=1, barebones=True).fit(public, DataLoader(reviews(20_000, 0.5, (0, 30), opinions=1), 64))
    rows, axes = [], (figure := plots.empty_figure(6, 4.5)).subplots()
    for name, fusion, optimizer in (
        ("whole network, FedAvg", "weighted_average", partial(adam, lr=0.001)),
        ("adapters, FedAvg", "weighted_average", partial(adam, lr=0.01)),
        ("adapters, IVON + sites", "sites", partial(fb.IVON, lr=0.1, temperature=0.1)),
    ):
        network: Any = deepcopy(public.network)
        if "adapters" in name:
            network.requires_grad_(False).head.requires_grad_(True)
            for layer in network.encoder.layers:
                layer.linear1, layer.linear2 = LowRank(layer.linear1), LowRank(layer.linear2)
        model = fb.HybridBayesianClassifier(network, 0, optimizer=optimizer)
        federation = fb.FederatedBayes(fusion=fusion, local_epochs=2)
        loader = DataLoader(known, batch_size=20, shuffle=True)
        L.Trainer(max_epochs=rounds, callbacks=[federation], barebones=True).fit(model, loader)
        scores = fb.evaluate_clients(fb.PosteriorPredictive(model, federation.posterior, samples=20), new)
        kilobytes = 1000 * federation.history[-1]["megabytes_up"] / 6
        rows.append([name, scores.mean("accuracy"), scores.mean("nll"), scores.worst("nll"), kilobytes])
        axes.plot(list(shops), scores.values["nll"], "o-", label=f"{name}: {kilobytes:.1f} kB")
    print(markdown_table(["", "accuracy", "NLL", "NLL of the worst shop", "kB of a shop and round"], rows))
    axes.set(xlabel="from 10 % to 90 % content customers", ylabel="NLL (nats)")
    axes.legend(frameon=False)
    output.mkdir(parents=True, exist_ok=True)
    figure.savefig(output / "text.png")
    return {"whole": rows[0][4], "adapters": rows[2][4], "accuracy": rows[2][1]}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("outputs/gallery/text"))
    with quietly():
        main(parser.parse_args().output)
