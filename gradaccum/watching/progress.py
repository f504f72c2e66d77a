"""A bar of rich that moves with each update, and tells loss, norm, scale and skipped windows beside it."""

from __future__ import annotations

import math
from types import TracebackType
from typing import Any

from gradaccum._validation import require_int
from gradaccum.errors import UsageError, explain
from gradaccum.watching.packages import imported
from gradaccum.watching.window import ClosedWindow


class RichProgress:
    """A `rich.progress.Progress` over the updates of a run, shown inside its ``with`` block.

        with RichProgress(total_updates=1000) as progress:
            opt.add_listener(progress)
            ...

    The bar stands at ``optimizer_step``, so it is right in a resumed run too. Skipped windows do not move it; it counts those that it
    heard of. After the block it is no longer drawn.

    Args:
        total_updates: how many updates the run makes, an int >= 1.
        description: the text before the bar.
        console: the `rich.console.Console` to draw on, in place of rich's own.

    Raises:
        MissingPackageError: rich is not installed.
        ArgumentTypeError, ArgumentValueError: `total_updates` is no int >= 1.
    """

    def __init__(self, total_updates: int, *, description: str = "updates", console: Any = None) -> None:
        total = require_int("total_updates", total_updates, at_least=1)
        rich = imported("RichProgress", "rich.progress", install="rich")
        columns = (rich.TextColumn("{task.description}"), rich.BarColumn(), rich.MofNCompleteColumn(), rich.TimeRemainingColumn())
        self._progress = rich.Progress(*columns, rich.TextColumn("{task.fields[said]}", markup=False), console=console)
        self._task = self._progress.add_task(description, total=total, said="")
        self._skipped = 0
        self._entered = False

    def __call__(self, window: ClosedWindow) -> None:
        """Move the bar.

        Raises:
            UsageError: nothing is drawn yet.
        """
        if not self._entered:
            fix = "Write with RichProgress(total_updates=1000) as progress: ... around the loop."
            raise explain(UsageError, "RichProgress", expected="to be entered before a window closes", found="no with block", fix=fix)
        self._skipped += window.skipped
        self._progress.update(self._task, completed=window.optimizer_step, said=self._said(window))

    def __enter__(self) -> RichProgress:
        """Begin to draw."""
        self._progress.start()
        self._entered = True
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._progress.stop()

    def _said(self, window: ClosedWindow) -> str:
        said = [] if math.isnan(window.loss) else [f"loss {window.loss:.4g}"]
        said += [] if math.isnan(window.grad_norm) else [f"norm {window.grad_norm:.4g}"]
        said += [f"scale {window.loss_scale:.10g}"] if window.loss_scale != 1 else []
        said += [f"{self._skipped} skipped"] if self._skipped else []
        return ", ".join(said)
