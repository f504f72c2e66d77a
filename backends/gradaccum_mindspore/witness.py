"""Whether an update that raised was made: the inner optimizer's smallest Parameters, before and after.

An optimizer's call can raise before it changed anything, and after it changed all: in a hook, or by Ctrl-C. MindSpore counts no versions
of a Parameter. Most of its optimizers move ``global_step`` as they begin to write; of the others some small Parameters are compared.
"""

from __future__ import annotations

from typing import Any

import mindspore as ms

COUNT = 4
ELEMENTS = 64


class Witness:
    """Looks at the smallest Parameters of an optimizer.

    Args:
        inner: the optimizer.
    """

    def __init__(self, inner: Any) -> None:
        seen = [parameter for parameter in inner.get_parameters() if parameter.dtype != ms.bfloat16]
        self.watched = sorted(seen, key=lambda parameter: parameter.size)[:COUNT]
        """Never bfloat16, which NumPy does not have. ``global_step`` is among them: it has one element."""

    def look(self) -> list[bytes]:
        """Some of what they hold."""
        return [parameter.asnumpy().reshape(-1)[:ELEMENTS].tobytes() for parameter in self.watched]
