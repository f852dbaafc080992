"""Models, collators and adapters of transformers, datasets and peft; tiny, with weights that are drawn on the spot."""

# pyright: reportMissingImports=false
from __future__ import annotations

from typing import Any

import lightning as L
import torch
from torch import Tensor

from benchmarks.situations.situation import ALONE, Group, mapped

asked = Group("Hugging Face", "transformers", "datasets", "peft")
TRANSFORMERS = "https://github.com/huggingface/transformers"
PEFT = "https://github.com/huggingface/peft"
WORDS = 24
STILL = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
LLAMA = {**SMALL, "vocab_size": WORDS, "num_key_value_heads": 2, "max_position_embeddings": 32, "pad_token_id": 0}


class Wrapped(L.LightningModule):
    """A user's module around a model that computes its loss."""

    def __init__(self, model: Any, lr: float = 0.05) -> None:
        super().__init__()
        self.model, self.lr = model, lr

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.model(**batch).loss
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=self.lr)


def tokens(x: Tensor) -> list[int]:
    """Three to eight words of what is in an example."""
    places = ((x.repeat(2)[:8] + 4).clamp(0, 7.9) * 2).long() + 6
    return places[: 3 + int(x.abs().sum() * 7) % 6].tolist()


def sentences(x: Tensor, y: Tensor) -> dict[str, Any]:
    words = tokens(x)
    return {"input_ids": words, "attention_mask": [1] * len(words), "labels": int(y)}


def texts(x: Tensor, y: Tensor) -> dict[str, Any]:
    words = tokens(x)
    return {"input_ids": words, "attention_mask": [1] * len(words)}


def answers(x: Tensor, y: Tensor) -> dict[str, Any]:
    words = tokens(x)
    return {"input_ids": words, "attention_mask": [1] * len(words), "labels": words[::-1][: 2 + int(y)]}


def tokenizer() -> Any:
    """Return a tokenizer of WORDS words, made here."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    special = ["[PAD]", "[UNK]", "[MASK]", "[BOS]", "[EOS]"]
    vocabulary = {word: number for number, word in enumerate([*special, *(f"w{n}" for n in range(WORDS - 5))])}
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "mask_token": "[MASK]", "eos_token": "[EOS]"}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(vocabulary, "[UNK]")), **names)


def collator(name: str, **options: Any) -> dict[str, Any]:
    """Return loader options with a collator of transformers, which is made at the first batch."""
    made: list[Any] = []

    def collate(rows: list[Any]) -> Any:
        import transformers

        if not made:
            made.append(getattr(transformers, name)(tokenizer(), **options))
        return made[0](rows)

    return {"collate_fn": collate}


def classifier(**options: Any) -> Any:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(vocab_size=WORDS, num_labels=3, **{**SMALL, **STILL, **options})
    return BertForSequenceClassification(config)


@asked(
    "BERT, batches by DataCollatorWithPadding",
    f"{TRANSFORMERS}/issues/28066",
    "pad to the longest text of the batch",
    dataset=mapped(sentences),
    loading=collator("DataCollatorWithPadding"),
    tolerance=1e-4,
)
def padded():
    return Wrapped(classifier())


@asked(
    "BERT with its default dropout",
    "https://github.com/Lightning-AI/pytorch-lightning/issues/20646",
    "fine-tune with the dropout of the configuration",
    dataset=mapped(sentences),
    loading=collator("DataCollatorWithPadding"),
    noisy=True,
    rounds=1,
)
def dropped():
    return Wrapped(classifier(num_hidden_layers=1, hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1))


@asked(
    "BERT as from_pretrained returns it, in eval()",
    "https://github.com/Lightning-AI/pytorch-lightning/issues/20128",
    "fine-tune a model whose mode Lightning leaves as it is, so that nothing is dropped",
    dataset=mapped(sentences),
    loading=collator("DataCollatorWithPadding"),
    tolerance=1e-4,
)
def evaluated():
    return Wrapped(classifier(num_hidden_layers=1, hidden_dropout_prob=0.5, attention_probs_dropout_prob=0.5).eval())


@asked(
    "a masked language model, masks drawn by the collator",
    f"{TRANSFORMERS}/issues/5979",
    "mask other words in every epoch",
    dataset=mapped(texts),
    loading=collator("DataCollatorForLanguageModeling", mlm_probability=0.3),
    data_noise=True,
    rounds=1,
)
def masked():
    from transformers import BertConfig, BertForMaskedLM

    return Wrapped(BertForMaskedLM(BertConfig(vocab_size=WORDS, **{**SMALL, "num_hidden_layers": 1}, **STILL)))


@asked(
    "GPT-2 with tied weights, warm-up in every step",
    f"{TRANSFORMERS}/issues/11903",
    "train a language model whose head shares the embedding's weights",
    dataset=mapped(texts),
    loading=collator("DataCollatorForLanguageModeling", mlm=False),
    tolerance=1e-4,
    rounds=3,
)
class Causal(Wrapped):
    def __init__(self) -> None:
        from transformers import GPT2Config, GPT2LMHeadModel

        none = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16, "bos_token_id": 3, "eos_token_id": 4}
        super().__init__(GPT2LMHeadModel(GPT2Config(vocab_size=WORDS, **sizes, **none)))

    def configure_optimizers(self):
        from transformers import get_linear_schedule_with_warmup

        plain = ("bias", "ln_1.weight", "ln_2.weight", "ln_f.weight")
        groups = [
            {"params": [p for n, p in self.named_parameters() if n.endswith(plain)], "weight_decay": 0.0},
            {"params": [p for n, p in self.named_parameters() if not n.endswith(plain)], "weight_decay": 0.1},
        ]
        optimizer = torch.optim.AdamW(groups, lr=0.01, eps=1e-3)
        schedule = get_linear_schedule_with_warmup(optimizer, 4, 40)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


@asked(
    "T5, batches by DataCollatorForSeq2Seq",
    f"{TRANSFORMERS}/issues/4092",
    "pad labels by -100, and let the model shift them",
    dataset=mapped(answers),
    loading=collator("DataCollatorForSeq2Seq"),
    tolerance=1e-4,
    why="is not differentiable with respect to argument 'attn_mask'",
    **ALONE,
)
def answering():
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2, "dropout_rate": 0.0}
    return Wrapped(T5ForConditionalGeneration(T5Config(vocab_size=WORDS, decoder_start_token_id=0, **sizes)))


@asked(
    "Wav2Vec2, spans masked by NumPy",
    f"{TRANSFORMERS}/issues/10459",
    "fine-tune a speech model with SpecAugment",
    dataset=mapped(lambda x, y: {"input_values": x.repeat(20), "labels": y}),
    why="in the layer Wav2Vec2GroupNormConvLayer",
    **ALONE,
)
def spoken():
    from transformers import Wav2Vec2Config, Wav2Vec2ForSequenceClassification

    none = dict.fromkeys(("hidden_dropout", "attention_dropout", "feat_proj_dropout", "final_dropout", "layerdrop"), 0)
    config = Wav2Vec2Config(
        vocab_size=WORDS,
        num_labels=3,
        conv_dim=(8, 8),
        conv_kernel=(4, 3),
        conv_stride=(2, 2),
        num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
        mask_time_prob=0.3,
        mask_time_length=2,
        classifier_proj_size=8,
        activation_dropout=0.0,
        **none,
        **{**SMALL, "num_hidden_layers": 1},
    )
    return Wrapped(Wav2Vec2ForSequenceClassification(config))


@asked(
    "Mixtral: a mixture of experts with the loss of its router",
    f"{TRANSFORMERS}/issues/28255",
    "train experts, some of which a batch does not choose",
    dataset=mapped(texts),
    loading=collator("DataCollatorForLanguageModeling", mlm=False),
    tolerance=1e-4,
    why="scatter_add_(self, *extra_args) is not possible",
    **ALONE,
)
def experts():
    from transformers import MixtralConfig, MixtralForCausalLM

    routed = {"num_local_experts": 3, "num_experts_per_tok": 1, "output_router_logits": True}
    return Wrapped(MixtralForCausalLM(MixtralConfig(**routed, **{**LLAMA, "num_hidden_layers": 1})))


def from_columns(dataset: Any, padded: bool = False) -> Any:
    """Return a data set of Hugging Face, of columns, whose examples are transformed when they are read.

    Args:
        dataset: of tensors.
        padded: texts have different lengths, and all that are read at once are padded to one length.
    """
    import datasets

    x, y = dataset.tensors
    columns = datasets.Dataset.from_dict({"text": x.tolist(), "label": y.tolist()})

    def pads(rows: dict[str, list[Any]]) -> dict[str, Any]:
        words = [tokens(torch.tensor(row)) for row in rows["text"]]
        return {**tokenizer().pad({"input_ids": words}, return_tensors="pt"), "labels": torch.tensor(rows["label"])}

    def transform(rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
        words = (torch.tensor(rows["text"]) + 4).clamp(0, 15).long() + 6
        return {"input_ids": list(words), "labels": [torch.tensor(label) for label in rows["label"]]}

    return columns.with_transform(pads if padded else transform)


@asked(
    "datasets.Dataset with a transform",
    "https://github.com/flwrlabs/flower/pull/2513",
    "transform examples of Hugging Face's data sets when they are read",
    dataset=from_columns,
    tolerance=1e-4,
)
def transformed():
    return Wrapped(classifier())


asked(
    "datasets.Dataset with a transform that pads the batch",
    "https://github.com/huggingface/datasets/pull/646",
    "tokenize in the transform, padding=True: the data set reads whole batches by __getitems__",
    dataset=lambda dataset: from_columns(dataset, padded=True),
    tolerance=1e-4,
)(transformed)


@asked(
    "LoRA on Llama with gradient checkpointing",
    f"{PEFT}/pull/404",
    "save memory while adapters train",
    dataset=mapped(texts),
    loading=collator("DataCollatorForLanguageModeling", mlm=False),
    tolerance=1e-4,
    why="takes gradients itself",
    **ALONE,
)
def adapted():
    import peft
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(**LLAMA))
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.enable_input_require_grads()
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)
    return Wrapped(peft.get_peft_model(model, config), lr=0.5)


@asked(
    "prompt tuning",
    f"{PEFT}/issues/2379",
    "train virtual tokens in front of a frozen model",
    dataset=mapped(texts),
    loading=collator("DataCollatorForLanguageModeling", mlm=False),
    tolerance=1e-4,
)
def prompted():
    import peft
    from transformers import LlamaConfig, LlamaForCausalLM

    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    return Wrapped(peft.get_peft_model(LlamaForCausalLM(LlamaConfig(**LLAMA)), config), lr=0.5)


@asked(
    "Adafactor of transformers with its own learning rate",
    f"{TRANSFORMERS}/issues/11612",
    "let the optimizer warm up by itself (relative_step)",
    dataset=mapped(sentences),
    loading=collator("DataCollatorWithPadding"),
    tolerance=1e-4,
    why="does not treat every entry of a parameter alike",
    **ALONE,
)
class OwnRate(Wrapped):
    def __init__(self) -> None:
        super().__init__(classifier())

    def configure_optimizers(self):
        from transformers import Adafactor

        return Adafactor(self.parameters(), scale_parameter=True, relative_step=True, warmup_init=True, lr=None)
