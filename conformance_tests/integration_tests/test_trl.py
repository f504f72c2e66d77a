"""TRL's trainers with `AccumulationCallback`: the loss of GRPO divides by tokens or is
a mean, and a window is the large batch of either.
"""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("trl")


from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from torch.optim import SGD
from torch.optim.lr_scheduler import ConstantLR
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

import gradaccum
from benchmarks.scoreboard.transformers_rows import tokenizer, words
from benchmarks.scoreboard.trl_rows import gpt2, pairs
from conformance_tests.framework_tests.refusing import refused
from gradaccum_torch.integrations.transformers import AccumulationCallback

from .regression import distance

pytestmark = pytest.mark.filterwarnings("default")
STEPS = 4
RATE = 0.1


class Recording(GRPOTrainer):  # type: ignore[misc]
    """Keeps the gradient and the tokens of each micro-batch, all of one model."""

    def compute_loss(self, model: Any, inputs: Any, **options: Any) -> Tensor:
        loss: Tensor = super().compute_loss(model, inputs, **options)
        parameters = list(model.parameters())
        gradients = torch.autograd.grad(loss, parameters, retain_graph=True)
        self.seen.append((gradients, inputs))
        return loss


def rewards(completions: list[str], **_: Any) -> list[float]:
    return [float(sum(map(ord, each)) % 11) for each in completions]


@pytest.fixture
def quiet(recwarn: pytest.WarningsRecorder) -> Iterator[None]:
    """TRL's own warnings are no errors; gradaccum's are none at all."""
    yield
    assert not any(
        issubclass(each.category, gradaccum.GradAccumWarning) for each in recwarn
    )


OPTIONS = {
    "max_grad_norm": 0.0,
    "bf16": False,
    "gradient_checkpointing": False,
    "use_cpu": True,
    "report_to": "none",
    "disable_tqdm": True,
    "save_strategy": "no",
    "seed": 3,
}


def made(
    folder: Path, loss_type: str, steps_per_generation: int
) -> tuple[Any, AccumulationCallback]:
    model = gpt2()
    inner = SGD(model.parameters(), lr=RATE)
    arguments = GRPOConfig(
        str(folder),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=STEPS,
        num_generations=2,
        max_completion_length=6,
        steps_per_generation=steps_per_generation,
        loss_type=loss_type,
        max_steps=1,
        **OPTIONS,
    )
    trainer = Recording(
        model,
        reward_funcs=rewards,
        args=arguments,
        train_dataset=Dataset.from_list([{"prompt": words(i, 3)} for i in range(16)]),
        processing_class=tokenizer("left"),
        optimizers=(inner, ConstantLR(inner, 1.0)),
    )
    trainer.seen = []
    callback = AccumulationCallback(trainer)
    trainer.add_callback(callback)
    return trainer, callback


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("steps_per_generation", [1, 4])
@pytest.mark.parametrize("loss_type", ["dapo", "grpo"])
def test_window_is_the_large_batch_of_the_loss(
    tmp_path: Path, loss_type: str, steps_per_generation: int
) -> None:
    trainer, callback = made(tmp_path, loss_type, steps_per_generation)
    before = [p.detach().clone() for p in trainer.model.parameters()]
    trainer.train()
    tokens = [float(inputs["completion_mask"].sum()) for _, inputs in trainer.seen]
    assert len(set(tokens)) > 1
    # What the loss of a micro-batch is divided by: all tokens of its generation, shared
    # out over its micro-batches; or it is a mean.
    divisors = [
        float(inputs["num_items_in_batch"]) / steps_per_generation
        for _, inputs in trainer.seen
    ]
    total = sum(tokens)
    if loss_type == "grpo":
        divisors = [1.0] * STEPS
        total = STEPS
    for place, parameter in enumerate(trainer.model.parameters()):
        gradient = sum(
            divisor * gradients[place]
            for divisor, (gradients, _) in zip(divisors, trainer.seen, strict=True)
        )
        expected = before[place] - RATE * gradient / total
        # TRL has the advantages in float32.
        torch.testing.assert_close(parameter.detach(), expected, rtol=1e-6, atol=1e-7)
    assert callback.optimizer.result.applied


def test_unknown_loss_is_refused(tmp_path: Path) -> None:
    trainer, _ = made(tmp_path, "grpo", 1)
    trainer.loss_type = "new"
    with refused(gradaccum.UsageError, "loss_type", "dapo"):
        trainer.train()


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("name", ["SFT", "DPO"])
def test_unequal_micro_batches_equal_large_batch(tmp_path: Path, name: str) -> None:
    """SFT counts tokens. The loss of DPO is a mean over a batch, the last of which is
    short.
    """
    kind = SFTTrainer
    config = SFTConfig
    items = [{"text": words(item, 2 + item % 5)} for item in range(7)]
    models_by_name = {}
    if name == "DPO":
        kind = DPOTrainer
        config = DPOConfig
        items = pairs(False)
        models_by_name["ref_model"] = gpt2()
    models = []
    for size in (2, 8):
        model = gpt2()
        inner = SGD(model.parameters(), lr=RATE)
        arguments = config(
            str(tmp_path),
            per_device_train_batch_size=size,
            gradient_accumulation_steps=8 // size,
            num_train_epochs=1,
            **OPTIONS,
        )
        trainer = kind(
            model,
            args=arguments,
            train_dataset=Dataset.from_list(items),
            processing_class=tokenizer("left"),
            optimizers=(inner, ConstantLR(inner, 1.0)),
            **models_by_name,
        )
        if size == 2:
            trainer.add_callback(AccumulationCallback(trainer))
        trainer.train()
        models.append(model)
    assert distance(*models) < 1e-6
    assert distance(models[0], gpt2()) > 1e-4
