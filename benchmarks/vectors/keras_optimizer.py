"""``gradient_accumulation_steps`` of Keras's optimizers under the vectors' events, on
the torch backend. What no argument of an optimizer says is not offered.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

os.environ["KERAS_BACKEND"] = "torch"

import keras

from gradaccum_conformance.vectors.run import NotOffered


class Recorder(keras.optimizers.Optimizer):  # type: ignore[misc]
    """Keeps the gradients that Keras's accumulation hands over, and moves nothing."""

    def __init__(self, **options: Any) -> None:
        super().__init__(learning_rate=1.0, **options)
        self.gradients: dict[str, float] = {}

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        self.gradients[variable.name] = float(gradient)


class KerasOptimizer:
    """Two variables without axes."""

    def __init__(self, options: Mapping[str, Any], dtype: str) -> None:
        steps = options["steps"]
        scale = options["loss_scale"]
        if options["reduction"] != "mean":
            raise NotOffered("a reduction other than the mean")
        if not isinstance(steps, int):
            raise NotOffered("windows of another size")
        if isinstance(scale, Mapping):
            raise NotOffered("a dynamic loss scale with these constants")
        if options["skip_norm"] is not None:
            raise NotOffered("a window skipped by its norm")
        self.steps = steps
        self.scale = 1.0 if scale is None else scale
        self.dtype = dtype
        self.variables = [
            keras.Variable(0.0, dtype=dtype, name=name) for name in ("first", "second")
        ]
        self.optimizer = Recorder(
            gradient_accumulation_steps=steps if steps > 1 else None,
            global_clipnorm=options["clip_norm"],
            loss_scale_factor=scale,
        )
        self.optimizer.build(self.variables)

    def micro_batch(
        self, gradient: list[float | None], weight: float | None, loss: float
    ) -> None:
        if weight not in (1, None):
            raise NotOffered("weights")
        self.optimizer.gradients = {}
        gradients = [
            None if number is None else keras.ops.cast(number * self.scale, self.dtype)
            for number in gradient
        ]
        self.optimizer.apply(gradients, self.variables)

    def flush(self) -> None:
        raise NotOffered("a flush")

    def discard(self) -> None:
        raise NotOffered("a discard")

    def resume(self, options: Mapping[str, Any]) -> KerasOptimizer:
        """Save and load the optimizer's variables, as a saved model does."""
        successor = KerasOptimizer(options, self.dtype)
        store: dict[str, Any] = {}
        self.optimizer.save_own_variables(store)
        successor.optimizer.load_own_variables(store)
        return successor

    def observe(self) -> dict[str, Any]:
        iterations = int(self.optimizer._iterations)
        gradients = self.optimizer.gradients
        update = [gradients.get(variable.name) for variable in self.variables]
        return {
            "state": {
                "micro_step": iterations % self.steps,
                "optimizer_step": iterations // self.steps,
            },
            "update": update if gradients else None,
        }
