"""The functions of a session of the conformance suite, compiled once per model,
optimizer, options, dtype and mode, and shared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import gradaccum
from gradaccum_harnesses.jax.models import forward, total_loss
from gradaccum_jax.optimizer import discard, flush
from gradaccum_jax.state import scale_loss


class CaptureState(NamedTuple):
    """The number of runs of the ``capture`` optimizer, and its last gradient."""

    calls: Any
    gradient: Any


def capture(learning_rate: float) -> optax.GradientTransformation:
    def init(params: Any) -> CaptureState:
        return CaptureState(
            jnp.zeros((), jnp.int32), jax.tree.map(jnp.zeros_like, params)
        )

    def update(
        gradients: Any, state: CaptureState, params: Any = None
    ) -> tuple[Any, CaptureState]:
        return jax.tree.map(lambda g: -learning_rate * g, gradients), CaptureState(
            state.calls + 1, gradients
        )

    return optax.GradientTransformation(init, update)


def inner_optimizer(spec: Any) -> optax.GradientTransformation:
    match spec.kind:
        case "capture":
            return capture(spec.learning_rate)
        case "sgd":
            return optax.sgd(spec.learning_rate)
        case "momentum":
            return optax.sgd(spec.learning_rate, momentum=0.9)
        case "adam":
            return optax.adam(spec.learning_rate)
        case "adamw":
            return optax.adamw(spec.learning_rate, weight_decay=0.01)
    raise AssertionError(f"no optax form of the optimizer {spec}")


def x64(switched_on: bool) -> AbstractContextManager[Any]:
    """Switch 64-bit types on or off, whatever the process has set."""
    if hasattr(jax, "enable_x64"):
        return jax.enable_x64(switched_on)  # type: ignore[no-any-return]
    from jax.experimental import enable_x64

    return enable_x64(switched_on)


def needs_x64(dtype: str, options: Mapping[str, Any] | None) -> bool:
    return "float64" in (dtype, str((options or {}).get("accumulate_dtype")))


class Program:
    """The functions of one kind of session: pure, from (params, state) to (params,
    state).
    """

    def __init__(
        self, model: Any, optimizer: Any, options: Mapping[str, Any] | None, mode: str
    ) -> None:
        inner = inner_optimizer(optimizer)
        self.model = model
        self.mode = mode
        self.wrapped = options is not None
        self.tx: Any = inner if options is None else gradaccum.wrap(inner, **options)

    @property
    def init(self) -> Any:
        return self.tx.init

    @cached_property
    def train(self) -> Callable[..., Any]:
        """The function ``train(params, state, x, y, weight, loss)`` of one micro-batch;
        returns (params, state, unscaled loss).
        """
        return self._in_mode(self.train_plainly, static=("loss",))

    @cached_property
    def apply(self) -> Callable[..., Any]:
        """The function ``apply(params, state, gradients, weight, loss)`` of given
        gradients, unscaled; returns (params, state).
        """
        return self._in_mode(self.apply_plainly)

    @cached_property
    def flush(self) -> Callable[..., Any]:
        return self._in_mode(self.flush_plainly)

    @cached_property
    def discard(self) -> Callable[..., Any]:
        return self._in_mode(lambda params, state: (params, discard(self.tx, state)))

    @cached_property
    def predict(self) -> Callable[..., Any]:
        return jax.jit(lambda params, x: forward(self.model, params, x))

    def train_plainly(
        self, params: Any, state: Any, x: Any, y: Any, weight: Any, loss: str
    ) -> Any:
        def objective(params: Any) -> tuple[Any, Any]:
            value = total_loss(self.model, params, x, y, loss)
            return (scale_loss(value, state) if self.wrapped else value), value

        gradients, value = jax.grad(objective, has_aux=True)(params)
        return *self.step(params, state, gradients, weight, value), value

    def apply_plainly(
        self, params: Any, state: Any, gradients: Any, weight: Any, value: Any = None
    ) -> Any:
        """Run `apply` without compiling. The gradient of a scaled loss has the
        parameter's dtype, whatever the loss has.
        """
        scaled = jax.tree.map(
            lambda g: scale_loss(g, state).astype(g.dtype) if self.wrapped else g,
            gradients,
        )
        return self.step(params, state, scaled, weight, value)

    def step(
        self, params: Any, state: Any, gradients: Any, weight: Any, value: Any = None
    ) -> Any:
        extra = {"weight": weight, "value": value} if self.wrapped else {}
        updates, state = self.tx.update(gradients, state, params, **extra)
        return optax.apply_updates(params, updates), state

    def flush_plainly(self, params: Any, state: Any, denominator: Any = None) -> Any:
        updates, state = flush(self.tx, state, params, denominator=denominator)
        return optax.apply_updates(params, updates), state

    def _in_mode(
        self, function: Callable[..., Any], static: tuple[str, ...] = ()
    ) -> Callable[..., Any]:
        if self.mode == "eager":
            return function
        return jax.jit(
            function if self.mode == "jit" else _as_scan(function),
            static_argnames=static,
        )


def _as_scan(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `function` as the body of a scan over one micro-batch, whose carry must keep
    every type.
    """

    def run(params: Any, state: Any, *inputs: Any, **static: Any) -> Any:
        def body(carry: Any, row: Any) -> Any:
            params, state, *rest = function(*carry, *row, **static)
            return (params, state), rest

        (params, state), rest = jax.lax.scan(
            body,
            (params, state),
            jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], inputs),
            length=1,
        )
        return params, state, *(leaf[0] for leaf in rest)

    return run


_PROGRAMS: dict[Any, Program] = {}


def program(
    model: Any, optimizer: Any, options: Mapping[str, Any] | None, dtype: str, mode: str
) -> Program:
    frozen = (
        None
        if options is None
        else tuple((name, _frozen(value)) for name, value in sorted(options.items()))
    )
    key = (model, optimizer, frozen, dtype, mode)
    if not _hashable(key):
        return Program(model, optimizer, options, mode)
    if key not in _PROGRAMS:
        _PROGRAMS[key] = Program(model, optimizer, options, mode)
    return _PROGRAMS[key]


def _hashable(key: Any) -> bool:
    try:
        hash(key)
    except TypeError:
        return False
    return True


def _frozen(value: Any) -> Any:
    return (
        tuple(map(_frozen, value))
        if isinstance(value, (list, tuple))
        else (type(value), value)
    )
