"""Ready-made listeners: lines of JSON, a progress bar, curves. Each imports its package
when it is made.
"""

from __future__ import annotations

import json
import math
import os
from types import TracebackType
from typing import IO, Any

from gradaccum.errors import (
    ArgumentTypeError,
    UsageError,
    explain,
    imported,
    require_int,
)
from gradaccum.watching.watch import ClosedWindow

_OTHERWISE = "pass any function of one ClosedWindow"


class JsonLines:
    """Writes each window as a line ``{"optimizer_step": 17, "applied": true, ...}``
    with the fields of a `ClosedWindow`.

    Every line is valid JSON: inf and NaN are written as null. Each line is flushed. A
    path is appended to: a resumed run writes the windows after the last checkpoint
    again, and the later line counts. A last line that a crash broke off is ended first.

    Args:
        target: a path, or a text file that is open for writing, which stays the
            caller's to close.

    Raises:
        ArgumentTypeError: `target` is neither.
        OSError: the path cannot be written.
    """

    def __init__(self, target: str | os.PathLike[str] | IO[str]) -> None:
        self._own = isinstance(target, (str, os.PathLike))
        if isinstance(target, (str, os.PathLike)):
            broken_off = _ends_in_mid_line(target)
            self._file: IO[str] = open(target, "a", encoding="utf-8")  # noqa: SIM115 - it lives as long as the listener
            self._file.write("\n" if broken_off else "")
        elif callable(getattr(target, "write", None)):
            self._file = target
        else:
            fix = 'Write JsonLines("run.jsonl").'
            raise explain(
                ArgumentTypeError,
                "target",
                expected="a path or an open text file",
                got=target,
                fix=fix,
            )

    def __call__(self, window: ClosedWindow) -> None:
        self._file.write(
            json.dumps(
                {name: _writable(value) for name, value in window._asdict().items()},
                allow_nan=False,
            )
            + "\n"
        )
        self._file.flush()

    def close(self) -> None:
        """Close a file that this listener opened."""
        if self._own:
            self._file.close()

    def __enter__(self) -> JsonLines:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _writable(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _ends_in_mid_line(path: str | os.PathLike[str]) -> bool:
    try:
        with open(path, "rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read(1) != b"\n"
    except OSError:  # No file, or an empty one.
        return False


class RichProgress:
    """A `rich.progress.Progress` over the updates of a run, shown inside its ``with``
    block.

        with RichProgress(total_updates=1000) as progress:
            opt.add_listener(progress)
            ...

    The bar stands at ``optimizer_step``, also in a resumed run. Skipped windows do not
    move it; it counts them.

    Args:
        total_updates: how many updates the run makes, an int >= 1.
        description: the text before the bar.
        console: the `rich.console.Console` to draw on, in place of rich's own.

    Raises:
        MissingPackageError: rich is not installed.
        ArgumentTypeError, ArgumentValueError: `total_updates` is no int >= 1.
    """

    def __init__(
        self, total_updates: int, *, description: str = "updates", console: Any = None
    ) -> None:
        total = require_int("total_updates", total_updates, at_least=1)
        rich = imported(
            "RichProgress", "rich.progress", install="rich", otherwise=_OTHERWISE
        )
        columns = (
            rich.TextColumn("{task.description}"),
            rich.BarColumn(),
            rich.MofNCompleteColumn(),
            rich.TimeRemainingColumn(),
        )
        self._progress = rich.Progress(
            *columns,
            rich.TextColumn("{task.fields[said]}", markup=False),
            console=console,
        )
        self._task = self._progress.add_task(description, total=total, said="")
        self._skipped = 0
        self._entered = False

    def __call__(self, window: ClosedWindow) -> None:
        """Move the bar.

        Raises:
            UsageError: nothing is drawn yet.
        """
        if not self._entered:
            fix = (
                "Write with RichProgress(total_updates=1000) as progress: ... around"
                " the loop."
            )
            raise explain(
                UsageError,
                "RichProgress",
                expected="to be entered before a window closes",
                found="no with block",
                fix=fix,
            )
        self._skipped += window.skipped
        self._progress.update(
            self._task, completed=window.optimizer_step, said=self._said(window)
        )

    def __enter__(self) -> RichProgress:
        self._progress.start()
        self._entered = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def _said(self, window: ClosedWindow) -> str:
        said = [] if math.isnan(window.loss) else [f"loss {window.loss:.4g}"]
        said += [] if math.isnan(window.grad_norm) else [f"norm {window.grad_norm:.4g}"]
        said += [f"scale {window.loss_scale:.10g}"] if window.loss_scale != 1 else []
        said += [f"{self._skipped} skipped"] if self._skipped else []
        return ", ".join(said)


_CURVES = (
    "loss",
    "grad_norm",
    "loss_scale",
    "weight",
    "micro_batches",
    "seconds",
    "skipped",
)


class TensorBoard:
    """Writes each number of a window by
    ``writer.add_scalar(tag, value, optimizer_step)``.

    The tags are ``gradaccum/loss``, ``grad_norm``, ``loss_scale``, ``weight``,
    ``micro_batches``, ``seconds`` and ``skipped`` (0 or 1). A NaN has no point. A
    skipped window stands at the step of the update before it.

    Args:
        writer: a writer of `torch.utils.tensorboard` or tensorboardX, or another object
            with their ``add_scalar``, which stays the caller's to close; or a
            directory.
        prefix: what each tag begins with.

    Raises:
        MissingPackageError: `writer` is a directory, and neither package is installed.
        ArgumentTypeError: `writer` is neither.
    """

    def __init__(self, writer: Any, *, prefix: str = "gradaccum/") -> None:
        self._own = isinstance(writer, (str, os.PathLike))
        if not self._own and not callable(getattr(writer, "add_scalar", None)):
            expected, fix = (
                "an object with add_scalar, or a directory",
                'Write TensorBoard("runs/1") or TensorBoard(SummaryWriter()).',
            )
            raise explain(
                ArgumentTypeError, "writer", expected=expected, got=writer, fix=fix
            )
        self._writer, self._prefix = (
            _opened(os.fspath(writer)) if self._own else writer,
            prefix,
        )

    def __call__(self, window: ClosedWindow) -> None:
        for name in _CURVES:
            value = float(getattr(window, name))
            if not math.isnan(value):
                self._writer.add_scalar(
                    f"{self._prefix}{name}", value, window.optimizer_step
                )

    def close(self) -> None:
        """Close a writer that this listener opened."""
        if self._own:
            self._writer.close()

    def __enter__(self) -> TensorBoard:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _opened(directory: str) -> Any:
    install = "tensorboard torch, or tensorboardX"
    package = imported(
        "TensorBoard",
        "torch.utils.tensorboard",
        "tensorboardX",
        install=install,
        otherwise=_OTHERWISE,
    )
    return package.SummaryWriter(directory)
