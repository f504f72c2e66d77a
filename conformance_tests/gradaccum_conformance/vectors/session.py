"""Sessions of the suite as implementations that the runner can play vectors on."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import numpy as np

import gradaccum
from gradaccum_conformance.harness import Dtype, Harness, Setup
from gradaccum_conformance.specs import Arrays, Dense, Model, Optimizer

MODEL = Model("two numbers", (1,), (Dense(1, 1),))
"""A weight and a bias, of one element each."""
SHAPES = MODEL.parameter_shapes()


class SessionImplementation:
    """A backend's session over two parameters; its update is what the inner optimizer
    was handed.
    """

    def __init__(
        self, harness: Harness, options: Mapping[str, Any], dtype: str
    ) -> None:
        zeros = {name: np.zeros(shape) for name, shape in SHAPES.items()}
        setup = Setup(
            MODEL,
            zeros,
            Optimizer("capture"),
            cast(Dtype, dtype),
            options=wrap_options(options),
        )
        self.harness = harness
        self.dtype = dtype
        self.session = harness.start(setup)
        self.begin_event()
        self.is_new = True
        self.tells_loss = False

    def micro_batch(
        self, gradient: list[float | None], weight: float | None, loss: float
    ) -> None:
        self.begin_event()
        tree = {
            name: None if number is None else np.full(SHAPES[name], number)
            for name, number in zip(SHAPES, gradient, strict=True)
        }
        self.tells_loss = self.session.gradients_with_loss(tree, weight, loss)
        if not self.tells_loss:
            self.session.gradients(tree, weight=weight)

    def flush(self) -> None:
        self.begin_event()
        self.session.flush()

    def discard(self) -> None:
        self.begin_event()
        self.session.discard()

    def resume(self, options: Mapping[str, Any]) -> SessionImplementation:
        self.begin_event()
        successor = type(self)(self.harness, options, self.dtype)
        with TemporaryDirectory() as folder:
            self.session.save(Path(folder))
            successor.session.load(Path(folder))
        successor.begin_event()
        successor.is_new = True
        return successor

    def observe(self) -> dict[str, Any]:
        state = self.session.state()
        assert self.session.result().loss_scale == state.loss_scale
        return {
            "state": state._asdict(),
            "sum": numbers_in(self.session.accumulator()),
            "update": self._update(),
            "decision": self._decision(),
        }

    def begin_event(self) -> None:
        self.calls = self.session.captured().calls
        self.is_new = False

    def _update(self) -> Any:
        captured = self.session.captured()
        calls = captured.calls - self.calls
        if calls > 1:
            return f"{calls} updates"
        return numbers_in(captured.gradient or {}) if calls else None

    def _decision(self) -> dict[str, Any] | None:
        result = self.session.result()
        # A result that was loaded is that of the run before.
        if self.is_new or not result.closed:
            return None
        decision = {
            "apply": bool(result.applied),
            "overflow": bool(result.overflow),
            "grad_norm": float(result.grad_norm),
        }
        if self.tells_loss:
            decision["loss"] = float(result.loss)
        return decision


def numbers_in(arrays: Arrays) -> list[float]:
    return [float(arrays[name].item()) for name in SHAPES]


def wrap_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `gradaccum.wrap` for the options of a vector."""
    steps = options["steps"]
    loss_scale = options["loss_scale"]
    if isinstance(steps, Mapping):
        steps = gradaccum.until_weight(steps["until_weight"])
    if isinstance(loss_scale, Mapping):
        loss_scale = gradaccum.DynamicLossScale(**loss_scale)
    return {**options, "steps": steps, "loss_scale": loss_scale}
