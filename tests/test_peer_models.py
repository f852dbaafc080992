"""Models of other packages, unchanged, federate with IVON; each is skipped where its package is not installed.

pip install --group models && python -m pytest tests/test_peer_models.py
"""

import lightning as L
import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, default_collate

import lightning_fedbayes as fb
from tests.federations import trainer

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(600)]


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


class Words(Own):
    """A user's module around a transformer: batches are the dicts of its tokenizer."""

    def forward(self, **batch):
        return self.network(**batch)

    def training_step(self, batch, batch_idx):
        return self.network(**batch).loss


def bert(seed=0):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(seed)
    return transformers.BertForSequenceClassification(
        transformers.BertConfig(
            vocab_size=50,
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=32,
            num_labels=2,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )


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


def test_the_frozen_blocks_of_a_transformer_run_once_for_all_draws():
    module, calls = Words(bert()), []
    mean = {name: p.detach().clone() for name, p in module.named_parameters()}
    posterior = fb.GaussianPosterior(
        mean,
        {
            name: torch.full_like(p, 0.01 if "layer.1" in name or "classifier" in name else 0.0)
            for name, p in mean.items()
        },
    )
    module.network.bert.encoder.layer[0].register_forward_hook(lambda *_: calls.append("BatchedTensor" in repr(_[2])))
    batch = next(iter(sentences()))
    made = fb.PosteriorPredictive(module, posterior, 5)
    torch.manual_seed(0)
    found = made.predict_step(batch)
    assert calls[0] is False  # one pass, then that of the mean for the comparison of the first batch
    made._one_by_one = True
    torch.manual_seed(0)
    torch.testing.assert_close(found.probs, made.predict_step(batch).probs, rtol=1e-5, atol=1e-5)


LENGTHS = [7, 7, 7, 7, 3, 5, 7, 4, 6, 7, 2, 5]  # of the texts: the first batch has nothing to mask


def lora_bert(rank=2, **options):
    """A tiny BERT with LoRA, whose loss Hugging Face computes from the labels in the batch."""
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=50,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        num_labels=2,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    bert = transformers.BertForSequenceClassification(config)
    return peft.get_peft_model(bert, peft.LoraConfig(task_type="SEQ_CLS", r=rank, lora_dropout=0.0, **options))


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


@pytest.mark.parametrize("engine", ["sequential", "auto", 2])
@pytest.mark.parametrize(
    "method", ["reverse_kl_barycenter", "sites", "weighted_average", "fedprox", "ditto", "population"]
)
def test_lora_with_ivon_has_a_posterior_of_what_trains(method, engine):
    module = Tuned(lora_bert(), fb.IVON)
    posterior = tuned(module, engine, fusion=method).posterior
    for name, parameter in module.named_parameters():
        assert bool((posterior.variance[name] > 0).all()) == parameter.requires_grad, name


@pytest.mark.parametrize("engine", ["sequential", "auto"])
def test_laplace_of_lora(engine):
    class Pairs(Tuned):
        def forward(self, inputs):
            return self.network(**inputs).logits

        def training_step(self, batch, batch_idx):
            return F.cross_entropy(self(batch[0]), batch[1])

    def pairs(examples):
        batch = torch.utils.data.default_collate(examples)
        return batch, batch.pop("labels")

    module, data = Pairs(lora_bert(), torch.optim.Adam), texts().dataset
    loader = DataLoader(data, batch_size=4, collate_fn=pairs)
    posterior = tuned(module, engine, loader, fusion="sites", posterior=fb.Laplace()).posterior
    for name, parameter in module.named_parameters():
        assert bool((posterior.variance[name] > 0).all()) == parameter.requires_grad, name
