"""The harness of the reference and of other NumPy backends. The oracle runs the models;
plain attributes show the rest.
"""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, cast

import ml_dtypes
import numpy as np

import gradaccum
from gradaccum import GradientError, StepResult
from gradaccum.kit import State, require_weight, resumed, terms_of
from gradaccum_conformance import oracle
from gradaccum_conformance.coupled_loss import TEMPERATURE, contrast, mirrored
from gradaccum_conformance.harness import (
    Captured,
    Dtype,
    GradientTree,
    LargeBatchCall,
    LargeBatchHarness,
    Loss,
    Option,
    Outcome,
    Returns,
    Session,
    Setup,
    WorkersHarness,
    WrapOptions,
)
from gradaccum_conformance.reference import large_batch
from gradaccum_conformance.reference.accumulation import ReferenceAccumulation
from gradaccum_conformance.reference.optimizers import NumpyOptimizer, make_optimizer
from gradaccum_conformance.reference.workers import Workers, meet
from gradaccum_conformance.specs import Array, Arrays, Batch, Model, Optimizer


class NumpySession(Session):
    """A model's weights, an inner optimizer over them and, if wrapped, the accumulation
    around it.
    """

    def __init__(
        self, model: Model, inner: NumpyOptimizer, options: WrapOptions | None
    ) -> None:
        self.model = model
        self.inner = inner
        self.weights = inner.parameters
        self.wrapped: ReferenceAccumulation | None = (
            None if options is None else gradaccum.wrap(cast(Any, inner), **options)
        )

    @property
    def accumulation(self) -> ReferenceAccumulation:
        assert self.wrapped is not None, "this session is not wrapped"
        return self.wrapped

    def micro_batch(
        self, batch: Batch, *, weight: float | None = None, loss: Loss = "mean"
    ) -> float:
        x = batch.x.astype(next(iter(self.weights.values())).dtype)
        with np.errstate(invalid="ignore"):  # An item may hold inf.
            value, gradient = oracle.loss_and_gradient(
                self.model, self.weights, Batch(x, batch.y), loss=loss
            )
        self.gradients_with_loss(gradient, weight, value)
        return value

    def gradients(self, tree: GradientTree, *, weight: float | None = None) -> None:
        self.gradients_with_loss(tree, weight, math.nan)

    def gradients_in(self, tree: Arrays) -> None:
        # Past the copies that `gradients_with_loss` makes.
        self.accumulation.step(tree)

    def gradients_with_loss(
        self, tree: GradientTree, weight: float | None, loss: float
    ) -> bool:
        checked = {
            name: None if g is None else _checked(name, g, self.weights)
            for name, g in tree.items()
        }
        if self.wrapped is None:
            zeros = {name: np.zeros_like(p) for name, p in self.weights.items()}
            self.inner.step(
                zeros | {name: g for name, g in checked.items() if g is not None}
            )
            return True
        scale = self.wrapped.result.loss_scale
        with np.errstate(over="ignore", invalid="ignore"):
            scaled = {
                name: None if g is None else g * g.dtype.type(scale)
                for name, g in checked.items()
            }
        self.wrapped.step(
            scaled, None if weight is None else require_weight(weight), loss
        )
        return True

    def flush(self, denominator: float | None = None) -> None:
        self.accumulation.flush(denominator)

    def discard(self) -> None:
        self.accumulation.discard()

    def result(self) -> StepResult:
        return self.accumulation.result

    def state(self) -> State:
        return self.accumulation.state()

    def accumulator(self) -> Arrays:
        return self.accumulation.total()

    def parameters(self) -> Arrays:
        return _plain(self.weights)

    def masters(self) -> Arrays:
        return _plain(self.inner.parameters)

    def optimizer_state(self) -> Arrays:
        return _plain(self.inner.state)

    def captured(self) -> Captured:
        calls = int(self.inner.state["calls"])
        names = self.weights if calls else ()
        gradient = {name: self.inner.state[f"{name}.gradient"] for name in names}
        return Captured(calls, _plain(gradient))

    def predict(self, x: Array) -> Array:
        return oracle.predict(self.model, self.weights, x)

    def snapshot(self) -> Any:
        return copy.deepcopy((self.weights, self.inner, self.wrapped))

    def restore(self, snapshot: Any) -> None:
        self.weights, self.inner, self.wrapped = copy.deepcopy(snapshot)

    def save(self, directory: Path) -> None:
        (directory / "reference.pickle").write_bytes(
            pickle.dumps((self.weights, self.inner, self.wrapped))
        )

    def load(self, directory: Path) -> None:
        weights, inner, wrapped = pickle.loads(
            (directory / "reference.pickle").read_bytes()
        )
        _require_same_shapes(weights, self.weights)
        _require_same_shapes(inner.parameters, self.inner.parameters)  # The masters.
        state = wrapped.state()
        options = self.accumulation.options
        wrapped.resume(
            resumed(state, terms_of(wrapped.options, state.optimizer_step), options),
            options,
        )
        self.weights = weights
        self.inner = inner
        self.wrapped = wrapped


class NumpyHarness(WorkersHarness, LargeBatchHarness):
    """Drives the reference."""

    name = "numpy"
    worker_modes = ("eager",)
    large_batch_modes = ("eager",)
    large_batch: ClassVar[Any] = large_batch
    """Where `value_and_grad` and `coupled_value_and_grad` are; another NumPy backend's
    harness has its own.
    """
    workers: Workers | None = None

    def start(self, setup: Setup) -> NumpySession:
        parameters = {
            name: w.astype(_DTYPES[setup.dtype]) for name, w in setup.weights.items()
        }
        return NumpySession(
            setup.model, self.make_inner(setup.optimizer, parameters), setup.options
        )

    def join(self, rank: int, workers: int, folder: Path, port: int) -> None:
        self.workers = meet(rank, workers, folder)

    def start_shared(self, setup: Setup) -> NumpySession:
        return self.start(
            setup._replace(options={**(setup.options or {}), "workers": self.workers})
        )

    def make_inner(self, spec: Optimizer, parameters: Arrays) -> NumpyOptimizer:
        """The inner optimizer; another NumPy backend's harness overrides this alone."""
        return make_optimizer(spec, parameters)

    def gradient(
        self,
        model: Model,
        weights: Arrays,
        batch: Batch,
        *,
        dtype: Dtype,
        loss: Loss = "mean",
    ) -> Arrays:
        typed = {name: w.astype(dtype) for name, w in weights.items()}
        return oracle.loss_and_gradient(
            model, typed, Batch(batch.x.astype(dtype), batch.y), loss=loss
        )[1]

    def value_and_grad(self, call: LargeBatchCall, batch: Batch) -> Outcome:
        weights = _typed_weights(call)

        def loss_fn(piece: tuple[Any, ...]) -> tuple[Any, Arrays, Any]:
            return loss_gradient_aux(
                call.model, weights, call.loss, call.returns, Batch(*piece[:2])
            )

        return Outcome(
            *self.large_batch.value_and_grad(
                loss_fn, _arguments(call, batch), **call.options
            )
        )

    def update(
        self,
        session: Session,
        batch: Batch,
        *,
        loss: Loss = "mean",
        options: Mapping[str, Option],
        returns: Returns | None = None,
    ) -> float:
        assert isinstance(session, NumpySession)
        scale = session.accumulation.result.loss_scale

        def loss_fn(piece: Batch) -> tuple[float, Arrays, Any]:
            value, gradient, aux = loss_gradient_aux(
                session.model, session.weights, loss, returns, piece
            )
            with np.errstate(over="ignore", invalid="ignore"):
                return (
                    value,
                    {name: g * g.dtype.type(scale) for name, g in gradient.items()},
                    aux,
                )

        return float(
            self.large_batch.update(session.accumulation, loss_fn, batch, **options)
        )

    def coupled(self, call: LargeBatchCall, batch: Batch) -> Outcome:
        weights = _typed_weights(call)

        def outputs_fn(
            piece: tuple[Any, ...],
        ) -> tuple[Arrays, Callable[[Arrays], Arrays]]:
            left, left_backward = oracle.outputs_and_backward(
                call.model, weights, piece[0]
            )
            right, right_backward = oracle.outputs_and_backward(
                call.model, weights, mirrored(piece[0])
            )

            def backward(gradients: Arrays) -> Arrays:
                left_part = left_backward(gradients["left"])
                right_part = right_backward(gradients["right"])
                return {name: left_part[name] + right_part[name] for name in weights}

            return {"left": left, "right": right}, backward

        def loss_fn(outputs: Arrays) -> tuple[float, Arrays, Arrays]:
            coupled = contrast(outputs["left"], outputs["right"], TEMPERATURE)
            loss = coupled.loss
            if call.returns is not None:
                loss = call.returns(loss, outputs["left"])
            return (
                loss,
                {"left": coupled.left, "right": coupled.right},
                {"temperature": np.asarray(coupled.temperature)},
            )

        loss, gradient = self.large_batch.coupled_value_and_grad(
            outputs_fn, loss_fn, _arguments(call, batch), **call.options
        )
        return Outcome(loss, gradient, {})


_DTYPES = {
    "float32": np.float32,
    "float64": np.float64,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
}


def _arguments(call: LargeBatchCall, batch: Batch) -> tuple[Any, ...]:
    return batch if call.extra is None else (*batch, call.extra)


def _typed_weights(call: LargeBatchCall) -> Arrays:
    return {name: w.astype(_DTYPES[call.dtype]) for name, w in call.weights.items()}


def loss_gradient_aux(
    model: Model, weights: Arrays, loss: Loss, returns: Returns | None, piece: Batch
) -> tuple[Any, Arrays, Any]:
    """What a loss function of `piece` gives: the loss, its gradient, and the aux if
    `returns` has one, or None.
    """
    typed = Batch(piece.x.astype(next(iter(weights.values())).dtype), piece.y)
    with np.errstate(invalid="ignore"):
        value, gradient = oracle.loss_and_gradient(model, weights, typed, loss=loss)
        if returns is None:
            return value, gradient, None
        returned = returns(value, oracle.predict(model, weights, typed.x))
    if isinstance(returned, tuple):
        return returned[0], gradient, returned[1]
    return returned, gradient, None


def _plain(arrays: Arrays) -> Arrays:
    return {
        name: array.astype(np.float32)
        if array.dtype == ml_dtypes.bfloat16
        else array.copy()
        for name, array in arrays.items()
    }


def _checked(name: str, gradient: Array, parameters: Arrays) -> Array:
    p = parameters.get(name)
    given = np.asarray(gradient)
    if p is None or given.shape != p.shape or given.dtype.kind != "f":
        expected = (
            f"a floating array of shape {p.shape}"
            if p is not None
            else f"one of {list(parameters)}"
        )
        found = f"{given.dtype} of shape {given.shape}"
        raise GradientError(
            f"gradients[{name!r}]: expected {expected}; got {found}. Pass the gradient"
            " of this parameter."
        )
    return given.astype(p.dtype)


def _require_same_shapes(loaded: Arrays, own: Arrays) -> None:
    theirs, ours = (
        {name: (p.shape, p.dtype.name) for name, p in tree.items()}
        for tree in (loaded, own)
    )
    if theirs != ours:
        raise gradaccum.CheckpointError(
            f"directory: expected parameters {ours}; got parameters {theirs}. Load into"
            " the same model."
        )


harness = NumpyHarness()
