"""Notices when something other than autograd changed ``.grad``, without a pass over the gradients.

While ``.grad`` holds the undivided sum of a window, ``clip_grad_norm_``, ``scaler.unscale_``, ``model.zero_grad()`` or an assignment
would make the result silently wrong. So every parameter is watched: right after autograd has accumulated, `Watched` notes which tensor
``.grad`` is and its version, and `intact` compares; both take less than a microsecond together. A version tells that something wrote,
not what: `Values` lets a call pass that writes the values that are there. torch does not count writes through ``p.grad.data`` or NumPy,
a collective of ``torch.distributed`` or a clip of sharded gradients. Only the values show these, and they are compared in the first
window, or where a call rewrites them.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from gradaccum_torch.watched import Arrivals, Watched


class Sentinels:
    """What autograd left in the ``.grad`` of all parameters."""

    def __init__(self) -> None:
        self._watched: dict[int, Watched] = {}
        """Keyed by id(): the same identity as hash(tensor), ten times faster."""
        self.arrivals = Arrivals()
        self.strict = False
        """A write counts even if it changes nothing: most gradients are elsewhere, and a norm taken here is not theirs."""
        self.holds = False
        """There was something in a ``.grad`` at the last `reset`."""
        self.watching = True
        """A change of a ``.grad`` is refused; False: every change is the user's to make."""

    def leave_all_changes(self) -> None:
        """Every change of a ``.grad`` is the user's to make."""
        self.watching = self.arrivals.values.wanted = False

    @property
    def arrived(self) -> bool:
        """Autograd has delivered something since `next_micro_batch`."""
        return self.arrivals.arrived

    def watch(self, parameters: Iterable[Tensor]) -> None:
        """Watch these and no others; what is known of one that is watched already stays."""
        known, arrivals = self._watched, self.arrivals
        self._watched = {id(each): known.get(id(each)) or Watched(each, arrivals) for each in parameters}
        arrivals.gradients[:] = self._watched.values()

    def of(self, parameter: Tensor) -> Watched:
        """One watched parameter."""
        return self._watched[id(parameter)]

    def note(self, parameter: Tensor) -> None:
        """Take its ``.grad`` as it is now for what autograd left there, if it is watched."""
        watched = self._watched.get(id(parameter))
        if watched is not None:
            watched.note()

    def intact(self) -> bool:
        """Whether every ``.grad`` is what autograd left there; waits for the device where values are compared."""
        if not self.watching:
            return True
        touched = []
        for watched in self._watched.values():
            gradient = watched.parameter.grad
            if gradient is not watched.gradient or (gradient is not None and gradient._version != watched.version):
                touched.append(watched)
        if self.arrivals.disturbed or (touched and self.strict):
            return False
        if self.arrivals.values.noted is not None:
            return self._same_values(touched)
        return not touched or not any(map(Watched.is_touched, touched))

    def next_micro_batch(self) -> None:
        """What arrives from now on belongs to another micro-batch."""
        self.arrivals.arrived = self.arrivals.outside = self.arrivals.multiplied = self.arrivals.disturbed = False

    def window_ended(self) -> None:
        """The window was closed: its values are no longer compared."""
        self.arrivals.values.window_ended()

    def flags(self) -> tuple[bool, bool, bool]:
        """What `reset` needs to go on elsewhere, where the gradients are copies."""
        return self.arrivals.arrived, self.arrivals.outside, not self.intact()

    def reset(self, arrived: bool = False, outside: bool = False, disturbed: bool = False) -> None:
        """Take ``.grad`` as it is now for what autograd left there."""
        arrivals = self.arrivals
        arrivals.arrived, arrivals.outside, arrivals.disturbed, arrivals.under_way = arrived, outside, disturbed, False
        arrivals.multiplied = False
        arrivals.values.forget()
        holds = False
        for watched in self._watched.values():
            gradient = watched.gradient = watched.parameter.grad
            if gradient is None:
                watched.version = -1
            else:
                watched.version, holds = gradient._version, True
        self.holds = holds

    def _same_values(self, touched: list[Watched]) -> bool:
        """Whether nothing was replaced and all values are what they were; a gradient that was written into is noted anew."""
        values, gradients = self.arrivals.values, [watched.parameter.grad for watched in self._watched.values()]
        if any(watched.parameter.grad is not watched.gradient for watched in touched):
            return False
        if not values.same(gradient for gradient in gradients if gradient is not None):
            return False
        for watched in filter(Watched.is_touched, touched):
            watched.note()
            values.rewritten()
        return True
