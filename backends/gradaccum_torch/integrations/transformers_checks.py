"""What a `transformers.Trainer` must be told for a window of a wrapped optimizer to be right under it."""

from __future__ import annotations

from typing import Any

from gradaccum import ArgumentTypeError, UsageError
from gradaccum.kit import explain
from gradaccum_torch.optimizer import AccumulatingOptimizer
from gradaccum_torch.scheduler import GatedScheduler

Trainer = Any
"""A `transformers.Trainer`."""

_AT_EVALUATION = {"ReduceLROnPlateau", "GreedyLR"}
"""Schedulers that the Trainer moves by a metric, at an evaluation: no gate is needed."""
_OWN_ENGINES = {"DEEPSPEED", "MEGATRON_LM", "XLA"}
"""Ways to train in which gradients are not in ``.grad`` when the optimizer's step is called."""


def require_trainer(trainer: Trainer) -> None:
    """Require that `trainer` leaves accumulation and clipping to its optimizer.

    Raises:
        ArgumentTypeError: its optimizer is not wrapped, or its scheduler not gated.
        UsageError: its arguments contradict the window's, or the gradients are not the optimizer's to handle.
    """
    opt = unwrapped(trainer.optimizer)
    if not opt._options.separate_sums:
        found = "without it, and the Trainer clears .grad after each micro-batch"
        raise _error("separate_sums", "gradaccum.wrap(..., separate_sums=True)", found, "Write separate_sums=True.")
    _require_no_second_accumulation(trainer)
    _require_one_weight(trainer)
    _require_same_clipping(trainer.args.max_grad_norm, opt._options.clip_norm)
    _require_gate(trainer.lr_scheduler)


def unwrapped(optimizer: Any) -> AccumulatingOptimizer:
    """The wrapped optimizer, which Accelerate may have put into one of its own.

    Raises:
        ArgumentTypeError: it is not wrapped.
    """
    found = optimizer
    while not isinstance(found, AccumulatingOptimizer):
        if not hasattr(found, "optimizer"):
            fix = "Write Trainer(..., optimizers=(opt, gradaccum.wrap(scheduler))) with opt = gradaccum.wrap(optimizer, steps=4, ...)."
            found = f"an optimizer of the class {type(found).__name__}"
            raise explain(ArgumentTypeError, "optimizers", expected="a wrapped optimizer", found=found, fix=fix)
        found = found.optimizer
    return found


def _require_no_second_accumulation(trainer: Trainer) -> None:
    steps, engine = trainer.args.gradient_accumulation_steps, trainer.accelerator.distributed_type.name
    if steps > 1:
        fix = "Leave gradient_accumulation_steps out; steps= of gradaccum.wrap says how long a window is."
        raise _error("gradient_accumulation_steps", "1 beside a wrapped optimizer", f"{steps}, which would accumulate twice", fix)
    if trainer.accelerator.scaler is not None:
        fix = "Write bf16=True."
        raise _error("fp16", "no loss scaler beside a wrapped optimizer", "one that skips and unscales each micro-batch", fix)
    if engine in _OWN_ENGINES:
        fix = "Use the accumulation of that engine, with a bare optimizer."
        raise _error("trainer", "gradients that are in .grad", f"a Trainer on {engine}", fix)


def _require_one_weight(trainer: Trainer) -> None:
    counts = trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None
    if counts and trainer.args.world_size > 1 and not trainer.args.average_tokens_across_devices:
        expected, found = "True where losses are means over tokens", "False, under which a micro-batch weighs another number on each worker"
        raise _error("average_tokens_across_devices", expected, found, "Leave it out.")


def _require_same_clipping(max_grad_norm: float, clip_norm: float | None) -> None:
    if max_grad_norm > 0 and clip_norm != max_grad_norm:
        fix = f"Write gradaccum.wrap(..., clip_norm={max_grad_norm}), or TrainingArguments(max_grad_norm={clip_norm or 0})."
        expected = f"clip_norm={max_grad_norm}, as max_grad_norm of TrainingArguments, whose default is 1.0"
        raise _error("clip_norm", expected, f"clip_norm={clip_norm}", fix)


def _require_gate(scheduler: Any) -> None:
    kinds = {kind.__name__ for kind in type(scheduler).__mro__}
    if not isinstance(scheduler, GatedScheduler) and not kinds & _AT_EVALUATION:
        raise explain(
            ArgumentTypeError,
            "optimizers",
            expected="a gated scheduler, which moves once per update",
            found=f"a scheduler of the class {type(scheduler).__name__}, which the Trainer moves at each micro-batch",
            fix="Write optimizers=(opt, gradaccum.wrap(get_scheduler(name, opt, num_training_steps=updates))).",
        )


def _error(argument: str, expected: str, found: str, fix: str) -> UsageError:
    return explain(UsageError, argument, expected=expected, found=found, fix=fix)
