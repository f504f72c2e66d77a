"""Stage 10: JAX: exactness, memory, time beside `optax.MultiSteps` and
`optax.microbatch`, and transfers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import gradaccum
import gradaccum_jax
from benchmarks.contestants import jax_mlp
from benchmarks.gpu.records import Check, Measured, Setting, mebibytes, shown
from benchmarks.rounds import Plan, Timing, measure

FLOAT64_BOUND = 1e-12
SIZES = (3, 2, 3, 1, 2, 3)
"""The items of the micro-batches: one window of four, and a short one."""
STEPS = 4
CLIP_NORM = 1e-2
MULTISTEPS = "optax.MultiSteps"
MICROBATCH = "optax.microbatch"
OURS = "gradaccum"
MEBIBYTE = 2**20

Tree = Any


@contextmanager
def float64() -> Iterator[None]:
    jax.config.update("jax_enable_x64", True)  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        jax.config.update("jax_enable_x64", False)  # type: ignore[no-untyped-call]


def make_params(width: int) -> Tree:
    rng = np.random.default_rng(1)
    shapes = {"first": (width, 2 * width), "last": (2 * width, width)}
    return {
        name: jnp.asarray(rng.normal(size=shape) / width**0.5)
        for name, shape in shapes.items()
    }


def make_items(items: int, width: int) -> tuple[Any, Any]:
    """Return inputs and targets, each of shape ``(items, width)``."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(2, items, width))
    return jnp.asarray(x), jnp.asarray(y)


def outputs_of(params: Tree, x: Any) -> Any:
    return jnp.tanh(x @ params["first"]) @ params["last"]


def mean_loss(params: Tree, x: Any, y: Any) -> Any:
    return jnp.mean((outputs_of(params, x) - y) ** 2)


def adamw() -> Any:
    return optax.adamw(1e-2, eps=1e-3)


def distance(ended: Tree, expected: Tree, start: Tree) -> float:
    """Return how far the parameters ended from the large batch's, relative to how far
    those moved from the start.
    """
    got, wanted, before = map(flat, (ended, expected, start))
    return float(np.linalg.norm(got - wanted) / np.linalg.norm(wanted - before))


def flat(tree: Tree) -> Any:
    return np.concatenate([np.asarray(leaf).ravel() for leaf in jax.tree.leaves(tree)])


def within(found: float, note: str = "") -> Measured:
    text = f"{found:.1e}{note}"
    return Measured(found <= FLOAT64_BOUND, text, f"{FLOAT64_BOUND:.0e}")


def device(setting: Setting) -> Measured:
    backend = jax.default_backend()
    name = jax.devices()[0].device_kind
    return Measured(backend == "gpu", f"{backend}: {name}", "gpu")


# Exact.


def ragged_windows(setting: Setting) -> Measured:
    """Train on ragged micro-batches with weights, clipped; `epoch` closes the short
    window.
    """
    width = setting.size(8, 256)
    with float64():
        x, y = make_items(sum(SIZES), width)
        loader = list(zip(cut(x), cut(y), strict=True))
        tx = gradaccum.wrap(adamw(), steps=STEPS, clip_norm=CLIP_NORM)
        params = make_params(width)
        state = tx.init(params)

        @jax.jit
        def step(params: Tree, state: Any, x: Any, y: Any, last: Any) -> Any:
            grads = jax.grad(mean_loss)(params, x, y)
            updates, state = tx.update(grads, state, params, weight=len(x), last=last)
            return optax.apply_updates(params, updates), state

        for (each_x, each_y), last in gradaccum_jax.epoch(loader):
            params, state = step(params, state, each_x, each_y, last)
        first = sum(SIZES[:STEPS])
        windows = [(x[:first], y[:first]), (x[first:], y[first:])]
        expected = train_large(make_params(width), windows)
        return within(distance(params, expected, make_params(width)))


def cut(array: Any) -> list[Any]:
    return list(jnp.split(array, np.cumsum(SIZES)[:-1]))


def train_large(params: Tree, windows: Sequence[tuple[Any, Any]]) -> Tree:
    tx = adamw()
    state = tx.init(params)
    for x, y in windows:
        grads = jax.grad(mean_loss)(params, x, y)
        norm = jnp.linalg.norm(jnp.concatenate(list(map(jnp.ravel, grads.values()))))
        factor = jnp.minimum(1.0, CLIP_NORM / norm)
        grads = jax.tree.map(lambda leaf, factor=factor: leaf * factor, grads)
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    return params


def value_and_grad(setting: Setting) -> Measured:
    width = setting.size(8, 256)
    with float64():
        x, y = make_items(29, width)
        params = make_params(width)
        _, found = gradaccum_jax.value_and_grad(mean_loss, steps=STEPS)(params, x, y)
        expected = jax.grad(mean_loss)(params, x, y)
        zeros = jax.tree.map(jnp.zeros_like, params)
        return within(distance(found, expected, zeros))


def contrastive_loss(params: Tree, outputs: Any) -> Any:
    """Compare each output with all others, shape ``(items, width)``; the parameters
    take no part.
    """
    labels = jnp.roll(jnp.arange(len(outputs)), 1)
    losses = optax.softmax_cross_entropy_with_integer_labels(
        outputs @ outputs.T, labels
    )
    return losses.mean()


def coupled(setting: Setting) -> Measured:
    width = setting.size(8, 256)
    with float64():
        x, _ = make_items(29, width)
        params = make_params(width)
        call = gradaccum_jax.coupled_value_and_grad(
            outputs_of, contrastive_loss, steps=STEPS
        )
        _, found = call(params, x)
        expected = jax.grad(lambda p: contrastive_loss(p, outputs_of(p, x)))(params)
        zeros = jax.tree.map(jnp.zeros_like, params)
        return within(distance(found, expected, zeros))


def layered(setting: Setting) -> Measured:
    """Apply an update layer by layer, and the usual window's."""
    width = setting.size(8, 128)
    with float64():
        rng = np.random.default_rng(0)
        shapes = ((width, width), (width, 2), (4, width, width))
        first, last, layers = (jnp.asarray(rng.normal(size=s) / 8) for s in shapes)
        params = ((first, last), layers)
        x = jnp.asarray(rng.normal(size=(16, width)))

        def layer(weight: Any, hidden: Any, x: Any) -> Any:
            return hidden + jnp.tanh(hidden @ weight)

        def head_loss(outer: Any, hidden: Any, x: Any) -> Any:
            return jnp.mean((hidden @ outer[1] - 1) ** 2)

        def loss_fn(params: Tree, x: Any) -> Any:
            outer, layers = params
            hidden = x @ outer[0]
            for weight in layers:
                hidden = layer(weight, hidden, x)
            return head_loss(outer, hidden, x)

        tx = gradaccum.wrap(adamw(), steps=None, on_overflow="ignore")
        step = gradaccum_jax.layered_value_and_update(
            lambda outer, x: x @ outer[0], layer, head_loss, tx, steps=STEPS
        )
        _, found, _ = jax.jit(step)(params, step.init(params), x)
        inner = adamw()
        grads = jax.grad(loss_fn)(params, x)
        updates, _ = inner.update(grads, inner.init(params), params)
        expected = optax.apply_updates(params, updates)
        return within(distance(found, expected, params))


def float16_masters(setting: Setting) -> Measured:
    """Make four updates that float16 alone would round away."""
    small = 2.0**-13
    params: Tree = {"w": jnp.ones((8,), jnp.float16)}
    tx = gradaccum.wrap(optax.sgd(small), steps=STEPS, master_weights=True)
    state = tx.init(params)
    step = jax.jit(tx.update)
    for _ in range(4 * STEPS):
        updates, state = step({"w": jnp.ones((8,), jnp.float16)}, state, params)
        params = optax.apply_updates(params, updates)
    found = float(params["w"][0])
    expected = 1 - 4 * small
    passed = bool((params["w"] == expected).all())
    return Measured(passed, f"{found:.7g}", f"{expected:.7g}", bare="1")


# Memory.


def needed(compiled: Any) -> float:
    """Return the MiB that a compiled program needs beside what it is given."""
    memory = compiled.memory_analysis()
    outputs = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return float(memory.temp_size_in_bytes + outputs) / MEBIBYTE


def large_batch_memory(setting: Setting) -> Measured:
    width = setting.size(64, 1024)
    params = jax_mlp.make_params(width)
    x = jnp.ones((setting.size(1024, 65536), width))

    def of(function: Callable[..., Any]) -> float:
        return needed(jax.jit(function).lower(params, x).compile())

    ours = of(gradaccum_jax.value_and_grad(jax_mlp.loss, steps=8))
    at_once = of(jax.value_and_grad(jax_mlp.loss))
    text = mebibytes(ours)
    if hasattr(optax, "microbatch"):
        theirs = of(microbatched(len(x) // 8))
        text += f"; {MICROBATCH} {mebibytes(theirs)}"
    return Measured(
        ours < at_once / 2, text, "half of one call", bare=mebibytes(at_once)
    )


def microbatched(items: int) -> Callable[..., Any]:
    """Return optax's gradient of a large batch in micro-batches of so many items."""
    microbatch: Callable[..., Any] = optax.microbatch(
        jax_mlp.gradient,
        argnums=1,
        microbatch_size=items,
        accumulator=optax.microbatching.AccumulationType.MEAN,
    )
    return microbatch


def transformations() -> dict[str, Any]:
    return {
        MULTISTEPS: optax.MultiSteps(jax_mlp.adamw(), jax_mlp.STEPS),
        OURS: gradaccum.wrap(jax_mlp.adamw(), steps=jax_mlp.STEPS),
    }


def compiled_steps(setting: Setting) -> dict[str, jax_mlp.Compiled]:
    width = setting.size(64, 2048)
    x = jax_mlp.batches(width)[0]
    return {
        name: jax_mlp.compile_step(tx, jax_mlp.make_params(width), x)
        for name, tx in transformations().items()
    }


def step_memory(setting: Setting) -> Measured:
    """Measure what a step needs beside its donated parameters and state, and the
    state.
    """

    def total(compiled: jax_mlp.Compiled) -> float:
        leaves = jax.tree.leaves(compiled.state)
        state = sum(leaf.nbytes for leaf in leaves) / MEBIBYTE
        return float(state + needed(compiled.step))

    found = {name: total(step) for name, step in compiled_steps(setting).items()}
    return Measured(
        found[OURS] <= 1.02 * found[MULTISTEPS],
        mebibytes(found[OURS]),
        f"1.02 of {MULTISTEPS}",
        bare=f"{MULTISTEPS} {mebibytes(found[MULTISTEPS])}",
    )


# Time.


def step_time(setting: Setting) -> Measured:
    width = setting.size(64, 2048)
    windows = {
        name: jax_mlp.window(compiled, jax_mlp.batches(width))
        for name, compiled in compiled_steps(setting).items()
    }
    plan = Plan(rounds=100, least=3, seconds=setting.seconds(0.2))
    usual, ours = measure(windows, MULTISTEPS, plan)
    return timed(usual, ours)


def timed(usual: Timing, ours: Timing) -> Measured:
    return Measured(
        None,
        f"{ours.ratio:.2f} ({ours.ratio_low:.2f} to {ours.ratio_high:.2f})",
        bare=f"{usual.contestant} {usual.median_ms:.2f} ms",
    )


def large_batch_time(setting: Setting) -> Measured:
    width = setting.size(64, 1024)
    params = jax_mlp.make_params(width)
    x = jnp.ones((setting.size(256, 16384), width))
    gradients: dict[str, Any] = {
        MICROBATCH: jax.jit(microbatched(len(x) // 8)),
        OURS: jax.jit(gradaccum_jax.value_and_grad(jax_mlp.loss, steps=8)),
    }
    windows = {
        name: partial(lambda function: jax_mlp.wait(function(params, x)), function)
        for name, function in gradients.items()
    }
    plan = Plan(rounds=100, least=3, seconds=setting.seconds(0.2))
    return timed(*measure(windows, MICROBATCH, plan))


# Transfers.


def transfers(setting: Setting, epoch: bool) -> Measured:
    """Forbid every transfer that a loop does not ask for by name, in either direction;
    with `epoch` only to the host, because ``last`` is a Python bool.
    """
    width = setting.size(64, 1024)
    params = jax_mlp.make_params(width)
    tx = gradaccum.wrap(jax_mlp.adamw(), steps=jax_mlp.STEPS, clip_norm=1.0)
    state = tx.init(params)
    xs = jax_mlp.batches(width)

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(params: Tree, state: Any, x: Any, last: Any = None) -> Any:
        grads = jax_mlp.gradient(params, x)
        given = {} if last is None else {"last": last}
        updates, state = tx.update(grads, state, params, weight=len(x), **given)
        return optax.apply_updates(params, updates), state

    def window(params: Tree, state: Any) -> Any:
        if epoch:
            for x, last in gradaccum_jax.epoch(xs):
                params, state = step(params, state, x, last)
        else:
            for x in xs:
                params, state = step(params, state, x)
        return params, state

    for _ in range(2):  # Compiles, for the first state and for the ones that follow.
        params, state = window(params, state)
    guard = jax.transfer_guard_device_to_host if epoch else jax.transfer_guard
    bound = "none to the host" if epoch else "none"
    try:
        with guard("disallow"):
            params, state = window(params, state)
    except Exception as error:
        return Measured(False, shown(error), bound)
    applied = bool(gradaccum_jax.result(state).applied)
    return Measured(applied, bound, bound)


MICROBATCHING = ("optax.microbatching",)
CHECKS = (
    Check("JAX's device", device, needs_gpu=True),
    Check("wrap, ragged, clipped, a short window", ragged_windows),
    Check("value_and_grad", value_and_grad),
    Check("coupled_value_and_grad", coupled),
    Check("layered_value_and_update", layered),
    Check("float16 with master weights", float16_masters),
    Check("no transfer in the loop", partial(transfers, epoch=False)),
    Check("no transfer to the host, epoch", partial(transfers, epoch=True)),
    Check("memory of value_and_grad, 8 micro-batches", large_batch_memory),
    Check("memory of a step and its state", step_memory),
    Check("time of a window, AdamW", step_time),
    Check("time of value_and_grad", large_batch_time, packages=MICROBATCHING),
)
