"""A walk over states: every event from every state that can be reached, however deep it
lies.

Sequences up to a length visit the shallow states again and again, and the deep ones
never.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from typing import Any, Protocol

from gradaccum.kit import UntilWeight
from gradaccum_conformance.harness import Option, Session
from gradaccum_conformance.scenarios import global_norm


class Walker(Protocol):
    """What goes from state to state."""

    def do(self, event: str, history: tuple[str, ...]) -> None: ...

    def snapshot(self) -> Any: ...

    def restore(self, snapshots: Any) -> None: ...


def walk(
    walker: Walker, events: Iterable[str], state: Callable[[], Hashable]
) -> dict[Hashable, int]:
    """Breadth first: each event once from each state.

    Returns:
        The states, each with the least number of events that lead to it.
    """
    depths = {state(): 0}
    waiting: deque[tuple[tuple[str, ...], Any]] = deque([((), walker.snapshot())])
    while waiting:
        path, here = waiting.popleft()
        for event in events:
            walker.restore(here)
            walker.do(event, path)
            if (reached := state()) not in depths:
                depths[reached] = len(path) + 1
                waiting.append(((*path, event), walker.snapshot()))
    return depths


def state_of(truth: Session, options: dict[str, Option]) -> Hashable:
    """What the reference will do next depends on nothing else, so there are finitely
    many of these.

    Updates are told apart up to the last change of the schedule, skipped windows and
    parameters not at all. The micro-batches of a window that ends by its weight are
    told apart up to one: those of weight 0 are without end.
    """
    steps = options["steps"]
    fields = truth.state()
    norm = global_norm(truth.accumulator())
    last_change = steps[-1][0] if isinstance(steps, list) else 0
    micro_step = fields.micro_step
    if isinstance(steps, UntilWeight):
        micro_step = min(micro_step, 1)
    known = fields._replace(
        micro_step=micro_step,
        optimizer_step=min(fields.optimizer_step, last_change),
        skipped_windows=0,
    )
    return (*known, round(norm, 3) if math.isfinite(norm) else None)
