"""Segments whose activations are recomputed: a segment runs without keeping them, and
once more when its gradient is asked for.

`mindspore.recompute` frees and repeats: with ``use_reentrant=False``, as the other way
drops the gradients of Tensors in a tuple, and with ``early_stop=False``, as stopping
early in a Cell tears MindSpore's stack of calls. `Call` does what MindSpore does not in
PyNative mode:

- The second run draws what the first run drew. The default generator and the counters
  in `mindspore.common.seed` can be set; the kernel of `mindspore.ops.Dropout` keeps its
  state to itself, so `Tape` records its masks, a byte per element on a CPU. Any other
  kernel with a state of its own draws anew, and the outputs, which are compared, show
  it.
- What the forward pass changes moves once: running statistics, counters, any Parameter
  without a gradient.
- The second run casts as the first did. MindSpore replays
  `mindspore.amp.auto_mixed_precision`, but not `to_float`, and would hand a float32
  statistic to the backward pass in half precision.

MindSpore's compiler never repeats an operator that draws or an assignment;
`keep_statistics` says what it has to be told.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import mindspore as ms
from mindspore import Tensor, nn, ops
from mindspore._c_expression import MixedPrecisionType
from mindspore.ops.operations._grad_ops import DropoutGrad

from gradaccum import UsageError
from gradaccum.kit import explain
from gradaccum_mindspore.private import SEEDS, pynative_executor, set_counters
from gradaccum_mindspore.sums import Array, DType

_KINDS = {ms.float16: MixedPrecisionType.FP16, ms.bfloat16: MixedPrecisionType.BF16}
_engine: Any = sys.modules[ms.recompute.__module__]


def current() -> Any:
    """Return the current cast of inputs, found by running an operator: MindSpore does
    not say.
    """
    if (wide := _seen(ms.float32)) in _KINDS:
        return _KINDS[wide]
    return (
        MixedPrecisionType.FP32
        if _seen(ms.float16) == ms.float32
        else MixedPrecisionType.NOTSET
    )


def _seen(dtype: DType) -> DType:
    return ops.stop_gradient(Tensor(0, dtype)).dtype


@contextmanager
def cast(kind: Any) -> Iterator[None]:
    pynative_executor.set_mixed_precision_type(kind)
    try:
        yield
    finally:
        pynative_executor.set_mixed_precision_type(MixedPrecisionType.NOTSET, False)


def uncast() -> Any:
    return cast(MixedPrecisionType.NOTSET)


def detached(tensor: Tensor) -> Tensor:
    """Return the same values without a gradient."""
    with uncast():
        return ops.stop_gradient(tensor)


class _Operators:
    """`mindspore.ops`, of which MindSpore's recomputation takes `stop_gradient`."""

    stop_gradient = staticmethod(detached)

    def __getattr__(self, name: str) -> Any:
        return getattr(ops, name)


@contextmanager
def kept_whole() -> Iterator[None]:
    _engine.ops = _Operators()
    try:
        yield
    finally:
        _engine.ops = ops


_drop = ops.Dropout.__call__

_tapes: ContextVar[tuple[Tape, ...]] = ContextVar("tapes", default=())
"""The tapes of the segments that run now, the innermost last."""


@dataclass(frozen=True)
class Seeds:
    """The positions of MindSpore's random functions."""

    generator: Tensor
    global_seed: int | None
    counters: dict[tuple[str, int], int]

    @classmethod
    def now(cls) -> Seeds:
        return cls(ms.get_rng_state(), SEEDS._GLOBAL_SEED, dict(SEEDS._KERNEL_SEED))

    def put_back(self) -> None:
        ms.set_rng_state(self.generator)
        SEEDS._GLOBAL_SEED = self.global_seed
        set_counters(self.counters)


class Tape:
    """The draws of one call of a segment: the seeds when it began, and the masks of its
    dropouts in their order.
    """

    def __init__(self) -> None:
        self._seeds = Seeds.now()
        self._masks: list[Tensor] = []
        self._next: int | None = None

    @contextmanager
    def recording(self) -> Iterator[None]:
        with _running(self):
            yield

    @contextmanager
    def replaying(self) -> Iterator[None]:
        """Replay the segment's draws in the block; later draws stay as they would have
        been.
        """
        before, self._next = Seeds.now(), 0
        self._seeds.put_back()
        try:
            with _running(self):
                yield
        finally:
            self._next = None
            before.put_back()

    def mask(self, draw: Callable[[], Tensor]) -> Tensor:
        """Return the mask of the next dropout; past the end of the tape a new one."""
        if self._next is None:
            self._masks.append(_narrowed(draw()))
            return self._masks[-1]
        self._next += 1
        return self._masks[self._next - 1] if self._next <= len(self._masks) else draw()


def _narrowed(mask: Tensor) -> Tensor:
    """Narrow a mask of zeros and ones to a byte per element; Ascend's bits stay."""
    return mask if mask.dtype in (ms.bool_, ms.uint8) else mask.astype(ms.bool_)


@contextmanager
def _running(tape: Tape) -> Iterator[None]:
    """Make dropouts ask this tape first: their class is changed meanwhile, as MindSpore
    has no hook.
    """
    token = _tapes.set((*_tapes.get(), tape))
    before, ops.Dropout.__call__ = ops.Dropout.__call__, _dropped
    try:
        yield
    finally:
        ops.Dropout.__call__ = before
        _tapes.reset(token)


def _dropped(dropout: ops.Dropout, x: Tensor) -> Any:
    """Return the dropout's output, bit for bit, from its mask: dropout's gradient is
    that same product.
    """
    if not _tapes.get():  # another thread's
        return _drop(dropout, x)
    mask = _mask(_tapes.get(), lambda: _drop(dropout, detached(x))[1])
    wide = mask.astype(x.dtype) if mask.dtype == ms.bool_ else mask
    return DropoutGrad(dropout.keep_prob)(x, wide), wide


def _mask(tapes: tuple[Tape, ...], draw: Callable[[], Tensor]) -> Tensor:
    """Return the mask of the innermost tape that replays; those inside of it record
    it.
    """
    if not tapes:
        return draw()
    return tapes[-1].mask(lambda: _mask(tapes[:-1], draw))


WRITERS = ("BatchNorm", "SyncBatchNorm", "BatchNormExt", "InstanceNorm")
"""The operators that write into an argument of theirs, and that MindSpore's compiler
repeats all the same.
"""


def buffers_of(cell: nn.Cell) -> list[Tensor]:
    """Return untrained Parameters and registered buffers."""
    found = {id(p): p for p in cell.get_parameters() if not p.requires_grad} | {
        id(buffer): buffer for buffer in cell.buffers()
    }
    return list(found.values())


class Values:
    """The values of some buffers at one moment."""

    def __init__(self, buffers: Sequence[Tensor]) -> None:
        self._pairs = [(buffer, buffer.asnumpy().copy()) for buffer in buffers]

    def forget_unchanged(self) -> None:
        """Keep the values of what has changed since."""
        self._pairs = [
            (buffer, value)
            for buffer, value in self._pairs
            if not same_bits(buffer.asnumpy(), value)
        ]

    def put_back(self) -> None:
        """Assign them. A compiled function does not see `set_data`."""
        with uncast():
            for buffer, value in self._pairs:
                ops.assign(buffer, Tensor(value, buffer.dtype))

    @contextmanager
    def again(self) -> Iterator[None]:
        before = Values([buffer for buffer, _ in self._pairs])
        self.put_back()
        try:
            yield
        finally:
            before.put_back()


def same_bits(first: Array, second: Array) -> bool:
    """True if two arrays are equal bit for bit."""
    return (
        first.shape == second.shape
        and first.dtype == second.dtype
        and first.tobytes() == second.tobytes()
    )


def keep_statistics(cell: nn.Cell) -> None:
    """Let compiled code keep what batch normalization returns, in place of running it
    again and moving its statistics twice.
    """
    for _, inner in cell.cells_and_names():
        for value in vars(inner).values():
            if isinstance(value, ops.Primitive) and value.name in WRITERS:
                _keep(value)


def _keep(operator: ops.Primitive) -> ops.Primitive:
    """Keep the attribute: MindSpore's copy of an operator is made of its arguments
    alone.
    """
    operator.add_prim_attr("recompute", False)
    operator.__deepcopy__ = lambda memo: _keep(type(operator)(**operator.init_attrs))
    return operator


class Repeated(Protocol):
    """A function that runs twice."""

    function: Callable[..., Any]
    name: str

    def buffers(self) -> list[Tensor]:
        """Return the values that it may change."""


class Segment:
    """A Cell whose activations are recomputed."""

    def __init__(self, cell: nn.Cell) -> None:
        self.cell, self.function, self.name = (
            cell,
            cell.construct,
            f"recompute({type(cell).__name__})",
        )

    def buffers(self) -> list[Tensor]:
        return buffers_of(self.cell)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not (pynative_executor.grad_flag() and pynative_executor.enable_grad()):
            return self.function(*args, **kwargs)
        call = Call(self)
        return ms.recompute(
            lambda *given: call(*given, **kwargs),
            *args,
            use_reentrant=False,
            early_stop=False,
            save_rng_state=False,
        )


class Call:
    """One call of a segment: all that it needs to run again."""

    def __init__(self, segment: Repeated) -> None:
        self._segment = segment
        self._outputs: list[Tensor] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return (
            self._record(*args, **kwargs)
            if self._outputs is None
            else self._replay(*args, **kwargs)
        )

    def _record(self, *args: Any, **kwargs: Any) -> Any:
        self._casting, self._tape, self._values = (
            current(),
            Tape(),
            Values(self._segment.buffers()),
        )
        try:
            with self._tape.recording():
                outputs = self._segment.function(*args, **kwargs)
        except BaseException:
            self._values.put_back()
            raise
        self._values.forget_unchanged()
        self._outputs = [detached(tensor) for tensor in tensors_of(outputs)]
        return outputs

    def _replay(self, *args: Any, **kwargs: Any) -> Any:
        with (
            cast(self._casting),
            kept_whole(),
            self._tape.replaying(),
            self._values.again(),
        ):
            outputs = self._segment.function(*args, **kwargs)
        self._require_same(tensors_of(outputs))
        return outputs

    def _require_same(self, outputs: list[Tensor]) -> None:
        """Raise unless the second run returned the same: its gradient would belong to
        other activations.
        """
        first = self._outputs or []
        if len(first) != len(outputs) or not all(
            same_bits(a.asnumpy(), b.asnumpy())
            for a, b in zip(first, outputs, strict=True)
        ):
            raise explain(
                UsageError,
                self._segment.name,
                expected="a second run that returns the same bits as the first",
                found=(
                    "other values: it draws numbers that MindSpore cannot draw again in"
                    " PyNative mode, or depends on what it changes"
                ),
                fix=(
                    "Use nn.Dropout rather than Dropout1d, Dropout2d or Dropout3d, call"
                    " mindspore.set_seed before the likes of ops.rand, or compile the"
                    " training step with mindspore.jit, which repeats no operator that"
                    " draws."
                ),
            )


def tensors_of(nest: object) -> list[Tensor]:
    if isinstance(nest, Tensor):
        return [nest]
    inner = (
        nest.values()
        if isinstance(nest, Mapping)
        else nest
        if isinstance(nest, tuple | list)
        else ()
    )
    return [tensor for value in inner for tensor in tensors_of(value)]
