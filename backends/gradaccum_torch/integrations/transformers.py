"""A callback for the `transformers.Trainer` and for TRL's trainers. With this callback,
each update of the Trainer uses the gradient of one gradaccum window.

During training, `AccumulationCallback` replaces the Trainer's optimizer, its
``training_step`` and ``_prepare_inputs``, and two methods of its accelerator.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from transformers import TrainerCallback  # type: ignore[import-not-found,import-untyped,unused-ignore]

from gradaccum import UsageError
from gradaccum_torch.backend import wrap
from gradaccum_torch.optimizer import AccumulatingOptimizer

Trainer = Any
"""A `transformers.Trainer`. Its type is not imported, because mypy runs without the
transformers package.
"""
Argument = Any
"""Any argument that the Trainer passes to its callbacks or to its own methods."""


class AccumulationCallback(TrainerCallback):  # type: ignore[misc,unused-ignore]
    """Makes each update of a Trainer equal to the update that the large batch would
    give. Add it with ``trainer.add_callback(AccumulationCallback(trainer))``.

    The Trainer's arguments, optimizer and scheduler stay as they are:
    ``gradient_accumulation_steps`` is the length of a window, and ``max_grad_norm``
    clips the window's gradient. The weight of a micro-batch is the number of items that
    the Trainer counts in it, or its batch size if the Trainer does not count items. The
    Trainer logs the loss and the norm of the window, and the processes reduce their
    gradients once per window.

    Args:
        trainer: a `transformers.Trainer`, or TRL's `SFTTrainer`, `DPOTrainer` or
            `GRPOTrainer`.

    Attributes:
        optimizer: the wrapped optimizer, which exists once ``trainer.train()`` has
            begun.

    Raises:
        UsageError: raised in ``trainer.train()`` if gradaccum does not know by what
            number TRL divides the loss, or if a subclass of the Trainer calls
            ``loss.backward()`` itself although the micro-batch has a weight.
    """

    optimizer: AccumulatingOptimizer

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._replacements = ExitStack()
        self._grad_norm = torch.zeros(())
        """The gradient norm of the window. The Trainer gets this tensor before the
        update, but reads the tensor's value only after the update.
        """

    def on_train_begin(
        self, args: Argument, state: Argument, control: Argument, **kwargs: Argument
    ) -> None:
        trainer = self._trainer
        accelerator = trainer.accelerator
        self._replacements.close()  # An earlier run may have ended with an exception.
        self.__dict__.pop("optimizer", None)  # An optimizer has at most one wrapper.
        module = trainer.model_wrapped
        is_parallel = isinstance(module, DistributedDataParallel)
        self.optimizer = wrap(
            trainer.optimizer.optimizer,
            None,
            # Always set clip_norm, because the Trainer logs the norm, which is computed
            # only if clip_norm is set.
            clip_norm=args.max_grad_norm or sys.float_info.max,
            loss_scale=accelerator.scaler,
            module=module if is_parallel else None,
        )
        self._replace(trainer.optimizer, "optimizer", self.optimizer)
        self._replace(trainer.optimizer, "scaler", None)
        self._replace(accelerator, "backward", self.optimizer.backward)
        self._replace(accelerator, "clip_grad_norm_", lambda *_: self._grad_norm)
        # Have each process count only its own items, because the counts of all
        # processes are added up when the window ends.
        self._replace(args, "average_tokens_across_devices", False)
        training_step = partial(self._training_step, trainer.training_step)
        self._replace(trainer, "training_step", training_step)
        prepare_inputs = partial(self._prepare_inputs, trainer._prepare_inputs)
        self._replace(trainer, "_prepare_inputs", prepare_inputs)

    def on_substep_end(
        self, args: Argument, state: Argument, control: Argument, **kwargs: Argument
    ) -> None:
        self.optimizer.step()

    def on_optimizer_step(
        self, args: Argument, state: Argument, control: Argument, **kwargs: Argument
    ) -> None:
        """Close the window, after ``step`` was called for the window's last
        micro-batch.
        """
        self.optimizer.flush()
        result = self.optimizer.result
        self._grad_norm.fill_(result.grad_norm)
        # With this flag, the Trainer does not step its scheduler after a skipped
        # update.
        self._trainer.optimizer._is_overflow = result.skipped
        if math.isfinite(result.loss):
            self._trainer._tr_loss += result.loss

    def on_train_end(
        self, args: Argument, state: Argument, control: Argument, **kwargs: Argument
    ) -> None:
        self._replacements.close()

    def _training_step(
        self, training_step: Argument, model: Argument, inputs: Argument, *_: Argument
    ) -> Tensor:
        """Run the Trainer's ``training_step`` as if the micro-batch were the whole
        batch, so that the loss is a mean over the micro-batch. Return 0 as the loss to
        log, because the window's loss is logged later.
        """
        trainer = self._trainer
        trainer.current_gradient_accumulation_steps = 1
        count = trainer._get_num_items_in_batch([inputs], trainer.args.device)
        if count is not None and trainer.loss_is_scaled_for_ga is not False:
            self.optimizer.weigh(float(count.flatten()[0]))
        elif isinstance(inputs, Mapping):  # GRPO's inputs are a list that GRPO splits.
            self.optimizer.weigh(batch_size(inputs))
        loss: Tensor = training_step(model, inputs, count)
        return torch.zeros_like(loss)

    def _prepare_inputs(self, prepare_inputs: Argument, inputs: Argument) -> Any:
        """Set the micro-batch's weight to the number of tokens by which TRL divides the
        loss, even if TRL has counted these tokens over a larger batch.
        """
        prepared = prepare_inputs(inputs)
        if isinstance(prepared, Mapping) and self._trainer.model.training:
            count = prepared.get("num_items_in_batch")
            if count is not None and divides_by_tokens(self._trainer):
                self.optimizer.weigh(float(count))
        return prepared

    def _replace(self, owner: Any, name: str, replacement: Argument) -> None:
        if name in vars(owner):
            self._replacements.callback(setattr, owner, name, vars(owner)[name])
        else:
            self._replacements.callback(delattr, owner, name)
        setattr(owner, name, replacement)


def batch_size(inputs: Mapping[str, Any]) -> float:
    """Return the number of rows in a batch's first tensor, or 1 if it has no tensor."""
    sizes = [len(value) for value in inputs.values() if isinstance(value, Tensor)]
    return float(sizes[0]) if sizes else 1.0


_BY_TOKENS = {"dapo", "cispo", "vespo"}
"""The names of TRL's losses that are sums divided by ``num_items_in_batch``. With such
a loss, the weight of a micro-batch is ``num_items_in_batch``.
"""
_MEANS = {"grpo", "bnpo", "dr_grpo", "sapo", "luspo"}
"""The names of TRL's losses that are means over a micro-batch. With such a loss, a
micro-batch is not weighted by its number of tokens.
"""


def divides_by_tokens(trainer: Trainer) -> bool:
    """True if the trainer's loss is a sum over tokens that TRL divides by a number of
    tokens. TRL stores this number in the inputs under the key ``num_items_in_batch``. A
    trainer without a ``loss_type`` is assumed to have such a loss.

    Raises:
        UsageError: gradaccum does not know the number by which TRL divides this kind
            of loss.
    """
    kind = getattr(trainer, "loss_type", None)
    if kind in _MEANS:
        return False
    if kind is None or kind in _BY_TOKENS:
        return True
    raise UsageError(
        f"loss_type: expected one of {', '.join(sorted(_BY_TOKENS | _MEANS))}; got"
        f" {kind!r}. Choose another loss, or leave AccumulationCallback out."
    )
