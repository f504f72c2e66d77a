"""The rows of ms-swift: its trainers of SFT and DPO."""

from __future__ import annotations

import tempfile
from functools import cache
from typing import Any

import torch
from datasets import Dataset
from swift.model import get_model_processor
from swift.rlhf_trainers import DPOConfig, DPOTrainer
from swift.template import get_template
from swift.trainers import Seq2SeqTrainer, Seq2SeqTrainingArguments
from transformers import Qwen2Config, Qwen2ForCausalLM

from benchmarks.scoreboard.measuring import Gradients
from benchmarks.scoreboard.torch_models import (
    FULL,
    SHORT_BATCH,
    SHORT_WINDOW,
    moved,
    sgd,
)
from benchmarks.scoreboard.transformers_rows import (
    ONE_UPDATE,
    WORDS,
    sizes,
    tokenizer,
    words,
)

TINY: dict[str, Any] = {
    "vocab_size": len(WORDS),
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
}
TINY |= {
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "bos_token_id": 1,
    "eos_token_id": 1,
}
IN_ORDER: dict[str, Any] = {"train_dataloader_shuffle": False, "check_model": False}


@cache
def folder() -> str:
    torch.manual_seed(0)
    made = tempfile.mkdtemp()
    Qwen2ForCausalLM(Qwen2Config(**TINY, pad_token_id=0)).save_pretrained(made)
    tokenizer().save_pretrained(made)
    return made


def loaded() -> tuple[Any, Any]:
    found: tuple[Any, Any] = get_model_processor(
        folder(), model_type="qwen2", torch_dtype=torch.float64
    )
    return found


def trainer(
    kind: Any,
    arguments: Any,
    mode: str,
    items: list[dict[str, Any]],
    micro: bool,
    own: Any = (),
    **options: Any,
) -> Any:
    model, processor = loaded()
    template = get_template(processor, template_type="dummy")
    template.set_mode(mode)
    template.model = model
    settings = arguments(
        tempfile.mkdtemp(), **sizes(micro), **ONE_UPDATE, **IN_ORDER, **options
    )
    data = Dataset.from_list([template.encode(each) for each in items])
    return kind(
        model=model,
        args=settings,
        template=template,
        train_dataset=data,
        optimizers=(sgd(model), None),
        **dict(own),
    )


def talk(item: int, length: int) -> dict[str, Any]:
    said = (("user", words(item, 3)), ("assistant", words(item + 1, length)))
    return {"messages": [{"role": role, "content": content} for role, content in said]}


def supervised(micro: bool, even: bool, **options: Any) -> Any:
    items = [talk(item, 6 if even else 2 + item % 5) for item in range(FULL)]
    return trainer(
        Seq2SeqTrainer, Seq2SeqTrainingArguments, "train", items, micro, **options
    )


def sft(*, micro: bool, even: bool) -> Gradients:
    made = supervised(micro, even)
    return moved(made.model, made.train)


def smoothed_sft(*, micro: bool, even: bool) -> Gradients:
    """Equal items. With `even`, the Trainer is told that the loss takes no number of
    items: the way to mend it from outside.
    """
    made = supervised(micro, True, label_smoothing_factor=0.1)
    made.model_accepts_loss_kwargs = not even
    return moved(made.model, made.train)


def dpo(count: int, micro: bool) -> Gradients:
    items = [
        {**talk(item, 2 + item % 4), "rejected_response": words(item + 5, 2 + item % 3)}
        for item in range(count)
    ]
    made = trainer(
        DPOTrainer,
        DPOConfig,
        "rlhf",
        items,
        micro,
        {"ref_model": loaded()[0]},
        loss_type="sigmoid",
    )
    return moved(made.model, made.train)


def dpo_short_batch(*, micro: bool, even: bool) -> Gradients:
    return dpo(FULL if even else SHORT_BATCH, micro)


def dpo_short_window(*, micro: bool, even: bool) -> Gradients:
    return dpo(FULL if even else SHORT_WINDOW, micro)
