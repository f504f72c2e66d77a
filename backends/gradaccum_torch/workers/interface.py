"""The interface of the workers that share a window."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from gradaccum import UsageError
from gradaccum.kit import Fields, State, explain
from gradaccum_torch.private.names import is_in_join

if TYPE_CHECKING:
    from gradaccum_torch.parameters import Parameters
    from gradaccum_torch.sums.strategy import Strategy

Sums = Sequence[Tensor | None]
"""Sums by position, None where there is none."""


Held = Literal["own", "of all", "kept", "torn"]
"""The sum that an open window holds: this worker's; that of all until their update;
after a failed reduction this worker's, or neither.
"""


class Joined(NamedTuple):
    """A window that several workers share, as all of them have it."""

    fields: Fields
    sums: Sums
    numbers: Sequence[float]
    """Of all; this worker's own where they were added up before."""
    packed: Tensor | None = None
    """The sums side by side, of which each is a part; None: they are not, or not all.
    """


def learning_rates(optimizer: torch.optim.Optimizer) -> list[float]:
    return [float(group.get("lr", 0.0)) for group in optimizer.param_groups]


class Stages(Protocol):
    """The stages of a pipeline, as one of them sees them."""

    def window_ended(self) -> None: ...

    def add_tied(
        self, fields: State, sums: Sums, zeros: Callable[[int], Tensor]
    ) -> Sums: ...

    def agreed(
        self, fields: State, sums: Sums, norm: float, finite: bool
    ) -> tuple[float, bool]: ...

    def require_own_sum(self, call: str) -> None: ...


class Workers(ABC):
    """The workers that share a window; by default this one closes, saves and copies its
    window by itself.
    """

    several: bool
    """There are others, so that a window's end must `join` them."""
    held: Held = "own"
    """The sum that the open window holds; see `require_own_sum`."""
    place: tuple[int, int] | None = None
    """The rank of this worker and their number, which its part of a saved sum belongs
    to; None: any worker can load any part.
    """
    group: dist.ProcessGroup | None = None
    """The process group that they make; None: this worker is alone, or a mesh of
    several groups shares its parameters.
    """
    stages: Stages | None = None
    """The other stages of a pipeline, whose norm and decision are one with this
    stage's.
    """
    strategy: Callable[[Parameters, torch.dtype | None], Strategy] | None = None
    """Makes the place of the sum, where the workers' engine keeps it until the window
    ends; None: the engine does not.
    """

    @property
    def joined(self) -> bool:
        """After `join`: True if the window holds a micro-batch."""
        return True

    @abstractmethod
    def join(
        self,
        fields: State,
        sums: Sums,
        zeros: Callable[[int], Tensor],
        numbers: Sequence[float],
        part: int | None = None,
    ) -> Joined:
        """Add up the window of all workers, once even if the update raises; collective.

        The `sums` of all replace this worker's in place; `zeros` makes an empty sum by
        position; `numbers` are the losses and statistics. `part`: the sums are a part,
        of that number on all workers; `part_ended` follows.

        Returns:
            The state with the weight and the overflow flag of all, the sums, None where
            no worker has one, and the numbers of all.
        """

    def flush(
        self, close: Callable[[], None], between: Callable[[], None], is_open: bool
    ) -> None:
        """Close the open window by `close`, and as many more as others have; call
        `between` two of them.
        """
        if is_open:
            close()

    def take_part(self) -> None:  # noqa: B027
        """Begin to share windows, once nothing can refuse the optimizer any more;
        collective.
        """

    def parameters_changed(self) -> None:  # noqa: B027
        """Take note of other parameters, of other dtypes, or of new groups."""

    def hold(self, held: Held) -> None:
        self.held = held

    def window_ended(self) -> None:
        """Begin the next window, with this worker's own sum."""
        self.hold("own")

    def part_ended(self) -> None:
        """Go on with this worker's own sum of the parts to come."""
        self.window_ended()

    def require_own_sum(self, call: str) -> None:  # noqa: B027
        """Raise unless the sum is this worker's own."""

    def require_parameters(self, parameters: Sequence[Tensor]) -> None:  # noqa: B027
        """Raise unless the workers share each of these new `parameters`."""

    def taking_part(self) -> AbstractContextManager[None] | None:
        """Return a context in which a backward pass delivers zeros, if others wait for
        it at weight 0.
        """
        return None

    def require_no_graph(self) -> None:
        fix = (
            "Leave create_graph= out; second derivatives over several workers are not"
            " supported."
        )
        found = "gradients with a graph, which a reduction does not have"
        raise explain(
            UsageError,
            "create_graph",
            expected="False where several workers reduce gradients",
            found=found,
            fix=fix,
        )

    def leave(self) -> Held:
        """Return the sum to take along to other workers; raise if this one cannot
        leave.
        """
        fix = "Start all workers anew from a checkpoint."
        raise explain(
            UsageError,
            "regroup()",
            expected="a whole copy of the model on each worker",
            found="parts of it",
            fix=fix,
        )

    def catch_up(
        self, closed: int, has_own: bool, state: Callable[[], dict[str, Any]]
    ) -> dict[str, Any] | None:
        """Return the `state` of a worker that has closed more than this one's `closed`
        windows, if there is one; collective.

        `has_own`: it holds a part of an open window that no failed reduction took
        along.
        """
        return None

    def require_no_copy(self) -> None:
        """Raise unless a copy of the optimizer could take part in reductions."""
        if self.group is not None or self.stages is not None:
            expected = (
                "an optimizer without module=, process_group= and norm_group=, as a"
                " copy has no part in the process group"
            )
            fix = "Save opt.state_dict(), and wrap anew where it is loaded."
            raise explain(
                UsageError,
                "copy, pickle",
                expected=expected,
                found="one with several workers",
                fix=fix,
            )


def require_no_join(module: DistributedDataParallel) -> None:
    """Raise unless the loop runs outside of ``module.join()``."""
    if is_in_join(module):
        fix = (
            "Leave join() out, and write gradaccum.wrap(optimizer, ...,"
            " module=parallel): opt.flush() takes part in the others' windows."
        )
        raise explain(
            UsageError,
            "join",
            expected="a loop without DistributedDataParallel.join()",
            found="one under it",
            fix=fix,
        )
