"""Several workers for the conformance suite: one process each, joined by
`jax.distributed`, all running one program.

That program takes a gradient, its weight and its loss from each worker. A worker
without a micro-batch gives zeros with a weight of 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np

from gradaccum_conformance import Loss, Model, Optimizer, Setup, WorkersHarness
from gradaccum_conformance.harness import GradientTree
from gradaccum_conformance.specs import Arrays, Batch
from gradaccum_harnesses.jax.files import read
from gradaccum_harnesses.jax.program import Program, x64
from gradaccum_harnesses.jax.session import (
    FILE,
    JaxHarness,
    JaxSession,
    loss_and_gradient,
)
from gradaccum_jax import data_parallel
from gradaccum_jax.optimizer import discard
from gradaccum_jax.saving import check_state
from gradaccum_jax.workers.group import map_by_kind

AXIS = "workers"
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
        first = {device.process_index: device for device in reversed(jax.devices())}
        devices = np.array([first[rank] for rank in sorted(first)])
        self.mesh = jax.sharding.Mesh(devices, (AXIS,))

    @cached_property
    def init(self) -> Any:
        return self.on_all(self.tx.init)

    @cached_property
    def apply(self) -> Any:
        """The function ``apply(params, state, gradients, weight, loss)``, with one row
        per worker in the last three.
        """

        def apply(params: Any, state: Any, *rows: Any) -> Any:
            return self.apply_plainly(
                params, state, *jax.tree.map(lambda row: row[0], rows)
            )

        return self.on_all(apply)

    @cached_property
    def flush(self) -> Any:
        return self.on_all(self.flush_plainly)

    @cached_property
    def discard(self) -> Any:
        return self.on_all(lambda params, state: (params, discard(self.tx, state)))

    def on_all(self, function: Any) -> Any:
        return data_parallel(function, self.mesh, AXIS)


class SharedSession(JaxSession):
    """One worker's view of trees that all of them hold."""

    program: SharedProgram

    def micro_batch(
        self, batch: Batch, *, weight: float | None = None, loss: Loss = "mean"
    ) -> float:
        value, gradient = loss_and_gradient(
            self.model, self.local(self.params), batch, loss
        )
        self._apply(gradient, weight, value)
        return value

    def idle(self) -> None:
        self._apply({}, 0.0)

    def flush(self, denominator: Any = None) -> None:
        assert denominator is None
        with x64(self.wide):
            self.params, self.opt_state = self.program.flush(
                self.params, self.opt_state
            )

    def accumulator(self) -> Arrays:
        return {name: rows[0] for name, rows in super().accumulator().items()}

    def load(self, directory: Path) -> None:
        with x64(self.wide):
            saved = read(directory / FILE)
            own = check_state(self.program.tx, saved["opt_state"], self.params)
            self.opt_state = map_by_kind(
                own, own=self._rows, shared=self.placed, other=self.placed
            )
            self.params = self.placed(
                {name: saved["params"][name] for name in self.params}
            )

    def local(self, tree: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf.addressable_data(0), tree)

    def placed(self, tree: Any) -> Any:
        return self._put(tree, jax.sharding.PartitionSpec())  # type: ignore[no-untyped-call]

    def _rows(self, tree: Any) -> Any:
        return self._put(tree, jax.sharding.PartitionSpec(AXIS))  # type: ignore[no-untyped-call]

    def _put(self, tree: Any, spec: Any) -> Any:
        sharding = jax.sharding.NamedSharding(self.program.mesh, spec)
        put: Any = jax.make_array_from_process_local_data
        return jax.tree.map(lambda leaf: put(sharding, np.asarray(leaf)), tree)

    def _adopt(self, params: Any, opt_state: Any) -> None:
        self.params = params
        self.opt_state = opt_state

    def _apply(self, tree: GradientTree, weight: float | None, *loss: float) -> None:
        """The program of all workers has a gradient for each parameter: zeros where it
        takes no part.
        """
        gradients = {}
        for name, p in self.params.items():
            gradient = tree.get(name)
            row = np.zeros(p.shape) if gradient is None else gradient
            gradients[name] = np.asarray(row, self.dtype)[None]
        weights = np.asarray([1.0 if weight is None else weight], np.float32)
        losses = np.asarray(loss or [np.nan], np.float32)
        with x64(self.wide):
            self.params, self.opt_state = self.program.apply(
                self.params, self.opt_state, *self._rows((gradients, weights, losses))
            )


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
        return SharedSession(setup, program)
