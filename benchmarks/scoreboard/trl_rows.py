"""The rows of TRL's trainers, with a tokenizer of twelve words."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import torch
from datasets import Dataset
from torch import nn
from transformers import GPT2Config, GPT2ForSequenceClassification, GPT2LMHeadModel
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    RewardConfig,
    RewardTrainer,
    SFTConfig,
    SFTTrainer,
)

from benchmarks.scoreboard.measuring import Gradients
from benchmarks.scoreboard.torch_models import FULL, SHORT_BATCH, moved, sgd
from benchmarks.scoreboard.transformers_rows import (
    ONE_UPDATE,
    WORDS,
    sizes,
    tokenizer,
    words,
)

OPTIONS: dict[str, Any] = {**ONE_UPDATE, "bf16": False, "gradient_checkpointing": False}


def gpt2(kind: Any = GPT2LMHeadModel) -> Any:
    torch.manual_seed(0)
    tiny = {
        "vocab_size": len(WORDS),
        "n_positions": 16,
        "n_embd": 8,
        "n_layer": 1,
        "n_head": 2,
        "num_labels": 1,
    }
    ends = {"bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0}
    return kind(
        GPT2Config(**tiny, **ends, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    ).double()


def trained(
    kind: Any,
    config: Any,
    model: nn.Module,
    items: list[dict[str, Any]],
    micro: bool,
    own: Any = (),
    **options: Any,
) -> Gradients:
    arguments = config(tempfile.mkdtemp(), **sizes(micro), **OPTIONS, **options)
    data = Dataset.from_list(items)
    trainer = kind(
        model,
        args=arguments,
        train_dataset=data,
        processing_class=tokenizer("left"),
        optimizers=(sgd(model), None),
        **dict(own),
    )
    return moved(model, trainer.train)


def sft(*, micro: bool, even: bool) -> Gradients:
    items = [{"text": words(item, 6 if even else 2 + item % 5)} for item in range(FULL)]
    return trained(SFTTrainer, SFTConfig, gpt2(), items, micro)


def pairs(even: bool) -> list[dict[str, str]]:
    lengths = range(FULL if even else SHORT_BATCH)
    return [
        {
            "prompt": words(at, 3),
            "chosen": " " + words(at + 1, 2 + at % 4),
            "rejected": " " + words(at + 5, 2 + at % 3),
        }
        for at in lengths
    ]


def dpo(*, micro: bool, even: bool) -> Gradients:
    return trained(
        DPOTrainer, DPOConfig, gpt2(), pairs(even), micro, {"ref_model": gpt2()}
    )


def reward(*, micro: bool, even: bool) -> Gradients:
    return trained(
        RewardTrainer,
        RewardConfig,
        gpt2(GPT2ForSequenceClassification),
        pairs(even),
        micro,
    )


def grpo(*, micro: bool, even: bool, loss: str = "dapo") -> Gradients:
    """Completions of up to six words, each as long as chance has it; with `even` none
    ends before.
    """
    model = gpt2()
    limits: dict[str, Any] = {
        "max_completion_length": 6,
        "num_generations": 2,
        "seed": 3,
    }
    limits["generation_kwargs"] = {"min_new_tokens": 6} if even else {}
    rewards: Callable[..., list[float]] = lambda completions, **_: [  # noqa: E731
        float(len(set(each))) + each.count("a") for each in completions
    ]
    items = [{"prompt": words(at, 3)} for at in range(4)]
    return trained(
        GRPOTrainer,
        GRPOConfig,
        model,
        items,
        micro,
        {"reward_funcs": rewards},
        loss_type=loss,
        **limits,
    )


def grpo_bnpo(*, micro: bool, even: bool) -> Gradients:
    return grpo(micro=micro, even=even, loss="bnpo")
