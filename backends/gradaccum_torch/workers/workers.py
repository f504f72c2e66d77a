"""The workers that a window is added up over: what it asks of them, and this worker alone."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import final

from torch import Tensor

from gradaccum import UsageError
from gradaccum.kit import Fields, State, explain
from gradaccum_torch.workers.deferred import Deferred

Sums = Sequence[Tensor | None]
"""Sums by position, None where there is none."""


class Workers(ABC):
    """The workers that share a window, as it asks them."""

    several: bool
    """There are others, so that a window's end must `join` them."""
    not_own: bool
    """The open window's sum is not this worker's own; see `require_own_sum`."""
    joined: bool
    """After `join`: the window holds a micro-batch."""
    place: tuple[int, int] | None = None
    """The rank of this worker and their number, which its part of a saved sum belongs to; None: any worker can load any part."""
    deferred: Deferred | None = None
    """What keeps the sum until the window ends; None: it is in ``.grad`` or a buffer."""

    @abstractmethod
    def join(self, fields: State, sums: Sums, zeros: Callable[[int], Tensor]) -> tuple[Fields, Sums]:
        """Add up the window of all workers; collective. Nothing is added twice where the update of a joined window raised.

        Args:
            fields: this worker's state.
            sums: this worker's; those of all replace them in place.
            zeros: an empty sum by position.

        Returns:
            The state with the weight and the overflow flag of all, and the sums, None where no worker has one.

        Raises:
            UsageError: a worker did not come before the process group's timeout.
        """

    @abstractmethod
    def flush(self, close: Callable[[], None], is_open: bool) -> None:
        """Close the open window by `close`, and with others as many more as they have; `is_open`: this worker has one."""

    @abstractmethod
    def window_ended(self) -> None:
        """The next window begins, with this worker's own sum."""

    @abstractmethod
    def require_own_sum(self, call: str) -> None:
        """The sum is this worker's own.

        Raises:
            UsageError: it is that of all workers, because the update raised; or the reduction failed.
        """

    @abstractmethod
    def require_no_closure(self) -> None:
        """Raise `UsageError` where a step with a closure cannot be that of all workers."""

    def require_no_graph(self) -> None:
        """Raise `UsageError` where gradients that are to be differentiated again would lose their graph."""
        fix = "Leave create_graph= out; second derivatives over several workers are not supported."
        found = "gradients with a graph, which a reduction does not have"
        raise explain(UsageError, "create_graph", expected="False where several workers reduce gradients", found=found, fix=fix)

    @abstractmethod
    def require_no_copy(self) -> None:
        """Raise `UsageError` where a copy of the optimizer would have no part in the others' reductions."""


class OwnSum(Workers):
    """Workers that need no reduction of the sum: this one closes, saves and copies its window by itself."""

    not_own, joined = False, True

    def flush(self, close: Callable[[], None], is_open: bool) -> None:
        if is_open:
            close()

    def window_ended(self) -> None: ...

    def require_own_sum(self, call: str) -> None: ...

    def require_no_closure(self) -> None: ...

    def require_no_copy(self) -> None: ...


@final
class Alone(OwnSum):
    """No other worker."""

    several = False
    place = 0, 1

    def join(self, fields: State, sums: Sums, zeros: Callable[[int], Tensor]) -> tuple[Fields, Sums]:
        return fields, sums

    def require_no_graph(self) -> None: ...
