"""The MindSpore Cell, loss and batch that `gradaccum.verify` examines in PyNative mode.

Operators run synchronously, because this code reads each operator's result immediately.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from numpy.typing import NDArray

from gradaccum.kit import (
    Conditions,
    HostRandom,
    ModelState,
    Subject,
    places_of,
    scalar_loss_error,
)
from gradaccum_mindspore.gradient_sum import LIMITS
from gradaccum_mindspore.mindspore_private import (
    SEEDS,
    context,
    forget_recorded,
    set_counters,
)

PLAIN = (bool, int, float, str)
"""The types of the Cell attributes that are restored after a run."""


class MindSporeSubject(Subject):
    """A Cell, its loss and one batch, which `gradaccum.verify` examines. Dropout Cells
    run in evaluation mode, because an item would get different random numbers in a
    different micro-batch. For the same reason, a Cell with other random operators
    cannot be verified.
    """

    def __init__(self, model: nn.Cell, *arguments: Any, **options: Any) -> None:
        super().__init__(model, *arguments, **options)
        self.state = CellState(model)
        self.random_state = SeedState()
        self._parameters: dict[str, Parameter] = {
            parameter.name: parameter for parameter in model.trainable_params()
        }
        self.places = places_of(
            {name: parameter.size for name, parameter in self._parameters.items()}
        )

    def is_model(self, value: object) -> bool:
        if not isinstance(value, nn.Cell):
            return False
        parameters = {id(parameter) for parameter in self.model.trainable_params()}
        return any(id(each) in parameters for each in value.trainable_params())

    @staticmethod
    def is_array(value: object) -> bool:
        return isinstance(value, Tensor | np.ndarray)

    @staticmethod
    def take(array: Any, axis: int | None, items: Sequence[int]) -> Any:
        if axis is None:
            return array
        places = np.asarray(items, np.int32)
        if isinstance(array, Tensor):
            return ops.gather(array, Tensor(places), axis)
        return np.take(array, places, axis)

    @contextmanager
    def isolated(self) -> Iterator[None]:
        with (
            context(mode=ms.PYNATIVE_MODE, pynative_synchronize=True),
            # Suppress NumPy's warnings, because the report says which gradients are not
            # finite.
            np.errstate(all="ignore"),
            super().isolated(),
        ):
            yield

    def perturb(self, seed: int) -> None:
        roundoff, _ = self.precision
        generator = np.random.default_rng(seed)
        for parameter in self._parameters.values():
            signs = generator.choice((-1.0, 1.0), parameter.shape)
            values = wide(parameter) * (1 + roundoff * signs)
            ops.assign(parameter, Tensor(values, parameter.dtype))

    def named_layers(self) -> Any:
        return self.model.cells_and_names()

    def gradient(
        self, part: Sequence[int], conditions: Conditions
    ) -> NDArray[np.float64]:
        arguments = self.batch.part(part)

        def forward() -> Tensor:
            loss = self.loss(self.model, arguments)
            return loss * Tensor(conditions.scale, loss.dtype)

        parameters = list(self._parameters.values())
        try:
            _, gradients = ms.value_and_grad(forward, None, parameters)()
        except BaseException:
            forget_recorded()
            raise
        vectors = [wide(gradient).reshape(-1) for gradient in gradients]
        gradient: NDArray[np.float64] = np.concatenate(vectors) / conditions.scale
        return gradient

    def loss(self, model: nn.Cell, arguments: tuple[Any, ...]) -> Tensor:
        loss = super().loss(model, arguments)
        if not isinstance(loss, Tensor):
            raise scalar_loss_error(f"an object of type {type(loss).__name__}")
        # If the loss had several elements, MindSpore would differentiate their sum.
        if loss.size != 1:
            raise scalar_loss_error(f"a Tensor of shape {loss.shape}")
        return loss

    def arrays(self, part: Sequence[int]) -> list[tuple[str, Any]]:
        return [(path, wide(array)) for path, array in self.batch.arrays(part)]

    def random_layers(self) -> list[str]:
        return self.layers_in_mode("Dropout", training=True)

    @cached_property
    def precision(self) -> tuple[float, float]:
        """Two numbers: the largest machine epsilon among the dtypes of the parameters,
        the inputs and the outputs of Cells; and the smallest positive number that the
        dtypes of all parameters can represent.
        """
        part = range(self.batch.items)
        parameters = list(self._parameters.values())
        values = [*parameters, *(array for _, array in self.batch.arrays(part))]

        def note(_: nn.Cell, __: Any, output: Any) -> None:
            values.append(output)

        handles = [
            cell.register_forward_hook(note) for _, cell in self.model.cells_and_names()
        ]
        try:
            self.loss(self.model, self.batch.part(part))
        finally:
            for handle in handles:
                handle.remove()
        self.state.restore()
        roundoff = max(LIMITS[value.dtype][0] for value in values if is_floating(value))
        return roundoff, max(LIMITS[parameter.dtype][1] for parameter in parameters)


class CellState(ModelState):
    """A copy of a model's parameters, and of the attributes of its Cells that are
    numbers, strings or flags.
    """

    def __init__(self, model: nn.Cell) -> None:
        self._cells = dict(model.cells_and_names())
        self._parameters = {
            parameter.name: parameter for parameter in model.get_parameters()
        }
        self._before = self._get()

    def _get(self) -> dict[str, Any]:
        """Return the current values of the parameters and attributes, by name."""
        values: dict[str, Any] = {
            name: parameter.asnumpy().copy()
            for name, parameter in self._parameters.items()
        }
        for path, cell in self._cells.items():
            for name, value in vars(cell).items():
                if not name.startswith("_") and isinstance(value, PLAIN):
                    values[f"{path}.{name}".lstrip(".")] = value
        return values

    def restore(self) -> None:
        for name in self.changed_names(modes=True):
            before = self._before.get(name)
            if name in self._parameters:
                parameter = self._parameters[name]
                ops.assign(parameter, Tensor(before, parameter.dtype))
            else:
                path, _, attribute = name.rpartition(".")
                setattr(self._cells[path], attribute, before)

    def changed_names(self, *, modes: bool = False) -> tuple[str, ...]:
        """Return the names of the parameters and attributes that have changed since
        this object was created. Names that end in ``training``, such as the flag for a
        Cell's mode, are included only if `modes` is true.
        """
        return tuple(
            name
            for name, value in self._get().items()
            if not np.array_equal(value, self._before.get(name, np.nan))
            and (modes or not name.endswith("training"))
        )


class SeedState(HostRandom):
    """A copy of the random states of MindSpore, Python and NumPy."""

    def __init__(self) -> None:
        super().__init__()
        self._seed = SEEDS._GLOBAL_SEED
        self._counters = dict(SEEDS._KERNEL_SEED)

    def restore(self, seed: int = 0) -> None:
        super().restore(seed)
        set_counters(self._counters)
        SEEDS._GLOBAL_SEED = seed or self._seed


def is_floating(value: object) -> bool:
    if isinstance(value, Tensor):
        return value.dtype in LIMITS
    return isinstance(value, np.ndarray) and value.dtype.kind == "f"


def wide(value: Any) -> NDArray[np.float64]:
    """Return a Tensor or a NumPy array as a float64 NumPy array."""
    if isinstance(value, Tensor):
        if value.dtype == ms.bfloat16:
            value = value.astype(ms.float32)
        value = value.asnumpy()
    return np.asarray(value).astype(np.float64)
