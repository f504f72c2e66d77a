"""An update: the inner optimizer's call, the rounding of masters after it, and whether an update that raised was made."""

from __future__ import annotations

import mindspore as ms
from mindspore import nn

from gradaccum_mindspore.masters import Masters
from gradaccum_mindspore.types import Gradients, Optimizer

WATCHED = 4
"""Parameters that a `Witness` compares."""
ELEMENTS = 64
"""Elements of each."""


class Update(nn.Cell):  # type: ignore[misc]
    """Calls the inner optimizer once and, if there are masters, rounds them into the model."""

    def __init__(self, inner: Optimizer, masters: Masters) -> None:
        super().__init__(auto_prefix=False)
        self.inner = inner
        self.masters = masters
        self.rounds = len(masters.masters) > 0
        self.witness = Witness(inner)

    def construct(self, gradients: Gradients) -> bool:
        self.inner(gradients)
        self.round()
        return True

    def round(self) -> bool:
        """Round the masters, if there are any, into the model's parameters."""
        if self.rounds:
            self.masters()
        return True


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
