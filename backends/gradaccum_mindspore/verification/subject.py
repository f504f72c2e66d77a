"""Run a MindSpore loss for `gradaccum.verify`, in PyNative mode, on parts of the batch
and under given conditions. The user's state is restored afterwards.

Operators run synchronously. Asynchronous operators would gain nothing, because this
code reads their values at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from numpy.typing import NDArray

from gradaccum.kit import (
    Batch,
    Conditions,
    HostRandom,
    Precision,
    Run,
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


class MindSporeSubject:
    """The implementation of `gradaccum.kit.Subject` for MindSpore."""

    def __init__(
        self,
        model: nn.Cell,
        loss_fn: Callable[..., Any],
        batch: Batch,
        weight: Callable[[Sequence[int]], float],
        has_aux: bool,
    ) -> None:
        self._model = model
        self._loss_fn = loss_fn
        self._batch = batch
        self._weight = weight
        self._has_aux = has_aux
        self._state = ModelState(model)
        self._random = RandomState()
        self._parameters: dict[str, Parameter] = {
            parameter.name: parameter for parameter in model.trainable_params()
        }
        self.items = batch.items
        self.names: Sequence[str] = list(self._parameters)

    def window(
        self, parts: Sequence[Sequence[int]], conditions: Conditions
    ) -> list[Run]:
        with self._isolated():
            self._prepare(conditions)
            runs = []
            for part in parts:
                if not conditions.carry_state:
                    self._state.restore()
                    self._prepare(conditions)
                self._random.restore(conditions.seed)
                runs.append(self._run(part, conditions))
            return runs

    def dot(self, a: NDArray[np.float64], b: NDArray[np.float64]) -> float:
        return float(np.vdot(a, b))

    def precision(self, name: str) -> Precision:
        parameter = self._parameters[name]
        _, smallest = LIMITS[parameter.dtype]
        return Precision(self._roundoff, smallest, parameter.size, self._batch.terms)

    def arrays(self, part: Sequence[int]) -> list[tuple[str, Any]]:
        return [(path, wide(array)) for path, array in self._batch.arrays(part)]

    def statistics_layers(self) -> list[str]:
        return self._layers("BatchNorm")

    def random_layers(self) -> list[str]:
        return self._layers("Dropout")

    def _layers(self, word: str) -> list[str]:
        return [
            name
            for name, cell in self._model.cells_and_names()
            if cell.training and word in type(cell).__name__
        ]

    @contextmanager
    def _isolated(self) -> Iterator[None]:
        with context(mode=ms.PYNATIVE_MODE, pynative_synchronize=True):
            try:
                yield
            finally:
                self._state.restore()
                self._random.restore()

    def _prepare(self, conditions: Conditions) -> None:
        """Set the training modes of the Cells, and perturb the parameters if
        `conditions` contain a perturbation.
        """
        if not conditions.random_layers:
            for _, cell in self._model.cells_and_names():
                if "Dropout" in type(cell).__name__:
                    cell.training = False
        if not conditions.training:
            self._model.set_train(False)
        if conditions.perturbation is None:
            return
        generator = np.random.default_rng(conditions.perturbation)
        for parameter in self._parameters.values():
            signs = generator.choice((-1.0, 1.0), parameter.shape)
            values = wide(parameter) * (1 + self._roundoff * signs)
            ops.assign(parameter, Tensor(values, parameter.dtype))

    def _run(self, part: Sequence[int], conditions: Conditions) -> Run:
        arguments = self._batch.part(part)

        def forward() -> Tensor:
            loss = self._loss(arguments)
            return loss * Tensor(conditions.scale, loss.dtype)

        parameters = list(self._parameters.values())
        try:
            _, gradient_list = ms.value_and_grad(forward, None, parameters)()
        except BaseException:
            forget_recorded()
            raise
        gradients = {
            name: wide(gradient) / conditions.scale
            for name, gradient in zip(self.names, gradient_list, strict=True)
        }
        is_exact = conditions.perturbation is None
        changed_state = self._state.changed_names() if is_exact else ()
        return Run(gradients, self._weight(part), changed_state)

    def _loss(self, arguments: tuple[Any, ...]) -> Tensor:
        loss = self._loss_fn(self._model, *arguments)
        if self._has_aux:
            loss, _ = loss
        # MindSpore would differentiate the sum of several elements.
        if loss.size != 1:
            raise scalar_loss_error(f"a Tensor of shape {loss.shape}")
        return loss

    @cached_property
    def _roundoff(self) -> float:
        """The distance from 1 to the next number in the coarsest dtype among the
        parameters, the inputs and the outputs of Cells.
        """
        part = range(self.items)
        arguments = self._batch.part(part)
        values: list[Any] = list(self._parameters.values())
        values += [array for _, array in self._batch.arrays(part)]

        def note(_: nn.Cell, __: Any, output: Any) -> None:
            values.append(output)

        with self._isolated():
            handles = [
                cell.register_forward_hook(note)
                for _, cell in self._model.cells_and_names()
            ]
            try:
                self._loss(arguments)
            finally:
                for handle in handles:
                    handle.remove()
        return max(LIMITS[value.dtype][0] for value in values if is_floating(value))


class ModelState:
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
        """Return the names of the parameters and attributes that have changed."""
        return tuple(
            name
            for name, value in self._get().items()
            if not np.array_equal(value, self._before.get(name, np.nan))
            and (modes or not name.endswith("training"))
        )


class RandomState:
    """A copy of the random states of MindSpore, Python and NumPy."""

    def __init__(self) -> None:
        self._host = HostRandom()
        self._seed = SEEDS._GLOBAL_SEED
        self._counters = dict(SEEDS._KERNEL_SEED)

    def restore(self, seed: int = 0) -> None:
        """Restore the user's random states if `seed` is 0. Otherwise, set random states
        that depend on `seed`.
        """
        self._host.restore(seed)
        set_counters(self._counters)
        SEEDS._GLOBAL_SEED = UNUSUAL_SEED + seed if seed else self._seed


UNUSUAL_SEED = 0x5EED0
"""The base of the seeds that are set here. It is far from the seeds that users write.
"""


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
