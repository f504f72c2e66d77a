"""Checks of arguments: gradients, weights, losses. Each raises before anything is
changed.

Structure, shape and dtype are constants of a compiled program, which checks them while
MindSpore compiles it.
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
"""The loss of a micro-batch, not scaled; None if it is not known."""
NamedGradients = Mapping[str, Tensor | None]
Spec = tuple[str, Shape, DType]
"""(name, shape, dtype) of a parameter of the model."""
Specs = tuple[Spec, ...]

# The gradients of a micro-batch.


def gradients_by_position(
    gradients: Gradients | NamedGradients,
    specs: Specs,
    current_names: Callable[[], tuple[str, ...]],
) -> Gradients:
    """Return the gradients in the parameters' order, checked. A dict has the names in
    `specs`, or the `current_names`.
    """
    if isinstance(gradients, Mapping):
        names = names_of(tuple(gradients), specs, current_names())
        gradients = [gradients[name] for name in names]
    if not isinstance(gradients, Sequence):
        raise _structure_error(f"an object of type {type(gradients).__name__}", specs)
    is_pair = len(gradients) == 2 and isinstance(gradients[1], tuple | list | Mapping)
    require_structure(len(gradients), is_pair, specs)
    shapes: list[Shape | None] = []
    dtypes: list[DType | None] = []
    for gradient, (name, _, _) in zip(gradients, specs, strict=True):
        if gradient is None:
            shapes.append(None)
            dtypes.append(None)
        elif isinstance(gradient, Tensor):
            shapes.append(tuple(gradient.shape))
            dtypes.append(gradient.dtype)
        else:
            found = f"an object of type {type(gradient).__name__}"
            raise _gradient_error(name, "a dense Tensor or None", found)
    require_shapes_and_dtypes(shapes, dtypes, specs)
    return tuple(gradients)


def require_structure(count: int, is_pair: bool, specs: Specs) -> None:
    """Raise unless there is one gradient per parameter.

    `is_pair`: the second of two is no gradient, but holds gradients.
    """
    if is_pair:
        raise explain(
            GradientError,
            "gradients",
            expected=_in_order(specs),
            found="a pair of a loss and its gradients",
            fix="Write loss, gradients = value_and_grad(x, y), then"
            " optimizer(gradients).",
        )
    if count != len(specs):
        raise _structure_error(f"a tuple of {count}", specs)


def require_shapes_and_dtypes(
    shapes: Sequence[Shape | None], dtypes: Sequence[DType | None], specs: Specs
) -> None:
    """Raise unless each gradient has its parameter's shape and dtype; half precision
    also takes a float32 gradient. A dtype of None stands for no gradient.
    """
    own_shapes = [shape for _, shape, _ in specs]
    if list(shapes) != own_shapes and Counter(shapes) == Counter(own_shapes):
        raise _structure_error("gradients in another order", specs)
    for shape, dtype, spec in zip(shapes, dtypes, specs, strict=True):
        name, own_shape, own_dtype = spec
        if dtype is None:
            continue
        if shape != own_shape:
            raise _gradient_error(name, f"shape {own_shape}", f"shape {shape}")
        is_half = str(own_dtype) in ("Float16", "BFloat16")
        is_wider = is_half and str(dtype) == "Float32"
        if str(dtype) != str(own_dtype) and not is_wider:
            raise _gradient_error(name, f"dtype {own_dtype}", f"dtype {dtype}")


def names_of(
    keys: tuple[str, ...], specs: Specs, current_names: tuple[str, ...]
) -> tuple[str, ...]:
    """Return the names by which a dict has its gradients, in the parameters' order."""
    first_names = tuple(name for name, _, _ in specs)
    for names in (current_names, first_names):
        if set(keys) == set(names):
            return names
    found = f"a dict with the keys {sorted(map(str, keys))}"
    raise _structure_error(found, specs, expected=f"the keys {list(current_names)}")


def without_none(gradients: Gradients, specs: Specs) -> Gradients:
    """Replace None by zeros: the compiler takes a tuple that holds a None for a
    constant.
    """
    pairs = zip(gradients, specs, strict=True)
    return tuple(
        Tensor(np.zeros(shape), dtype) if gradient is None else gradient
        for gradient, (_, shape, dtype) in pairs
    )


def _in_order(specs: Specs) -> str:
    return f"{len(specs)} gradients in the order of the optimizer's parameters"


def _structure_error(
    found: str, specs: Specs, expected: str | None = None
) -> GradientError:
    return explain(
        GradientError,
        "gradients",
        expected=expected or _in_order(specs),
        found=found,
        fix="Differentiate by optimizer.parameters: mindspore.value_and_grad(fn, None,"
        " optimizer.parameters).",
    )


def _gradient_error(name: str, expected: str, found: str) -> GradientError:
    return explain(
        GradientError,
        f"gradient of {name!r}",
        expected=expected,
        found=found,
        fix="Hand over the gradient as mindspore.value_and_grad returns it; let a hook"
        " or bprop keep shape and dtype.",
    )


# Its weight and its loss.


LOSS_FIX = (
    "Write optimizer(gradients, weight, loss) with the loss that was differentiated,"
    " not scaled."
)


def require_named(
    positional: int, dtype: object, has_weight: bool, has_loss: bool
) -> None:
    """Raise unless weight and loss are given once each, and by name where a floating
    Tensor or array alone may be either.

    `positional`: how many have no name; `dtype`: the first one's, if it has one.
    """
    fix = (
        "Write optimizer(gradients, weight=n), optimizer(gradients, loss=loss), or"
        " optimizer(gradients, n, loss)."
    )
    is_twice = (positional > 0 and has_weight) or (positional > 1 and has_loss)
    if positional > 2 or is_twice:
        raise explain(
            ArgumentTypeError,
            "weight",
            expected="weight and loss, each once",
            found=f"{positional} of them without a name",
            fix=fix,
        )
    if positional == 1 and not has_loss and "float" in str(dtype).lower():
        raise explain(
            ArgumentTypeError,
            "weight",
            expected="to be named where a floating Tensor stands alone, because it may"
            " be the loss",
            found=f"one of {dtype}",
            fix=fix,
        )


def weight_as_number(weight: Number) -> float:
    if isinstance(weight, Tensor):
        require_one_number("weight", weight.shape)
        weight = weight.asnumpy().item()
    return require_weight(weight)


def item_weights(weights: Any, items: int) -> list[float]:
    if isinstance(weights, Tensor):
        weights = weights.asnumpy()
    if isinstance(weights, np.ndarray):
        weights = weights.tolist()
    return require_item_weights(weights, items)


def loss_as_number(loss: object) -> float:
    """Return the loss as a float, which may be inf or NaN."""
    if isinstance(loss, bool | str) or not hasattr(loss, "__float__"):
        raise explain(
            ArgumentTypeError,
            "loss",
            expected="a number or a Tensor of one element",
            got=loss,
            fix=LOSS_FIX,
        )
    require_one_number("loss", getattr(loss, "shape", ()))
    if isinstance(loss, Tensor):
        loss = loss.astype(ms.float64).asnumpy()
    return float(loss.item() if isinstance(loss, np.ndarray) else loss)


def require_one_number(argument: str, shape: Shape) -> None:
    if prod(shape) != 1:
        raise explain(
            ArgumentValueError,
            argument,
            expected="one number",
            found=f"shape {shape}",
            fix=LOSS_FIX if argument == "loss" else "Write weight.sum().",
        )


# The same checks while MindSpore compiles. MindSpore 2.7 warns of a check whose result
# is unused, so some return True.


check_compiled_structure: Callable[[int, bool, Specs], None] = constexpr(
    require_structure
)
check_compiled_named: Callable[[int, DType | None, bool, bool], None] = constexpr(
    require_named
)
check_compiled_loss: Callable[[object], float] = constexpr(loss_as_number)
check_compiled_shape: Callable[[str, Shape], None] = constexpr(require_one_number)


@constexpr  # type: ignore[untyped-decorator]
def check_compiled_gradients(
    shapes: tuple[Shape | None, ...], dtypes: tuple[DType | None, ...], specs: Specs
) -> bool:
    plain_shapes: list[Shape] = []
    for shape, (name, _, _) in zip(shapes, specs, strict=True):
        # of a RowTensor, in MindSpore 2.7 and later
        if shape is None or isinstance(shape, Tensor):
            raise explain(
                GradientError,
                f"gradient of {name!r}",
                expected="a dense Tensor or None",
                found="a sparse one: a RowTensor",
                fix="Build the layer so that its gradient is dense:"
                " mindspore.nn.Embedding instead of EmbeddingLookup.",
            )
        plain_shapes.append(tuple(shape))
    require_shapes_and_dtypes(plain_shapes, dtypes, specs)
    return True


def compiled_names_of(
    specs: Specs, current_names: Callable[[], tuple[str, ...]]
) -> Callable[[tuple[str, ...]], tuple[str, ...]]:
    """Return `names_of` as a function of the keys alone: the compiler cannot read a
    Parameter's name.
    """

    @constexpr(reuse_result=False)  # type: ignore[untyped-decorator]
    def names(keys: tuple[str, ...]) -> tuple[str, ...]:
        return names_of(keys, specs, current_names())

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
