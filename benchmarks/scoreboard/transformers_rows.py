"""The rows of transformers' Trainer."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from torch.optim import Optimizer
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainingArguments,
)

import gradaccum
from benchmarks.scoreboard.measuring import Gradients
from benchmarks.scoreboard.torch_models import (
    FULL,
    MICRO,
    SHORT_BATCH,
    STEPS,
    moved,
    sgd,
)
from conformance_tests.integration_tests.regression import Items, Regressor

VOCABULARY, LENGTH = 12, 6
WORDS = ("<pad>", "<eos>", *"abcdefghij")
TINY_BERT: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 8}
TINY_BERT |= {"num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
TINY_BERT |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
QUIET: dict[str, Any] = {
    "report_to": "none",
    "disable_tqdm": True,
    "use_cpu": True,
    "save_strategy": "no",
}
ONE_UPDATE: dict[str, Any] = {
    "num_train_epochs": 1,
    "max_grad_norm": 0.0,
    "lr_scheduler_type": "constant",
    **QUIET,
}


def sizes(micro: bool) -> dict[str, int]:
    return {
        "per_device_train_batch_size": MICRO if micro else FULL,
        "gradient_accumulation_steps": STEPS if micro else 1,
    }


def tokenizer(padding_side: str = "right") -> PreTrainedTokenizerFast:
    made = Tokenizer(
        models.WordLevel(
            {word: place for place, word in enumerate(WORDS)}, unk_token="<pad>"
        )
    )
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="<pad>",
        eos_token="<eos>",
        padding_side=padding_side,
    )


def words(item: int, length: int) -> str:
    return " ".join(
        WORDS[2 + (3 * item + place * place) % 10] for place in range(length)
    )


def trained(model: nn.Module, items: Any, micro: bool, **options: Any) -> Gradients:
    return moved(model, trainer_of(model, sgd(model), items, micro, **options).train)


def trainer_of(
    model: nn.Module, optimizer: Optimizer, items: Any, micro: bool, **options: Any
) -> Trainer:
    arguments = TrainingArguments(
        tempfile.mkdtemp(), **sizes(micro), **ONE_UPDATE, **options
    )
    return Trainer(model, arguments, train_dataset=items, optimizers=(optimizer, None))


def sequences(even: bool) -> list[dict[str, torch.Tensor]]:
    ids = torch.randint(
        0, VOCABULARY, (FULL, LENGTH), generator=torch.Generator().manual_seed(2)
    )
    labels = ids.clone()
    for index in range(FULL):
        labels[index, LENGTH if even else 2 + index % 5 :] = -100
    return [{"input_ids": a, "labels": b} for a, b in zip(ids, labels, strict=True)]


def gpt2() -> Any:
    torch.manual_seed(0)
    tiny = {
        "vocab_size": VOCABULARY,
        "n_positions": LENGTH,
        "n_embd": 8,
        "n_layer": 1,
        "n_head": 2,
    }
    return GPT2LMHeadModel(
        GPT2Config(
            **tiny,
            bos_token_id=0,
            eos_token_id=0,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
    ).double()


def causal_lm(*, micro: bool, even: bool) -> Gradients:
    return trained(gpt2(), sequences(even), micro)


def smoothed_lm(*, micro: bool, even: bool) -> Gradients:
    return trained(gpt2(), sequences(even), micro, label_smoothing_factor=0.1)


def own_mean(*, micro: bool, even: bool) -> Gradients:
    return trained(Regressor(), Items(FULL if even else SHORT_BATCH), micro)


def bert() -> Any:
    torch.manual_seed(0)
    return BertForSequenceClassification(BertConfig(**TINY_BERT, num_labels=3)).double()


def t5() -> Any:
    torch.manual_seed(0)
    tiny = {
        "vocab_size": VOCABULARY,
        "d_model": 8,
        "d_kv": 4,
        "d_ff": 8,
        "num_layers": 1,
        "num_heads": 2,
        "dropout_rate": 0.0,
    }
    return T5ForConditionalGeneration(
        T5Config(**tiny, decoder_start_token_id=0, pad_token_id=0)
    ).double()


def untold(model: Any, even: bool) -> Any:
    """With `even`, the Trainer is told that the model's loss takes no number of items:
    the way to mend it from outside.
    """
    if even:
        model.accepts_loss_kwargs = False
    return model


def classification(*, micro: bool, even: bool) -> Gradients:
    return trained(untold(bert(), even), labelled(), micro)


def labelled() -> list[dict[str, torch.Tensor]]:
    return [
        {"input_ids": each["input_ids"], "labels": torch.tensor(i % 3)}
        for i, each in enumerate(sequences(True))
    ]


def seq2seq(*, micro: bool, even: bool) -> Gradients:
    return trained(untold(t5(), even), sequences(True), micro)


def loss_of(model: Any, ids: torch.Tensor, labels: torch.Tensor) -> Any:
    return model(input_ids=ids, labels=labels).loss


def stacked(name: str, even: bool) -> torch.Tensor:
    return torch.stack([each[name] for each in sequences(even)])


VERIFIED = {
    "causal_lm": lambda: gradaccum.verify(
        gpt2(), loss_of, (stacked("input_ids", False), stacked("labels", False))
    ),
    "classification": lambda: gradaccum.verify(
        bert(), loss_of, (stacked("input_ids", True), torch.arange(FULL) % 3)
    ),
    "seq2seq": lambda: gradaccum.verify(
        t5(), loss_of, (stacked("input_ids", True), stacked("labels", True))
    ),
    "own_mean": lambda: gradaccum.verify(
        Regressor(),
        lambda model, x, y: model(x, y)["loss"],
        (Items(FULL).x, Items(FULL).labels),
    ),
}


def check(
    model: Any,
    items: Any,
    loss_fn: Callable[..., Any] | None = None,
    weight: Callable[..., float] | None = None,
) -> gradaccum.LoopReport:
    """The micro-batches are the model's calls, as the Trainer shuffles the items."""
    optimizer = sgd(model)
    with gradaccum.recording(optimizer, model) as record:
        trainer_of(model, optimizer, items, True).train()
    return record.report(loss_fn, weight=weight, steps=STEPS)


def check_causal_lm() -> gradaccum.LoopReport:
    """The Trainer divides by the number of labels, each item's first one too, which
    nothing predicts; so does the loss of the check.
    """
    model = gpt2()

    def loss_fn(*, labels: torch.Tensor, **arguments: Any) -> Any:
        count = count_of(labels=labels)
        return model(labels=labels, num_items_in_batch=count, **arguments).loss

    return check(model, sequences(False), loss_fn, count_of)


def count_of(*, labels: torch.Tensor, **_: Any) -> float:
    return float((labels != -100).sum())


CHECKED = {
    "causal_lm": check_causal_lm,
    "classification": lambda: check(bert(), labelled()),
    "seq2seq": lambda: check(t5(), sequences(True)),
    "own_mean": lambda: check(Regressor(), Items(SHORT_BATCH)),
}
