"""Compiled programs that Python calls in turn, where it decides on the host what comes next."""

from __future__ import annotations

from mindspore import nn


class Program(nn.Cell):  # type: ignore[misc]
    """A Cell whose calls cost what its operators cost, however many cells it holds."""

    def __init__(self) -> None:
        super().__init__(auto_prefix=False)

    @property
    def compile_phase(self) -> str | None:
        """The program of the last call."""
        phase: str | None = self._compile_phase
        return phase

    @compile_phase.setter
    def compile_phase(self, phase: str) -> None:
        # MindSpore's own setter tells all cells below, at each call: for a wrapped optimizer a quarter of a small micro-batch.
        self._compile_phase = phase

    def _check_construct_args(self, *inputs: object) -> None:
        """Nothing: the compiler checks them once, where MindSpore inspects a signature at each call."""
