"""JAX: a window over two devices, which the CPU stands for: its time, its collectives
and their bytes, as it grows longer.

All contestants run a whole window in one program, a scan over its micro-batches.
`optax.MultiSteps` as its users write it averages every micro-batch's gradient. The loop
by hand adds up and reduces once; it measures no norm and carries no weight, and its
steps are fixed. With the promises of gradaccum it does: a gradient that is not finite
applies no update, so that none may begin before the norm of all is known. An optimizer
that takes one micro-batch per call keeps each device's sum in its state, where it is
read and written once more.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_force_host_platform_device_count=2 --xla_cpu_multi_thread_eigen=false",
)

import jax
import jax.numpy as jnp
import numpy as np
import optax

import gradaccum
import gradaccum_jax
from benchmarks.case import Case

BASELINE = "hand-written: a scan, then one psum"
PROMISING, STREAMING = (
    "hand-written, with the same promises",
    "hand-written, with the same promises, the sum in the state",
)
DEVICES, ITEMS, WIDTH, LAYERS, QUICK_WIDTH = 2, 32, 512, 4, 64
LENGTHS = (1, 4, 16)
AXIS = "data"
P: Any = jax.sharding.PartitionSpec
BYTES = {"f32": 4, "s32": 4, "f64": 8, "pred": 1}


class Contestant(NamedTuple):
    """One way to make a window."""

    window: Callable[..., Any]
    """``window(params, state, x)``: x has the shape (devices, steps, items, width);
    returns (params, state).
    """
    params: Any
    state: Any


def cases(quick: bool) -> Iterator[Case]:
    if jax.device_count() < DEVICES:
        raise RuntimeError(
            "JAX had started before the number of the CPU's devices was set"
        )
    width = QUICK_WIDTH if quick else WIDTH
    for steps in LENGTHS[:2] if quick else LENGTHS:
        x = jax.random.normal(jax.random.key(1), (DEVICES, steps, ITEMS, width))
        made = {label: make(steps, model(width)) for label, make in CONTESTANTS.items()}
        x = jax.device_put(x, jax.sharding.NamedSharding(mesh(), P(AXIS)))
        runs = {label: _run(contestant, x) for label, contestant in made.items()}
        yield Case(
            f"windows of {steps}",
            BASELINE,
            {a: run for a, (run, _) in runs.items()},
            {a: c for a, (_, c) in runs.items()},
            x=steps,
        )


def mesh() -> jax.sharding.Mesh:
    return jax.sharding.Mesh(np.array(jax.devices()[:DEVICES]), (AXIS,))


def model(width: int) -> list[Any]:
    keys = jax.random.split(jax.random.key(0), LAYERS)
    made = [jax.random.normal(key, (width, width)) / width**0.5 for key in keys]
    return list(jax.device_put(made, jax.sharding.NamedSharding(mesh(), P())))


def gradient(params: Any, x: Any) -> Any:
    def loss(params: Any) -> Any:
        y = x
        for layer in params:
            y = jnp.tanh(y @ layer)
        return jnp.square(y).mean()

    return jax.grad(loss)(params)


def shared(steps: int, params: Any) -> Contestant:
    """gradaccum, with the step of one device under `data_parallel`."""
    tx = gradaccum.wrap(_adamw(), steps=steps, axis_name=AXIS)
    lift = partial(gradaccum_jax.data_parallel, mesh=mesh(), axis_name=AXIS)
    return Contestant(lift(_scanned(tx)), params, lift(tx.init)(params))


def reduced_each(steps: int, params: Any) -> Contestant:
    """`optax.MultiSteps`; every micro-batch's gradient is averaged over the devices."""
    tx = optax.MultiSteps(_adamw(), steps)
    window = _scanned(tx, _mean)
    lifted = jax.shard_map(
        window,
        mesh=mesh(),
        in_specs=(P(), P(), P(AXIS)),
        out_specs=P(),
        check_vma=False,
    )
    return Contestant(lifted, params, tx.init(params))


def by_hand(steps: int, params: Any) -> Contestant:
    tx = _adamw()

    def window(params: Any, state: Any, x: Any) -> Any:
        start = jax.tree.map(jnp.zeros_like, params)
        total = jax.lax.scan(
            lambda total, x: (jax.tree.map(jnp.add, total, gradient(params, x)), None),
            start,
            x[0],
        )[0]
        updates, state = tx.update(
            jax.tree.map(lambda leaf: leaf / steps, _mean(total)), state, params
        )
        return optax.apply_updates(params, updates), state

    lifted = jax.shard_map(
        window,
        mesh=mesh(),
        in_specs=(P(), P(), P(AXIS)),
        out_specs=P(),
        check_vma=False,
    )
    return Contestant(lifted, params, tx.init(params))


def by_hand_promising(steps: int, params: Any) -> Contestant:
    """The loop by hand with a weight, the norm, and no update by a gradient that is not
    finite.
    """
    tx = _adamw()

    def window(params: Any, state: Any, x: Any) -> Any:
        def add(carry: Any, x: Any) -> Any:
            return (
                jax.tree.map(jnp.add, carry[0], gradient(params, x)),
                carry[1] + 1,
            ), None

        return _promised(
            tx,
            (params, state),
            jax.lax.scan(
                add,
                (jax.tree.map(jnp.zeros_like, params), jnp.zeros((), jnp.float32)),
                x[0],
            )[0],
        )

    lifted = jax.shard_map(
        window,
        mesh=mesh(),
        in_specs=(P(), P(), P(AXIS)),
        out_specs=P(),
        check_vma=False,
    )
    return Contestant(lifted, params, tx.init(params))


def by_hand_streaming(steps: int, params: Any) -> Contestant:
    """The same, as an optimizer that takes one micro-batch must: the sum and the weight
    outlive the call.
    """
    tx = _adamw()

    def take(carry: Any, x: Any) -> Any:
        held, (total, weight) = carry
        total = jax.tree.map(
            lambda leaf, new: jnp.where(weight == 0, 0, leaf) + new,
            total,
            gradient(held[0], x),
        )
        weight += 1
        held = jax.lax.cond(
            weight == steps,
            lambda held: _promised(tx, held, (total, weight)),
            lambda held: held,
            held,
        )
        return (held, (total, jnp.where(weight == steps, 0, weight))), None

    def window(params: Any, state: Any, x: Any) -> Any:
        sums = jax.tree.map(lambda leaf: leaf[0], state[1])
        (params, state), sums = jax.lax.scan(take, ((params, state[0]), sums), x[0])[0]
        return params, (state, jax.tree.map(lambda leaf: leaf[None], sums))

    specs = (P(), (P(), P(AXIS)))
    sums = jax.tree.map(
        lambda leaf: jnp.zeros((DEVICES, *leaf.shape), leaf.dtype),
        (params, jnp.zeros((), jnp.float32)),
    )
    sums = jax.device_put(sums, jax.sharding.NamedSharding(mesh(), P(AXIS)))
    return Contestant(
        jax.shard_map(
            window,
            mesh=mesh(),
            in_specs=(*specs, P(AXIS)),
            out_specs=specs,
            check_vma=False,
        ),
        params,
        (tx.init(params), sums),
    )


def _promised(tx: Any, held: Any, sums: Any) -> Any:
    """Apply the update of the window with `sums`, if its gradient is finite:
    ``(params, state)`` after it.
    """
    total, weight = jax.lax.psum(sums, AXIS)  # type: ignore[no-untyped-call]

    def update(held: Any) -> Any:
        updates, state = tx.update(
            jax.tree.map(lambda leaf: leaf / weight, total), held[1], held[0]
        )
        return optax.apply_updates(held[0], updates), state

    return jax.lax.cond(
        jnp.isfinite(optax.global_norm(total) / weight), update, lambda held: held, held
    )


CONTESTANTS = {
    BASELINE: by_hand,
    PROMISING: by_hand_promising,
    STREAMING: by_hand_streaming,
    "gradaccum": shared,
    "optax.MultiSteps": reduced_each,
}


def _scanned(
    tx: Any, reduce: Callable[[Any], Any] = lambda grads: grads
) -> Callable[..., Any]:
    def window(params: Any, state: Any, x: Any) -> Any:
        def body(carry: Any, x: Any) -> Any:
            updates, state = tx.update(
                reduce(gradient(carry[0], x)), carry[1], carry[0]
            )
            return (optax.apply_updates(carry[0], updates), state), None

        return jax.lax.scan(body, (params, state), x[0])[0]

    return window


def _run(
    contestant: Contestant, x: Any
) -> tuple[Callable[[], object], dict[str, float]]:
    """One window, compiled and donated; and its collectives."""
    start = (contestant.params, contestant.state)
    compiled = (
        jax.jit(contestant.window, donate_argnums=(0, 1)).lower(*start, x).compile()
    )
    carried = list(
        jax.device_put(jax.tree.map(jnp.copy, start), compiled.input_shardings[0][:2])
    )

    def run() -> object:
        carried[:] = compiled(*carried, x)
        return jax.block_until_ready(carried)  # type: ignore[no-untyped-call]

    count, size = reductions(str(compiled.as_text()), x.shape[1])
    return run, {"all-reduces per window": count, "bytes reduced per window": size}


def reductions(hlo: str, steps: int) -> tuple[float, float]:
    """All-reduces of one window, and their bytes: those in the body of the scan run in
    every micro-batch, in its branches once.
    """
    parts: dict[str, str] = dict(
        re.findall(
            r"^(?:ENTRY )?%?([\w.\-]+) \(.*?\{\n(.*?)^\}",
            hlo,
            flags=re.MULTILINE | re.DOTALL,
        )
    )
    scans = {
        body
        for text in parts.values()
        for body, line in _loops(text)
        if f'"n":"{steps}"' in line
    }
    count = size = 0
    for name, text in parts.items():
        for kinds in re.findall(r"= (.*?) all-reduce(?:-start)?\(", text):
            times = steps if name in scans else 1
            count += times
            size += times * sum(
                BYTES[kind] * int(np.prod([int(n) for n in shape.split(",") if n]))
                for kind, shape in _arrays(kinds)
            )
    return count, size


def _loops(text: str) -> list[tuple[str, str]]:
    return [
        (found[1], line)
        for line in text.splitlines()
        if (found := re.search(r" while\(.*body=%?([\w.\-]+)", line))
    ]


def _arrays(kinds: str) -> list[tuple[str, str]]:
    return re.findall(r"(\w+)\[([\d,]*)\]", kinds)


def _mean(tree: Any) -> Any:
    reduce: Any = jax.lax.pmean
    return reduce(tree, AXIS)


def _adamw() -> Any:
    return optax.adamw(1e-4)
