"""The numbers of each closed window as TensorBoard's curves, over the updates of the run."""

from __future__ import annotations

import math
import os
from types import TracebackType
from typing import Any

from gradaccum.errors import ArgumentTypeError, explain
from gradaccum.watching.packages import imported
from gradaccum.watching.window import ClosedWindow

_CURVES = ("loss", "grad_norm", "loss_scale", "weight", "micro_batches", "seconds", "skipped", "noise_scale")


class TensorBoard:
    """Writes each number of a window by ``writer.add_scalar(tag, value, optimizer_step)``.

    The tags are ``gradaccum/loss``, ``grad_norm``, ``loss_scale``, ``weight``, ``micro_batches``, ``seconds``, ``skipped`` (0 or 1)
    and ``noise_scale``. A NaN, which mostly is a number that nobody told, has no point. A skipped window
    stands at the step of the update before it.

    Args:
        writer: a writer of `torch.utils.tensorboard`, of tensorboardX, or any other object with their ``add_scalar``, which stays the
            caller's to close; or a directory, for a writer of this listener's own.
        prefix: what each tag begins with.

    Raises:
        MissingPackageError: `writer` is a directory, and neither package is installed.
        ArgumentTypeError: `writer` is neither.
    """

    def __init__(self, writer: Any, *, prefix: str = "gradaccum/") -> None:
        self._own = isinstance(writer, (str, os.PathLike))
        if not self._own and not callable(getattr(writer, "add_scalar", None)):
            expected, fix = "an object with add_scalar, or a directory", 'Write TensorBoard("runs/1") or TensorBoard(SummaryWriter()).'
            raise explain(ArgumentTypeError, "writer", expected=expected, got=writer, fix=fix)
        self._writer, self._prefix = _opened(os.fspath(writer)) if self._own else writer, prefix

    def __call__(self, window: ClosedWindow) -> None:
        """Write one point of each curve."""
        for name in _CURVES:
            value = float(getattr(window, name))
            if not math.isnan(value):
                self._writer.add_scalar(f"{self._prefix}{name}", value, window.optimizer_step)

    def close(self) -> None:
        """Write what is left and close the writer, if this opened it."""
        if self._own:
            self._writer.close()

    def __enter__(self) -> TensorBoard:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()


def _opened(directory: str) -> Any:
    """A writer into `directory`."""
    package = imported("TensorBoard", "torch.utils.tensorboard", "tensorboardX", install="tensorboard torch, or tensorboardX")
    return package.SummaryWriter(directory)
