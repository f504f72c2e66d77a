"""transformers' Trainer: one update of micro-batches is the update of the large batch,
for a model that divides its loss by itself, and for a last micro-batch that is short.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainingArguments,
)


class Regression(nn.Module):
    """Its loss is the mean over the items of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(5, 1).double()

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": nn.functional.mse_loss(self.net(x), labels)}


def update(make: Any, items: list[Any], folder: Path, size: int, steps: int) -> Tensor:
    """Return how far one update by SGD moved the parameters."""
    torch.manual_seed(0)
    model = make()
    before = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    arguments = TrainingArguments(
        str(folder),
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
    Trainer(model, arguments, train_dataset=items, optimizers=(optimizer, None)).train()
    return nn.utils.parameters_to_vector(model.parameters()).detach() - before


def compare(make: Any, items: list[Any], folder: Path) -> None:
    large = update(make, items, folder, len(items), 1)
    torch.testing.assert_close(update(make, items, folder, 2, 4), large)


def sequences() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return list(torch.randint(2, 12, (8, 6), generator=generator))


def test_bert_classifier(tmp_path: Path) -> None:
    config = BertConfig(
        vocab_size=12,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=8,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=3,
    )
    items = [
        {"input_ids": ids, "labels": torch.tensor(index % 3)}
        for index, ids in enumerate(sequences())
    ]
    compare(lambda: BertForSequenceClassification(config).double(), items, tmp_path)


def test_t5(tmp_path: Path) -> None:
    config = T5Config(
        vocab_size=12,
        d_model=8,
        d_kv=4,
        d_ff=8,
        num_layers=1,
        num_heads=2,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        pad_token_id=0,
    )
    items = [{"input_ids": ids, "labels": ids} for ids in sequences()]
    compare(lambda: T5ForConditionalGeneration(config).double(), items, tmp_path)


@pytest.mark.parametrize("items", [8, 7], ids=["equal", "short_batch"])
def test_loss_of_the_model(items: int, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(items, 5, dtype=torch.float64, generator=generator)
    rows = [{"x": row, "labels": row.sum(0, keepdim=True).sin()} for row in x]
    compare(Regression, rows, tmp_path)
