"""The name of the program that a Cell was last compiled to, which MindSpore writes at every call."""

from __future__ import annotations

from mindspore import nn


class OwnPhase(nn.Cell):  # type: ignore[misc]
    """A Cell that does not tell the cells below it which program was called: none of these asks.

    MindSpore's own setter tells all of them, at each call. For the cells of a wrapped optimizer that takes as long as ten operators.
    """

    @property
    def compile_phase(self) -> str | None:
        """The program of the last call."""
        phase: str | None = self._compile_phase
        return phase

    @compile_phase.setter
    def compile_phase(self, phase: str) -> None:
        object.__setattr__(self, "_compile_phase", phase)
