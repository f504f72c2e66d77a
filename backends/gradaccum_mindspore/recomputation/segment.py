"""One segment in PyNative mode: it runs without keeping what it computes, and once more when its gradient is asked for.

`mindspore.recompute` frees and repeats. Its way by hooks on saved tensors (``use_reentrant=False``) takes any nest of arguments and finds
the Parameters by itself; the other way drops the gradients of Tensors in a tuple, and mixes calls up when one is never differentiated.
``early_stop=False``, because stopping early leaves MindSpore's stack of calls torn when a Cell is among what runs. What MindSpore does not
do is done here: each call replays its own randomness, and moves its buffers once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import mindspore as ms
from mindspore import Tensor, nn

from gradaccum import UsageError
from gradaccum.kit import explain
from gradaccum_mindspore.recomputation.buffers import Values, buffers_of, same_bits
from gradaccum_mindspore.recomputation.casting import cast, current, detached, kept_whole
from gradaccum_mindspore.recomputation.randomness import Tape
from gradaccum_mindspore.recorded import pynative_executor


class Segment:
    """A function whose activations are recomputed, and the cells that it uses."""

    def __init__(self, function: Callable[..., Any], cells: Iterable[nn.Cell], name: str) -> None:
        self.function, self.cells, self.name = function, list(cells), name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run it. Where nobody asks for a gradient it runs as it is."""
        if not (pynative_executor.grad_flag() and pynative_executor.enable_grad()):
            return self.function(*args, **kwargs)
        call = Call(self)
        return ms.recompute(lambda *given: call(*given, **kwargs), *args, use_reentrant=False, early_stop=False, save_rng_state=False)


class Call:
    """One call of a segment: what it needs in order to run again as it ran."""

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        self._outputs: list[Tensor] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The first time it records, afterwards it replays."""
        return self._record(*args, **kwargs) if self._outputs is None else self._replay(*args, **kwargs)

    def _record(self, *args: Any, **kwargs: Any) -> Any:
        self._casting, self._tape, self._values = current(), Tape(), Values(buffers_of(self._segment.cells))
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
        with cast(self._casting), kept_whole(), self._tape.replaying(), self._values.again():
            outputs = self._segment.function(*args, **kwargs)
        self._require_same(tensors_of(outputs))
        return outputs

    def _require_same(self, outputs: list[Tensor]) -> None:
        """Raise if the second run returned something else: its gradient would belong to other activations than the loss.

        Raises:
            UsageError: it did.
        """
        first = self._outputs or []
        if len(first) != len(outputs) or not all(same_bits(a.asnumpy(), b.asnumpy()) for a, b in zip(first, outputs, strict=True)):
            raise explain(
                UsageError,
                f"recompute({self._segment.name})",
                expected="a second run that returns the same bits as the first",
                found="other values: it draws numbers that MindSpore cannot draw again in PyNative mode, or depends on what it changes",
                fix="Use nn.Dropout rather than Dropout1d, Dropout2d or Dropout3d, call mindspore.set_seed before the likes of ops.rand, "
                "or compile the training step with mindspore.jit, which repeats no operator that draws.",
            )


def tensors_of(nest: object) -> list[Tensor]:
    """The Tensors in a nest of tuples, lists and dicts."""
    if isinstance(nest, Tensor):
        return [nest]
    inner = nest.values() if isinstance(nest, Mapping) else nest if isinstance(nest, tuple | list) else ()
    return [tensor for value in inner for tensor in tensors_of(value)]
