"""Custom backwards that do not carry the gradient that they are handed, so that their
loss cannot be scaled.

The gradients of the whole at several scales say whether something is wrong. Then each
custom backward that was met runs alone: `mindspore.nn.Cell.bprop` and the framework's
autograd functions.

MindSpore keeps no list of the functions that ran. So `watched` replaces, for the time
of a check, `mindspore.nn.Cell._call_custom_bprop` and each autograd function's
``forward``. Meanwhile everything runs as Python, because a compiled function calls
neither. At the end `watched` restores everything that a forward pass may change.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, TypeAlias

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore.common import _Function
from numpy.typing import NDArray

from gradaccum import ArgumentValueError, LinearityReport
from gradaccum.kit import (
    ROUNDINGS,
    SCALES,
    comparable,
    explain,
    linearity_report,
    relative_error,
)
from gradaccum_mindspore.gradient_sum import DType, write
from gradaccum_mindspore.mindspore_private import forgotten_on_error
from gradaccum_mindspore.verification.batch import (
    LIMITS,
    is_float,
    require_scalar,
    wide,
)

Output: TypeAlias = "Tensor | tuple[Output, ...]"


class Custom(NamedTuple):
    """A custom backward as it was met."""

    call: Callable[..., Any]
    """The cell, or the autograd function's ``apply``."""
    arguments: tuple[Any, ...]
    output: Output


def is_linear(custom: Custom, tolerance: float) -> bool:
    tensors = [value for value in custom.arguments if _is_tensor(value)]
    gradient = ops.GradOperation(get_all=True, sens_param=True)(_of_tensors(custom))
    rng = np.random.default_rng(0)
    upstream = _like(custom.output, rng)
    once, twice = (
        [wide(each) for each in gradient(*tensors, _times(upstream, factor))]
        for factor in (1.0, 2.0)
    )
    return all(
        relative_error(b / 2, a, _norm) <= tolerance
        for a, b in zip(once, twice, strict=True)
    )


def _is_tensor(value: object) -> bool:
    return isinstance(value, Tensor) and is_float(value)


def _of_tensors(custom: Custom) -> Callable[..., Any]:
    """Return the call as a function of its floating Tensors alone."""

    def function(*tensors: Tensor) -> Output:
        given = iter(tensors)
        return custom.call(
            *[next(given) if _is_tensor(value) else value for value in custom.arguments]
        )

    return function


def _like(output: Output, rng: np.random.Generator) -> Output:
    if isinstance(output, (tuple, list)):
        return tuple(_like(part, rng) for part in output)
    return Tensor(rng.integers(1, 4, output.shape).astype(np.float32), output.dtype)


def _times(upstream: Output, factor: float) -> Output:
    if isinstance(upstream, tuple):
        return tuple(_times(part, factor) for part in upstream)
    return upstream * Tensor(factor, upstream.dtype)


DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
"""Nobody can repeat their random numbers: the kernel keeps its own state."""


class Met:
    """The custom backwards and dtypes met while a function ran, and the values that it
    may have changed.
    """

    def __init__(self) -> None:
        self.dtypes: set[DType] = set()
        self._customs: dict[tuple[str, int], Custom] = {}
        self._buffers: dict[int, tuple[Parameter, NDArray[Any]]] = {}
        self._random_state = ms.get_rng_state()
        self._dropouts: list[nn.Cell] = []

    def customs(self) -> Iterator[tuple[str, Custom]]:
        for (name, _), custom in list(self._customs.items()):
            yield name, custom

    def note(self, name: str, owner: object, custom: Custom) -> None:
        self._customs.setdefault((name, id(owner)), custom)

    def keep(self, cell: nn.Cell) -> None:
        """Keep what a cell may change, such as statistics; switch a dropout off."""
        if isinstance(cell, DROPOUTS) and cell.training:
            self._dropouts.append(cell.set_train(False))
        if cell.mixed_precision_type is not None:
            self.dtypes.add(
                ms.bfloat16 if "BF16" in str(cell.mixed_precision_type) else ms.float16
            )
        for parameter in cell.get_parameters(expand=False):
            if not parameter.requires_grad and id(parameter) not in self._buffers:
                self._buffers[id(parameter)] = parameter, parameter.asnumpy().copy()

    def restore(self) -> None:
        self.rewind()
        for cell in self._dropouts:
            cell.set_train(True)

    def rewind(self) -> None:
        for parameter, value in self._buffers.values():
            write(parameter, Tensor(value, parameter.dtype))
        ms.set_rng_state(self._random_state)


@contextmanager
def watched() -> Iterator[Met]:
    """Run as Python, meet custom backwards, and put everything back at the end."""
    met = Met()
    with ExitStack() as stack:
        stack.callback(ms.set_context, mode=ms.get_context("mode"))
        stack.callback(met.restore)
        stack.enter_context(_compiled_as_python())
        ms.set_context(mode=ms.PYNATIVE_MODE)
        stack.enter_context(
            _instead(nn.Cell, "__call__", _keeping(met, nn.Cell.__call__))
        )
        stack.enter_context(
            _instead(
                nn.Cell, "_call_custom_bprop", _noting(met, nn.Cell._call_custom_bprop)
            )
        )
        for kind in _subclasses(_Function):
            stack.enter_context(
                _instead(
                    kind, "forward", staticmethod(_forwarding(met, kind, kind.forward))
                )
            )
        yield met


@contextmanager
def _compiled_as_python() -> Iterator[None]:
    before = os.environ.get("MS_JIT")
    os.environ["MS_JIT"] = "0"
    try:
        yield
    finally:
        os.environ.update(MS_JIT=before) if before is not None else os.environ.pop(
            "MS_JIT"
        )


@contextmanager
def _instead(owner: type, name: str, value: object) -> Iterator[None]:
    """Give `owner` another attribute for a while."""
    own = vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        delattr(owner, name) if own is None else setattr(owner, name, own)


def _subclasses(kind: type[_Function]) -> set[type[_Function]]:
    return {
        below
        for child in kind.__subclasses__()
        for below in (child, *_subclasses(child))
    }


def _keeping(met: Met, call: Callable[..., Any]) -> Callable[..., Any]:
    def kept(cell: nn.Cell, *args: object, **kwargs: object) -> Any:
        met.keep(cell)
        return call(cell, *args, **kwargs)

    return kept


def _noting(met: Met, call: Callable[..., Any]) -> Callable[..., Any]:
    def noted(cell: nn.Cell, *args: object, **kwargs: object) -> Any:
        output = call(cell, *args, **kwargs)
        met.note(
            type(cell).__name__,
            cell,
            Custom(lambda *values: cell(*values, **kwargs), args, output),
        )
        return output

    return noted


def _forwarding(
    met: Met, kind: type[_Function], forward: Callable[..., Any]
) -> Callable[..., Any]:
    # new in MindSpore 2.10
    with_context = getattr(_Function, "setup_context", None) in (
        None,
        getattr(kind, "setup_context", None),
    )

    def noted(*args: object, **kwargs: object) -> Any:
        output = forward(*args, **kwargs)
        given = args[1:] if with_context else args
        met.note(
            kind.__name__,
            kind,
            Custom(lambda *values: kind.apply(*values, **kwargs), given, output),
        )
        return output

    return noted


Gradients = Mapping[str, NDArray[np.float64]]


def verify_loss_scaling(
    fn: Callable[..., Tensor], weights: Parameter | Sequence[Parameter], *inputs: object
) -> LinearityReport:
    """Check that grad(s x loss) = s x grad(loss) for s in 2^0 ... 2^16.

    Powers of two multiply a float exactly, so the two are equal but for numbers that
    leave a dtype's range. Where float16 is met (in weights, inputs, the loss or a cell
    set to it), only the four largest scales with finite gradients are compared. The
    tolerance is sixteen units in the last place of the coarsest dtype met.

    It runs in PyNative mode, compiled functions as Python, and switches dropout layers
    off. Every scale starts from the same Parameters and random state, which are
    restored at the end. Not for two threads at once.

    Args:
        fn: a function, compiled or not, or a Cell; ``fn(*inputs)`` returns the loss, a
            floating Tensor of one element, not scaled.
        weights: the Parameters to differentiate by, as for `mindspore.value_and_grad`:
            a Parameter, or a list or tuple of them.
        inputs: the arguments of `fn`.

    Returns:
        A `gradaccum.LinearityReport`: errors by the Parameter's name, culprits by the
            name of the class.

    Raises:
        ArgumentValueError: `fn` does not return such a loss, or not the same one each
            time.
    """
    parameters = [weights] if isinstance(weights, Parameter) else list(weights)
    with watched() as met:
        loss = require_scalar(fn(*inputs))
        met.rewind()
        if not np.array_equal(loss.asnumpy(), fn(*inputs).asnumpy(), equal_nan=True):
            fix = "Switch its random parts off: net.set_train(False)."
            expected = "a function that returns the same loss each time"
            raise explain(
                ArgumentValueError,
                "fn",
                expected=expected,
                found="two different losses",
                fix=fix,
            )
        gradients = list(_unscaled_gradients(fn, parameters, inputs, loss.dtype, met))
        met.dtypes.update(
            value.dtype for value in (*parameters, *inputs, loss) if _is_tensor(value)
        )
        epsilon = max(LIMITS[dtype][0] for dtype in met.dtypes)
        culprits = [
            name
            for name, custom in met.customs()
            if not is_linear(custom, ROUNDINGS * epsilon)
        ]
    return linearity_report(
        comparable(gradients, _is_finite, float16=ms.float16 in met.dtypes),
        culprits,
        epsilon,
        _norm,
    )


def _unscaled_gradients(
    fn: Callable[..., Tensor],
    parameters: Sequence[Parameter],
    inputs: Sequence[object],
    dtype: DType,
    met: Met,
) -> Iterator[Gradients]:
    for scale in SCALES:
        factor = Tensor(scale, dtype)
        met.rewind()
        with forgotten_on_error():
            _, gradients = ms.value_and_grad(
                lambda *values, s=factor: fn(*values) * s, None, list(parameters)
            )(*inputs)
        yield {
            each.name: wide(gradient) / scale
            for each, gradient in zip(parameters, gradients, strict=True)
        }


def _norm(gradient: NDArray[np.float64]) -> float:
    return float(np.linalg.norm(gradient))


def _is_finite(gradients: Gradients) -> bool:
    return all(np.isfinite(gradient).all() for gradient in gradients.values())
