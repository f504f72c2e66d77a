"""ms-swift's trainers of SFT and DPO: one update of micro-batches is the update of the
large batch, with label smoothing, and where the last micro-batch or the last window is
short.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from swift.model import get_model_processor
from swift.rlhf_trainers import DPOConfig, DPOTrainer
from swift.template import get_template
from swift.trainers import Seq2SeqTrainer, Seq2SeqTrainingArguments
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

WORDS = ("<pad>", "<eos>", *"abcdefghij")
LARGE = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}
MICRO = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a model of one layer and a tokenizer of twelve words."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(WORDS),
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=32,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=1,
    )
    Qwen2ForCausalLM(config).save_pretrained(tmp_path)
    vocabulary = {word: index for index, word in enumerate(WORDS)}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>"
    ).save_pretrained(tmp_path)
    return tmp_path


def text(item: int, length: int) -> str:
    return " ".join(WORDS[2 + (3 * item + n * n) % 10] for n in range(length))


def conversation(item: int, length: int) -> dict[str, Any]:
    return {
        "messages": [
            {"role": "user", "content": text(item, 3)},
            {"role": "assistant", "content": text(item + 1, length)},
        ]
    }


def load(folder: Path) -> tuple[Any, Any]:
    return get_model_processor(
        str(folder), model_type="qwen2", torch_dtype=torch.float64
    )


def update(
    trainer: Any,
    arguments: Any,
    mode: str,
    items: list[dict[str, Any]],
    folder: Path,
    *,
    reference: Any = None,
    **options: Any,
) -> Tensor:
    """Return how far one update by SGD moved the parameters."""
    model, processor = load(folder)
    before = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    template = get_template(processor, template_type="dummy")
    template.set_mode(mode)
    template.model = model
    settings = arguments(
        str(folder / "output"),
        num_train_epochs=1,
        max_grad_norm=0.0,
        lr_scheduler_type="constant",
        train_dataloader_shuffle=False,
        check_model=False,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        save_strategy="no",
        **options,
    )
    trainer(
        model=model,
        args=settings,
        template=template,
        train_dataset=Dataset.from_list([template.encode(item) for item in items]),
        optimizers=(torch.optim.SGD(model.parameters(), lr=0.1), None),
        **({"ref_model": reference} if reference else {}),
    ).train()
    return nn.utils.parameters_to_vector(model.parameters()).detach() - before


@pytest.mark.parametrize("smoothing", [0.0, 0.1], ids=["plain", "smoothed"])
def test_sft(smoothing: float, folder: Path) -> None:
    items = [conversation(item, 6) for item in range(8)]
    large, accumulated = (
        update(
            Seq2SeqTrainer,
            Seq2SeqTrainingArguments,
            "train",
            items,
            folder,
            label_smoothing_factor=smoothing,
            **sizes,
        )
        for sizes in (LARGE, MICRO)
    )
    torch.testing.assert_close(accumulated, large)


@pytest.mark.parametrize(
    "count", [8, 7, 6], ids=["equal", "short_batch", "short_window"]
)
def test_dpo(count: int, folder: Path) -> None:
    items = [
        conversation(item, 2 + item % 4)
        | {"rejected_response": text(item + 5, 2 + item % 3)}
        for item in range(count)
    ]
    large, accumulated = (
        update(
            DPOTrainer,
            DPOConfig,
            "rlhf",
            items,
            folder,
            reference=load(folder)[0],
            loss_type="sigmoid",
            **sizes,
        )
        for sizes in (LARGE, MICRO)
    )
    torch.testing.assert_close(accumulated, large)
