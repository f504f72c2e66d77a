"""Checks of what users hand in: gradients, weights, dtypes. Each raises before anything is changed.

The gradient checks look at structure, shape and dtype alone, which are constants of a compiled program: they run at compile time
inside `mindspore.jit` and graph mode, and at every call in PyNative.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import mindspore as ms
from mindspore import Tensor, amp
from mindspore.ops import constexpr

from gradaccum import ArgumentValueError, GradientError, Options, accumulate_dtype_error, explain, foreign_scaler_error, require_weight

HALF = (ms.float16, ms.bfloat16)
FLOATS = {"float16": ms.float16, "bfloat16": ms.bfloat16, "float32": ms.float32, "float64": ms.float64}

Specs = tuple[tuple[str, tuple[int, ...], Any], ...]
"""(name, shape, dtype) of each model parameter."""


def accumulate_dtype(own: Any, asked: Any) -> Any:
    """The dtype of a sum of gradients of dtype `own`; `asked` is the option: a MindSpore, NumPy or named dtype, or None.

    Raises:
        ArgumentTypeError, ArgumentValueError: `asked` is no floating dtype.
    """
    if asked is None:
        return ms.float32 if own in HALF else own
    name = asked if isinstance(asked, str) else getattr(asked, "__name__", None) or str(asked)
    for key, dtype in FLOATS.items():
        if asked is dtype or asked == dtype or name == key:
            return dtype
    raise accumulate_dtype_error(asked)


def reaches_beyond(own: Any, handed: Any) -> Any:
    """Whether a finite sum of dtype `own` can be an inf in the dtype `handed`; for the compiler to follow too."""
    return handed == ms.float16 or (own == ms.float64 and handed != ms.float64)


def own_scaler(options: Options) -> Any:
    """The `mindspore.amp.DynamicLossScaler` that was given as the loss scale, or None.

    Raises:
        ArgumentTypeError: another framework's scaler was given.
    """
    if options.scaler is None or isinstance(options.scaler, amp.DynamicLossScaler):
        return options.scaler
    raise foreign_scaler_error("a mindspore.amp.DynamicLossScaler", options.scaler)


def gradients_by_position(gradients: Any, specs: Specs) -> tuple[Any, ...]:
    """The gradients in the parameters' order, checked: a tuple or list in that order, or a dict by parameter name.

    None stands for a parameter that took no part.

    Raises:
        GradientError: another number, other names, another shape or dtype.
    """
    names = [name for name, _, _ in specs]
    if isinstance(gradients, Mapping):
        check_names(tuple(gradients), specs)
        gradients = [gradients[name] for name in names]
    if not isinstance(gradients, Sequence) or len(gradients) != len(specs):
        got = f"a tuple of {len(gradients)}" if isinstance(gradients, Sequence) else f"an object of type {type(gradients).__name__}"
        raise _structure_error(got, f"{len(specs)} gradients in the order of the optimizer's parameters")
    for gradient, spec in zip(gradients, specs, strict=True):
        check_gradient(gradient, spec)
    return tuple(gradients)


def check_names(keys: tuple[str, ...], specs: Specs) -> None:
    """Raise `GradientError` unless the keys of a dict of gradients are the parameters' names."""
    names = [name for name, _, _ in specs]
    if set(keys) != set(names):
        raise _structure_error(f"a dict with the keys {sorted(map(str, keys))}", f"the keys {names}")


def check_gradient(gradient: Any, spec: tuple[str, tuple[int, ...], Any]) -> None:
    """Raise `GradientError` unless `gradient` is None or a Tensor of the parameter's shape and dtype."""
    if gradient is None:
        return
    name, shape, dtype = spec
    if not isinstance(gradient, Tensor):
        raise _gradient_error(name, "a dense Tensor or None", f"an object of type {type(gradient).__name__}")
    check_shape_and_dtype(name, tuple(gradient.shape), str(gradient.dtype), shape, str(dtype))


def check_shape_and_dtype(name: str, shape: tuple[int, ...], dtype: str, expected_shape: tuple[int, ...], expected_dtype: str) -> None:
    """Raise `GradientError` unless both agree. A parameter in half precision also takes a float32 gradient."""
    if shape != expected_shape:
        raise _gradient_error(name, f"shape {expected_shape}", f"shape {shape}")
    half = expected_dtype in ("Float16", "BFloat16")
    if dtype != expected_dtype and not (half and dtype == "Float32"):
        raise _gradient_error(name, f"dtype {expected_dtype}", f"dtype {dtype}")


def weight_as_number(weight: Any) -> float:
    """The weight of a micro-batch as a float; None is 1.

    Raises:
        ArgumentTypeError, ArgumentValueError: it is no finite number >= 0.
    """
    if weight is None:
        return 1.0
    if isinstance(weight, Tensor):
        if weight.size != 1:
            raise explain(ArgumentValueError, "weight", expected="one number", got=f"shape {weight.shape}", fix="Write weight.sum().")
        weight = weight.asnumpy().item()
    return require_weight(weight)


def _structure_error(got: str, expected: str) -> GradientError:
    fix = "Differentiate by optimizer.parameters: mindspore.value_and_grad(fn, None, optimizer.parameters)."
    return explain(GradientError, "gradients", expected=expected, got=got, fix=fix)


def _gradient_error(name: str, expected: str, got: str) -> GradientError:
    fix = "Hand over the gradient as mindspore.value_and_grad returns it."
    return explain(GradientError, f"gradient of {name!r}", expected=expected, got=got, fix=fix)


@constexpr  # type: ignore[untyped-decorator]
def check_compiled_structure(count: int, specs: Specs) -> None:
    """The number of gradients, while compiling."""
    if count != len(specs):
        raise _structure_error(f"a tuple of {count}", f"{len(specs)} gradients in the order of the optimizer's parameters")


@constexpr  # type: ignore[untyped-decorator]
def check_compiled_names(keys: tuple[str, ...], specs: Specs) -> None:
    """The keys of a dict, while compiling."""
    check_names(keys, specs)


@constexpr  # type: ignore[untyped-decorator]
def check_compiled_gradients(shapes: tuple[tuple[int, ...], ...], dtypes: tuple[Any, ...], specs: Specs) -> None:
    """The gradients' shapes and dtypes, while compiling; a dtype of None: no gradient."""
    for shape, dtype, (name, expected_shape, expected_dtype) in zip(shapes, dtypes, specs, strict=True):
        if dtype is not None:
            check_shape_and_dtype(name, tuple(shape), str(dtype), expected_shape, str(expected_dtype))
