"""Checks of arguments: gradients, weights, losses, parameters. Each raises before
anything is changed.

Structure, shape and dtype are constants of a compiled program, which checks them while
compiling.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, TypeAlias

import mindspore as ms
import numpy as np
from mindspore import Tensor
from mindspore.ops import constexpr

from gradaccum import ArgumentTypeError, ArgumentValueError, GradientError
from gradaccum.kit import explain, given_weight, require_item_weights, require_weight
from gradaccum_mindspore.gradient_sum import DType, Gradients, Number, Shape

Weight: TypeAlias = Number | None
"""How many items a micro-batch has; None: 1."""
Loss: TypeAlias = Number | None
"""The loss of a micro-batch, not scaled; None if it is not told."""
NamedGradients = Mapping[str, Tensor | None]
Spec = tuple[str, Shape, DType]
"""(name, shape, dtype) of a parameter of the model."""
Specs = tuple[Spec, ...]


LOSS_FIX = (
    "Write optimizer(gradients, weight, loss) with the loss that was differentiated,"
    " not scaled."
)


def gradients_by_position(
    gradients: Gradients | NamedGradients,
    specs: Specs,
    now: Callable[[], tuple[str, ...]],
) -> Gradients:
    """Return the gradients in the parameters' order, checked. A dict has the names in
    `specs`, or those that `now` returns.
    """
    if isinstance(gradients, Mapping):
        gradients = [
            gradients[name] for name in names_of(tuple(gradients), specs, now())
        ]
    if not isinstance(gradients, Sequence):
        found = f"an object of type {type(gradients).__name__}"
        raise _structure_error(found, _in_order(specs))
    is_pair = len(gradients) == 2 and isinstance(gradients[1], tuple | list | Mapping)
    require_structure(len(gradients), is_pair, specs)
    try:
        for gradient, spec in zip(gradients, specs, strict=True):
            check_gradient(gradient, spec)
    except GradientError:
        shapes = tuple(getattr(gradient, "shape", None) for gradient in gradients)
        refuse_other_order(shapes, specs)
        raise
    return tuple(gradients)


def require_structure(count: int, is_pair: bool, specs: Specs) -> None:
    """Raise unless there is one gradient per parameter.

    `is_pair`: the second of two is no gradient, but holds gradients.
    """
    if is_pair:
        fix = "Write loss, gradients = value_and_grad(x, y), then optimizer(gradients)."
        raise explain(
            GradientError,
            "gradients",
            expected=_in_order(specs),
            found="a pair of a loss and its gradients",
            fix=fix,
        )
    if count != len(specs):
        raise _structure_error(f"a tuple of {count}", _in_order(specs))


def refuse_other_order(shapes: Sequence[Shape | None], specs: Specs) -> None:
    """Raise `GradientError` if the parameters' shapes come in another order."""
    own_shapes = [shape for _, shape, _ in specs]
    if list(shapes) != own_shapes and Counter(shapes) == Counter(own_shapes):
        raise _structure_error("gradients in another order", _in_order(specs))


def _in_order(specs: Specs) -> str:
    return f"{len(specs)} gradients in the order of the optimizer's parameters"


def names_of(
    keys: tuple[str, ...], specs: Specs, now: tuple[str, ...]
) -> tuple[str, ...]:
    for names in (now, tuple(name for name, _, _ in specs)):
        if set(keys) == set(names):
            return names
    raise _structure_error(
        f"a dict with the keys {sorted(map(str, keys))}", f"the keys {list(now)}"
    )


def without_none(gradients: Gradients, specs: Specs) -> Gradients:
    """Replace None by zeros: the compiler takes a tuple that holds a None for a
    constant.
    """
    pairs = zip(gradients, specs, strict=True)
    return tuple(
        Tensor(np.zeros(shape), dtype) if gradient is None else gradient
        for gradient, (_, shape, dtype) in pairs
    )


def check_gradient(gradient: object, spec: Spec) -> None:
    """Raise `GradientError` unless `gradient` is None or a Tensor of the parameter's
    shape and dtype.
    """
    if gradient is None:
        return
    name, shape, dtype = spec
    if not isinstance(gradient, Tensor):
        raise _gradient_error(
            name,
            "a dense Tensor or None",
            f"an object of type {type(gradient).__name__}",
        )
    check_shape_and_dtype(
        name, tuple(gradient.shape), str(gradient.dtype), shape, str(dtype)
    )


def check_shape_and_dtype(
    name: str, shape: Shape, dtype: str, expected_shape: Shape, expected_dtype: str
) -> None:
    """Raise `GradientError` unless both agree; half precision also takes a float32
    gradient.
    """
    if shape != expected_shape:
        raise _gradient_error(name, f"shape {expected_shape}", f"shape {shape}")
    half = expected_dtype in ("Float16", "BFloat16")
    if dtype != expected_dtype and not (half and dtype == "Float32"):
        raise _gradient_error(name, f"dtype {expected_dtype}", f"dtype {dtype}")


def weight_as_number(weight: Number) -> float:
    if isinstance(weight, Tensor):
        require_one_number("weight", weight.shape)
        weight = weight.asnumpy().item()
    return require_weight(weight)


def item_weights(weights: Any, items: int) -> list[float]:
    given = weights.asnumpy() if isinstance(weights, Tensor) else weights
    return require_item_weights(
        given.tolist() if isinstance(given, np.ndarray) else given, items
    )


def loss_as_number(loss: object) -> float:
    """Return the loss as a float, which may be inf or NaN."""
    if isinstance(loss, Tensor):
        require_one_number("loss", loss.shape)
        return float(loss.astype(ms.float64).asnumpy().item())
    if isinstance(loss, (bool, str)) or not hasattr(loss, "__float__"):
        raise explain(
            ArgumentTypeError,
            "loss",
            expected="a number or a Tensor of one element",
            got=loss,
            fix=LOSS_FIX,
        )
    require_one_number("loss", getattr(loss, "shape", ()))
    return float(loss.item() if isinstance(loss, np.ndarray) else loss)


def require_one_number(argument: str, shape: Shape) -> None:
    if prod(shape) != 1:
        fix = LOSS_FIX if argument == "loss" else "Write weight.sum()."
        raise explain(
            ArgumentValueError,
            argument,
            expected="one number",
            found=f"shape {shape}",
            fix=fix,
        )


def _structure_error(found: str, expected: str) -> GradientError:
    fix = (
        "Differentiate by optimizer.parameters: mindspore.value_and_grad(fn, None,"
        " optimizer.parameters)."
    )
    return explain(GradientError, "gradients", expected=expected, found=found, fix=fix)


def _gradient_error(name: str, expected: str, found: str) -> GradientError:
    fix = (
        "Hand over the gradient as mindspore.value_and_grad returns it; let a hook or"
        " bprop keep shape and dtype."
    )
    return explain(
        GradientError, f"gradient of {name!r}", expected=expected, found=found, fix=fix
    )


def _sparse_error(name: str) -> GradientError:
    fix = (
        "Build the layer so that its gradient is dense: mindspore.nn.Embedding instead"
        " of EmbeddingLookup."
    )
    return explain(
        GradientError,
        f"gradient of {name!r}",
        expected="a dense Tensor or None",
        found="a sparse one: a RowTensor",
        fix=fix,
    )


def require_told_apart(
    places: int, dtype: DType | None, no_weight: bool, no_loss: bool
) -> bool:
    """Raise unless weight and loss are given once each, and by name where a floating
    Tensor or array alone may be either.

    `places`: how many have no name; `dtype`: the first one's, if it has one.
    """
    fix = (
        "Write optimizer(gradients, weight=n), optimizer(gradients, loss=loss), or"
        " optimizer(gradients, n, loss)."
    )
    if places > 2 or (places > 0 and not no_weight) or (places > 1 and not no_loss):
        raise explain(
            ArgumentTypeError,
            "weight",
            expected="weight and loss, each once",
            found=f"{places} of them without a name",
            fix=fix,
        )
    if places == 1 and no_loss and "float" in str(dtype).lower():
        expected = (
            "to be named where a floating Tensor stands alone, because it may be the"
            " loss"
        )
        raise explain(
            ArgumentTypeError,
            "weight",
            expected=expected,
            found=f"one of {dtype}",
            fix=fix,
        )
    return True


compiled_told_apart: Callable[[int, DType | None, bool, bool], bool] = constexpr(
    require_told_apart
)


check_compiled_structure: Callable[[int, bool, Specs], None] = constexpr(
    require_structure
)


def compiled_names_of(
    specs: Specs, now: Callable[[], tuple[str, ...]]
) -> Callable[[tuple[str, ...]], tuple[str, ...]]:
    """Return `names_of` as a function of the keys alone: the compiler cannot read a
    Parameter's name.
    """

    @constexpr(reuse_result=False)  # type: ignore[untyped-decorator]
    def names(keys: tuple[str, ...]) -> tuple[str, ...]:
        return names_of(keys, specs, now())

    while_compiling: Callable[[tuple[str, ...]], tuple[str, ...]] = names
    return while_compiling


@constexpr  # type: ignore[untyped-decorator]
def check_compiled_weight(weight: object) -> None:
    """Check a constant weight; None stands for no constant."""
    if weight is not None:
        require_weight(weight)


@constexpr  # type: ignore[untyped-decorator]
def check_compiled_no_weight(use: Any) -> None:
    given_weight(None, use)


check_compiled_loss: Callable[[object], float] = constexpr(loss_as_number)
check_compiled_shape: Callable[[str, Shape], None] = constexpr(require_one_number)


@constexpr  # type: ignore[untyped-decorator]
def check_compiled_gradients(
    shapes: tuple[Shape | None, ...], dtypes: tuple[DType | None, ...], specs: Specs
) -> bool:
    refuse_other_order(shapes, specs)
    for shape, dtype, (name, expected_shape, expected_dtype) in zip(
        shapes, dtypes, specs, strict=True
    ):
        # of a RowTensor, in MindSpore 2.7 and later
        if shape is None or isinstance(shape, Tensor):
            raise _sparse_error(name)
        if dtype is not None:
            check_shape_and_dtype(
                name, tuple(shape), str(dtype), expected_shape, str(expected_dtype)
            )
    return True
