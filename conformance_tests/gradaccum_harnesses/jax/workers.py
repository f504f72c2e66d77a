"""Several workers for the conformance suite: one process each, joined by
`jax.distributed`, all running one program.

That program has one shape: forward and backward of a batch padded to a fixed length,
plus a given gradient. A worker without a batch or micro-batch pads all of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gradaccum import StepResult
from gradaccum.kit import FIELD_DTYPES, State
from gradaccum_conformance import (
    Captured,
    Dtype,
    Loss,
    Model,
    Optimizer,
    Setup,
    WorkersHarness,
)
from gradaccum_conformance.harness import GradientTree
from gradaccum_conformance.specs import Arrays, Batch
from gradaccum_harnesses.jax.files import read, write
from gradaccum_harnesses.jax.models import forward
from gradaccum_harnesses.jax.program import Program, needs_x64, x64
from gradaccum_harnesses.jax.session import (
    FILE,
    JaxHarness,
    JaxSession,
    sums_of,
    to_numpy,
)
from gradaccum_jax import data_parallel
from gradaccum_jax.optimizer import discard
from gradaccum_jax.saving import check_state
from gradaccum_jax.state import result, scale_loss
from gradaccum_jax.workers.group import map_by_kind

AXIS = "workers"
LONGEST = 8
"""Items in a worker's padded batch."""
SECONDS = 60
"""For the workers to meet."""


class SharedProgram(Program):
    """A `Program` whose functions run on one device of each process, with the arguments
    of all.
    """

    def __init__(
        self, model: Model, optimizer: Optimizer, options: Mapping[str, Any], mode: str
    ) -> None:
        super().__init__(model, optimizer, {**options, "axis_name": AXIS}, mode)
        self.mesh = _mesh()

    @cached_property
    def event(self) -> Any:
        """The function ``event(params, state, x, y, shares, gradients, weight,
        tells)``, one row per worker; returns the losses too.
        """
        return self.over(self._event)

    @cached_property
    def flush(self) -> Any:
        return self.over(self.flush_plainly)

    @cached_property
    def discard(self) -> Any:
        return self.over(lambda params, state: (params, discard(self.tx, state)))

    def over(self, function: Any) -> Any:
        return data_parallel(function, self.mesh, AXIS)

    def _event(self, params: Any, state: Any, *rows: Any) -> Any:
        x, y, shares, given, weight, tells = jax.tree.map(lambda row: row[0], rows)

        def objective(params: Any) -> tuple[Any, Any]:
            losses = optax.softmax_cross_entropy_with_integer_labels(
                forward(self.model, params, x), y
            )
            value = jnp.sum(shares * losses)
            return scale_loss(value, state), value

        own, value = jax.grad(objective, has_aux=True)(params)
        gradients = jax.tree.map(
            lambda g, more: g + scale_loss(more, state).astype(g.dtype), own, given
        )
        return *self.step(
            params, state, gradients, weight, jnp.where(tells, value, jnp.nan)
        ), value


class SharedSession(JaxSession):
    """One worker's view of trees that all of them hold."""

    program: SharedProgram

    def __init__(
        self,
        model: Model,
        weights: Arrays,
        program: SharedProgram,
        dtype: Dtype,
        wide: bool,
    ) -> None:
        self.model, self.program, self.dtype, self.wide = (
            model,
            program,
            jnp.dtype(getattr(jnp, dtype)),
            wide,
        )
        with x64(wide):
            self.params = self._whole(
                {
                    name: jnp.asarray(weights[name], self.dtype)
                    for name in model.parameter_shapes()
                }
            )
            self.opt_state = program.over(program.tx.init)(self.params)

    def micro_batch(
        self, batch: Batch, *, weight: float | None = None, loss: Loss = "mean"
    ) -> float:
        return self._event(
            batch, 1.0 / batch.items if loss == "mean" else 1.0, {}, weight
        )

    def gradients(self, tree: GradientTree, *, weight: float | None = None) -> None:
        self._event(None, 0.0, tree, weight)

    def idle(self) -> None:
        self._event(None, 0.0, {}, 0.0)

    def flush(self, denominator: Any = None) -> None:
        with x64(self.wide):
            flush = (
                self.program.flush
                if denominator is None
                else self.program.over(
                    partial(self.program.flush_plainly, denominator=denominator)
                )
            )
            self.params, self.opt_state = flush(self.params, self.opt_state)

    def result(self) -> StepResult:
        return StepResult(*(scalar.item() for scalar in result(_local(self.opt_state))))

    def state(self) -> State:
        return State(
            *(
                np.asarray(_local(getattr(self.opt_state, name))).item()
                for name in FIELD_DTYPES
            )
        )

    def accumulator(self) -> Arrays:
        return to_numpy(
            jax.tree.map(lambda leaf: leaf[0], sums_of(_local(self.opt_state)))
        )

    def parameters(self) -> Arrays:
        return to_numpy(_local(self.params))

    def optimizer_state(self) -> Arrays:
        inner = _local(self.opt_state.inner_state)
        return to_numpy(
            {
                jax.tree_util.keystr(path): leaf
                for path, leaf in jax.tree_util.tree_flatten_with_path(inner)[0]
            }
        )

    def captured(self) -> Captured:
        inner = _local(self.opt_state.inner_state)
        calls = int(inner.calls)
        return Captured(calls, to_numpy(inner.gradient) if calls else None)

    def save(self, directory: Path) -> None:
        write(directory / FILE, _local(self.snapshot()._asdict()))

    def load(self, directory: Path) -> None:
        with x64(self.wide):
            saved = read(directory / FILE)
            own = check_state(self.program.tx, saved["opt_state"], self.params)
            self.opt_state = map_by_kind(
                own, own=self._row, shared=self._whole, other=self._whole
            )
            self.params = self._whole(
                {name: saved["params"][name] for name in self.params}
            )

    def _adopt(self, params: Any, opt_state: Any) -> None:
        self.params, self.opt_state = params, opt_state

    def _event(
        self,
        batch: Batch | None,
        share: float,
        tree: GradientTree,
        weight: float | None,
    ) -> float:
        items = 0 if batch is None else batch.items
        assert items <= LONGEST, (
            f"{items} items are more than the {LONGEST} of a padded batch"
        )
        x, y = (
            np.zeros((1, LONGEST, *self.model.input_shape), np.float32),
            np.zeros((1, LONGEST), np.int32),
        )
        shares = np.zeros((1, LONGEST), np.float32)
        if batch is not None:
            x[0, :items], y[0, :items], shares[0, :items] = batch.x, batch.y, share
        given = {
            name: _gradient_of(tree, name, p.shape)[None].astype(self.dtype)
            for name, p in self.params.items()
        }
        with x64(self.wide):
            weights, tells = (
                np.asarray([1.0 if weight is None else weight], np.float32),
                np.asarray([batch is not None]),
            )
            rows = (
                x.astype(self.dtype),
                y,
                shares.astype(self.dtype),
                given,
                weights,
                tells,
            )
            self.params, self.opt_state, losses = self.program.event(
                self.params, self.opt_state, *self._row(rows)
            )
            return float(_local(losses)[0])

    def _row(self, tree: Any) -> Any:
        return self._put(tree, jax.sharding.PartitionSpec(AXIS))  # type: ignore[no-untyped-call]

    def _whole(self, tree: Any) -> Any:
        return self._put(tree, jax.sharding.PartitionSpec())  # type: ignore[no-untyped-call]

    def _put(self, tree: Any, spec: Any) -> Any:
        sharding = jax.sharding.NamedSharding(self.program.mesh, spec)
        return jax.tree.map(lambda leaf: _global(np.asarray(leaf), sharding), tree)


class JaxWorkers(JaxHarness, WorkersHarness):
    """The harness, with processes that `join`."""

    worker_modes = ("jit",)

    def join(self, rank: int, workers: int, folder: Path, port: int) -> None:
        config: Any = jax.config
        config.update("jax_platforms", "cpu")
        config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(
            f"127.0.0.1:{port}", workers, rank, initialization_timeout=SECONDS
        )

    def start_shared(self, setup: Setup) -> SharedSession:
        program = SharedProgram(
            setup.model, setup.optimizer, setup.options or {}, setup.mode or "jit"
        )
        return SharedSession(
            setup.model,
            setup.weights,
            program,
            setup.dtype,
            needs_x64(setup.dtype, setup.options),
        )


def _mesh() -> jax.sharding.Mesh:
    """Return one device of each process, in one axis."""
    first = {device.process_index: device for device in reversed(jax.devices())}
    return jax.sharding.Mesh(np.array([first[rank] for rank in sorted(first)]), (AXIS,))


def _global(array: Any, sharding: Any) -> Any:
    """Return the array of all processes of which `array` is this one's part."""
    put: Any = jax.make_array_from_process_local_data
    return put(sharding, array)


def _gradient_of(tree: GradientTree, name: str, shape: tuple[int, ...]) -> Any:
    """Return zeros for a parameter that takes no part: the program of all workers has a
    gradient for each.
    """
    gradient = tree.get(name)
    return np.zeros(shape, np.float32) if gradient is None else gradient


def _local(tree: Any) -> Any:
    """Return this process's row of each array, or the whole of a replicated one."""
    return jax.tree.map(lambda leaf: leaf.addressable_data(0), tree)
