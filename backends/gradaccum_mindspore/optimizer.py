"""The wrapped optimizer: a `mindspore.nn.Optimizer` that runs the one it wraps once per window.

One class serves every mode. The compiler (`mindspore.jit`, graph mode) follows ``construct`` and never sees ``__call__``, so
``__call__`` can be the PyNative path. It calls `mindspore.nn.Cell`'s constructor alone and lends the inner optimizer's attributes, so
that there is one learning rate and one ``global_step``: the inner one's, which moves per update.
"""

from __future__ import annotations

from typing import Any

import mindspore as ms
from mindspore import ParameterTuple, nn, ops
from mindspore.experimental import optim

from gradaccum import StepResult, UsageError
from gradaccum.kit import Options, ends, explain, select
from gradaccum_mindspore.capturing import refuse_trace
from gradaccum_mindspore.checks import gradients_by_position, weight_as_number, without_none
from gradaccum_mindspore.closing import Discard, Flush, is_graph_mode
from gradaccum_mindspore.compiled_window import CompiledWindow
from gradaccum_mindspore.inner_scale import inner_scale, with_inner_scale
from gradaccum_mindspore.masters import Update, turn_to_masters
from gradaccum_mindspore.pynative_window import EagerWindow
from gradaccum_mindspore.scaled import note_read, require_read
from gradaccum_mindspore.state import Storage

FIXED = ("options", "inner", "storage", "window", "eager", "update", "flush", "discard", "loss_scale")
"""Attributes that cannot be set, beside the options."""


class AccumulatingOptimizer(nn.Optimizer):  # type: ignore[misc]
    """What `gradaccum.wrap` returns for a `mindspore.nn.Optimizer`.

    ``optimizer(gradients)`` and ``optimizer(gradients, weight)`` take in one micro-batch, in PyNative, inside `mindspore.jit`, in
    graph mode, in `mindspore.nn.TrainOneStepCell` and in `mindspore.train.Model`, and return whether it closed a window (a bool, or a
    bool Tensor where compiled).

    Args:
        inner: the optimizer to run once per window.
        options: the checked options. With ``master_weights`` `inner` works on float32 masters from now on, so differentiate by this
            object's ``parameters``, not by `inner`'s, and load weights into the model before wrapping.
        name: part of the names of the Parameters that hold the state; give two wrapped optimizers of one program different ones.
    """

    def __init__(self, inner: Any, options: Options, name: str = "gradaccum") -> None:
        nn.Cell.__init__(self, auto_prefix=False)
        if options.master_weights:
            # The inner optimizer's will be the masters; what users differentiate by stays.
            self.parameters = ParameterTuple(inner.parameters)
        options = with_inner_scale(options, inner)
        self.inner = inner
        self.options = options
        self.storage = Storage(inner.parameters, options, name, inner_scale(inner))
        if options.master_weights:
            turn_to_masters(inner, self.storage.masters)
        self.window = CompiledWindow(self.storage, options)
        self.eager = EagerWindow(self.storage, options)
        self.update = Update(inner, self.storage.masters)
        self.flush = Flush(self.window, self.eager, self.update)
        self.discard = Discard(self.window, self.eager)
        object.__setattr__(self, "_complete", True)

    def __getattr__(self, name: str) -> Any:
        try:
            return nn.Cell.__getattr__(self, name)
        except AttributeError:
            if "_cells" not in self.__dict__ or "inner" not in self._cells:
                raise
            return getattr(self._cells["inner"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        if not self.__dict__.get("_complete", False):
            nn.Cell.__setattr__(self, name, value)
        elif name in Options._fields or name in FIXED:
            raise explain(
                UsageError,
                name,
                expected="options that stay as they were, because compiled code has read them already",
                got=value,
                fix="Wrap the optimizer anew, or pass a schedule as steps=.",
            )
        elif name not in self.__dict__ and not hasattr(nn.Cell, name) and hasattr(self.inner, name):
            setattr(self.inner, name, value)
        else:
            nn.Cell.__setattr__(self, name, value)

    def __call__(self, gradients: Any, weight: Any = None) -> Any:
        """One micro-batch, from Python.

        Args:
            gradients: a tuple or list in the order of ``self.parameters``, or a dict by parameter name; None for a parameter that took
                no part. Multiplied by the loss scale, if there is one.
            weight: number or Tensor of one element, >= 0: how many items the micro-batch has; 1 if left out.

        Returns:
            Whether this micro-batch closed a window.

        Raises:
            GradientError: another number, shape or dtype than the parameters'.
            ArgumentTypeError, ArgumentValueError: `weight` is no finite number >= 0.
            ArgumentTypeError, ArgumentValueError: a callable ``steps`` gave no int >= 1.
            UsageError: there is a loss scale, and nobody has asked for it yet; or ``jit(capture_mode="trace")`` is recording.
        """
        refuse_trace()
        require_read(self.storage.scaled)
        ordered = gradients_by_position(gradients, self.storage.specs, self.storage.names)
        amount = weight_as_number(weight)
        if is_graph_mode():
            ordered = without_none(ordered, self.storage.specs)
            return super().__call__(ordered, None if weight is None else ms.Tensor(amount, self.storage.float_dtype))
        size = self.eager.size()
        state = self.eager.add(ordered, amount, size)
        full = bool(ends(state, size, select))
        if full:
            self.eager.close(state, self.update)
        return full

    def construct(self, gradients: Any, weight: Any = None) -> Any:
        require_read(self.storage.scaled)
        gradients = self.window.ordered(gradients)
        state, event = self.window.add(gradients, weight)
        full = self.window.is_full(state)
        if self.window.steps is None:
            self.window.write_open(state, event)
            return full
        self.window.write_open(state, event)
        self.window.write_size(state)
        if full:
            self.flush.close()
        return full

    def scale(self, loss: Any) -> Any:
        """``loss`` times the loss scale, in the loss's dtype: what to differentiate. In PyNative and in compiled code."""
        return loss * ops.cast(self.loss_scale, loss.dtype)

    @property
    def loss_scale(self) -> Any:
        """The current loss scale, a float32 Tensor of shape () (a Parameter): in PyNative and in compiled code, for ``sens`` say."""
        note_read(self.storage.scaled)
        return self.storage.loss_scale

    @property
    def result(self) -> StepResult:
        """What the last micro-batch, flush or discard did, in Python numbers. For Python, not for compiled code."""
        note_read(self.storage.scaled)
        return self.storage.result()


class AccumulatingExperimentalOptimizer(AccumulatingOptimizer, optim.Optimizer):  # type: ignore[misc]
    """The same for a `mindspore.experimental.optim.Optimizer`, and an instance of that, so that its schedulers take it."""

    def add_param_group(self, param_group: Any) -> None:
        """Raise `UsageError`: there are sums for the parameters that were there when the optimizer was wrapped."""
        expected, found = "all groups before the optimizer is wrapped, as each parameter has its sum then", "a group more"
        raise explain(UsageError, "param_group", expected=expected, found=found, fix="Write gradaccum.wrap(optimizer, steps=4) after it.")
