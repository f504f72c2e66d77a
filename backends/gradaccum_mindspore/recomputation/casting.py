"""A Cell under `to_float` casts the inputs of every operator inside of it, in PyNative mode. Three things follow for a segment.

Its second run casts as the first did: MindSpore replays `mindspore.amp.auto_mixed_precision`, but not `to_float`. What is kept of a segment
and put back is not cast. And what MindSpore's recomputation hands to the backward pass is not cast either: MindSpore passes it through
`stop_gradient`, inside of the Cell, and so a float32 statistic of a normalization comes back in half precision.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mindspore as ms
from mindspore import Tensor, ops
from mindspore._c_expression import MixedPrecisionType

from gradaccum_mindspore.recorded import pynative_executor
from gradaccum_mindspore.types import DType

_KINDS = {ms.float16: MixedPrecisionType.FP16, ms.bfloat16: MixedPrecisionType.BF16}
_engine: Any = sys.modules[ms.recompute.__module__]


def current() -> Any:
    """How inputs are cast now. MindSpore does not say, so an operator is asked."""
    if (wide := _seen(ms.float32)) in _KINDS:
        return _KINDS[wide]
    return MixedPrecisionType.FP32 if _seen(ms.float16) == ms.float32 else MixedPrecisionType.NOTSET


def _seen(dtype: DType) -> DType:
    return ops.stop_gradient(Tensor(0, dtype)).dtype


@contextmanager
def cast(kind: Any) -> Iterator[None]:
    """Operators cast their inputs in this way."""
    pynative_executor.set_mixed_precision_type(kind)
    try:
        yield
    finally:
        pynative_executor.set_mixed_precision_type(MixedPrecisionType.NOTSET, False)


def uncast() -> Any:
    """Operators take their inputs as they are."""
    return cast(MixedPrecisionType.NOTSET)


def detached(tensor: Tensor) -> Tensor:
    """The same values without a gradient, in the same dtype."""
    with uncast():
        return ops.stop_gradient(tensor)


class _Operators:
    """`mindspore.ops`, of which MindSpore's recomputation takes `stop_gradient`."""

    stop_gradient = staticmethod(detached)

    def __getattr__(self, name: str) -> Any:
        return getattr(ops, name)


@contextmanager
def kept_whole() -> Iterator[None]:
    """What MindSpore's recomputation keeps inside has its own dtype."""
    _engine.ops = _Operators()
    try:
        yield
    finally:
        _engine.ops = ops
