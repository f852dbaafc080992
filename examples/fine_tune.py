"""Fine-tune what trains above a frozen network, in a federation that learns a posterior of it.

python examples/fine_tune.py         # a head above frozen features of digits
python examples/fine_tune.py lora    # LoRA in a small BERT of random weights; needs transformers and peft
"""

import sys
from typing import Any

import lightning as L
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset, random_split

import lightning_fedbayes as fb


class FineTuned(L.LightningModule):
    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return getattr(output := self.network(inputs), "logits", output)  # Hugging Face's models return an object

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return fb.IVON([p for p in self.parameters() if p.requires_grad], lr=0.05, temperature=0.1)


def lora_in_bert() -> tuple[nn.Module, L.LightningDataModule]:
    from peft import LoraConfig, get_peft_model  # pyright: ignore[reportMissingImports]
    from transformers import BertConfig, BertForSequenceClassification  # pyright: ignore[reportMissingImports]

    config = BertConfig(vocab_size=20, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
    words = torch.randint(0, 20, (500, 7))
    train, held_out = random_split(TensorDataset(words, (words[:, 0] < 10).long()), [0.7, 0.3])
    network = get_peft_model(BertForSequenceClassification(config), LoraConfig(task_type="SEQ_CLS", r=4))
    return network, L.LightningDataModule.from_datasets(train, held_out)


def main(lora: bool = False) -> dict[str, float]:
    """Return scores of held-out data and the figures of the last round."""
    L.seed_everything(0, verbose=False)
    backbone = nn.Sequential(nn.Linear(64, 256), nn.ReLU()).requires_grad_(False)  # yours: of torchvision, timm, ...
    network, data = nn.Sequential(backbone, nn.Linear(256, 10)), fb.DigitsDataModule()
    if lora:
        network, data = lora_in_bert()
    data.setup("fit")
    module, federation = FineTuned(network), fb.FederatedBayes(fb.IIDPartition(clients=5), local_epochs=2)
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_model_summary": False}
    L.Trainer(max_epochs=10, callbacks=[federation], **quiet).fit(module, data.train_dataloader())
    predictive = fb.PosteriorPredictive(module, federation.posterior, samples=20)
    return dict(L.Trainer(**quiet).validate(predictive, data.val_dataloader())[0]) | federation.history[-1]


if __name__ == "__main__":
    print(main("lora" in sys.argv))
