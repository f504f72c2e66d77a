"""Losses that the Trainer of transformers divides by a number of tokens: a micro-batch weighs as many."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs PyTorch")
pytest.importorskip("transformers", reason="needs transformers")
pytest.importorskip("accelerate", reason="needs accelerate")

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, Trainer

from conformance_tests.integration_tests.regression import distance
from conformance_tests.integration_tests.transformers_runs import COUNT, STEPS, bare, large, trained, wrapped

VOCABULARY, LENGTH = 11, 6


class Tokens(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Sequences of unequal length; what is beyond is no label. In the first `empty` there is none at all."""

    def __init__(self, empty: int = 0) -> None:
        self.empty = empty
        self.ids = torch.randint(0, VOCABULARY, (COUNT, LENGTH), generator=torch.Generator().manual_seed(2))

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        labels = self.ids[index].clone()
        labels[0 if index < self.empty else 2 + index % 5 :] = -100
        return {"input_ids": self.ids[index], "labels": labels}


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "n_positions": LENGTH, "n_embd": 8, "n_layer": 1, "n_head": 2}
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(**sizes, **ends, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))


@pytest.fixture
def sgd(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Adam would hide a wrong factor, and blow up the rounding of a gradient of 0."""
    monkeypatch.setattr(torch.optim, "AdamW", torch.optim.SGD)
    return


@pytest.mark.usefixtures("sgd")
def test_token_means_equal_large_batch(tmp_path: Path) -> None:
    """The Trainer divides by the tokens of a micro-batch, which then weighs as many."""
    mine, other = trained(wrapped(tmp_path, gpt2(), Tokens())), trained(large(tmp_path, model=gpt2(), data=Tokens()))
    own = trained(bare(tmp_path, gpt2(), Tokens(), gradient_accumulation_steps=STEPS))
    assert distance(own.model, other.model) < 1e-6
    assert distance(mine.model, other.model) < 1e-6


@pytest.mark.usefixtures("sgd")
def test_micro_batches_without_a_token(tmp_path: Path) -> None:
    """At least five of ten, whose loss is 0 / 0. They weigh nothing, and there is no backward pass."""
    trainer = trained(wrapped(tmp_path, gpt2(), Tokens(15)))
    assert distance(trainer.model, trained(bare(tmp_path, gpt2(), Tokens(15), gradient_accumulation_steps=STEPS)).model) < 1e-6


class Untold(Trainer):
    """Its model is not told how many tokens there are."""

    def _get_num_items_in_batch(self, *args: Any) -> None:
        return None


class MeanOfBatch(Trainer):
    """Its loss is not told, though the Trainer counts."""

    loss_is_scaled_for_ga = False

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Tensor:
        loss: Tensor = model(**inputs).loss
        return loss


@pytest.mark.usefixtures("sgd")
@pytest.mark.parametrize("kind", [Untold, MeanOfBatch])
def test_means_of_unequal_counts_are_the_trainers_own(tmp_path: Path, kind: type[Trainer]) -> None:
    """A loss that is not told the number of items is a mean for the Trainer too, whatever it holds."""

    def once(make: Any, **options: Any) -> Trainer:
        trainer = make(tmp_path, gpt2(), Tokens(), **options)
        trainer.__class__ = kind
        return trained(trainer)

    mine, own = once(wrapped), once(bare, gradient_accumulation_steps=STEPS)
    assert distance(mine.model, own.model) < 1e-6
    assert distance(mine.model, trained(large(tmp_path, model=gpt2(), data=Tokens())).model) > 1e-4


@pytest.mark.usefixtures("sgd")
@pytest.mark.parametrize("options", [{}, {"label_smoothing_factor": 0.1}], ids=["function", "smoothed"])
def test_losses_of_the_user_and_of_the_trainer(tmp_path: Path, options: dict[str, Any]) -> None:
    def mean(outputs: Any, labels: Tensor, num_items_in_batch: Tensor) -> Tensor:
        logits = outputs["logits"][:, :-1].reshape(-1, VOCABULARY)
        return nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum") / num_items_in_batch

    def once(trainer: Trainer) -> nn.Module:
        if not options:
            trainer.compute_loss_func = mean
        return trained(trainer).model

    mine, other = once(wrapped(tmp_path, gpt2(), Tokens(), **options)), once(large(tmp_path, model=gpt2(), data=Tokens(), **options))
    assert distance(mine, other) < 1e-6
