"""The `Subject` that `gradaccum.verify` examines: a model, a loss and one batch. Each
framework has a subclass, which runs parts of the batch under given conditions, and
restores the user's state.
"""

from __future__ import annotations

import inspect
import random
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

from gradaccum.least_squares import Vector
from gradaccum.options import Reduction
from gradaccum.verification.batch import Batch, Items


@dataclass(frozen=True)
class Conditions:
    """How the micro-batches of an experiment are run: the model's mode, the handling of
    its state, the random state, the loss's scale and the perturbation of the
    parameters. The defaults are the same as in training.
    """

    training: bool = True
    """False means that the model runs in evaluation mode."""
    carry_state: bool = True
    """False means that the model's state is restored before each micro-batch."""
    seed: int = 0
    """If this is 0, each micro-batch starts from the user's random state. Any other
    number is a seed with which the random generators are reseeded instead.
    """
    scale: float = 1.0
    """The factor by which the loss is multiplied. The gradients are divided by the
    factor before they are returned.
    """
    perturbation: int | None = None
    """The index of the perturbation to apply; None means no perturbation. A
    perturbation changes each parameter by one rounding error.
    """


class ModelState:
    """A copy of a model's state. This base class restores nothing. It is used for JAX,
    where a loss has no state.
    """

    def restore(self) -> None:
        """Restore the parameters, buffers and attributes that have changed since this
        copy was made.
        """

    def changed_names(self) -> tuple[str, ...]:
        """Return the names of the parameters, buffers and attributes that have changed
        since this copy was made.
        """
        return ()


class HostRandom:
    """The random states of Python and NumPy at the time when the object was created.
    NumPy must already be imported.
    """

    def __init__(self) -> None:
        # Do not look for numpy.random in sys.modules, because NumPy 2 imports it only
        # when it is first used, possibly inside the user's function.
        self._numpy: Any = sys.modules["numpy"].random
        self._python_state = random.getstate()
        self._numpy_state = self._numpy.get_state()

    def restore(self, seed: int = 0) -> None:
        """Restore the saved random states, or reseed the generators with `seed` if it
        is not 0.
        """
        random.setstate(self._python_state)
        self._numpy.set_state(self._numpy_state)
        if seed:
            random.seed(seed)
            self._numpy.seed(seed)


class Subject(ABC):
    """A model, its loss and one batch; see `gradaccum.verify` for the arguments."""

    is_model: Callable[[object], bool] | None = None
    """A function that returns True for the model, and for any module that shares
    parameters with the model. None if the model cannot be called, as in JAX, where the
    model is a pytree of parameters.
    """
    quiet_layers: Sequence[str] = ()
    """The names of layers that run in evaluation mode because they draw random numbers.
    """
    places: Mapping[str, slice]
    """For each parameter, the slice of a gradient vector that contains the parameter's
    elements. Parameters with respect to which the loss is not differentiated are left
    out.
    """

    def __init__(
        self,
        model: Any,
        loss_fn: Callable[..., Any],
        batch: Any,
        *,
        weight: Any = None,
        axes: Any = 0,
        has_aux: bool = False,
    ) -> None:
        self.model = model
        self.state = ModelState()
        self.random_state = HostRandom()
        self._loss_fn, arguments = as_loss(loss_fn, batch, self.is_model)
        self._has_aux = has_aux
        if isinstance(batch, dict) and callable(weight):
            weight = with_keywords(weight, batch)
        self.batch = Batch(arguments, axes, self.is_array, self.take, weight)

    def loss(self, model: Any, arguments: tuple[Any, ...]) -> Any:
        loss = self._loss_fn(model, *arguments)
        if self._has_aux:
            loss, _ = loss
        return loss

    def gradients(self, parts: Sequence[Items], conditions: Conditions) -> list[Vector]:
        """Run each of `parts` in order as one micro-batch, and return the gradients."""
        self.prepare(conditions)
        gradients = []
        for part in parts:
            if not conditions.carry_state:
                self.prepare(conditions)
            self.random_state.restore(conditions.seed)
            gradients.append(self.gradient(part, conditions))
        return gradients

    @contextmanager
    def isolated(self) -> Iterator[None]:
        """A context manager in which all micro-batches are run. At its end, the user's
        model and random states are restored.
        """
        try:
            yield
        finally:
            self.state.restore()
            self.random_state.restore()

    def prepare(self, conditions: Conditions) -> None:
        """Restore the model, set the mode of its layers, and perturb its parameters."""
        self.state.restore()
        for name, layer in self.named_layers():
            if not conditions.training or name in self.quiet_layers:
                layer.training = False
        if conditions.perturbation is not None:
            self.perturb(conditions.perturbation)

    @abstractmethod
    def perturb(self, seed: int) -> None:
        """Increase or decrease each element of the parameters at random by one rounding
        error.
        """

    def named_layers(self) -> Iterable[tuple[str, Any]]:
        """Return the layers of the model, each with its name."""
        return ()

    def layers_in_mode(self, word: str, *, training: bool) -> list[str]:
        """Return the names of the layers that are in training mode (or in evaluation
        mode if `training` is False), and whose class name contains `word`.
        """
        return [
            name
            for name, layer in self.named_layers()
            if layer.training == training and word in type(layer).__name__
        ]

    @abstractmethod
    def gradient(self, part: Items, conditions: Conditions) -> Vector:
        """Return the gradient of a micro-batch: the gradients of all parameters in one
        float64 vector, with zeros for a parameter on which the loss does not depend.
        """

    def unreached_parameters(self) -> Sequence[str]:
        """Return the names of the parameters on which the loss does not depend. Return
        no names if the framework cannot distinguish such a parameter from a parameter
        whose gradient is zero.
        """
        return ()

    def is_divided_by(self, steps: int, reduction: Reduction) -> bool:
        """True if the loss ends with a division by `steps` that is most likely a
        mistake, because accumulation divides the gradient too.

        The result is False if the division computes the loss's own mean, because this
        division is correct. With the reduction "sum", the result is False because
        accumulation does not divide. The result is also False if the framework cannot
        detect the division.
        """
        return False

    @property
    @abstractmethod
    def precision(self) -> tuple[float, float]:
        """A pair of numbers. The first is the machine epsilon of the coarsest
        floating-point dtype in the computation. The second is the smallest positive
        number that a gradient can contain, because smaller numbers become 0.
        """

    @staticmethod
    @abstractmethod
    def is_array(value: object) -> bool: ...

    @staticmethod
    @abstractmethod
    def take(array: Any, axis: int | None, items: Items) -> Any:
        """Return the slices of `array` that belong to `items`, or the whole array if
        `axis` is None.
        """

    def arrays(self, part: Items) -> Iterable[tuple[str, Any]]:
        """Return the arrays of a micro-batch, each with its path, such as
        ``batch[1]['mask']``. Arrays that are passed whole are left out. So are random
        keys, because their elements are not numbers.
        """
        return self.batch.arrays(part)

    def random_layers(self) -> Sequence[str]:
        """Return the names of the layers that draw random numbers in training mode."""
        return ()


def places_of(sizes: Mapping[str, int]) -> dict[str, slice]:
    """Return, for each parameter, its slice of a vector that contains all parameters.
    `sizes` contains the number of elements of each parameter.
    """
    places = {}
    start = 0
    for name, size in sizes.items():
        places[name] = slice(start, start + size)
        start += size
    return places


OUTPUTS = ("input", "output", "out", "logits", "pred", "y_pred", "y_hat")
"""Common names for the output of a model. If the name of a loss function's first
argument begins with one of these words, the function counts as a criterion: a function
``loss_fn(outputs, *targets)`` that gets the model's output instead of the model. A
function that refers to the model itself is never a criterion.
"""
LossFunction: TypeAlias = Callable[..., Any]


def as_loss(
    loss_fn: LossFunction, batch: Any, is_model: Callable[[object], bool] | None = None
) -> tuple[LossFunction, tuple[Any, ...]]:
    """Return the loss as a function that is called as ``loss_fn(model, *batch)``, and a
    tuple of the arguments that follow the model.

    `loss_fn` may also be ``loss_fn(*batch)``, which does not get the model as an
    argument, or a criterion, ``loss_fn(outputs, *targets)``. A dictionary is passed as
    keyword arguments if `loss_fn` accepts its keys.

    Args:
        loss_fn: the user's loss function.
        batch: a tuple or list of arguments, or one argument.
        is_model: returns True for the model and for its wrappers. None means that the
            model cannot be called, as in JAX.
    """
    arguments = as_arguments(batch)
    body = getattr(loss_fn, "forward", getattr(loss_fn, "construct", loss_fn))
    try:
        signature = inspect.signature(body)
    except ValueError:  # A compiled function has no signature.
        return loss_fn, arguments
    if isinstance(batch, dict):
        if _takes(signature, 1, batch):
            return lambda model, keywords: loss_fn(model, **keywords), arguments
        if _takes(signature, 0, batch):
            return lambda model, keywords: loss_fn(**keywords), arguments
    count = len(arguments)
    if is_model is None or not _takes(signature, count):
        return loss_fn, arguments
    if any(map(is_model, _referred_values(loss_fn))):
        return lambda model, *batch: loss_fn(*batch), arguments
    first_name = next(iter(signature.parameters), "")
    is_criterion = body is not loss_fn or first_name.startswith(OUTPUTS)
    if is_criterion or not _takes(signature, count + 1):
        return lambda model, x, *targets: loss_fn(model(x), *targets), arguments
    return loss_fn, arguments


def with_keywords(
    weight: Callable[..., Any], batch: Mapping[str, Any]
) -> Callable[[Mapping[str, Any]], Any]:
    """Return `weight` as a function of a dictionary. If `weight` accepts the keys of
    `batch` as keywords, but cannot be called with the dictionary as its only argument,
    the dictionary is passed as keyword arguments.
    """
    try:
        signature = inspect.signature(weight)
    except ValueError:  # A compiled function has no signature.
        return weight
    if _takes(signature, 1) or not _takes(signature, 0, batch):
        return weight
    return lambda keywords: weight(**keywords)


def as_arguments(batch: Any) -> tuple[Any, ...]:
    """Return a batch as a tuple of arguments for the loss: the elements of a tuple or
    list, or else the batch itself as the only argument.
    """
    return tuple(batch) if isinstance(batch, list | tuple) else (batch,)


def _takes(
    signature: inspect.Signature, count: int, keywords: Mapping[str, Any] | None = None
) -> bool:
    try:
        signature.bind(*[None] * count, **(keywords or {}))
    except TypeError:
        return False
    return True


def _referred_values(loss_fn: Any, depth: int = 2) -> list[object]:
    """Return the loss function itself and the values of the variables that it closes
    over or reads as globals. If the loss function is a method, also return the
    attributes of its object. Functions among the variables are searched in the same
    way, up to `depth` levels deep.
    """
    instance = getattr(loss_fn, "__self__", None)
    values = [loss_fn, *getattr(instance, "__dict__", {}).values()]
    function = inspect.unwrap(getattr(loss_fn, "__func__", loss_fn))
    if depth and inspect.isfunction(function):
        variables = inspect.getclosurevars(function)
        for value in (*variables.nonlocals.values(), *variables.globals.values()):
            is_function = inspect.isfunction(value)
            values += _referred_values(value, depth - 1) if is_function else [value]
    return values
