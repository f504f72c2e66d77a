"""Sessions of the conformance suite over the JAX backend."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gradaccum import StepResult
from gradaccum.kit import FIELD_DTYPES, State
from gradaccum_conformance import Captured, Dtype, Harness, Loss, Model, Session, Setup
from gradaccum_conformance.harness import GradientTree
from gradaccum_conformance.specs import Array, Arrays, Batch
from gradaccum_harnesses.jax.files import read, write
from gradaccum_harnesses.jax.models import total_loss
from gradaccum_harnesses.jax.program import Program, needs_x64, program, x64
from gradaccum_jax.gradient_sum import clear
from gradaccum_jax.saving import check_state, rebuild
from gradaccum_jax.state import result

FILE = "checkpoint.npz"


class Checkpoint(NamedTuple):
    """A session's two trees. Their arrays are immutable, so a snapshot needs no
    copy.
    """

    params: Any
    opt_state: Any


class JaxSession(Session):
    """A `Program` and its two trees."""

    def __init__(self, setup: Setup, program: Program) -> None:
        self.model = setup.model
        self.program = program
        self.dtype = jnp.dtype(getattr(jnp, setup.dtype))
        self.wide = needs_x64(setup.dtype, setup.options)
        with x64(self.wide):
            self.params = self.placed(
                {
                    name: jnp.asarray(setup.weights[name], self.dtype)
                    for name in setup.model.parameter_shapes()
                }
            )
            self.opt_state = program.init(self.params)

    def local(self, tree: Any) -> Any:
        """What this process holds of a tree."""
        return tree

    def placed(self, tree: Any) -> Any:
        """A tree where the program expects its parameters."""
        return tree

    def micro_batch(
        self, batch: Batch, *, weight: float | None = None, loss: Loss = "mean"
    ) -> float:
        with x64(self.wide):
            x = jnp.asarray(batch.x, self.dtype)
            y = jnp.asarray(batch.y, jnp.int32)
            train = self.program.train if _valid(weight) else self.program.train_plainly
            self.params, self.opt_state, value = train(
                self.params, self.opt_state, x, y, weight, loss=loss
            )
            return float(value)

    def gradients(self, tree: GradientTree, *, weight: float | None = None) -> None:
        self._apply(tree, weight)

    def gradients_with_loss(
        self, tree: GradientTree, weight: float | None, loss: float
    ) -> bool:
        self._apply(tree, weight, loss)
        return True

    def _apply(self, tree: GradientTree, weight: float | None, *loss: float) -> None:
        with x64(self.wide):
            given = {
                name: None
                if (leaf := tree.get(name)) is None
                else jnp.asarray(leaf, self.dtype)
                for name in self.params
            }
            apply = self.program.apply if _valid(weight) else self.program.apply_plainly
            self.params, self.opt_state = apply(
                self.params, self.opt_state, given, weight, *loss
            )

    def flush(self, denominator: Any = None) -> None:
        with x64(self.wide):
            flush = (
                self.program.flush
                if denominator != 0 and _valid(denominator)
                else self.program.flush_plainly
            )
            self.params, self.opt_state = flush(
                self.params, self.opt_state, denominator
            )

    def discard(self) -> None:
        with x64(self.wide):
            self.params, self.opt_state = self.program.discard(
                self.params, self.opt_state
            )

    def result(self) -> StepResult:
        with x64(self.wide):
            scalars = result(self.local(self.opt_state))
            return StepResult(*(scalar.item() for scalar in scalars))

    def state(self) -> State:
        local = self.local(self.opt_state)
        return State(
            *(np.asarray(getattr(local, name)).item() for name in FIELD_DTYPES)
        )

    def accumulator(self) -> Arrays:
        """The open window's sums; zeros between two windows, when the accumulator is
        unused.
        """
        state = self.local(self.opt_state)
        sums = state.accumulator if int(state.micro_step) else clear(state.accumulator)
        return to_numpy(sums)

    def parameters(self) -> Arrays:
        local = self.local(self.params)
        return to_numpy({name: local[name] for name in self.model.parameter_shapes()})

    def masters(self) -> Arrays:
        own = self.opt_state.masters
        return to_numpy(
            {
                name: p if own[name] is None else own[name]
                for name, p in self.params.items()
            }
        )

    def inner_state(self) -> Any:
        local = self.local(self.opt_state)
        return local.inner_state if self.program.wrapped else local

    def optimizer_state(self) -> Arrays:
        leaves, _ = jax.tree_util.tree_flatten_with_path(self.inner_state())
        return to_numpy({jax.tree_util.keystr(path): leaf for path, leaf in leaves})

    def captured(self) -> Captured:
        inner = self.inner_state()
        calls = int(inner.calls)
        return Captured(calls, to_numpy(inner.gradient) if calls else {})

    def predict(self, x: Array) -> Array:
        with x64(self.wide):
            return to_numpy(
                {"y": self.program.predict(self.params, jnp.asarray(x, self.dtype))}
            )["y"]

    def snapshot(self) -> Checkpoint:
        return Checkpoint(self.params, self.opt_state)

    def restore(self, snapshot: Checkpoint) -> None:
        with x64(self.wide):
            self._adopt(snapshot.params, snapshot.opt_state)

    def save(self, directory: Path) -> None:
        write(directory / FILE, self.local(self.snapshot()._asdict()))

    def load(self, directory: Path) -> None:
        with x64(self.wide):
            plain = read(directory / FILE)
            self._adopt(plain["params"], plain["opt_state"])

    def _adopt(self, params: Any, opt_state: Any) -> None:
        wrapped = self.program.wrapped
        tx = self.program.tx
        checked = (
            check_state(tx, opt_state, self.params)
            if wrapped
            else rebuild(opt_state, self.opt_state)
        )
        self.params = rebuild(params, self.params)
        self.opt_state = checked


class JaxHarness(Harness):
    """Models as pure functions, optimizers as optax transformations."""

    name = "jax"
    modes = ("jit", "eager", "scan")
    deep_modes = ("scan",)
    brief_modes = ("eager",)
    """Under ``jit`` the same source runs compiled, and it takes half the time."""

    def start(self, setup: Setup) -> JaxSession:
        mode = setup.mode or self.modes[0]
        kept = program(setup.model, setup.optimizer, setup.options, setup.dtype, mode)
        return JaxSession(setup, kept)

    def gradient(
        self,
        model: Model,
        weights: Arrays,
        batch: Batch,
        *,
        dtype: Dtype,
        loss: Loss = "mean",
    ) -> Arrays:
        with x64(dtype == "float64"):
            params = {
                name: jnp.asarray(weights[name], getattr(jnp, dtype))
                for name in model.parameter_shapes()
            }
            return loss_and_gradient(model, params, batch, loss)[1]


def loss_and_gradient(
    model: Model, params: Any, batch: Batch, loss: Loss
) -> tuple[float, Arrays]:
    dtype = next(iter(params.values())).dtype
    x = jnp.asarray(batch.x, dtype)
    y = jnp.asarray(batch.y, jnp.int32)
    value, gradient = _value_and_grad(params, x, y, model=model, loss=loss)
    return float(value), to_numpy(gradient)


_value_and_grad = jax.jit(
    jax.value_and_grad(
        lambda params, x, y, *, model, loss: total_loss(model, params, x, y, loss)
    ),
    static_argnames=("model", "loss"),
)


def to_numpy(tree: Mapping[str, Any]) -> Arrays:
    return {
        name: np.array(leaf, np.float32 if leaf.dtype == jnp.bfloat16 else None)
        for name, leaf in tree.items()
    }


def _valid(weight: Any) -> bool:
    """True if compiled code takes this weight; the API itself must refuse any other."""
    return weight is None or (
        type(weight) in (int, float) and 0 <= weight < float("inf")
    )
