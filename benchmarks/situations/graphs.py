"""Graphs of PyTorch Geometric."""

# pyright: reportMissingImports=false
from __future__ import annotations

from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from benchmarks.situations.situation import ALONE, Group, mapped
from tests.federations import CLASSES
from tests.zoo.case import Net

asked = Group("PyTorch Geometric", "torch_geometric")
PYG = "https://github.com/pyg-team/pytorch_geometric"


def ring(x: Tensor, y: Tensor) -> Any:
    """A graph of three to six nodes."""
    from torch_geometric.data import Data

    nodes = 3 + int(x.abs().sum() * 7) % 4
    after = (torch.arange(nodes) + 1) % nodes
    edges = torch.stack([torch.cat([torch.arange(nodes), after]), torch.cat([after, torch.arange(nodes)])])
    return Data(x=torch.stack([x[:nodes], x.roll(1)[:nodes]], 1), edge_index=edges, y=y.view(1))


def shop(x: Tensor, y: Tensor) -> Any:
    """A graph with nodes of two kinds."""
    from torch_geometric.data import HeteroData

    made, people = HeteroData(), 2 + int(x.abs().sum() * 7) % 2
    made["person"].x, made["item"].x = x.view(-1, 2)[:people], x.view(-1, 3)
    made["person", "buys", "item"].edge_index = torch.tensor([[0, 1, people - 1], [0, 1, 0]])
    made["item", "of", "person"].edge_index = torch.tensor([[0, 1, 0], [0, 1, people - 1]])
    made.y = y.view(1)
    return made


def graph_loader(loader: DataLoader) -> Any:
    from torch_geometric.loader import DataLoader as Loader

    return Loader(loader.dataset, batch_size=4, generator=loader.generator)


class Convolutions(nn.Module):
    """Two graph convolutions and a mean over the nodes of each graph."""

    def __init__(self) -> None:
        from torch_geometric.nn import GCNConv, GraphNorm

        super().__init__()
        self.first, self.norm, self.second = GCNConv(2, 8), GraphNorm(8), GCNConv(8, 8)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, graph: Any) -> Tensor:
        from torch_geometric.nn import global_mean_pool

        x = self.norm(self.first(graph.x, graph.edge_index), graph.batch).relu()
        return self.head(global_mean_pool(self.second(x, graph.edge_index).relu(), graph.batch))


class Classifier(Net):
    """Logs with the number of graphs as the batch's size."""

    def training_step(self, batch, batch_idx):
        loss = nn.functional.cross_entropy(self(batch), batch.y)
        self.log("train_loss", loss, batch_size=batch.num_graphs, on_epoch=True)
        return loss


@asked(
    "graphs in batches, logs by the number of graphs",
    f"{PYG}/issues/9829",
    "classify graphs; the size of a batch is none of its tensors'",
    dataset=mapped(ring),
    given=graph_loader,
    why="batches hold more than tensors (DataBatch)",
    tolerance=1e-4,
    **ALONE,
)
def graphs():
    return Classifier(Convolutions())


class Convolution(nn.Module):
    """One convolution, of as many features as there are."""

    def __init__(self) -> None:
        from torch_geometric.nn import GraphConv

        super().__init__()
        self.layer = GraphConv((-1, -1), 8)

    def forward(self, x, edge_index):
        return self.layer(x, edge_index).relu()


@asked(
    "graphs with nodes of several kinds",
    f"{PYG}/pull/3098",
    "convert a network by to_hetero, and train with HeteroData",
    dataset=mapped(shop),
    given=graph_loader,
    why="batches hold more than tensors (HeteroDataBatch)",
    tolerance=1e-4,
    **ALONE,
)
class Kinds(Net):
    def __init__(self) -> None:
        from torch_geometric.nn import to_hetero

        kinds = ["person", "item"], [("person", "buys", "item"), ("item", "of", "person")]
        super().__init__(to_hetero(Convolution(), kinds))
        one = shop(torch.arange(6.0), torch.tensor(0))
        with torch.no_grad():
            self.net(one.x_dict, one.edge_index_dict)
        self.head = nn.Linear(16, CLASSES)

    def training_step(self, batch, batch_idx):
        from torch_geometric.nn import global_add_pool

        found = self.net(batch.x_dict, batch.edge_index_dict)
        pooled = [global_add_pool(found[kind], batch[kind].batch) for kind in ("person", "item")]
        return nn.functional.cross_entropy(self.head(torch.cat(pooled, 1)), batch.y)


@asked(
    "attention with dropout, then TopKPooling",
    f"{PYG}/issues/1738",
    "keep the best nodes of each graph",
    dataset=mapped(ring),
    given=graph_loader,
    why="batches hold more than tensors (DataBatch)",
    tolerance=1e-4,
    **ALONE,
)
class Pooled(Classifier):
    def __init__(self) -> None:
        from torch_geometric.nn import GATConv, TopKPooling

        super().__init__(GATConv(2, 4, heads=2, dropout=0.2))
        self.pool, self.head = TopKPooling(8, ratio=0.5), nn.Linear(8, CLASSES)

    def forward(self, x: Any) -> Tensor:
        from torch_geometric.nn import global_mean_pool

        found = self.net(x.x, x.edge_index).relu()
        found, _, _, batch, *_ = self.pool(found, x.edge_index, None, x.batch)
        return self.head(global_mean_pool(found, batch, len(x.y)))


def lightning_dataset(loader: DataLoader) -> L.LightningDataModule:
    from torch_geometric.data.lightning import LightningDataset

    return LightningDataset(loader.dataset, batch_size=4)


asked(
    "LightningDataset",
    f"{PYG}/pull/3634",
    "take PyG's own data module, which shuffles",
    dataset=mapped(ring),
    given=lightning_dataset,
    data_noise=True,
    why="batches hold more than tensors (DataBatch)",
    **ALONE,
)(graphs)
