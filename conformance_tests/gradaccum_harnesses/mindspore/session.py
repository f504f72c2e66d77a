"""The harness of the MindSpore adapter: PyNative, a jitted step and graph mode.

Compiling a step takes about a second, so a compiled trainer goes back to a pool, and
the next session of the same shape borrows it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor

from gradaccum.kit import FIELD_DTYPES, State, require_weight
from gradaccum_conformance.harness import (
    Captured,
    Dtype,
    GradientTree,
    Harness,
    Loss,
    OptimizerSession,
    Option,
    Setup,
)
from gradaccum_conformance.specs import Array, Arrays, Batch, Model, Optimizer
from gradaccum_harnesses.mindspore.trainer import MASTER, Trainer, plain
from gradaccum_mindspore.saving import load_checkpoint_into

FILE = "session.ckpt"
REPORTS = TemporaryDirectory()
"""The current folder while something may be compiled: a failed compilation writes a
report there.
"""


@contextmanager
def context_mode(mode: str) -> Iterator[None]:
    wanted = ms.GRAPH_MODE if mode == "graph" else ms.PYNATIVE_MODE
    before = ms.get_context("mode")
    if wanted != before:
        ms.set_context(mode=wanted)
    try:
        with chdir(REPORTS.name):
            yield
    finally:
        if wanted != before:
            ms.set_context(mode=before)


class MindSporeSession(OptimizerSession):
    """One borrowed trainer."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.optimizer = trainer.optimizer
        self._handed: dict[str, Tensor] = {}

    def micro_batch(
        self, batch: Batch, *, weight: float | None = None, loss: Loss = "mean"
    ) -> float:
        dtype = self.trainer.dtype
        labels = np.eye(self._outputs())[batch.y]
        divisor = batch.items if loss == "mean" else 1
        with context_mode(self.trainer.mode):
            inputs = (
                Tensor(batch.x, dtype),
                Tensor(labels, dtype),
                Tensor(divisor, dtype),
            )
            return float(self.trainer.step(*inputs, self._weight(weight)).asnumpy())

    def gradients(self, tree: GradientTree, *, weight: float | None = None) -> None:
        with context_mode(self.trainer.mode):
            gradients = self._gradients(tree)
            if self.trainer.wrapped:
                self.trainer.apply(gradients, weight=self._weight(weight))
            else:
                self.trainer.apply(gradients)

    def gradients_with_loss(
        self, tree: GradientTree, weight: float | None, loss: float
    ) -> bool:
        if self.trainer.mode != "pynative":
            return False
        with context_mode(self.trainer.mode):
            gradients = self._gradients(tree)
            self.optimizer(gradients, weight, Tensor(loss, ms.float32))
        return True

    def gradients_in(self, tree: Arrays) -> None:
        """Hand over the same tensors at each micro-batch, with new values in them."""
        with context_mode(self.trainer.mode):
            for name, gradient in tree.items():
                new = Tensor(np.ascontiguousarray(gradient), self.trainer.dtype)
                self._handed.setdefault(name, new).assign_value(new)
            self.trainer.apply(
                tuple(self._handed[p.name] for p in self.trainer.parameters)
            )

    def flush(self, denominator: Option = None) -> None:
        with context_mode(self.trainer.mode):
            self.optimizer.flush(denominator=denominator)

    def discard(self) -> None:
        with context_mode(self.trainer.mode):
            self.optimizer.discard()

    def state(self) -> State:
        entries = self.trainer.entries()
        return State(
            *(entries[f"gradaccum.{field}"].asnumpy().item() for field in FIELD_DTYPES)
        )

    def accumulator(self) -> Arrays:
        entries = self.trainer.entries()
        return {
            p.name: plain(entries[f"{p.name}.gradaccum.grad_sum"])
            for p in self.trainer.parameters
        }

    def parameters(self) -> Arrays:
        return {p.name: plain(p) for p in self.trainer.parameters}

    def masters(self) -> Arrays:
        entries = self.trainer.entries()
        return {
            p.name: plain(entries.get(p.name + MASTER, p))
            for p in self.trainer.parameters
        }

    def optimizer_state(self) -> Arrays:
        own = {p.name for p in self.trainer.parameters}
        return {
            p.name: plain(p)
            for p in self.trainer.inner.get_parameters()
            if p.name.removesuffix(MASTER) not in own
        }

    def captured(self) -> Captured:
        state = self.optimizer_state()
        calls = int(state["capture.calls"])
        names = [p.name for p in self.trainer.parameters] if calls else []
        return Captured(calls, {name: state[f"seen.{name}"] for name in names})

    def predict(self, x: Array) -> Array:
        with context_mode("pynative"):
            output: Array = self.trainer.network(
                Tensor(x, self.trainer.dtype)
            ).asnumpy()
            return output

    def snapshot(self) -> Any:
        return {
            name: Tensor(p.asnumpy().copy(), p.dtype)
            for name, p in self.trainer.entries().items()
        }

    def restore(self, snapshot: Any) -> None:
        load_checkpoint_into(self.optimizer, snapshot)

    def save(self, directory: Path) -> None:
        ms.save_checkpoint(self.optimizer, str(directory / FILE))

    def load(self, directory: Path) -> None:
        load_checkpoint_into(self.optimizer, ms.load_checkpoint(str(directory / FILE)))

    def _outputs(self) -> int:
        return int(self.trainer.parameters[-1].shape[0])

    def _weight(self, weight: float | None) -> Any:
        """Return a Tensor for compiled code, checked before, so that another weight is
        no other program.
        """
        if weight is None or self.trainer.mode == "pynative":
            return weight
        return Tensor(
            require_weight(weight),
            ms.float64 if self.trainer.dtype == ms.float64 else ms.float32,
        )

    def _gradients(self, tree: GradientTree) -> tuple[Any, ...]:
        scale = self.optimizer.loss_scale.item() if self.trainer.wrapped else 1.0
        return tuple(
            self._gradient(tree.get(p.name), p, scale) for p in self.trainer.parameters
        )

    def _gradient(self, gradient: Array | None, parameter: Any, scale: float) -> Any:
        if gradient is None:
            return None
        with np.errstate(over="ignore"):
            return Tensor(np.asarray(gradient) * scale, parameter.dtype)


class MindSporeHarness(Harness):
    """Drives the adapter in its three modes."""

    name = "mindspore"
    modes = ("pynative", "jit", "graph")
    brief_modes = ("graph",)
    """A graph is compiled from the same source as under ``jit``, and takes longest."""

    def __init__(self) -> None:
        self.pool: dict[Any, list[Trainer]] = {}

    def start(self, setup: Setup) -> MindSporeSession:
        # Many small operators: handing each to another thread and waiting costs more
        # than running it, and most on a busy machine.
        ms.set_context(pynative_synchronize=True)
        mode = setup.mode or self.modes[0]
        key = (
            setup.model,
            setup.optimizer,
            setup.dtype,
            mode,
            repr(sorted((setup.options or {"": None}).items())),
        )
        with context_mode(mode):
            free = self.pool.setdefault(key, [])
            trainer = (
                free.pop()
                if free
                else Trainer(
                    setup.model, setup.optimizer, setup.dtype, mode, setup.options
                )
            )
            trainer.reset(setup.weights)
        session = MindSporeSession(trainer)
        if mode != "pynative":
            weakref.finalize(session, free.append, trainer)
        return session

    def gradient(
        self,
        model: Model,
        weights: Arrays,
        batch: Batch,
        *,
        dtype: Dtype,
        loss: Loss = "mean",
    ) -> Arrays:
        session = self.start(Setup(model, weights, Optimizer("capture"), dtype))
        session.micro_batch(batch, loss=loss)
        gradient = session.captured().gradient
        assert gradient is not None
        return gradient
