"""sentence-transformers' trainer and `MultipleNegativesRankingLoss`: one update of
micro-batches is the update of the large batch, in which each anchor meets all pairs.
"""

from pathlib import Path

import torch
from datasets import Dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.sentence_transformer import losses
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

WORDS = ("<pad>", *"abcdefghijk")


def text(item: int, length: int) -> str:
    return " ".join(WORDS[1 + (3 * item + n * n) % 11] for n in range(length))


def save_encoder(folder: Path) -> None:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(WORDS),
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=8,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    BertModel(config).save_pretrained(folder)
    vocabulary = {word: index for index, word in enumerate(WORDS)}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>").save_pretrained(
        folder
    )


def test_multiple_negatives(tmp_path: Path) -> None:
    save_encoder(tmp_path / "encoder")
    pairs = [{"anchor": text(n, 3), "positive": text(n + 1, 4)} for n in range(8)]
    updates = []
    for size, steps in ((8, 1), (2, 4)):
        bert = Transformer(str(tmp_path / "encoder"))
        pooling = Pooling(bert.get_embedding_dimension())
        model = SentenceTransformer(modules=[bert, pooling], device="cpu").double()
        before = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
        arguments = SentenceTransformerTrainingArguments(
            str(tmp_path / "run"),
            per_device_train_batch_size=size,
            gradient_accumulation_steps=steps,
            num_train_epochs=1,
            max_grad_norm=0.0,
            lr_scheduler_type="constant",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
            save_strategy="no",
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        SentenceTransformerTrainer(
            model,
            arguments,
            train_dataset=Dataset.from_list(pairs),
            loss=losses.MultipleNegativesRankingLoss(model),
            optimizers=(optimizer, None),
        ).train()
        after = nn.utils.parameters_to_vector(model.parameters()).detach()
        updates.append(after - before)
    torch.testing.assert_close(updates[1], updates[0])
