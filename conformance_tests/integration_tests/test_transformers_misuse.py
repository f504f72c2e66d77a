"""Refusals, as training begins, of what would be silently wrong under the Trainer of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs PyTorch")
pytest.importorskip("transformers", reason="needs transformers")
pytest.importorskip("accelerate", reason="needs accelerate")

import torch
from accelerate.utils import DistributedType
from torch import Tensor
from transformers import Trainer

from conformance_tests.framework_tests.refusing import refused
from conformance_tests.integration_tests.regression import Regressor, distance
from conformance_tests.integration_tests.transformers_runs import bare, wrapped
from gradaccum import ArgumentTypeError, UsageError
from gradaccum_torch.integrations.transformers import AccumulationCallback, require_trainer


@pytest.mark.parametrize(
    ("kind", "word", "wrap", "options"),
    [
        (UsageError, "clip_norm=1.0", {"clip_norm": None}, {}),
        (UsageError, "max_grad_norm=0.5", {"clip_norm": 0.5}, {}),
        (UsageError, "steps=", {}, {"gradient_accumulation_steps": 2}),
        (UsageError, "separate_sums=True", {"separate_sums": False}, {}),
    ],
)
def test_refused_by_name(tmp_path: Path, kind: type[Exception], word: str, wrap: dict[str, Any], options: dict[str, Any]) -> None:
    trainer = wrapped(tmp_path, wrap=wrap, **options)
    with refused(kind, word):
        trainer.train()
    assert distance(trainer.model, Regressor()) == 0


def test_bare_optimizer_is_refused(tmp_path: Path) -> None:
    trainer = bare(tmp_path)
    trainer.add_callback(AccumulationCallback(trainer))
    with refused(ArgumentTypeError, "gradaccum.wrap(optimizer", "AdamW"):
        trainer.train()


def test_own_scheduler_of_the_trainer_is_refused(tmp_path: Path) -> None:
    """It would move at each micro-batch."""
    trainer = wrapped(tmp_path)
    trainer.lr_scheduler = None
    with refused(ArgumentTypeError, "gradaccum.wrap(get_scheduler(", "LambdaLR"):
        trainer.train()


def test_loss_scaler_is_refused(tmp_path: Path) -> None:
    trainer = wrapped(tmp_path)
    trainer.accelerator.scaler = torch.amp.GradScaler("cpu")
    with refused(UsageError, "fp16", "bf16=True"):
        trainer.train()


def test_other_engines_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed keeps gradients to itself."""
    trainer = wrapped(tmp_path)
    monkeypatch.setattr(trainer.accelerator.state, "distributed_type", DistributedType.DEEPSPEED)
    with refused(UsageError, "DEEPSPEED", "accumulation of that engine"):
        require_trainer(trainer)


def test_weights_of_one_worker_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each worker would divide by another sum of weights."""
    trainer = wrapped(tmp_path)
    trainer.model_accepts_loss_kwargs, trainer.args.average_tokens_across_devices = True, False
    require_trainer(trainer)
    monkeypatch.setattr(type(trainer.args), "world_size", 2)
    with refused(UsageError, "average_tokens_across_devices"):
        require_trainer(trainer)


class OwnStep(Trainer):
    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        loss: Tensor = self.compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
        loss.backward()
        return loss.detach()


class OwnClipping(Trainer):
    """As the Trainer does where gradients are on several meshes."""

    def _clip_grad_norm(self, model: Any) -> Tensor:
        return torch.nn.utils.clip_grad_norm_(model.parameters(), self.args.max_grad_norm)


@pytest.mark.parametrize(
    ("kind", "missing"), [(OwnStep, "did without accelerator.backward"), (OwnClipping, "did without accelerator.clip")]
)
def test_step_that_goes_another_way_is_refused(tmp_path: Path, kind: type[Trainer], missing: str) -> None:
    """Weight and loss scale would be lost, or each micro-batch clipped."""
    trainer = wrapped(tmp_path)
    trainer.__class__ = kind
    with refused(UsageError, missing, "training_step"):
        trainer.train()
    assert distance(trainer.model, Regressor()) == 0
