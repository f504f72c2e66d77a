"""The `Subject` that a framework supplies to `gradaccum.verify`: a model, a loss and
one batch. The parts of the batch are run under different conditions.

The core decides what to run. A `Subject` runs the parts and restores the user's state.
"""

from __future__ import annotations

import inspect
import random
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias

Gradient: TypeAlias = Any
"""A dense array or tensor in float64, which supports ``+``, ``-`` and ``* float``."""
Items: TypeAlias = Sequence[int]
"""Indices along the batch axis, in the order of the items in a micro-batch."""


@dataclass(frozen=True)
class Conditions:
    """The conditions under which a window is run. The defaults are the same as in
    training.
    """

    training: bool = True
    """False means that the model runs in evaluation mode."""
    random_layers: bool = True
    """False means that layers that draw random numbers run in evaluation mode."""
    carry_state: bool = True
    """False means that the model's state is restored before each micro-batch."""
    seed: int = 0
    """If this is 0, each micro-batch begins with the user's random state. Any other
    number gives another random state.
    """
    scale: float = 1.0
    """The factor by which the loss is multiplied. The gradients are divided by the
    factor before they are returned.
    """
    perturbation: int | None = None
    """The number of a perturbation, which changes each parameter by one rounding error;
    None means no perturbation.
    """


class Run(NamedTuple):
    """The results of the forward and backward pass of one micro-batch."""

    gradients: Mapping[str, Gradient]
    """The gradients by parameter name. A parameter that the loss did not reach is left
    out.
    """
    weight: float
    """The weight of the micro-batch: the user's ``weight=``, or the number of items."""
    changed_state: tuple[str, ...] = ()
    """Names of the buffers and attributes that the forward pass changed."""


class Precision(NamedTuple):
    """The precision of a parameter's gradient."""

    roundoff: float
    """The distance from 1 to the next number in the program's coarsest floating dtype.
    """
    smallest: float
    """The smallest positive number of the gradient's dtype."""
    elements: int
    """The number of elements of the gradient."""
    terms: int = 1
    """The approximate number of terms that are added up for one element of the
    gradient.
    """


class Subject(Protocol):
    """A model, its loss and one batch, which `gradaccum.verify` examines."""

    items: int
    """The number of items in the batch."""
    names: Sequence[str]
    """The names of the parameters with respect to which the loss is differentiated."""

    def window(self, parts: Sequence[Items], conditions: Conditions) -> list[Run]:
        """Run each of `parts` in order as one micro-batch, and restore the user's
        state.
        """
        ...

    def dot(self, a: Gradient, b: Gradient) -> float: ...

    def precision(self, name: str) -> Precision: ...

    def arrays(self, part: Items) -> Iterable[tuple[str, Any]]:
        """Return the arrays of a micro-batch that are split, each with its path, such
        as ``batch[1]['mask']``. Values without numbers that can be counted, such as
        random keys, are left out.
        """
        ...

    def statistics_layers(self) -> Sequence[str]:
        """Return the names of the batch norm layers that are in training mode."""
        ...

    def random_layers(self) -> Sequence[str]:
        """Return the names of the layers that draw random numbers in training mode."""
        ...


class HostRandom:
    """The random states of Python and NumPy at the time when the object was created."""

    def __init__(self) -> None:
        self._state = random.getstate()
        numpy = sys.modules.get("numpy")
        self._numpy: Any = getattr(numpy, "random", None)
        if self._numpy is not None:
            self._numpy_state = self._numpy.get_state()

    def restore(self, seed: int = 0) -> None:
        """Restore the saved random states, or set other states if `seed` is not 0."""
        if seed:
            random.seed(UNUSUAL_SEED + seed)
        else:
            random.setstate(self._state)
        if self._numpy is not None and seed:
            self._numpy.seed(UNUSUAL_SEED + seed)
        elif self._numpy is not None:
            self._numpy.set_state(self._numpy_state)


UNUSUAL_SEED = 0x5EED0
"""This is added to a seed, so that the sum differs from the seeds that users choose."""
OUTPUTS = ("input", "output", "out", "logits", "pred", "y_pred", "y_hat")
"""A function counts as a criterion if the name of its first argument begins with one of
these words.
"""
LossFunction = Callable[..., Any]


def as_loss(
    loss_fn: LossFunction, batch: Any, is_model: Callable[[object], bool] | None = None
) -> tuple[LossFunction, tuple[Any, ...]]:
    """Return the loss as a function that is called as ``loss_fn(model, *batch)``, and
    the arguments after the model.

    `loss_fn` may also be ``loss_fn(*batch)``, which refers to the model itself, or a
    criterion, ``loss_fn(outputs, *targets)``. A dictionary is passed as keyword
    arguments if `loss_fn` accepts its keys.

    Args:
        loss_fn: the user's loss function.
        batch: a tuple or list of arguments, or one argument.
        is_model: returns True for the model and for its wrappers. None means that the
            model cannot be called, as in JAX.
    """
    arguments = tuple(batch) if isinstance(batch, tuple | list) else (batch,)
    body = getattr(loss_fn, "forward", getattr(loss_fn, "construct", loss_fn))
    try:
        signature = inspect.signature(body)
    except ValueError:  # A compiled function has no signature.
        return loss_fn, arguments
    refers_to_model = is_model is not None and any(map(is_model, _reached(loss_fn)))
    if isinstance(batch, dict):
        if _takes(signature, 1, batch):
            return lambda model, keywords: loss_fn(model, **keywords), arguments
        if _takes(signature, 0, batch):
            return lambda model, keywords: loss_fn(**keywords), arguments
    names = list(signature.parameters)
    is_criterion = body is not loss_fn or (bool(names) and names[0].startswith(OUTPUTS))
    count = len(arguments)
    if is_model is None or not _takes(signature, count):
        return loss_fn, arguments
    if refers_to_model:
        return lambda model, *batch: loss_fn(*batch), arguments
    if is_criterion or not _takes(signature, count + 1):
        return lambda model, x, *targets: loss_fn(model(x), *targets), arguments
    return loss_fn, arguments


def _takes(
    signature: inspect.Signature, count: int, keywords: Mapping[str, Any] | None = None
) -> bool:
    try:
        signature.bind(*[None] * count, **(keywords or {}))
    except TypeError:
        return False
    return True


def _reached(loss_fn: Any, depth: int = 2) -> list[object]:
    """Return the loss function itself, the values of the variables that it closes over
    or reads as globals, and the attributes of the object that a method belongs to. The
    same is done for functions among these values, `depth` functions deep.
    """
    instance = getattr(loss_fn, "__self__", None)
    values = [loss_fn, *getattr(instance, "__dict__", {}).values()]
    function = inspect.unwrap(getattr(loss_fn, "__func__", loss_fn))
    if inspect.isfunction(function):
        variables = inspect.getclosurevars(function)
        found = [*variables.nonlocals.values(), *variables.globals.values()]
        values += found
        for value in found:
            if depth > 1 and inspect.isfunction(value):
                values += _reached(value, depth - 1)
    return values
