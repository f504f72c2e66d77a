"""The second run of a segment draws what the first run drew, in PyNative mode.

MindSpore draws from three places, and its own recomputation returns to one of them:
- the default generator has a state that can be set;
- functions such as `mindspore.ops.rand` take their seed from a counter in Python (`mindspore.common.seed`), which can be set too;
- the kernel of `mindspore.ops.Dropout` keeps its state to itself. `Tape` records its masks, a byte per element on a CPU.

Any other kernel with a state of its own (`Dropout2D`, a random function without `mindspore.set_seed`) draws anew. Whoever replays a segment
compares the outputs, and so notices. Compiled code needs nothing of this: MindSpore's compiler never repeats an operator that draws.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import mindspore as ms
from mindspore import Tensor, ops
from mindspore.ops.operations._grad_ops import DropoutGrad

from gradaccum_mindspore.recomputation.casting import detached

seeds: Any = import_module("mindspore.common.seed")
"""The module; `mindspore.common.seed` is a function of the same name."""

_drop = ops.Dropout.__call__

_tapes: ContextVar[tuple[Tape, ...]] = ContextVar("tapes", default=())
"""The tapes of the segments that run now, the innermost last."""


@dataclass(frozen=True)
class Seeds:
    """Where MindSpore's random functions stood."""

    generator: Tensor
    global_seed: int | None
    counters: dict[tuple[str, int], int]

    @classmethod
    def now(cls) -> Seeds:
        """Where they stand."""
        return cls(ms.get_rng_state(), seeds._GLOBAL_SEED, dict(seeds._KERNEL_SEED))

    def put_back(self) -> None:
        """Make the next draw the one that followed."""
        ms.set_rng_state(self.generator)
        seeds._GLOBAL_SEED = self.global_seed
        seeds._KERNEL_SEED.clear()
        seeds._KERNEL_SEED.update(self.counters)


class Tape:
    """What one call of a segment drew: where the seeds stood when it began, and the masks of its dropouts in their order."""

    def __init__(self) -> None:
        self._seeds = Seeds.now()
        self._masks: list[Tensor] = []
        self._next: int | None = None

    @contextmanager
    def recording(self) -> Iterator[None]:
        """The segment runs for the first time."""
        with _running(self):
            yield

    @contextmanager
    def replaying(self) -> Iterator[None]:
        """The segment runs again: it draws the same, and what is drawn afterwards stays as it would have been."""
        before, self._next = Seeds.now(), 0
        self._seeds.put_back()
        try:
            with _running(self):
                yield
        finally:
            self._next = None
            before.put_back()

    def mask(self, draw: Callable[[], Tensor]) -> Tensor:
        """The mask of the next dropout. Past the end of the tape the segment differs from its first run, and a new one does no harm."""
        if self._next is None:
            self._masks.append(_narrowed(draw()))
            return self._masks[-1]
        self._next += 1
        return self._masks[self._next - 1] if self._next <= len(self._masks) else draw()


def _narrowed(mask: Tensor) -> Tensor:
    """A mask of zeros and ones takes a byte per element. On Ascend it comes as bits and stays."""
    return mask if mask.dtype in (ms.bool_, ms.uint8) else mask.astype(ms.bool_)


@contextmanager
def _running(tape: Tape) -> Iterator[None]:
    """Dropouts ask this tape first. MindSpore has no hook for an operator, so its class is changed meanwhile."""
    token = _tapes.set((*_tapes.get(), tape))
    before, ops.Dropout.__call__ = ops.Dropout.__call__, _dropped
    try:
        yield
    finally:
        ops.Dropout.__call__ = before
        _tapes.reset(token)


def _dropped(dropout: ops.Dropout, x: Tensor) -> Any:
    """What the dropout returns, bit for bit, from its mask: the operator of dropout's gradient is that same product."""
    if not _tapes.get():  # another thread's
        return _drop(dropout, x)
    mask = _mask(_tapes.get(), lambda: _drop(dropout, detached(x))[1])
    wide = mask.astype(x.dtype) if mask.dtype == ms.bool_ else mask
    return DropoutGrad(dropout.keep_prob)(x, wide), wide


def _mask(tapes: tuple[Tape, ...], draw: Callable[[], Tensor]) -> Tensor:
    """From the innermost tape that replays; those inside of it record the same mask, those outside of it know it already."""
    if not tapes:
        return draw()
    return tapes[-1].mask(lambda: _mask(tapes[:-1], draw))
