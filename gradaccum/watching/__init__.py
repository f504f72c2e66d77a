"""Listeners: functions of a `ClosedWindow`, called after each window.

Ready ones: `JsonLines`, `RichProgress`, `TensorBoard`. `Watch` calls listeners in a
loop that reads its `StepResult` itself; a wrapped optimizer of torch or MindSpore has
``add_listener``. rich and TensorBoard are imported when their listener is made.
"""

from gradaccum.watching.watch import ClosedWindow, Listener, Watch
from gradaccum.watching.writers import JsonLines, RichProgress, TensorBoard

__all__ = [
    "ClosedWindow",
    "JsonLines",
    "Listener",
    "RichProgress",
    "TensorBoard",
    "Watch",
]
