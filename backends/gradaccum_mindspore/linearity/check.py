"""Whether a loss carries the gradient it is handed through every part, as loss scaling takes for granted.

The gradients of the whole at several scales say whether something is wrong. Then each custom backward that was met on the way runs alone,
and shows whether it is to blame. Custom backwards are `mindspore.nn.Cell.bprop` and the framework's autograd functions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor
from numpy.typing import NDArray

from gradaccum import ArgumentValueError, LinearityReport
from gradaccum.kit import ROUNDINGS, SCALES, comparable, explain, linearity_report
from gradaccum_mindspore.linearity.custom_rules import is_float, is_linear, norm, wide
from gradaccum_mindspore.linearity.watching import Met, watched
from gradaccum_mindspore.recorded import forgotten_on_error
from gradaccum_mindspore.types import DType

EPSILON = {ms.float16: 2.0**-10, ms.bfloat16: 2.0**-7, ms.float32: 2.0**-23, ms.float64: 2.0**-52}
"""Distance from 1 to the next number."""

Gradients = Mapping[str, NDArray[np.float64]]


def verify_loss_scaling(fn: Callable[..., Tensor], weights: Parameter | Sequence[Parameter], *inputs: object) -> LinearityReport:
    """Check that grad(s x loss) = s x grad(loss) for s in 2^0 ... 2^16.

    Powers of two multiply a float exactly, so the two are equal but for numbers that leave a dtype's range. Where float16 is met (in
    weights, inputs, the loss or a cell set to it), only the four largest scales with finite gradients are compared: at smaller ones
    gradients may have vanished, which loss scaling is there to prevent. The tolerance is sixteen units in the last place of the coarsest
    dtype met.

    It runs in PyNative mode, compiled functions as Python, and switches dropout layers off. Every scale starts from the same Parameters,
    also the statistics of a normalization, and from the same random state; all are restored at the end. Not for two threads at once.

    Args:
        fn: a function, compiled or not, or a Cell; ``fn(*inputs)`` returns the loss, a floating Tensor of one element, not scaled.
        weights: the Parameters to differentiate by, as for `mindspore.value_and_grad`: a Parameter, or a list or tuple of them.
        inputs: the arguments of `fn`.

    Returns:
        A `gradaccum.LinearityReport`: errors by the Parameter's name, culprits by the name of the class.

    Raises:
        ArgumentValueError: `fn` does not return such a loss, or not the same one each time.
    """
    parameters = [weights] if isinstance(weights, Parameter) else list(weights)
    with watched() as met:
        loss = fn(*inputs)
        if not is_float(loss) or loss.size != 1:
            raise _not_a_loss_error(loss)
        met.rewind()
        if not np.array_equal(loss.asnumpy(), fn(*inputs).asnumpy(), equal_nan=True):
            raise _not_repeatable_error()
        gradients = list(_unscaled_gradients(fn, parameters, inputs, loss.dtype, met))
        met.dtypes.update(value.dtype for value in (*parameters, *inputs, loss) if is_float(value))
        epsilon = max(EPSILON.get(dtype, 0.0) for dtype in met.dtypes)
        culprits = [name for name, custom in met.customs() if not is_linear(custom, ROUNDINGS * epsilon)]
    return linearity_report(comparable(gradients, _is_finite, float16=ms.float16 in met.dtypes), culprits, epsilon, norm)


def _unscaled_gradients(
    fn: Callable[..., Tensor], parameters: Sequence[Parameter], inputs: Sequence[object], dtype: DType, met: Met
) -> Iterator[Gradients]:
    """The gradients of ``scale * fn``, divided by the scale, for each of `SCALES`."""
    for scale in SCALES:
        factor = Tensor(scale, dtype)
        met.rewind()
        with forgotten_on_error():
            _, gradients = ms.value_and_grad(lambda *values, s=factor: fn(*values) * s, None, list(parameters))(*inputs)
        yield {each.name: wide(gradient) / scale for each, gradient in zip(parameters, gradients, strict=True)}


def _is_finite(gradients: Gradients) -> bool:
    return all(np.isfinite(gradient).all() for gradient in gradients.values())


def _not_a_loss_error(loss: object) -> ArgumentValueError:
    found = f"{loss.dtype} of shape {loss.shape}" if isinstance(loss, Tensor) else f"an object of type {type(loss).__name__}"
    expected = "a function that returns one floating Tensor of one element"
    return explain(ArgumentValueError, "fn", expected=expected, found=found, fix="Return the loss alone, reduced to one number.")


def _not_repeatable_error() -> ArgumentValueError:
    expected = "a function that returns the same loss each time it is called with the same inputs"
    return explain(
        ArgumentValueError, "fn", expected=expected, found="two different losses", fix="Switch its random parts off: net.set_train(False)."
    )
