"""A wrapped optimizer in the Trainer of transformers, beside the Trainer's own accumulation and the large batch, which a bare one makes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs PyTorch")
pytest.importorskip("transformers", reason="needs transformers")
pytest.importorskip("accelerate", reason="needs accelerate")

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau
from transformers import IntervalStrategy, Trainer, TrainerCallback
from transformers.optimization import GreedyLR

import gradaccum
from conformance_tests.framework_tests.migrating import programs_of
from conformance_tests.integration_tests.regression import Items, Regressor, distance
from conformance_tests.integration_tests.transformers_runs import COUNT, EPOCHS, MICRO, STEPS, bare, large, logged, trained, wrapped


def test_default_arguments_equal_large_batch(tmp_path: Path) -> None:
    """The default clips to 1.0. torch adds 1e-6 to the norm as it does, and the window does not."""
    mine, other = trained(wrapped(tmp_path)), trained(large(tmp_path))
    assert max(logged(other, "grad_norm")) > 1
    assert distance(mine.model, other.model) < 1e-6
    assert logged(mine, "grad_norm", STEPS) == pytest.approx(logged(other, "grad_norm"), rel=1e-6)
    assert logged(mine, "learning_rate", STEPS) == pytest.approx(logged(other, "learning_rate"), rel=1e-12)


def test_without_clipping_equals_large_batch(tmp_path: Path) -> None:
    mine = trained(wrapped(tmp_path, wrap={"clip_norm": None}, max_grad_norm=0.0))
    assert distance(mine.model, trained(large(tmp_path, max_grad_norm=0.0)).model) < 1e-12


def test_loss_scale_is_the_windows(tmp_path: Path) -> None:
    """The Trainer differentiates the loss times the scale of the wrapper, a power of two."""
    scaled = trained(wrapped(tmp_path, wrap={"loss_scale": gradaccum.DynamicLossScale(init_scale=2.0**10)}))
    assert scaled.optimizer.optimizer.result.loss_scale == 2.0**10
    assert distance(scaled.model, trained(wrapped(tmp_path)).model) == 0


@pytest.mark.parametrize("count", [COUNT, COUNT - 1], ids=["short window", "short micro-batch"])
def test_float32_equals_own_accumulation_bit_for_bit(tmp_path: Path, count: int) -> None:
    """The Trainer divides each loss by the 4 or 2 that the window divides by at its end: powers of two."""
    data, options = Items(count, torch.float32), {"max_grad_norm": 0.0}
    own = trained(bare(tmp_path, Regressor(torch.float32), data, gradient_accumulation_steps=STEPS, **options))
    mine = trained(wrapped(tmp_path, Regressor(torch.float32), data, {"clip_norm": None}, **options))
    assert distance(mine.model, own.model) == 0
    assert logged(mine, "grad_norm", STEPS) == pytest.approx(logged(own, "grad_norm"), rel=1e-6)


def test_bfloat16_equals_own_accumulation(tmp_path: Path) -> None:
    data, options = Items(COUNT, torch.float32), {"bf16": True}
    own = trained(bare(tmp_path, Regressor(torch.float32), data, gradient_accumulation_steps=STEPS, **options))
    mine = trained(wrapped(tmp_path, Regressor(torch.float32), data, **options))
    assert distance(mine.model, own.model) < 1e-5
    assert distance(mine.model, trained(bare(tmp_path, Regressor(torch.float32), data, gradient_accumulation_steps=STEPS)).model) > 1e-5


def test_update_count_and_arguments(tmp_path: Path) -> None:
    """The Trainer counts micro-batches as steps; what it was told and its methods are as they were."""
    trainer = trained(wrapped(tmp_path))
    assert trainer.state.global_step == 20
    assert trainer.optimizer.optimizer.result.optimizer_step == 6
    assert trainer.args.max_grad_norm == 1.0
    assert not {"backward", "clip_grad_norm_"} & set(vars(trainer.accelerator))
    assert "get_batch_samples" not in vars(trainer)


@pytest.mark.parametrize("steps", [6, 10], ids=["mid-window", "end of epoch"])
def test_resumed_run_is_bitwise_the_uninterrupted_one(tmp_path: Path, steps: int) -> None:
    options = {"save_strategy": "steps", "save_steps": steps}
    whole = trained(wrapped(tmp_path, **options))
    resumed = wrapped(tmp_path / "resumed", **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{steps}"))
    assert distance(resumed.model, whole.model) == 0
    assert resumed.lr_scheduler.get_last_lr() == whole.lr_scheduler.get_last_lr()
    assert resumed.optimizer.optimizer.result == whole.optimizer.optimizer.result


class Bare(Trainer):
    """Its loader is not Accelerate's, and does not announce its last batch."""

    def get_train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(self.train_dataset, batch_size=MICRO)


def test_unannounced_end_of_epoch(tmp_path: Path) -> None:
    """A checkpoint of the last micro-batch holds the open window; the resumed run ends it before the next epoch."""

    def make(folder: Path) -> Trainer:
        trainer = wrapped(folder, save_strategy="steps", save_steps=10)
        trainer.__class__ = Bare
        return trainer

    whole, resumed = trained(make(tmp_path)), make(tmp_path / "resumed")
    assert torch.load(tmp_path / "checkpoint-10" / "optimizer.pt")["gradaccum"]["micro_step"] == 2
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-10"))
    assert whole.optimizer.optimizer.result.optimizer_step == 6
    assert distance(resumed.model, whole.model) == 0


def test_max_steps_closes_last_window(tmp_path: Path) -> None:
    """The last checkpoint is the model that is handed back."""
    trainer = trained(wrapped(tmp_path, max_steps=6, save_strategy="steps", save_steps=100))
    saved = torch.load(tmp_path / "checkpoint-6" / "optimizer.pt")
    assert saved["gradaccum"]["optimizer_step"] == trainer.optimizer.optimizer.result.optimizer_step == 2
    assert trainer.lr_scheduler.get_last_lr() == [0.1 / 3]


class Stream(torch.utils.data.IterableDataset[dict[str, torch.Tensor]]):
    """Data without a length."""

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return map(Items(COUNT).__getitem__, range(COUNT))


def test_stream_of_data_equals_large_batch(tmp_path: Path) -> None:
    """The loader alone knows where an epoch ends."""
    mine, other = wrapped(tmp_path, data=Stream(), max_steps=20), large(tmp_path, data=Stream(), max_steps=6)
    assert distance(trained(mine).model, trained(other).model) < 1e-6
    assert mine.optimizer.optimizer.result.optimizer_step == 6


class Raising(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2:
            raise KeyboardInterrupt


def test_interrupted_run_starts_anew(tmp_path: Path) -> None:
    trainer = wrapped(tmp_path)
    trainer.add_callback(Raising())
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    trainer.remove_callback(Raising)
    assert distance(trained(trainer).model, trained(wrapped(tmp_path)).model) == 0


class ShortEpochs(TrainerCallback):
    """Ends each epoch after three micro-batches."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_epoch_stop = state.global_step in (3, 6)


def test_broken_off_epoch_closes_its_window(tmp_path: Path) -> None:
    trainer = wrapped(tmp_path, wrap={"steps": 5})
    trainer.add_callback(ShortEpochs())
    trainer.train()
    assert trainer.optimizer.optimizer.result.optimizer_step == 2
    assert trainer.lr_scheduler.get_last_lr() == [0.1 / 3]


@pytest.mark.parametrize("kind", [ReduceLROnPlateau, GreedyLR])
def test_scheduler_of_a_metric(tmp_path: Path, kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Trainer moves it at an evaluation, and nothing else does, where an epoch is broken off either."""
    trainer, metrics = wrapped(tmp_path, metric_for_best_model="loss", wrap={"steps": 5}), []
    trainer.args.eval_strategy, trainer.eval_dataset = IntervalStrategy.EPOCH, Items(4)
    trainer.lr_scheduler = kind(trainer.optimizer)
    monkeypatch.setattr(trainer.lr_scheduler, "step", metrics.append)
    trainer.add_callback(ShortEpochs())
    assert trained(trainer).optimizer.optimizer.result.optimizer_step == 2
    assert len(metrics) == EPOCHS


def test_program_of_the_page_on_moving() -> None:
    """Before and after; after, a callback flushes before the validation that cuts a window."""
    (program,) = [each for each in programs_of("torch") if each.of_neighbour]
    program.run_here()
    unflushed = program.blocks[1].replace("            optimizer.flush()\n", "")
    with pytest.raises(AssertionError):
        program._replace(blocks=(program.blocks[0], unflushed)).run_here()
