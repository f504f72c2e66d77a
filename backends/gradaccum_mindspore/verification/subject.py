"""A loss in MindSpore as `gradaccum.verify` runs it: in PyNative mode, in parts, under conditions, with the user's state put back after."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, NamedTuple

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from numpy.typing import NDArray

from gradaccum import ArgumentValueError
from gradaccum.kit import Column, Conditions, HostRandom, Layer, Precision, Run, scalar_loss_error
from gradaccum_mindspore.linearity import verify_loss_scaling
from gradaccum_mindspore.recorded import forgotten_on_error
from gradaccum_mindspore.verification.batch import Batch, is_float, perturbed
from gradaccum_mindspore.verification.draws import Lent
from gradaccum_mindspore.verification.kept import Kept, changed
from gradaccum_mindspore.verification.layers import Calls, mixing_layers
from gradaccum_mindspore.verification.rows import wide

LIMITS = {
    ms.float16: (2.0**-10, 2.0**-24),
    ms.bfloat16: (2.0**-7, 2.0**-133),
    ms.float32: (2.0**-23, 2.0**-149),
    ms.float64: (2.0**-52, 5e-324),
}
"""Distance from 1 to the next number, and the smallest positive number."""
OTHERS = "random operators other than nn.Dropout"
RESEEDED = "mindspore.set_seed, called by the loss"

Weight = Callable[[Sequence[int]], float]
"""The weight of a micro-batch, by its items."""


class Drew(NamedTuple):
    """Which random numbers a forward pass drew."""

    drew: bool
    """Whether random operators did."""
    reseeded: bool
    """Whether the loss set MindSpore's seed."""
    host: list[bytes]
    """The states of Python's and NumPy's generators after it."""


class MindSporeSubject:
    """`gradaccum.kit.Subject` of a loss in MindSpore.

    Args:
        model: the Cell; its trainable parameters are what the loss is differentiated by.
        loss_fn: ``loss_fn(model, *batch)``, a floating Tensor of one element.
        batch: the batch.
        weight: the weight of a micro-batch; None: its number of items.
    """

    def __init__(self, model: nn.Cell, loss_fn: Callable[..., Any], batch: Batch, weight: Weight | None) -> None:
        self._model, self._loss_fn, self._batch, self._weight = model, loss_fn, batch, weight
        self._parameters: dict[str, Parameter] = {parameter.name: parameter for parameter in model.trainable_params()}
        self._host = HostRandom(loss_fn, *(cell for _, cell in model.cells_and_names()))
        self.items = batch.items
        self.names: Sequence[str] = tuple(self._parameters)

    def window(self, parts: Sequence[Sequence[int]], conditions: Conditions) -> list[Run]:
        """See `Subject.window`."""
        with self._running(conditions) as (kept, lent, values):
            return [self._run(number, part, conditions, kept, lent, values) for number, part in enumerate(parts)]

    @contextmanager
    def _running(self, conditions: Conditions) -> Iterator[tuple[Kept, Lent, list[object] | None]]:
        """The model as the conditions have it: the user's state, the dropouts, and the values of the batch's leaves."""
        with Kept(self._model, self._host) as kept, Lent(self._model, self.items) as lent:
            if not conditions.training:
                self._model.set_train(False)
            kept.put_back_seeds(conditions.seed)
            values = None if conditions.perturbation is None else self._perturb(conditions.perturbation)
            yield kept, lent, values

    def _perturb(self, number: int) -> list[object]:
        """Move the parameters by one rounding, and give the batch's values, moved too."""
        rng = np.random.default_rng(number)
        for parameter in self._parameters.values():
            ops.assign(parameter, perturbed(parameter.value(), self._roundoff, rng, integers_too=True))
        return self._batch.perturbed(self._roundoff, rng)

    def _run(self, number: int, part: Sequence[int], conditions: Conditions, kept: Kept, lent: Lent, values: list[object] | None) -> Run:
        if number and not conditions.carry_state:
            kept.put_back_state()
            self._perturb(conditions.perturbation) if conditions.perturbation is not None else None
        if conditions.replay:
            self._host.begin(conditions.seed)
        lent.begin(part, (conditions.seed,) if conditions.replay else (conditions.seed, 1 + number))
        before = kept.state()
        loss, gradients = self._differentiated(self._batch.part(part, values), conditions.scale)
        weight = float(len(part)) if self._weight is None else self._weight(part)
        return Run(loss, gradients, weight, changed(before, kept.state()))

    def _differentiated(self, arguments: tuple[Any, ...], scale: float) -> tuple[float, dict[str, NDArray[np.float64]]]:
        """The loss and its gradients in float64."""

        def forward() -> Tensor:
            loss = _require_scalar(self._loss_fn(self._model, *arguments))
            return loss * Tensor(scale, loss.dtype)

        with forgotten_on_error():
            loss, gradients = ms.value_and_grad(forward, None, list(self._parameters.values()))()
        return float(wide(loss)) / scale, {name: wide(gradient) / scale for name, gradient in zip(self.names, gradients, strict=True)}

    def dot(self, a: NDArray[np.float64], b: NDArray[np.float64]) -> float:
        """See `Subject.dot`."""
        return float(np.vdot(a, b))

    def precision(self, name: str) -> Precision:
        """See `Subject.precision`."""
        parameter = self._parameters[name]
        return Precision(self._roundoff, LIMITS[parameter.dtype][1], parameter.size, self._batch.terms)

    @cached_property
    def _roundoff(self) -> float:
        """Of the coarsest floating dtype among parameters, inputs and the results of Cells."""
        with self._running(Conditions()) as (_, lent, _):
            lent.begin(range(self.items), (0,))
            calls = self._watched(range(self.items))
        leaves = [leaf.value for leaf in self._batch.leaves if isinstance(leaf.value, Tensor)]
        met = [value.dtype for value in (*self._parameters.values(), *leaves, *calls.outputs()) if is_float(value)]
        return max((LIMITS[dtype][0] for dtype in met), default=LIMITS[ms.float32][0])

    def _watched(self, part: Sequence[int]) -> Calls:
        """The calls of the model's Cells in a forward pass of some items."""
        calls = Calls(self._model)
        with calls.watching():
            _require_scalar(self._loss_fn(self._model, *self._batch.part(part)))
        return calls

    def columns(self) -> list[Column]:
        """See `Subject.columns`."""
        return self._batch.columns()

    def mixing_layers(self) -> list[Layer]:
        """See `Subject.mixing_layers`. Nothing is dropped meanwhile."""
        part = list(range(self.items // 2, self.items))
        found = {}
        for training in (True, False):
            with self._running(Conditions(training=training)) as (kept, lent, _):
                lent.begin(None, ())
                calls = self._watched(range(self.items)), self._watched(part)
                kept.put_back_state()
                found[training] = mixing_layers(*calls, self.items, part, self._roundoff)
        return [Layer(name, kind, name in found[False]) for name, kind in found[True].items()]

    def fixed_draws(self) -> list[str]:
        """See `Subject.fixed_draws`."""
        one, other = self._forward(), self._forward(seed=1)
        return [RESEEDED] * one.reseeded + self._host.seeded(one.host, other.host)

    def unreplayed_draws(self) -> list[str]:
        """See `Subject.unreplayed_draws`."""
        large, small = self._forward(), self._forward(self.items // 2)
        return [OTHERS] * large.drew + self._host.per_item(large.host, small.host)

    def _forward(self, items: int | None = None, seed: int = 0) -> Drew:
        """What random numbers the loss of the first `items` draws by itself."""
        part = range(self.items if items is None else items)
        with self._running(Conditions(seed=seed)) as (kept, lent, _):
            lent.begin(part, (0,))
            kept.watch_seed()
            self._watched(part)
            return Drew(kept.drew(), kept.reseeded(), self._host.states())

    def custom_rules(self) -> list[str]:
        """See `Subject.custom_rules`."""
        with self._running(Conditions()) as (_, lent, _):
            lent.begin(None, ())
            try:
                report = verify_loss_scaling(
                    lambda: self._loss_fn(self._model, *self._batch.part(range(self.items))), list(self._parameters.values())
                )
            except ArgumentValueError:  # Not the same loss twice: another experiment tells.
                return []
        return list(report.culprits)


def _require_scalar(loss: Any) -> Tensor:
    if not isinstance(loss, Tensor) or not is_float(loss) or math.prod(loss.shape) != 1:
        found = f"shape {loss.shape}, {loss.dtype}" if isinstance(loss, Tensor) else type(loss).__name__
        raise scalar_loss_error(found)
    return loss
