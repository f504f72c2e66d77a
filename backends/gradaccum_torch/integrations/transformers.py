"""A callback for the `transformers.Trainer` that makes each of the Trainer's
accumulated batches a window.

While the Trainer trains, `AccumulationCallback` replaces its ``get_batch_samples`` and
two methods of its accelerator.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback  # type: ignore[import-not-found,import-untyped,unused-ignore]

from gradaccum import ArgumentTypeError, UsageError
from gradaccum.kit import explain
from gradaccum_torch.optimizer import AccumulatingOptimizer
from gradaccum_torch.scheduler import GatedScheduler

Trainer = Any
"""A `transformers.Trainer`; mypy runs without that package."""
Argument = Any
"""What the Trainer hands to every callback."""


class AccumulationCallback(TrainerCallback):  # type: ignore[misc,unused-ignore]
    """Makes a window right under the `transformers.Trainer`:
    ``trainer.add_callback(AccumulationCallback(trainer))``.

    - Clipping: ``max_grad_norm``, 1.0 by default, must be the window's ``clip_norm``; a
      micro-batch is not clipped.
    - ``grad_norm`` in the logs is that of the last closed window, 0 before any.
    - Weights: where the Trainer counts items (tokens with a label, or TRL's
      ``num_items_in_batch`` where its loss divides by that), they are the micro-batch's
      weight. This waits for the device.
    - The last window of an epoch, and of the run, is closed with what it holds; the
      scheduler moves with it.
    - A run that does not resume begins with an empty window.

    Args:
        trainer: the `transformers.Trainer`, given ``optimizers=(opt, scheduler)``: an
            optimizer wrapped with ``separate_sums=True`` and a gated scheduler.

    Raises:
        ArgumentTypeError: as ``trainer.train()`` begins; its optimizer is not wrapped,
            or its scheduler not gated.
        UsageError: then; its arguments contradict the window's, or the gradients are
            not the optimizer's to handle.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._replacements = ExitStack()
        self._norm = torch.zeros(())
        """What the Trainer logs. It asks before the optimizer's step, and reads after
        that.
        """
        self._weight: float | None = None
        self._has_loss = False
        """A loss of the step under way was differentiated."""

    def on_train_begin(
        self, args: Argument, state: Argument, control: Argument, **kwargs: Argument
    ) -> None:
        require_trainer(self._trainer)
        self._replacements.close()  # An earlier run may have ended with an exception.
        self._weight = None
        opt = wrapped_optimizer(self._trainer.optimizer)
        if state.global_step == 0:
            opt.discard()
        accelerator = self._trainer.accelerator
        count_items = self._trainer.get_batch_samples
        self._replace(accelerator, "backward", self._backward)
        self._replace(accelerator, "clip_grad_norm_", self._window_norm)
        self._replace(
            self._trainer,
            "get_batch_samples",
            partial(self._batch_samples, count_items),
        )
        prepare = self._trainer._prepare_inputs
        self._replace(
            self._trainer, "_prepare_inputs", partial(self._prepared_inputs, prepare)
        )

    def on_epoch_begin(
        self, args: Argument, state: Argument, control: Argument, **kwargs: Argument
    ) -> None:
        """Close a window that was saved open at the end of an epoch."""
        if float(state.epoch or 0).is_integer():
            self._flush()

    def on_pre_optimizer_step(
        self, args: Argument, state: Argument, control: Argument, **kwargs: Argument
    ) -> None:
        """Require that the Trainer called the replacement of its backward pass.

        Raises:
            UsageError: a subclass differentiates by itself.
        """
        if not self._has_loss:
            raise trainer_error(
                "trainer",
                "a step that calls accelerator.backward",
                "one that did without it",
                "Leave training_step to the Trainer, or accumulate with"
                " gradient_accumulation_steps= and a bare optimizer.",
            )
        self._has_loss = False

    def on_optimizer_step(
        self, args: Argument, state: Argument, control: Argument, **kwargs: Argument
    ) -> None:
        """Close the window at the last micro-batch of an epoch or run, before the
        scheduler moves and a checkpoint is saved.
        """
        if (
            self._trainer.accelerator.gradient_state.end_of_dataloader
            or state.global_step + 1 >= state.max_steps
        ):
            self._close()
        self._norm.fill_(self._opt.result.grad_norm)

    def on_epoch_end(
        self, args: Argument, state: Argument, control: Argument, **kwargs: Argument
    ) -> None:
        """Close the window of an epoch that broke off, or whose last batch the loader
        did not announce.
        """
        self._flush()

    def on_train_end(
        self, args: Argument, state: Argument, control: Argument, **kwargs: Argument
    ) -> None:
        self._replacements.close()

    @property
    def _opt(self) -> AccumulatingOptimizer:
        return wrapped_optimizer(self._trainer.optimizer)

    def _close(self) -> None:
        """Flush an open window, or all workers' windows. Where none is open, the user's
        callbacks still read the result of the last step.
        """
        if self._opt.result.micro_step or self._opt._window.workers.is_shared:
            self._opt.flush()

    def _flush(self) -> None:
        self._close()
        self._norm.fill_(self._opt.result.grad_norm)
        if isinstance(self._trainer.lr_scheduler, GatedScheduler):
            self._trainer.lr_scheduler.step()

    def _backward(self, loss: Tensor, **kwargs: Argument) -> None:
        # Of several losses of a micro-batch the first names the weight.
        weight = None if self._has_loss else self._weight
        self._has_loss = True
        self._opt.backward(loss, weight, **kwargs)

    def _window_norm(
        self, parameters: Argument, max_norm: float, norm_type: float = 2
    ) -> Tensor:
        """Clip nothing; return the norm of the window that the next step may close."""
        return self._norm

    def _batch_samples(
        self, count_items: Argument, *args: Argument, **kwargs: Argument
    ) -> tuple[Any, Any]:
        """Note the number of items in the mean of the micro-batch."""
        samples, items = count_items(*args, **kwargs)
        self._weight = None
        divides = getattr(self._trainer, "loss_is_scaled_for_ga", None) is not False
        if items is not None and divides:
            self._weight = float(torch.as_tensor(items).flatten()[0])
        return samples, items

    def _prepared_inputs(
        self, prepare: Argument, *args: Argument, **kwargs: Argument
    ) -> Any:
        """Note by how many tokens TRL's loss divides, whatever batch they are of."""
        inputs = prepare(*args, **kwargs)
        items = inputs.get(_TRLS_COUNT) if isinstance(inputs, Mapping) else None
        if items is not None and divides_by_tokens(self._trainer):
            self._weight = float(torch.as_tensor(items))
        return inputs

    def _replace(self, owner: Any, name: str, method: Argument) -> None:
        if name in vars(owner):
            self._replacements.callback(setattr, owner, name, vars(owner)[name])
        else:
            self._replacements.callback(delattr, owner, name)
        setattr(owner, name, method)


_TRLS_COUNT = "num_items_in_batch"
_BY_TOKENS = {"dapo", "cispo", "vespo"}
_MEANS = {"grpo", "bnpo", "dr_grpo", "sapo", "luspo"}
"""The losses of TRL's trainers that divide by `_TRLS_COUNT`, and those that are means
of a micro-batch, which count the same.
"""


def divides_by_tokens(trainer: Trainer) -> bool:
    """True if the loss is a sum divided by the number of tokens that the inputs of TRL
    have with them.

    Raises:
        UsageError: nobody knows by what the loss divides.
    """
    kind = getattr(trainer, "loss_type", None)
    if kind in _MEANS:
        return False
    if kind is None or kind in _BY_TOKENS:
        return True
    known_kinds = ", ".join(sorted(_BY_TOKENS | _MEANS))
    fix = "Choose another one, or accumulate with gradient_accumulation_steps= alone."
    raise trainer_error("loss_type", f"one of {known_kinds}", repr(kind), fix)


# Refusals of a `transformers.Trainer` under which a window of a wrapped optimizer would
# be wrong.


_AT_EVALUATION = {"ReduceLROnPlateau", "GreedyLR"}
"""Schedulers that the Trainer moves by a metric, at an evaluation: no gate is needed.
"""


def require_trainer(trainer: Trainer) -> None:
    options = wrapped_optimizer(trainer.optimizer)._options
    args = trainer.args
    if not options.separate_sums:
        raise trainer_error(
            "separate_sums",
            "gradaccum.wrap(..., separate_sums=True)",
            "without it, and the Trainer clears .grad after each micro-batch",
            "Write separate_sums=True.",
        )
    if args.gradient_accumulation_steps > 1:
        raise trainer_error(
            "gradient_accumulation_steps",
            "1 beside a wrapped optimizer",
            f"{args.gradient_accumulation_steps}, which would accumulate twice",
            "Leave it out; steps= of gradaccum.wrap says how long a window is.",
        )
    if trainer.accelerator.scaler is not None:
        raise trainer_error(
            "fp16",
            "no loss scaler beside a wrapped optimizer",
            "one that skips and unscales each micro-batch",
            "Write bf16=True.",
        )
    if args.max_grad_norm > 0 and options.clip_norm != args.max_grad_norm:
        raise trainer_error(
            "clip_norm",
            f"clip_norm={args.max_grad_norm}, as max_grad_norm of TrainingArguments,"
            " whose default is 1.0",
            f"clip_norm={options.clip_norm}",
            f"Write gradaccum.wrap(..., clip_norm={args.max_grad_norm}), or"
            f" TrainingArguments(max_grad_norm={options.clip_norm or 0}).",
        )
    scheduler = trainer.lr_scheduler
    kinds = {kind.__name__ for kind in type(scheduler).__mro__}
    if not isinstance(scheduler, GatedScheduler) and not kinds & _AT_EVALUATION:
        raise explain(
            ArgumentTypeError,
            "optimizers",
            expected="a gated scheduler, which moves once per update",
            found=f"a scheduler of the class {type(scheduler).__name__}",
            fix="Write optimizers=(opt, gradaccum.wrap(get_scheduler(name, opt,"
            " num_training_steps=updates))).",
        )


def wrapped_optimizer(optimizer: Any) -> AccumulatingOptimizer:
    """Return the wrapped optimizer, out of Accelerate's if necessary; raise if it is
    not wrapped.
    """
    kind = type(optimizer).__name__
    while not isinstance(optimizer, AccumulatingOptimizer):
        if not hasattr(optimizer, "optimizer"):
            raise explain(
                ArgumentTypeError,
                "optimizers",
                expected="a wrapped optimizer",
                found=f"an optimizer of the class {kind}",
                fix="Write Trainer(..., optimizers=(opt, gradaccum.wrap(scheduler)))"
                " with opt = gradaccum.wrap(optimizer, steps=4, ...).",
            )
        optimizer = optimizer.optimizer
    return optimizer


def trainer_error(argument: str, expected: str, found: str, fix: str) -> UsageError:
    return explain(UsageError, argument, expected=expected, found=found, fix=fix)
