"""The rows of sentence-transformers."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from datasets import Dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.sentence_transformer import losses
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from transformers import BertConfig, BertModel

import gradaccum
from benchmarks.scoreboard.measuring import Gradients
from benchmarks.scoreboard.torch_models import FULL, moved, sgd
from benchmarks.scoreboard.transformers_rows import (
    ONE_UPDATE,
    TINY_BERT,
    sizes,
    tokenizer,
    words,
)

PAIRS = [
    {"anchor": words(at, 3), "positive": words(at + 1, 2 + at % 4)}
    for at in range(FULL)
]


def encoder() -> SentenceTransformer:
    torch.manual_seed(0)
    folder = tempfile.mkdtemp()
    BertModel(BertConfig(**TINY_BERT)).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    bert = Transformer(folder)
    return SentenceTransformer(
        modules=[bert, Pooling(bert.get_embedding_dimension())], device="cpu"
    ).double()


def trained(
    micro: bool, kind: Any, *, scored: bool = False, **options: Any
) -> Gradients:
    model = encoder()
    arguments = SentenceTransformerTrainingArguments(
        tempfile.mkdtemp(), **sizes(micro), **ONE_UPDATE
    )
    data = Dataset.from_list(
        [{**each, "label": at / 10} for at, each in enumerate(PAIRS)]
        if scored
        else PAIRS
    )
    trainer = SentenceTransformerTrainer(
        model,
        arguments,
        train_dataset=data,
        loss=kind(model, **options),
        optimizers=(sgd(model), None),
    )
    return moved(model, trainer.train)


def ranking(*, micro: bool, even: bool) -> Gradients:
    """With `even` a loss of single pairs takes its place."""
    if even:
        return trained(micro, losses.CosineSimilarityLoss, scored=True)
    return trained(micro, losses.MultipleNegativesRankingLoss)


def cached_ranking(*, micro: bool, even: bool) -> Gradients:
    """The package's own way: one batch of all pairs, computed two at a time."""
    if micro:
        return trained(
            False,
            losses.CachedMultipleNegativesRankingLoss,
            mini_batch_size=FULL if even else 2,
        )
    return trained(False, losses.MultipleNegativesRankingLoss)


def _verified() -> gradaccum.VerificationReport:
    model = encoder()
    texts = [
        dict(
            tokenizer()(
                [each[name] for each in PAIRS], padding=True, return_tensors="pt"
            )
        )
        for name in ("anchor", "positive")
    ]
    loss = losses.MultipleNegativesRankingLoss(model)
    return gradaccum.verify(
        model, lambda model, *features: loss(map(dict, features), None), tuple(texts)
    )


VERIFIED = {"ranking": _verified}
