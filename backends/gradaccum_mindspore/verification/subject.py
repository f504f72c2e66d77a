"""A loss in MindSpore as `gradaccum.verify` runs it: in PyNative mode, in parts, under
conditions, with the user's state put back after.

A run may change parameters, statistics, attributes of Cells, modes and random states. A
parameter is written only if it changed. Operators run one by one: MindSpore's threads
would wait for each value that is read here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from types import TracebackType
from typing import Any, NamedTuple

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from numpy.typing import NDArray

from gradaccum import ArgumentValueError
from gradaccum.kit import Column, Conditions, HostRandom, Precision, Run
from gradaccum_mindspore.mindspore_private import (
    SEEDS,
    forgotten_on_error,
    set_counters,
)
from gradaccum_mindspore.verification.batch import (
    LIMITS,
    Batch,
    is_float,
    perturbed,
    require_scalar,
    wide,
)
from gradaccum_mindspore.verification.custom_backward import verify_loss_scaling
from gradaccum_mindspore.verification.draws import Lent

NOBODYS = 1_618_033_988
"""A seed that no loss sets, so that one which sets the user's own seed again is
noticed.
"""
PLAIN = (int, float, complex, str, bool, type(None), Tensor, np.ndarray, tuple)


class Kept:
    """The user's state, as a context that puts it back, however the block ends."""

    def __init__(self, model: nn.Cell, host: HostRandom) -> None:
        self._model = model
        self._host = host
        self._cells = dict(model.cells_and_names())
        self._parameters = {
            parameter.name: parameter for parameter in model.get_parameters()
        }
        self._values = {
            name: parameter.asnumpy().copy()
            for name, parameter in self._parameters.items()
        }
        self._attributes = {
            name: _attributes(cell) for name, cell in self._cells.items()
        }
        self._modes = {name: cell.training for name, cell in self._cells.items()}
        self._seeds = (SEEDS._GLOBAL_SEED, dict(SEEDS._KERNEL_SEED))
        self._context = {
            name: ms.get_context(name) for name in ("mode", "pynative_synchronize")
        }

    def __enter__(self) -> Kept:
        ms.set_context(mode=ms.PYNATIVE_MODE, pynative_synchronize=True)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        ms.set_context(**self._context)
        self.put_back_state()
        for name, mode in self._modes.items():
            self._cells[name].training = mode
        self.put_back_seeds(0)
        SEEDS._GLOBAL_SEED = self._seeds[0]

    def put_back_state(self) -> None:
        for name, value in self._values.items():
            if not _same(self._parameters[name].asnumpy(), value):
                ops.assign(
                    self._parameters[name], Tensor(value, self._parameters[name].dtype)
                )
        for name, before in self._attributes.items():
            cell = self._cells[name]
            for gone in set(_attributes(cell)) - set(before):
                delattr(cell, gone)
            for attribute, value in before.items():
                if not _same(getattr(cell, attribute, None), value):
                    setattr(cell, attribute, value)

    def put_back_seeds(self, seed: int) -> None:
        set_counters(self._seeds[1])
        SEEDS._GLOBAL_SEED = (
            1 + seed if self._seeds[0] is None or seed else self._seeds[0]
        )
        self._host.begin(seed)

    def drew(self) -> bool:
        return dict(SEEDS._KERNEL_SEED) != self._seeds[1]

    def watch_seed(self) -> None:
        SEEDS._GLOBAL_SEED = NOBODYS

    def reseeded(self) -> bool:
        """True if something set MindSpore's seed since `watch_seed`, be it to the same
        value.
        """
        return bool(SEEDS._GLOBAL_SEED != NOBODYS)

    def state(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            name: parameter.asnumpy().copy()
            for name, parameter in self._parameters.items()
        }
        for name, cell in self._cells.items():
            found |= {
                f"{name}.{attribute}".lstrip("."): value
                for attribute, value in _attributes(cell).items()
            }
        return found


def changed(before: dict[str, Any], after: dict[str, Any]) -> tuple[str, ...]:
    return tuple(
        name
        for name in after
        if name not in before or not _same(before[name], after[name])
    )


def _attributes(cell: nn.Cell) -> dict[str, Any]:
    """Return public attributes with plain values, and copies of arrays."""
    found = {
        name: value
        for name, value in vars(cell).items()
        if not name.startswith("_") and name != "training"
    }
    plain = {
        name: value
        for name, value in found.items()
        if isinstance(value, PLAIN) and not isinstance(value, Parameter)
    }
    return {
        name: value.copy() if isinstance(value, Tensor | np.ndarray) else value
        for name, value in plain.items()
    }


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return bool(a.dtype == b.dtype and _same(a.asnumpy(), b.asnumpy()))
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()
    return a is b or (type(a) is type(b) and bool(a == b))


OTHERS = "random operators other than nn.Dropout"
RESEEDED = "mindspore.set_seed, called by the loss"

Weight = Callable[[Sequence[int]], float]


class Drew(NamedTuple):
    """The kinds of random numbers that a forward pass drew."""

    drew: bool
    reseeded: bool
    host: list[bytes]
    """The states of Python's and NumPy's generators."""


class MindSporeSubject:
    """`gradaccum.kit.Subject` of a loss in MindSpore."""

    def __init__(
        self,
        model: nn.Cell,
        loss_fn: Callable[..., Any],
        batch: Batch,
        weight: Weight | None,
    ) -> None:
        self._model = model
        self._loss_fn = loss_fn
        self._batch = batch
        self._weight = weight
        self._parameters: dict[str, Parameter] = {
            parameter.name: parameter for parameter in model.trainable_params()
        }
        self._host = HostRandom(loss_fn, *(cell for _, cell in model.cells_and_names()))
        self.items = batch.items
        self.names: Sequence[str] = tuple(self._parameters)

    def window(
        self, parts: Sequence[Sequence[int]], conditions: Conditions
    ) -> list[Run]:
        with self._running(conditions) as (kept, lent, values):
            return [
                self._run(number, part, conditions, kept, lent, values)
                for number, part in enumerate(parts)
            ]

    @contextmanager
    def _running(
        self, conditions: Conditions
    ) -> Iterator[tuple[Kept, Lent, list[object] | None]]:
        """Run the model under the conditions; give the user's state, the dropouts, and
        the batch's values.
        """
        with (
            Kept(self._model, self._host) as kept,
            Lent(self._model, self.items) as lent,
        ):
            if not conditions.training:
                self._model.set_train(False)
            kept.put_back_seeds(conditions.seed)
            values = (
                None
                if conditions.perturbation is None
                else self._perturb(conditions.perturbation)
            )
            yield kept, lent, values

    def _perturb(self, number: int) -> list[object]:
        """Move the parameters by one rounding, and give the batch's values, moved
        too.
        """
        rng = np.random.default_rng(number)
        for parameter in self._parameters.values():
            ops.assign(
                parameter,
                perturbed(parameter.value(), self._roundoff, rng, integers_too=True),
            )
        return self._batch.perturbed(self._roundoff, rng)

    def _run(
        self,
        number: int,
        part: Sequence[int],
        conditions: Conditions,
        kept: Kept,
        lent: Lent,
        values: list[object] | None,
    ) -> Run:
        if number and not conditions.carry_state:
            kept.put_back_state()
            self._perturb(
                conditions.perturbation
            ) if conditions.perturbation is not None else None
        if conditions.replay:
            self._host.begin(conditions.seed)
        lent.begin(
            part,
            (conditions.seed,) if conditions.replay else (conditions.seed, 1 + number),
        )
        before = kept.state()
        loss, gradients = self._differentiated(
            self._batch.part(part, values), conditions.scale
        )
        weight = float(len(part)) if self._weight is None else self._weight(part)
        return Run(loss, gradients, weight, changed(before, kept.state()))

    def _differentiated(
        self, arguments: tuple[Any, ...], scale: float
    ) -> tuple[float, dict[str, NDArray[np.float64]]]:
        def forward() -> Tensor:
            loss = require_scalar(self._loss_fn(self._model, *arguments))
            return loss * Tensor(scale, loss.dtype)

        with forgotten_on_error():
            loss, gradients = ms.value_and_grad(
                forward, None, list(self._parameters.values())
            )()
        return float(wide(loss)) / scale, {
            name: wide(gradient) / scale
            for name, gradient in zip(self.names, gradients, strict=True)
        }

    def dot(self, a: NDArray[np.float64], b: NDArray[np.float64]) -> float:
        return float(np.vdot(a, b))

    def precision(self, name: str) -> Precision:
        parameter = self._parameters[name]
        return Precision(
            self._roundoff,
            LIMITS[parameter.dtype][1],
            parameter.size,
            self._batch.terms,
        )

    @cached_property
    def _roundoff(self) -> float:
        """Of the coarsest floating dtype among parameters, inputs and the results of
        Cells.
        """
        with self._running(Conditions()) as (_, lent, _):
            lent.begin(range(self.items), (0,))
            outputs = self._outputs(range(self.items))
        leaves = [
            leaf.value for leaf in self._batch.leaves if isinstance(leaf.value, Tensor)
        ]
        met = [
            value.dtype
            for value in (*self._parameters.values(), *leaves, *outputs)
            if is_float(value)
        ]
        return max((LIMITS[dtype][0] for dtype in met), default=LIMITS[ms.float32][0])

    def _outputs(self, part: Sequence[int]) -> list[Any]:
        """Run the loss forward, and return the results of the model's Cells."""
        outputs: list[Any] = []
        handles = [
            cell.register_forward_hook(lambda _cell, _inputs, out: outputs.append(out))
            for _, cell in self._model.cells_and_names()
        ]
        try:
            require_scalar(self._loss_fn(self._model, *self._batch.part(part)))
        finally:
            for handle in handles:
                handle.remove()
        return outputs

    def columns(self) -> list[Column]:
        return self._batch.columns()

    def statistics_layers(self) -> list[str]:
        return [
            name
            for name, cell in self._model.cells_and_names()
            if cell.training and "BatchNorm" in type(cell).__name__
        ]

    def fixed_draws(self) -> list[str]:
        one = self._forward()
        other = self._forward(seed=1)
        return [RESEEDED] * one.reseeded + self._host.seeded(one.host, other.host)

    def unreplayed_draws(self) -> list[str]:
        large = self._forward()
        small = self._forward(self.items // 2)
        return [OTHERS] * large.drew + self._host.per_item(large.host, small.host)

    def _forward(self, items: int | None = None, seed: int = 0) -> Drew:
        part = range(self.items if items is None else items)
        with self._running(Conditions(seed=seed)) as (kept, lent, _):
            lent.begin(part, (0,))
            kept.watch_seed()
            self._outputs(part)
            return Drew(kept.drew(), kept.reseeded(), self._host.states())

    def custom_rules(self) -> list[str]:
        with self._running(Conditions()) as (_, lent, _):
            lent.begin(None, ())
            try:
                report = verify_loss_scaling(
                    lambda: self._loss_fn(
                        self._model, *self._batch.part(range(self.items))
                    ),
                    list(self._parameters.values()),
                )
            except ArgumentValueError:
                # Not the same loss twice: another experiment tells.
                return []
        return list(report.culprits)
