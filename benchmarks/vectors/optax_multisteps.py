"""`optax.MultiSteps` under the vectors' events. Each option becomes the nearest one that
MultiSteps has; what it has no option for is not offered.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.experimental import enable_x64

from gradaccum_conformance.vectors.run import NotOffered


class CaptureState(NamedTuple):
    """The number of updates that the inner optimizer made, and its last gradient."""

    calls: Any
    gradient: Any


def capture() -> optax.GradientTransformation:
    def init(params: Any) -> CaptureState:
        return CaptureState(jnp.zeros((), jnp.int32), jnp.zeros_like(params))

    def update(
        gradient: Any, state: CaptureState, params: Any = None
    ) -> tuple[Any, CaptureState]:
        return -gradient, CaptureState(state.calls + 1, gradient)

    return optax.GradientTransformation(init, update)


def every_k_schedule(steps: Any) -> int | Callable[[Any], Any]:
    """Return the argument of MultiSteps for the vectors' window sizes."""
    if isinstance(steps, int):
        return steps
    if not isinstance(steps, list):
        raise NotOffered("windows of another size")

    def size(gradient_step: Any) -> Any:
        count = jnp.asarray(steps[0][1])
        for first, later in steps[1:]:
            count = jnp.where(gradient_step >= first, later, count)
        return count

    return size


class MultiSteps:
    """One parameter of two elements."""

    def __init__(self, options: Mapping[str, Any], dtype: str) -> None:
        if options["reduction"] == "sum_per_item":
            raise NotOffered("weights")
        if options["loss_scale"] is not None:
            raise NotOffered("a loss scale")
        if options["skip_norm"] is not None:
            raise NotOffered("a window skipped by its norm")
        clip = optax.identity()
        if options["clip_norm"] is not None:
            clip = optax.clip_by_global_norm(options["clip_norm"])
        inner = optax.chain(clip, capture())
        skip = None if options["on_overflow"] == "ignore" else optax.skip_not_finite
        self.reduction = options["reduction"]
        self.dtype = dtype
        with enable_x64(dtype == "float64"):
            self.optimizer = optax.MultiSteps(
                inner,
                every_k_schedule(options["steps"]),
                use_grad_mean=self.reduction == "mean",
                should_skip_update_fn=skip,
                accumulator_dtype="float64" if dtype == "float64" else "float32",
            )
            self.params = jnp.zeros(2, dtype)
            self.state = self.optimizer.init(self.params)
            self.update = jax.jit(self.optimizer.update)
        self.calls = 0

    def micro_batch(
        self, gradient: list[float | None], weight: float | None, loss: float
    ) -> None:
        self.calls = self._capture_state().calls
        counts_alike = weight in (1, None) or (self.reduction == "sum" and weight != 0)
        if not counts_alike:
            raise NotOffered("weights")
        with enable_x64(self.dtype == "float64"):
            numbers = jnp.asarray([number or 0.0 for number in gradient], self.dtype)
            _, self.state = self.update(numbers, self.state, self.params)

    def flush(self) -> None:
        raise NotOffered("a flush")

    def discard(self) -> None:
        raise NotOffered("a discard")

    def resume(self, options: Mapping[str, Any]) -> MultiSteps:
        successor = MultiSteps(options, self.dtype)
        successor.state = self.state
        successor.calls = self._capture_state().calls
        return successor

    def observe(self) -> dict[str, Any]:
        inner = self._capture_state()
        made_update = inner.calls > self.calls
        return {
            "state": {
                "micro_step": int(self.state.mini_step),
                "optimizer_step": int(self.state.gradient_step),
            },
            "update": list(map(float, inner.gradient)) if made_update else None,
        }

    def _capture_state(self) -> CaptureState:
        inner: CaptureState = self.state.inner_opt_state[-1]
        return inner
