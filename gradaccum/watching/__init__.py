"""Watching a run: a listener is called with each window that closed, and with no micro-batch before that.

A listener is any function of a `ClosedWindow`. Ready ones: `JsonLines`, `RichProgress`, `TensorBoard`. `Watch` calls listeners in a loop
that reads its `StepResult` itself; a wrapped optimizer of torch or MindSpore has ``add_listener``. Importing this imports the standard
library only: rich and TensorBoard are imported when their listener is made.
"""

from gradaccum.watching.watch import ClosedWindow, Listener, Watch
from gradaccum.watching.writers import JsonLines, RichProgress, TensorBoard

__all__ = ["ClosedWindow", "JsonLines", "Listener", "RichProgress", "TensorBoard", "Watch"]
