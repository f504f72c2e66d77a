"""A callback for Lightning's ``Trainer``. It closes the last window of each epoch. It
raises an error if the Trainer is configured to clip or accumulate gradients itself, or
to step a scheduler after every micro-batch.

Without this callback, an epoch may end in the middle of a window, and a Trainer that is
configured to clip would clip each micro-batch's gradient, not the window's gradient.
Lightning would also step a scheduler with ``"interval": "step"`` after each micro-batch
if the scheduler is not wrapped.

If the optimizer was wrapped with ``separate_sums=True``, only this callback detects
that the Trainer clips, because such an optimizer allows other code to change ``.grad``.
"""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback

from gradaccum import UsageError
from gradaccum_torch.optimizer import AccumulatingOptimizer
from gradaccum_torch.saving import StateDict
from gradaccum_torch.scheduler import GatedScheduler

Output = Any
"""The return value of ``training_step``, which Lightning passes to callbacks."""


class AccumulationCallback(Callback):  # type: ignore[misc]
    """Closes the open window after the last batch of an epoch, before validation and
    checkpointing.

    Put this callback first in the Trainer's list. It assigns weight 0 to a batch
    whose ``training_step`` returns None, and steps wrapped schedulers with
    ``"interval": "step"`` after the last update of an epoch. Without it, a run whose
    gradient sum is kept in ``.grad`` cannot be resumed in the middle of a window.

    Raises:
        UsageError: the ``Trainer`` is configured to clip or accumulate gradients
            itself, or to step a scheduler after every micro-batch; or no optimizer is
            wrapped. The error is raised when training begins, or at the first batch
            after the configuration has changed.
    """

    def __init__(self) -> None:
        self._has_delivered = False
        self._saved_states: list[StateDict] = []

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Keep the optimizers' states from the checkpoint. `on_train_start` loads them
        again, because Lightning clears the model's gradients after it has loaded the
        states.
        """
        self._saved_states[:] = checkpoint.get("optimizer_states", ())

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """If the checkpoint contains an open window, restore the window's gradient sum.
        Raise if no optimizer is wrapped, or if a scheduler with ``"interval": "step"``
        would not step exactly once per update.
        """
        saved_states = list(self._saved_states)
        self._saved_states.clear()
        for optimizer, state in zip(trainer.optimizers, saved_states, strict=False):
            if (
                isinstance(optimizer, AccumulatingOptimizer)
                and optimizer.result.micro_step
            ):
                optimizer.load_state_dict(state)
        if not wrapped_optimizers(trainer):
            raise UsageError(
                "configure_optimizers: expected a wrapped optimizer; got"
                f" {', '.join(type(each).__name__ for each in trainer.optimizers)}."
                " Return gradaccum.wrap(optimizer, steps=4) from configure_optimizers,"
                " or leave AccumulationCallback out."
            )
        if pl_module.automatic_optimization:
            _require_gates(trainer)

    def on_train_batch_start(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        batch: Output,
        batch_idx: int,
    ) -> None:
        """Raise if the ``Trainer`` clips or accumulates gradients itself. Both settings
        are checked for every batch, because a ``GradientAccumulationScheduler`` may
        enable accumulation between two epochs.
        """
        self._has_delivered = False
        _require_untouched_micro_batches(trainer)

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._has_delivered = True

    def on_before_optimizer_step(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        optimizer: torch.optim.Optimizer,
    ) -> None:
        if (
            pl_module.automatic_optimization
            and not self._has_delivered
            and isinstance(optimizer, AccumulatingOptimizer)
        ):
            optimizer.backward(torch.zeros(()), weight=0)

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Output,
        batch: Output,
        batch_idx: int,
    ) -> None:
        if trainer.is_last_batch or batch_idx + 1 == trainer.num_training_batches:
            _flush(trainer, pl_module)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        _flush(trainer, pl_module)


def wrapped_optimizers(trainer: Trainer) -> list[AccumulatingOptimizer]:
    return [
        optimizer
        for optimizer in trainer.optimizers
        if isinstance(optimizer, AccumulatingOptimizer)
    ]


def _flush(trainer: Trainer, module: LightningModule) -> None:
    open_ones = [
        optimizer
        for optimizer in wrapped_optimizers(trainer)
        if optimizer.result.micro_step
    ]
    for optimizer in open_ones:
        optimizer.flush()
    if open_ones and module.automatic_optimization:
        for config in trainer.lr_scheduler_configs:
            if config.interval == "step" and not config.reduce_on_plateau:
                config.scheduler.step()


def _require_untouched_micro_batches(trainer: Trainer) -> None:
    for name, usual, option in (
        (
            "gradient_clip_val",
            None,
            "clip_norm={}). To clip by value, clip in"
            " optimizer.register_step_pre_hook(...).",
        ),
        ("accumulate_grad_batches", 1, "steps={}). steps also accepts a schedule."),
    ):
        value = getattr(trainer, name)
        if value and value != usual:
            raise UsageError(
                f"{name}: expected the Trainer's default, because the wrapped optimizer"
                f" does the clipping and the accumulation; got {value!r}"
                f" ({type(value).__name__}). Leave {name} out of the Trainer. In"
                " configure_optimizers, return gradaccum.wrap(optimizer,"
                f" {option.format(value)}"
            )


def _require_gates(trainer: Trainer) -> None:
    for config in trainer.lr_scheduler_configs:
        is_gated = isinstance(config.scheduler, GatedScheduler)
        if config.interval == "step" and not (is_gated and config.frequency == 1):
            raise UsageError(
                'lr_scheduler: expected a wrapped scheduler with "frequency": 1,'
                ' because with "interval": "step" Lightning steps the scheduler after'
                f" each micro-batch; got {type(config.scheduler).__name__} with"
                f' frequency {config.frequency}. Write {{"scheduler":'
                ' gradaccum.wrap(scheduler), "interval": "step"}, so that the scheduler'
                " steps once per update."
            )
