"""An update: the inner optimizer's call, the rounding of masters after it, and whether an update that raised was made."""

from __future__ import annotations

from functools import cache

import mindspore as ms
from mindspore import Parameter, Tensor, nn

from gradaccum import UsageError
from gradaccum.kit import explain
from gradaccum_mindspore.masters import Masters
from gradaccum_mindspore.types import Gradients, Optimizer

WATCHED = 4
"""Parameters that a `Witness` compares."""
ELEMENTS = 64
"""Elements of each."""
IN_PLACE = ("mindspore.mint.optim.sgd.SGD", "mindspore.mint.optim.adam.Adam")
"""They write parameters by ``Parameter.add_``."""


class Update(nn.Cell):  # type: ignore[misc]
    """Calls the inner optimizer once and, if there are masters, rounds them into the model."""

    def __init__(self, inner: Optimizer, masters: Masters) -> None:
        super().__init__(auto_prefix=False)
        self.inner = inner
        self.masters = masters
        self.rounds = len(masters.masters) > 0
        self.witness = Witness(inner)
        self.in_place = any(f"{kind.__module__}.{kind.__name__}" in IN_PLACE for kind in type(inner).__mro__)

    def require_in_place(self) -> None:
        """Raise before an update in PyNative that would leave the parameters as they are, as those in `IN_PLACE` do on a CPU.

        Raises:
            UsageError: it would.
        """
        if self.in_place and not adds_in_place(ms.get_context("device_target")):
            name = f"mint.optim.{type(self.inner).__name__}"
            expected = "one that moves parameters in PyNative; on this device Parameter.add_ does nothing there"
            fix = "Compile the step by @mindspore.jit and flush by mindspore.jit(optimizer.flush.construct)(), or take one of mindspore.nn."
            raise explain(UsageError, "optimizer", expected=expected, found=f"{name}, which adds in place", fix=fix)

    def construct(self, gradients: Gradients) -> bool:
        self.inner(gradients)
        self.round()
        return True

    def round(self) -> bool:
        """Round the masters, if there are any, into the model's parameters."""
        if self.rounds:
            self.masters()
        return True


@cache
def adds_in_place(device: str) -> bool:
    """Whether ``Parameter.add_`` adds in PyNative on `device`, the current one. MindSpore 2.10 returns the sum alone on a CPU."""
    tried = Parameter(Tensor([0.0], ms.float32), name="tried")
    tried.add_(Tensor([1.0], ms.float32))
    return bool(tried.asnumpy()[0] == 1.0)


class Witness:
    """Looks at the smallest Parameters of an optimizer, before and after a call.

    The call can raise before it changed anything, and after it changed everything: in a hook, or by Ctrl-C. MindSpore counts no versions of
    a Parameter. Most of its optimizers move ``global_step`` as they begin to write; for the others some small Parameters are compared.
    """

    def __init__(self, inner: Optimizer) -> None:
        seen = [parameter for parameter in inner.get_parameters() if parameter.dtype != ms.bfloat16]
        self.watched = sorted(seen, key=lambda parameter: parameter.size)[:WATCHED]
        """Never bfloat16, which NumPy does not have. ``global_step`` is among them: it has one element."""

    def look(self) -> list[bytes]:
        """Some of their elements."""
        return [parameter.asnumpy().reshape(-1)[:ELEMENTS].tobytes() for parameter in self.watched]
