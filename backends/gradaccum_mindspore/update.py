"""The inner optimizer's call, which is the update's alone; the rounding of masters
after it; and its own loss scale.

While a wrapper lives, a call of its inner optimizer is refused: both Python and
MindSpore's compiler look up ``construct`` on the object, and find one there that
raises. `Update` calls the class's own. A function that was compiled before the
optimizer was wrapped is not compiled again, and calls the inner optimizer unnoticed.

`mindspore.nn.SGD(..., loss_scale=1024.0)` divides each gradient by 1024;
`mindspore.amp.FixedLossScaleManager` or ``sens=`` multiplies the loss. So that counts
as the loss scale here. The inner optimizer gets the window's gradient times that scale.
"""

from __future__ import annotations

import gc
from functools import cache
from types import MethodType
from typing import Any
from weakref import finalize

import mindspore as ms
from mindspore import Parameter, Tensor, nn
from mindspore.ops import constexpr

from gradaccum import ArgumentTypeError, ArgumentValueError, UsageError
from gradaccum.kit import Options, ScaleRule, explain
from gradaccum_mindspore.gradient_sum import Gradients
from gradaccum_mindspore.master_weights import Masters, Optimizer
from gradaccum_mindspore.mindspore_private import is_graph_mode


def inner_scale(inner: Optimizer) -> float:
    """Return the scale that `inner` divides gradients by; 1 for none."""
    return float(getattr(inner, "loss_scale", 1.0))


def with_inner_scale(options: Options, inner: Optimizer) -> Options:
    scale = inner_scale(inner)
    if scale == 1:
        return options
    if options.scale_rule != ScaleRule():
        expected, found = (
            f"None, because the optimizer divides by its own loss_scale={scale:g}",
            f"{options.scale_rule.init_scale:g}",
        )
        fix = (
            "Leave loss_scale out of the optimizer: gradaccum.wrap(nn.SGD(parameters,"
            " 0.1), steps=4, loss_scale=1024.0)."
        )
        raise explain(
            ArgumentValueError, "loss_scale", expected=expected, found=found, fix=fix
        )
    return options._replace(scale_rule=ScaleRule(init_scale=scale))


IN_PLACE = ("mindspore.mint.optim.sgd.SGD", "mindspore.mint.optim.adam.Adam")
"""They write parameters by ``Parameter.add_``."""


def require_unwrapped(inner: Optimizer) -> None:
    """Raise unless no living wrapper has `inner`."""
    if is_guarded(inner):
        gc.collect()  # Cells are in cycles.
    if is_guarded(inner):
        expected, found = (
            "one that no living wrapper has",
            f"{type(inner).__name__}, which an earlier gradaccum.wrap has wrapped",
        )
        fix = (
            "Use the optimizer that gradaccum.wrap returned first, or delete it (del"
            " opt) before you wrap again."
        )
        raise explain(
            ArgumentTypeError, "optimizer", expected=expected, found=found, fix=fix
        )


def require_kernels(inner: Optimizer, options: Options) -> None:
    """Raise unless MindSpore can make the update: on a CPU none of its optimizers has
    a kernel for bfloat16.
    """
    names = [each.name for each in inner.parameters if each.dtype == ms.bfloat16]
    if not names or options.master_weights or ms.get_context("device_target") != "CPU":
        return
    if type(inner).construct.__module__.startswith("mindspore."):
        expected = (
            "True for bfloat16 parameters on a CPU, where MindSpore's optimizers cannot"
            " update them"
        )
        raise explain(
            ArgumentValueError,
            "master_weights",
            expected=expected,
            found=f"False, and {names[0]!r} in bfloat16",
            fix="Write gradaccum.wrap(optimizer, steps=4, master_weights=True).",
        )


def is_guarded(inner: Optimizer) -> bool:
    return getattr(vars(inner).get("construct"), "__func__", None) is _guarded


def _guarded(self: Optimizer, *gradients: Any, **named: Any) -> bool:
    """Stand in for an inner optimizer's ``construct``."""
    refuse_call(self.cls_name)
    return True


@constexpr  # type: ignore[untyped-decorator]
def refuse_call(name: str) -> None:
    expected, found = (
        "a call of the wrapped optimizer, which alone knows when a window ends",
        f"one of the inner {name}",
    )
    fix = (
        f"Write optimizer = gradaccum.wrap(nn.{name}(...), ...), so that one name is"
        " left, and call that."
    )
    raise explain(
        UsageError, "optimizer(gradients)", expected=expected, found=found, fix=fix
    )


class Update(nn.Cell):  # type: ignore[misc]
    """Calls the inner optimizer once and, if there are masters, rounds them into the
    model.
    """

    def __init__(self, inner: Optimizer, masters: Masters) -> None:
        super().__init__(auto_prefix=False)
        self.inner = inner
        self.masters = masters
        self.rounds = len(masters.masters) > 0
        self.inner_construct = inner.construct
        self.own, self.guard = vars(inner), MethodType(_guarded, inner)
        self.own["construct"] = self.guard
        # In graph mode Python would call what was compiled before.
        inner.compile_cache.clear()
        finalize(self, self.own.pop, "construct", None)
        self.in_place = any(
            f"{kind.__module__}.{kind.__name__}" in IN_PLACE
            for kind in type(inner).__mro__
        )

    def __call__(self, gradients: Gradients) -> bool:
        # MindSpore compiles most constructs, also in PyNative, and looks them up by
        # this name.
        del self.own["construct"]
        try:
            if is_graph_mode():
                return bool(super().__call__(gradients))
            self.masters.follow_model()
            self.inner(gradients)
            return self.round()
        finally:
            self.own["construct"] = self.guard

    def require_in_place(self) -> None:
        if self.in_place and not adds_in_place(ms.get_context("device_target")):
            name = f"mint.optim.{type(self.inner).__name__}"
            expected = (
                "one that moves parameters in PyNative; on this device Parameter.add_"
                " does nothing there"
            )
            fix = (
                "Compile the step by @mindspore.jit and flush by"
                " mindspore.jit(optimizer.flush.construct)(), or take one of"
                " mindspore.nn."
            )
            raise explain(
                UsageError,
                "optimizer",
                expected=expected,
                found=f"{name}, which adds in place",
                fix=fix,
            )

    def construct(self, gradients: Gradients) -> bool:
        if self.rounds:
            self.masters.follow_while_compiling()
        self.inner_construct(gradients)
        return self.round()

    def round(self) -> bool:
        if self.rounds:
            self.masters()
        return True


@cache
def adds_in_place(device: str) -> bool:
    """True if ``Parameter.add_`` adds in PyNative; on a CPU MindSpore 2.10 returns the
    sum alone.
    """
    tried = Parameter(Tensor([0.0], ms.float32), name="tried")
    tried.add_(Tensor([1.0], ms.float32))
    return bool(tried.asnumpy()[0] == 1.0)
