"""JAX, AdamW: what a window costs beside `optax.MultiSteps`, beside code written by
hand, and beside the work that must be done.

Everything runs on one core. "held / params" is what must be there between two
micro-batches: parameters, two moments and the sum are 4. "temp / params" is what a step
wants beside that. With the gradient compiled in, it is two matrices of the four, one
being computed while the last is added, and activations of the backward pass; the
floor's row shows what the gradient alone wants. ``benchmarks/README.md`` counts the
passes over memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import jax
import optax

import gradaccum
import gradaccum_jax
from benchmarks.case import Case
from benchmarks.contestants.jax_mlp import (
    STEPS,
    Window,
    adamw,
    batches,
    compile_step,
    gradient,
    make_params,
    scaled_gradient,
    window,
)
from benchmarks.contestants.jax_peers import (
    by_hand,
    floor,
    keras_step,
    microbatched,
    scanned,
)
from benchmarks.jax_counts import MakeOptimizer, counts, sizes
from benchmarks.triad import one_core

BASELINE = "optax.MultiSteps"
FLOOR = f"floor: {STEPS} gradients, 1 update"
BY_HAND = "hand-written: three jitted functions"
SCAN = "hand-written: scan over the whole window"
MICROBATCH = "optax.microbatch over the whole window"
SCALED = "gradaccum, dynamic loss scale"
CLIP_NORM = 1e-3
"""Below the norm here, so that it clips."""
SMALL = {"4 x 256^2": 256, "4 x 1024^2": 1024}
LARGE = {"4 x 2048^2": 2048}
"""Beside the floor only with what streams: each holds 4 or 5 times the parameters."""

OPTIMIZERS: dict[str, MakeOptimizer] = {
    BASELINE: lambda inner: optax.MultiSteps(inner, STEPS),
    "gradaccum": lambda inner: gradaccum.wrap(inner, steps=STEPS),
    "gradaccum, overflow ignored": lambda inner: gradaccum.wrap(
        inner, steps=STEPS, on_overflow="ignore"
    ),
    "gradaccum_jax.MultiSteps": lambda inner: gradaccum_jax.MultiSteps(inner, STEPS),
}


def cases(quick: bool) -> Iterator[Case]:
    one_core()
    for name, width in SMALL.items():
        yield streaming(name, width, whole=True)
    yield clipping("4 x 1024^2", 1024)
    for name, width in {} if quick else LARGE.items():
        yield streaming(name, width, whole=False)


def streaming(name: str, width: int, *, whole: bool) -> Case:
    """Everyone; without `whole` only what takes micro-batches as they come."""
    windows, counted = accumulating(OPTIMIZERS, width)
    windows |= {BY_HAND: by_hand(width), FLOOR: floor(width)}
    if whole:
        windows |= {SCAN: scanned(width), MICROBATCH: microbatched(width)}
    if whole and find_spec("keras"):
        step = keras_step(width)
        windows["Keras"], counted["Keras"] = window(step, batches(width)), sizes(step)
    return Case(name, BASELINE, windows, counted | {FLOOR: _gradient_alone(width)})


def clipping(name: str, width: int) -> Case:
    """Clipping by the window's norm: the baseline's optimizer clips, ours also has a
    dynamic loss scale and its overflow check.
    """
    optimizers: dict[str, MakeOptimizer] = {
        BASELINE: lambda inner: optax.MultiSteps(
            optax.chain(optax.clip_by_global_norm(CLIP_NORM), inner), STEPS
        ),
        "gradaccum": lambda inner: gradaccum.wrap(
            inner, steps=STEPS, clip_norm=CLIP_NORM
        ),
        SCALED: lambda inner: gradaccum.wrap(
            inner,
            steps=STEPS,
            clip_norm=CLIP_NORM,
            loss_scale=gradaccum.DynamicLossScale(),
        ),
    }
    return Case(f"{name}, clipped", BASELINE, *accumulating(optimizers, width))


def accumulating(
    optimizers: dict[str, MakeOptimizer], width: int
) -> tuple[dict[str, Window], dict[str, dict[str, float]]]:
    """A window and the counts of each."""
    xs, windows, counted = (
        batches(width),
        dict[str, Window](),
        dict[str, dict[str, float]](),
    )
    for name, make in optimizers.items():
        step = compile_step(
            make(adamw()),
            make_params(width),
            xs[0],
            scaled_gradient if name == SCALED else gradient,
        )
        windows[name], counted[name] = window(step, xs), counts(step, make)
    return windows, counted


def _gradient_alone(width: int) -> dict[str, float]:
    params = make_params(width)
    memory: Any = (
        jax.jit(gradient).lower(params, batches(width)[0]).compile().memory_analysis()
    )
    return {
        "temp / params": memory.temp_size_in_bytes / sum(leaf.nbytes for leaf in params)
    }
