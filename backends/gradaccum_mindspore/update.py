"""Call the inner optimizer once per window, and raise an error if anything else calls
it.

While a wrapped optimizer is alive, the ``construct`` attribute of its inner optimizer
is a function that raises an error. Both Python and MindSpore's compiler find this
attribute before the ``construct`` method of the optimizer's class. Only `Update` calls
that method. A function that was compiled before the optimizer was wrapped is not
compiled again, so calls to the inner optimizer from such a function are not detected.
"""

from __future__ import annotations

import gc
from types import MethodType
from typing import Any
from weakref import finalize

import mindspore as ms
from mindspore import nn
from mindspore.ops import constexpr

from gradaccum import ArgumentTypeError, ArgumentValueError, UsageError
from gradaccum_mindspore.gradient_sum import Gradients
from gradaccum_mindspore.master_weights import MasterWeights, Optimizer

IN_PLACE = ("mindspore.mint.optim.sgd", "mindspore.mint.optim.adam")
"""The modules whose optimizers update parameters through ``Parameter.add_``. In
MindSpore 2.10, this method has no effect in PyNative mode on a CPU.
"""


class Update(nn.Cell):  # type: ignore[misc]
    """Calls the inner optimizer. If there are float32 master weights, it then writes
    their rounded values into the model.
    """

    def __init__(self, inner: Optimizer, masters: MasterWeights) -> None:
        super().__init__(auto_prefix=False)
        self.inner = inner
        self.masters = masters
        self.has_masters = len(masters.masters) > 0
        self.inner_construct = inner.construct
        self.inner_attributes = vars(inner)
        self.guard = MethodType(guarded_construct, inner)
        self.inner_attributes["construct"] = self.guard
        # Without this line, a call in graph mode would run the program that was
        # compiled before the optimizer was wrapped.
        inner.compile_cache.clear()
        finalize(self, self.inner_attributes.pop, "construct", None)

    def __call__(self, gradients: Gradients) -> bool:
        # Even in PyNative mode, MindSpore compiles most optimizers and looks up
        # ``construct`` by name. So during the call, remove the function that raises.
        del self.inner_attributes["construct"]
        try:
            self.masters.copy_model_into_masters()
            self.inner(gradients)
            return self.round()
        finally:
            self.inner_attributes["construct"] = self.guard

    def construct(self, gradients: Gradients) -> bool:
        if self.has_masters:
            self.masters.compiled_copy()
        self.inner_construct(gradients)
        return self.round()

    def round(self) -> bool:
        if self.has_masters:
            self.masters()
        return True

    def require_effect(self) -> None:
        """Raise if the inner optimizer would leave every parameter unchanged in
        PyNative mode.
        """
        kind = type(self.inner)
        if kind.__module__ in IN_PLACE and ms.get_context("device_target") == "CPU":
            raise UsageError(
                "optimizer: expected an optimizer that changes parameters in PyNative"
                f" mode on a CPU; got mint.optim.{kind.__name__}, which changes nothing"
                " in this mode. Compile the training step with @mindspore.jit, or use"
                " an optimizer from mindspore.nn."
            )


def guarded_construct(self: Optimizer, *gradients: Any, **keywords: Any) -> bool:
    """Raise an error. This function replaces the ``construct`` method of an inner
    optimizer.
    """
    refuse_call(self.cls_name)
    return True


@constexpr  # type: ignore[untyped-decorator]
def refuse_call(name: str) -> None:
    raise UsageError(
        "optimizer(gradients): expected a call to the wrapped optimizer, because only"
        " the wrapped optimizer knows when a window ends; got a call to the inner"
        f" {name}. Write optimizer = gradaccum.wrap(nn.{name}(...), ...), so that no"
        " variable refers to the inner optimizer, and call optimizer(gradients)."
    )


def is_guarded(inner: Optimizer) -> bool:
    construct = vars(inner).get("construct")
    return getattr(construct, "__func__", None) is guarded_construct


def require_unwrapped(inner: Optimizer) -> None:
    """Raise if `inner` belongs to a wrapped optimizer that is still alive."""
    if is_guarded(inner):
        gc.collect()  # Reference cycles can keep a deleted Cell alive.
    if is_guarded(inner):
        raise ArgumentTypeError(
            "optimizer: expected an optimizer that is not wrapped yet; got"
            f" {type(inner).__name__}, which was already wrapped by an earlier call to"
            " gradaccum.wrap. Use the optimizer returned by that earlier call, or"
            " delete it (del opt) before wrapping again."
        )


def require_no_scale(inner: Optimizer) -> None:
    """Raise if `inner` has its own loss scale. The optimizer would divide the gradients
    by this scale, which gradaccum does not know.
    """
    scale = float(getattr(inner, "loss_scale", 1.0))
    if scale != 1:
        raise ArgumentValueError(
            "optimizer: expected an optimizer without its own loss scale; got"
            f" loss_scale={scale:g}. Leave loss_scale out of the optimizer, and pass it"
            " to wrap: gradaccum.wrap(nn.SGD(parameters, 0.1), steps=4,"
            " loss_scale=1024.0)."
        )
