"""Models of other packages, unchanged, federate with IVON: ``pip install --group models`` first."""

import lightning as L
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, default_collate

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
    options = {"img_size": 32} if name.startswith("vit") else {}
    data = images()
    predictive = federated(Own(timm.create_model(name, num_classes=3, **options)), data)
    assert predictive.predict_step(data.tensors[0]).probs.shape == (8, 3)


class Words(Own):
    """A user's module around a transformer: batches are the dicts of its tokenizer."""

    def forward(self, **batch):
        return self.network(**batch)

    def training_step(self, batch, batch_idx):
        return self.network(**batch).loss


def bert():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    small = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    still = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
    config = transformers.BertConfig(vocab_size=50, num_labels=2, **small, **still)
    return transformers.BertForSequenceClassification(config)


def sentences(count=12, as_encoding=False):
    torch.manual_seed(1)
    words, mask = torch.randint(0, 50, (count, 7)), torch.ones(count, 7, dtype=torch.long)
    mask[::3, 5:] = 0
    rows = [
        {"input_ids": w, "attention_mask": m, "labels": torch.tensor(n % 2)}
        for n, (w, m) in enumerate(zip(words, mask))
    ]
    if not as_encoding:
        return DataLoader(rows, 4)
    transformers = pytest.importorskip("transformers")
    return DataLoader(rows, 4, collate_fn=lambda examples: transformers.BatchEncoding(default_collate(examples)))


class Pair(Own):
    """The same network for pairs of inputs and targets."""

    def forward(self, words):
        return self.network(input_ids=words[..., 0], attention_mask=words[..., 1]).logits


def paired():
    parts = default_collate(list(sentences().dataset))
    return DataLoader(TensorDataset(torch.stack([parts["input_ids"], parts["attention_mask"]], -1), parts["labels"]), 4)


@pytest.mark.parametrize("as_encoding", [False, True])
def test_dicts_of_a_tokenizer(as_encoding):
    data, found = sentences(as_encoding=as_encoding), []
    predictive = federated(Words(bert()), None, loader=data)
    assert len(trainer(1).predict(predictive, data)) == 3
    for module, batches in ((Words(bert()), data), (Pair(bert()), paired())):
        names = [name for name, _ in module.named_parameters()]
        posterior = fb.Laplace(parameters=[next(n for n in names if n.endswith("classifier.weight"))]).posterior(
            module, batches
        )
        for predictive in ("draws", "linearised"):
            torch.manual_seed(0)
            made = fb.PosteriorPredictive(module, posterior, 4, predictive=predictive)
            found.append(trainer(1, [fb.UncertaintyReport()]).validate(made, batches, verbose=False)[0])
        site = fb.KroneckerLaplace(fb.Laplace(parameters=["*classifier*"])).site(module, batches)
        found.append(
            {
                f"{part}.{name.rpartition('.')[2]}": float(v.double().norm())
                for part in ("inputs", "outputs")
                for name, v in getattr(site, part).items()
            }
        )
    for ours, wanted in zip(found[:3], found[3:], strict=True):
        assert ours == pytest.approx(wanted, rel=1e-5, abs=1e-6)


def test_torch_geometric():
    pytest.importorskip("torch_geometric")
    from torch_geometric.data import Data
    from torch_geometric.loader import DataLoader as GraphLoader
    from torch_geometric.loader.dataloader import Collater
    from torch_geometric.nn import GCNConv, global_mean_pool

    class Graphs(L.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
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
    loader = GraphLoader(graphs, batch_size=4)
    predictive = federated(Graphs(), None, loader=loader)
    batch = next(iter(GraphLoader(graphs, batch_size=12)))
    assert predictive.sample(batch, 3).shape == (3, 12, 2)
    scaling, sets = fb.FederatedTemperature(), fb.FederatedConformal(0.5)
    scores = trainer(1, [fb.UncertaintyReport(), scaling, sets]).validate(predictive, loader, verbose=False)[0]
    assert {"val/nll", "val/retained_area_entropy", "val/scaled/temperature", "val/lac_50/threshold"} <= scores.keys()
    assert sum(len(each.label) for each in trainer(1).predict(predictive, loader)) == 12
    data = fb.ClientDatasets({"north": graphs[:5], "south": graphs[5:]})
    collate = Collater(graphs)
    assert fb.evaluate_clients(predictive, data, batch_size=4, collate_fn=collate).num_examples == (5, 7)

    module = Graphs().eval()  # a graph at a time, as (inputs, targets), is measured as the batch of all
    alone = [(one, one.y) for one in GraphLoader(graphs, batch_size=1)]
    site, wanted = fb.Laplace().site(module, loader), fb.Laplace().site(module, alone)
    for name, value in site.items():
        torch.testing.assert_close(value, wanted[name], rtol=1e-5, atol=1e-6)
    posterior = fb.Laplace().posterior(module, loader)
    mean, covariance = fb.PosteriorPredictive(module, posterior)._linearised(batch)
    one = fb.PosteriorPredictive(module, posterior)._linearised(alone[3][0])
    torch.testing.assert_close((mean[3:4], covariance[3:4]), one, rtol=1e-5, atol=1e-6)
    assert trainer(1).predict(fb.PosteriorPredictive(module, posterior), loader)[0].probs.shape == (4, 2)
    factors = fb.KroneckerLaplace(fb.Laplace(parameters=["head*"]))
    assert fb.PosteriorPredictive(module, factors.fuse([factors.site(module, loader)])).is_linearised

    module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), lr=0.05)
    federation = fb.FederatedBayes(fb.IIDPartition(2), posterior=fb.Laplace())
    trainer(1, [federation]).fit(module, loader)
    assert federation.posterior.linearised
    assert federation.history[-1]["valid_clients"] == 2


LENGTHS = [7, 7, 7, 7, 3, 5, 7, 4, 6, 7, 2, 5]  # of the texts: the first batch has nothing to mask


def lora_bert(rank=2, **options):
    """A tiny BERT with LoRA, whose loss Hugging Face computes from the labels in the batch."""
    peft, network = pytest.importorskip("peft"), bert()
    return peft.get_peft_model(network, peft.LoraConfig(task_type="SEQ_CLS", r=rank, lora_dropout=0.0, **options))


def texts(kind=dict, padded=True):
    """A loader of dicts, or of BatchEncodings."""
    generator = torch.Generator().manual_seed(0)
    examples = [
        kind(
            {
                "input_ids": torch.randint(1, 50, (7,), generator=generator),
                "labels": torch.tensor(i % 2),
                **({"attention_mask": (torch.arange(7) < LENGTHS[i % 12]).long()} if padded else {}),
            }
        )
        for i in range(24)
    ]
    return DataLoader(examples, batch_size=4)


class Tuned(L.LightningModule):
    """A user's module around a network of peft."""

    def __init__(self, network, optimizer=torch.optim.SGD, lr=0.05):
        super().__init__()
        self.network, self.optimizer, self.lr = network, optimizer, lr

    def training_step(self, batch, batch_idx):
        loss = self.network(**batch).loss
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return self.optimizer([p for p in self.parameters() if p.requires_grad], lr=self.lr)


def tuned(module, engine, data=None, **options):
    """Federate it; return the federation after a look at what must hold for every method."""
    frozen = {name: p.clone() for name, p in module.named_parameters() if not p.requires_grad}
    federation = fb.FederatedBayes(fb.SizesPartition((12, 7, 5)), engine=engine, **options)
    trainer(2, [federation]).fit(module, data or texts())
    assert federation.federation.engine.name == ("sequential" if engine == "sequential" else "vectorized")
    assert federation.history[-1]["valid_clients"] == len(federation.clients)
    assert all(torch.equal(value, module.get_parameter(name)) for name, value in frozen.items())
    assert not set(federation.federation.server.posterior.names) & {*frozen}
    return federation


METHODS = ["weighted_average", "fedprox", "scaffold", "ditto", "sites"]


@pytest.mark.parametrize("stack", ["vectorized", "auto", 2])
@pytest.mark.parametrize("method", METHODS)
def test_lora_ends_equal_by_either_engine(method, stack):
    modules = Tuned(lora_bert()), Tuned(lora_bert())
    for module, engine in zip(modules, ("sequential", stack)):
        tuned(module, engine, fusion=method)
    for (name, one), other in zip(modules[0].named_parameters(), modules[1].parameters()):
        torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.parametrize("engine", ["sequential", "auto", 2])
@pytest.mark.parametrize(
    "method", ["reverse_kl_barycenter", "sites", "weighted_average", "fedprox", "ditto", "population"]
)
def test_lora_with_ivon_has_a_posterior_of_what_trains(method, engine):
    module = Tuned(lora_bert(), fb.IVON)
    posterior = tuned(module, engine, fusion=method).posterior
    for name, parameter in module.named_parameters():
        assert bool((posterior.variance[name] > 0).all()) == parameter.requires_grad, name


def test_batch_encodings_and_no_mask():
    transformers = pytest.importorskip("transformers")
    tuned(Tuned(lora_bert()), "auto", texts(transformers.BatchEncoding))
    tuned(Tuned(lora_bert()), "auto", texts(padded=False))


@pytest.mark.parametrize("engine", ["sequential", "auto"])
def test_a_bayesian_head_on_lora(engine):
    """``last=1`` is the classifier that trains, not the frozen copy that peft keeps and nobody calls."""
    network = fb.bayesianize(lora_bert(), last=1)
    head = "base_model.model.classifier.modules_to_save.default"
    gaussians = [name for name, _ in network.named_parameters() if "rho" in name]
    assert gaussians == [f"{head}.rho_weight", f"{head}.rho_bias"]
    posterior = tuned(fb.with_kl(Tuned(network, torch.optim.Adam)), engine, fusion="sites").posterior
    assert sum(value.numel() for value in posterior.variance.values() if bool((value > 0).any())) == 34
