"""TRL's trainers: one update of micro-batches is the update of the large batch, where
the last micro-batch is short or completions differ in length.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from transformers import (
    GPT2Config,
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
)
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    RewardConfig,
    RewardTrainer,
)

WORDS = ("<pad>", "<eos>", *"abcdefghij")
CONFIG = GPT2Config(
    vocab_size=len(WORDS),
    n_positions=16,
    n_embd=8,
    n_layer=1,
    n_head=2,
    num_labels=1,
    bos_token_id=1,
    eos_token_id=1,
    pad_token_id=0,
    resid_pdrop=0.0,
    embd_pdrop=0.0,
    attn_pdrop=0.0,
)


def tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {word: index for index, word in enumerate(WORDS)}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token="<pad>",
        eos_token="<eos>",
        padding_side="left",
    )


def text(item: int, length: int) -> str:
    return " ".join(WORDS[2 + (3 * item + n * n) % 10] for n in range(length))


PAIRS = [
    {
        "prompt": text(item, 3),
        "chosen": " " + text(item + 1, 2 + item % 4),
        "rejected": " " + text(item + 5, 2 + item % 3),
    }
    for item in range(8)
]


def model(kind: Any = GPT2LMHeadModel) -> Any:
    torch.manual_seed(0)
    return kind(CONFIG).double()


def update(
    trainer: Any,
    config: Any,
    net: nn.Module,
    items: list[Any],
    folder: Path,
    **how: Any,
) -> Tensor:
    """Return how far one update by SGD moved the parameters."""
    before = nn.utils.parameters_to_vector(net.parameters()).detach().clone()
    arguments = config(
        str(folder),
        num_train_epochs=1,
        max_grad_norm=0.0,
        lr_scheduler_type="constant",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        bf16=False,
        save_strategy="no",
        gradient_checkpointing=False,
        **how.pop("arguments"),
    )
    trainer(
        net,
        args=arguments,
        train_dataset=Dataset.from_list(items),
        processing_class=tokenizer(),
        optimizers=(torch.optim.SGD(net.parameters(), lr=0.1), None),
        **how,
    ).train()
    return nn.utils.parameters_to_vector(net.parameters()).detach() - before


LARGE = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}
MICRO = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}


@pytest.mark.parametrize("items", [8, 7], ids=["equal", "short_batch"])
def test_dpo(items: int, tmp_path: Path) -> None:
    large, accumulated = (
        update(
            DPOTrainer,
            DPOConfig,
            model(),
            PAIRS[:items],
            tmp_path,
            arguments=sizes,
            ref_model=model(),
        )
        for sizes in (LARGE, MICRO)
    )
    torch.testing.assert_close(accumulated, large)


@pytest.mark.parametrize("items", [8, 7], ids=["equal", "short_batch"])
def test_reward(items: int, tmp_path: Path) -> None:
    large, accumulated = (
        update(
            RewardTrainer,
            RewardConfig,
            model(GPT2ForSequenceClassification),
            PAIRS[:items],
            tmp_path,
            arguments=sizes,
        )
        for sizes in (LARGE, MICRO)
    )
    torch.testing.assert_close(accumulated, large)


@pytest.mark.parametrize("loss_type", ["dapo", "bnpo"])
def test_grpo_of_ragged_completions(loss_type: str, tmp_path: Path) -> None:
    def reward(completions: list[str], **_: Any) -> list[float]:
        return [float(len(set(each))) + each.count("a") for each in completions]

    prompts = [{"prompt": text(item, 3)} for item in range(4)]
    how = {
        "max_completion_length": 6,
        "num_generations": 2,
        "seed": 3,
        "loss_type": loss_type,
    }
    large, accumulated = (
        update(
            GRPOTrainer,
            GRPOConfig,
            model(),
            prompts,
            tmp_path,
            arguments={**sizes, **how},
            reward_funcs=reward,
        )
        for sizes in (LARGE, MICRO)
    )
    torch.testing.assert_close(accumulated, large)
