"""Modules as their authors write them: in a federation, lines that begin with "-" go and lines with "+" come."""

import itertools
import logging

import lightning as L
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(600)]

SILENT = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
QUIET = {**dict.fromkeys(SILENT, False), "accelerator": "cpu"}
GIVEN = {"L": L, "torch": torch, "nn": nn, "F": F, "DataLoader": DataLoader, "TensorDataset": TensorDataset}
"""Names that every script has imported, beside options that keep a Trainer quiet."""

ADAM = """
      def configure_optimizers(self):
-         return torch.optim.Adam(self.parameters())
+         return fb.IVON(self.parameters())

"""
FIT = """
- trainer = L.Trainer(max_epochs=2, **quiet)
+ trainer = L.Trainer(max_epochs=2, callbacks=[fed := fb.FederatedBayes(fb.IIDPartition(2))], **quiet)
  trainer.fit(module, loader)
"""
PREDICT = """
FIT
+ predictions = trainer.predict(fb.PosteriorPredictive(module, fed.posterior), loader)
"""
"""Parts that scripts have in common."""

LORA_BERT = """
  from peft import LoraConfig, get_peft_model
  from transformers import BertConfig, BertForSequenceClassification
+ import lightning_fedbayes as fb

  tiny = dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32)
  words = torch.randint(0, 50, (16, 7))
  data = [{"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": n % 2} for n, ids in enumerate(words)]

  class Own(L.LightningModule):
      def __init__(self):
          super().__init__()
          bert = BertForSequenceClassification(BertConfig(vocab_size=50, num_labels=2, **tiny))
          self.network = get_peft_model(bert, LoraConfig(task_type="SEQ_CLS", r=2))

      def forward(self, **batch):
          return self.network(**batch)

      def training_step(self, batch, batch_idx):
          return self(**batch).loss

      def configure_optimizers(self):
-         return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad])
+         return fb.IVON([p for p in self.parameters() if p.requires_grad])

  module, loader = Own(), DataLoader(data, batch_size=4)
PREDICT
"""
FROZEN_TIMM = """
  import timm
+ import lightning_fedbayes as fb

  class Images(L.LightningModule):
      def __init__(self):
          super().__init__()
          self.backbone = timm.create_model("resnet10t", num_classes=0).requires_grad_(False).eval()
          self.head = nn.Linear(self.backbone.num_features, 3)

      def forward(self, x):
          return self.head(self.backbone(x))

      def training_step(self, batch, batch_idx):
          return F.cross_entropy(self(batch[0]), batch[1])

      def configure_optimizers(self):
-         return torch.optim.Adam(self.head.parameters())
+         return fb.IVON(self.head.parameters())

  module = Images()
  loader = DataLoader(TensorDataset(torch.randn(8, 3, 32, 32), torch.arange(8) % 3), batch_size=4)
PREDICT
"""
U_NET = """
  import segmentation_models_pytorch as smp
+ import lightning_fedbayes as fb

  class Segments(L.LightningModule):
      def __init__(self):
          super().__init__()
          self.network = smp.Unet("mobilenet_v2", 3, None, decoder_channels=(8, 8, 8), classes=2)

      def forward(self, x):
          return self.network(x)

      def training_step(self, batch, batch_idx):
          return F.cross_entropy(self(batch[0]), batch[1])

ADAM
  module, images = Segments(), torch.randn(8, 3, 32, 32)
  loader = DataLoader(TensorDataset(images, torch.randint(0, 2, (8, 32, 32))), batch_size=4)
FIT
+ draws = fb.PosteriorPredictive(module, fed.posterior).sample(images).softmax(2)  # draws, images, classes, *space
"""
TIME_SERIES = """
+ import lightning_fedbayes as fb
  wave = torch.sin(torch.arange(60) / 3) + 0.1 * torch.randn(60)
  windows = wave.unfold(0, 9, 1)

  class Forecast(L.LightningModule):
      def __init__(self):
          super().__init__()
          self.lstm, self.head = nn.LSTM(1, 8, batch_first=True), nn.Linear(8, 1)

      def forward(self, x):
          return self.head(self.lstm(x)[0][:, -1])

      def training_step(self, batch, batch_idx):
          return F.mse_loss(self(batch[0]), batch[1])

ADAM
  module, loader = Forecast(), DataLoader(TensorDataset(windows[:, :8, None], windows[:, 8:]), batch_size=8)
FIT
+ predictions = trainer.predict(fb.PosteriorPredictive(module, fed.posterior, likelihood=fb.Gaussian(1.0)), loader)
"""
PANDAS = """
  import pandas as pd
+ import lightning_fedbayes as fb

  columns = ["age", "pressure"]
  frame = pd.DataFrame(torch.randn(40, 2).numpy(), columns=columns).assign(site=["A", "B"] * 20, ill=[0, 1, 1, 0] * 10)

  def table(rows):
      return TensorDataset(torch.tensor(rows[columns].values), torch.tensor(rows["ill"].values))

  class Table(L.LightningModule):
      def __init__(self):
          super().__init__()
          self.network = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 2))

      def forward(self, x):
          return self.network(x)

      def training_step(self, batch, batch_idx):
          return F.cross_entropy(self(batch[0]), batch[1])

      def configure_optimizers(self):
          return torch.optim.Adam(self.parameters())

- module, data = Table(), table(frame)
+ module, data = Table(), fb.ClientDatasets({site: table(rows) for site, rows in frame.groupby("site")})
  loader = DataLoader(data, batch_size=8)
- trainer = L.Trainer(max_epochs=2, **quiet)
+ trainer = L.Trainer(max_epochs=2, callbacks=[fed := fb.FederatedBayes(posterior=fb.Laplace())], **quiet)
  trainer.fit(module, loader)
+ predictions = trainer.predict(fb.PosteriorPredictive(module, fed.posterior), loader)
"""
HUGGING_FACE_DATA = """
  from datasets import Dataset
  from transformers import BertConfig, BertForSequenceClassification
+ import lightning_fedbayes as fb

  tiny = dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32)
  words = torch.randint(0, 50, (16, 7))
  columns = {"input_ids": words, "attention_mask": torch.ones_like(words), "labels": torch.arange(16) % 2}
  data = Dataset.from_dict(columns).with_format("torch")

  class Texts(L.LightningModule):
      def __init__(self):
          super().__init__()
          self.network = BertForSequenceClassification(BertConfig(vocab_size=50, num_labels=2, **tiny))

      def forward(self, input_ids, attention_mask, labels=None):
          return self.network(input_ids, attention_mask, labels=labels)

      def training_step(self, batch, batch_idx):
          return self(**batch).loss

      def configure_optimizers(self):
-         return torch.optim.AdamW(self.parameters())
+         return fb.IVON(self.parameters())

  module, loader = Texts(), DataLoader(data, batch_size=4)
PREDICT
"""
ROWS = {
    "LoRA BERT": (LORA_BERT, 4, ["peft", "transformers"]),
    "frozen timm": (FROZEN_TIMM, 4, ["timm"]),
    "U-Net": (U_NET, 4, ["segmentation_models_pytorch"]),
    "time series": (TIME_SERIES, 4, []),
    "data frame": (PANDAS, 4, ["pandas"]),
    "Hugging Face data": (HUGGING_FACE_DATA, 4, ["datasets", "transformers"]),
}
"""Name → script, number of changed lines, packages."""


def whole(script):
    """The script with the parts that stand in it by name."""
    for name, part in (("PREDICT", PREDICT), ("FIT", FIT), ("ADAM", ADAM)):
        script = script.replace(f"{name}\n", part.lstrip("\n"))
    return script.strip("\n")


def version(script, mark):
    """The script with the lines that are marked "-", or with those that are marked "+"."""
    lines = whole(script).splitlines()
    return "\n".join(line[2:] for line in lines if line[:1].strip() in ("", mark))


def changed_lines(script):
    """Number of changed lines: a line for another one counts once."""
    marks = [line[:1] for line in whole(script).splitlines()]
    return sum(
        max(hunk.count("-"), hunk.count("+"))
        for marked, group in itertools.groupby(marks, lambda mark: mark in "-+" and mark != "")
        if marked
        for hunk in [list(group)]
    )


def run(text):
    torch.manual_seed(0)
    names = {**GIVEN, "quiet": QUIET}
    exec(compile(text, "script", "exec", dont_inherit=True), names)
    return names


@pytest.mark.parametrize("name", ROWS)
def test_an_authors_module_predicts_with_uncertainty(name, monkeypatch, tmp_path):
    script, lines, packages = ROWS[name]
    for package in packages:
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    assert changed_lines(script) == lines
    before = run(version(script, "-"))
    assert "fb" not in before
    after = run(version(script, "+"))
    assert after["fed"].history[-1]["valid_clients"] == 2
    assert len(after["fed"].history) == 2
    if name == "frozen timm":
        assert not after["module"].backbone.training
        assert after["fed"].history[-1]["megabytes_up"] < 0.1  # of a network of 20 MB
    if "draws" in after:
        uncertainty = after["draws"].var(0).mean((1, 2, 3))
        assert torch.allclose(after["draws"].sum(2), torch.ones(()))
    else:
        uncertainty = torch.cat([each.epistemic for each in after["predictions"]])
    assert len(uncertainty) == len(after["loader"].dataset)
    assert bool((uncertainty > 0).all())
