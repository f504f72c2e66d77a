"""A walk over states: every event from every state that can be reached, however deep it
lies.

Sequences up to a length visit the shallow states again and again, and the deep ones
never.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable
from typing import Any, Protocol

import numpy as np

from gradaccum.kit import UntilWeight
from gradaccum_conformance.harness import Option, Session


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
    steps, fields, total = options["steps"], truth.state(), truth.accumulator()
    finite = all(np.isfinite(array).all() for array in total.values())
    norm = (
        float(
            np.sqrt(
                sum(
                    float(np.square(array.astype(np.float64)).sum())
                    for array in total.values()
                )
            )
        )
        if finite
        else None
    )
    last_change = steps[-1][0] if isinstance(steps, list) else 0
    micro_step = (
        min(fields.micro_step, 1)
        if isinstance(steps, UntilWeight)
        else fields.micro_step
    )
    known = fields._replace(
        micro_step=micro_step,
        optimizer_step=min(fields.optimizer_step, last_change),
        skipped_windows=0,
    )
    return (*known, None if norm is None else round(norm, 3))
