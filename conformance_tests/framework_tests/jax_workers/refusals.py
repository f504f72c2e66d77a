"""Refusals while JAX traces: nothing has run, and what was accumulated is still
there.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.ad_checkpoint import checkpoint_name

import gradaccum
import gradaccum_jax
from conformance_tests.framework_tests.jax_workers.common import MESH, P, over
from conformance_tests.framework_tests.refusing import refused
from gradaccum_jax.sharding import vary
from gradaccum_jax.workers.group import mapped

TX = gradaccum.wrap(optax.sgd(1.0), steps=2, axis_name="data")
WHOLE = gradaccum.wrap(optax.sgd(1.0), steps=None, axis_name="data")
W, X = jnp.ones(3), jnp.arange(8.0)
SPECS = (P(), P("data"))


def loss_fn(w: Any, x: Any) -> Any:
    return (w.sum() * x).mean()


def inside(function: Any, *args: Any, specs: Any = SPECS, **options: Any) -> Any:
    """`function` in a `jax.shard_map` of the user's own."""
    return jax.jit(
        jax.shard_map(function, mesh=MESH, in_specs=specs, out_specs=P(), **options)
    )(*(args or (W, X)))


def step_of(tx: Any) -> Any:
    def step(w: Any, state: Any, x: Any) -> Any:
        updates, state = tx.update(jax.grad(loss_fn)(w, x), state, w)
        return w + updates, state

    return step


def reduced_gradients() -> None:
    """In a `jax.shard_map` of the user's own: by JAX for replicated parameters, and by
    the user. Copies of the parameters are right.
    """

    def by_jax(w: Any, x: Any) -> Any:
        return TX.update(jax.grad(loss_fn)(w, x), TX.init(w), w)[0]

    def by_hand(w: Any, x: Any) -> Any:
        return TX.update(
            jax.lax.pmean(jax.grad(loss_fn)(vary(w, frozenset(["data"])), x), "data"),
            TX.init(w),
            w,
        )[0]

    def own(w: Any, x: Any) -> Any:
        state, copy = TX.init(w), vary(w, frozenset(["data"]))
        for _ in range(2):
            updates, state = TX.update(jax.grad(loss_fn)(copy, x), state, w)
        return updates

    for function in (by_jax, by_hand):
        with refused(
            gradaccum.UsageError,
            "grads: expected",
            "reduced over ['data']",
            "data_parallel",
        ):
            inside(function)
    np.testing.assert_array_equal(inside(own), np.full(3, -3.5))


def unchecked_replication() -> None:
    with refused(gradaccum.UsageError, "axis_name", "check_vma=False"):
        inside(lambda w, x: TX.init(w).loss_scale, check_vma=False)
    with refused(gradaccum.UsageError, "axis_name", "vmap"):
        jax.vmap(TX.init, axis_name="data")(jnp.ones((4, 3)))


def outside() -> None:
    """Without `jax.shard_map`, each of the calls says how they are run."""
    state = over(TX.init)(W)
    fix = "gradaccum_jax.data_parallel(step, mesh, axis_name)"
    for call in (
        lambda: TX.init(W),
        lambda: TX.update(W, state, W),
        lambda: jax.jit(TX.update)(W, state, W),
        lambda: gradaccum_jax.flush(TX, state, W),
        lambda: gradaccum_jax.discard(TX, state),
    ):
        with refused(
            gradaccum.UsageError,
            "axis_name: expected an axis of the jax.shard_map around it",
            fix,
        ):
            call()
    with refused(gradaccum.UsageError, "axis_name", "'model'"):
        over(gradaccum.wrap(optax.sgd(1.0), steps=2, axis_name="model").init)(W)


def bad_names() -> None:
    for name, kind in (
        (3, "Type"),
        (["data"], "Type"),
        ((), "Value"),
        ("", "Value"),
        (("data", "data"), "Value"),
        (("data", 1), "Type"),
    ):
        with refused(
            getattr(gradaccum, f"Argument{kind}Error"),
            "axis_name: expected the name of a mesh axis",
        ):
            gradaccum.wrap(optax.sgd(1.0), steps=2, axis_name=name)


def bad_arguments() -> None:
    for function, mesh, axis, kind, name in (
        (3, MESH, "data", "Type", "step"),
        (TX.init, "data", "data", "Type", "mesh"),
        (TX.init, MESH, "model", "Value", "axis_name"),
        (TX.init, MESH, None, "Type", "axis_name"),
        (TX.init, MESH, ("data", "model"), "Value", "axis_name"),
    ):
        with refused(getattr(gradaccum, f"Argument{kind}Error"), f"{name}: expected"):
            gradaccum_jax.data_parallel(function, mesh, axis)  # type: ignore[arg-type]


def bad_batches() -> None:
    """A batch that four devices cannot divide; the state can be used again."""
    step, state = over(step_of(TX)), over(TX.init)(W)
    for batch in (X[:7], X[0]):
        with refused(
            gradaccum.ArgumentValueError,
            "batch[0]: expected",
            "4 devices",
            str(batch.shape),
        ):
            step(W, state, batch)
    step(W, step(W, state, X)[1], X)


def other_results() -> None:
    """The step must return (params, state, ...), of an optimizer with this axis."""
    state = over(TX.init)(W)
    for step in (
        lambda w, state, x: state,
        lambda w, state, x: (state, w),
        lambda w, state, x: {"params": w, "state": state},
        lambda w, state, x: (w[:2], state),
    ):
        with refused(
            gradaccum.UsageError,
            "what step returned: expected a tuple (params, state, *rest)",
        ):
            over(step)(W, state, X)
    with refused(gradaccum.UsageError, "what step(params) returned"):
        over(lambda w: w)(W)
    for bare in (optax.sgd(0.1), optax.adam(0.1)):
        with refused(
            gradaccum.UsageError,
            "state: expected the arguments (params, state, *batch)",
        ):
            over(step_of(bare))(W, bare.init(W), X)


def window_of_one_device() -> None:
    """An optimizer without ``axis_name``, its state, and a state of other devices."""
    alone = gradaccum.wrap(optax.sgd(1.0), steps=2)
    with refused(gradaccum.UsageError, "state", "axis_name='data'"):
        over(alone.init)(W)
    with refused(
        gradaccum.UsageError,
        "state",
        "no devices share",
        "tx.init(params), of a tx wrapped with axis_name= and mesh=",
    ):
        over(step_of(TX))(W, alone.init(W), X)
    with refused(gradaccum.UsageError, "state", "axis_name='data'"):
        over(step_of(alone))(W, over(TX.init)(W), X)
    half = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("data",))
    with refused(
        gradaccum.UsageError,
        "state",
        "2 devices share",
        "gradaccum_jax.redistributed(state, 2)",
    ):
        over(step_of(TX), half)(W, jax.device_get(over(TX.init)(W)), X)


def state_of_all_devices() -> None:
    """As it comes out of `data_parallel`, into a `jax.shard_map` of the user's own, or
    to an optimizer of one device.
    """
    state = over(TX.init)(W)
    by_field = mapped(
        state, own=lambda _: P("data"), shared=lambda _: P(), other=lambda _: P()
    )
    words = "state: expected the state of one device; got that of all"
    step = lambda w, state, x: step_of(TX)(w, state, x)[0]  # noqa: E731
    for specs in (P(), by_field):
        with refused(gradaccum.UsageError, words, "gradaccum_jax.data_parallel"):
            inside(step, W, state, X, specs=(P(), specs, P("data")))
    flush = lambda w, state: gradaccum_jax.flush(TX, state, w)[0]  # noqa: E731
    with refused(gradaccum.UsageError, words):
        inside(flush, W, state, specs=(P(), by_field))
    alone = gradaccum.wrap(optax.sgd(1.0), steps=2)
    with refused(gradaccum.UsageError, words):
        alone.update(W, state, W)


def differing_parameters() -> None:
    """Parameters of which each device has a part, or its own; and what the inner
    optimizer reads, of which each device has its own.
    """
    with refused(
        gradaccum.UsageError, "params: expected a value that is the same on all devices"
    ):
        inside(
            lambda w, x: TX.init(w).loss_scale,
            jnp.ones(4),
            X,
            specs=(P("data"), P("data")),
        )

    def with_value(w: Any, state: Any, x: Any) -> Any:
        updates, state = TX.update(jax.grad(loss_fn)(w, x), state, w, hint=x.mean())
        return w + updates, state

    with refused(
        gradaccum.UsageError,
        "['hint']: expected a value that is the same on all devices",
        "pmean",
    ):
        over(with_value)(W, over(TX.init)(W), X)


def parameters_of_each_device() -> None:
    """In `data_parallel` types cannot tell: parameters, an extra argument or the inner
    optimizer made of a device's own batch.
    """
    own, calm = lambda w, x: w + x.mean(), lambda w, x: 1.0 * w
    hinted = optax.GradientTransformationExtraArgs(
        optax.init_empty_state, lambda u, s, p=None, *, hint=1.0, **_: (u * hint, s)
    )

    def updating(seen: Any, hint: Any = None, rate: Any = None) -> Any:
        def step(w: Any, state: Any, x: Any) -> Any:
            tx = gradaccum.wrap(
                optax.sgd(rate(w, x)) if rate else hinted, steps=1, axis_name="data"
            )
            extra = {"hint": hint(w, x)} if hint else {}
            updates, state = tx.update(
                jax.grad(loss_fn)(w, x), state, seen(w, x), **extra
            )
            return w + updates, state

        return step

    def flushing(seen: Any) -> Any:
        return lambda w, state, x: (
            w + (made := gradaccum_jax.flush(WHOLE, state, seen(w, x)))[0],
            made[1],
        )

    def calling(seen: Any) -> Any:
        def step(w: Any, state: Any, x: Any) -> Any:
            _, updates, state = gradaccum_jax.value_and_update(loss_fn, WHOLE, steps=2)(
                seen(w, x), state, x
            )
            return w + updates, state

        return step

    norm = lambda w, x: jnp.linalg.norm(w)  # noqa: E731
    first = gradaccum.wrap(hinted, steps=1, axis_name="data")
    for made, tx, name in (
        (updating(own), first, "params: expected"),
        (updating(calm, own), first, "['hint']: expected"),
        (
            updating(calm, lambda w, x: jnp.where(x[0] > 2.5, 1.0, 2.0)),
            first,
            "['hint']: expected",
        ),
        (
            updating(calm, rate=lambda w, x: x.mean()),
            gradaccum.wrap(optax.sgd(1.0), steps=1, axis_name="data"),
            "what the inner optimizer made",
        ),
        (flushing(own), WHOLE, "params: expected"),
        (calling(own), WHOLE, "params: expected"),
    ):
        with refused(
            gradaccum.UsageError, name, "made of a device's own batch", "pmean"
        ):
            over(made)(W, over(tx.init)(W), X)
    for made, tx in (
        (updating(calm, norm), first),
        (flushing(calm), WHOLE),
        (calling(calm), WHOLE),
    ):
        over(made)(W, over(tx.init)(W), X)
    with refused(
        gradaccum.UsageError, "params: expected", "made of a device's own batch"
    ):
        over(
            lambda w: gradaccum.wrap(optax.adamw(1.0), steps=1, axis_name="data").init(
                w + jax.lax.axis_index("data")
            )
        )(W)


def optimizer_of_each_device() -> None:
    """In a `jax.shard_map` of the user's own: an inner optimizer that closes over a
    device's own value.
    """

    def step(w: Any, x: Any) -> Any:
        tx = gradaccum.wrap(optax.sgd(x.mean()), steps=1, axis_name="data")
        return tx.update(
            jax.grad(loss_fn)(vary(w, frozenset(["data"])), x), tx.init(w), w
        )[0]

    with refused(
        gradaccum.UsageError,
        "what the inner optimizer made",
        "may differ along ['data']",
    ):
        inside(step)


def losses() -> None:
    """Each device tells its own loss where they share a window; where they have one
    state, it is averaged as the gradients are.
    """
    alone = gradaccum.wrap(optax.sgd(1.0), steps=2)

    def step(tx: Any, average: bool, value: Any) -> Any:
        def run(w: Any, x: Any) -> Any:
            own = jax.grad(loss_fn)(vary(w, frozenset(["data"])), x)
            grads = jax.lax.pmean(own, "data") if average else own
            return tx.update(grads, tx.init(w), w, value=value(x))[0]

        return run

    with refused(
        gradaccum.UsageError,
        "value: expected the loss of this device's own micro-batch",
        "pmean",
    ):
        inside(step(TX, False, lambda x: jax.lax.pmean(x.mean(), "data")))
    with refused(
        gradaccum.UsageError,
        "value: expected one loss on all devices that have one state",
        "pmean",
    ):
        inside(step(alone, True, lambda x: x.mean()))
    for tx, average, value in (
        (TX, False, lambda x: x.mean()),
        (alone, True, lambda x: jax.lax.pmean(x.mean(), "data")),
    ):
        np.testing.assert_array_equal(inside(step(tx, average, value)), np.zeros(3))


def windows_by_weight() -> None:
    with refused(gradaccum.UsageError, "steps", "until_weight(8)", "flush()"):
        gradaccum.wrap(
            optax.sgd(1.0), steps=gradaccum.until_weight(8), axis_name="data"
        )


def optimizer_that_reduces() -> None:
    """A device whose window is skipped would leave the others waiting."""
    inner = optax.GradientTransformation(
        optax.init_empty_state, lambda u, s, p=None: (jax.lax.pmean(u, "data"), s)
    )
    tx = gradaccum.wrap(inner, steps=2)
    with refused(gradaccum.UsageError, "optimizer", "reduces over ['data']"):
        inside(lambda w, x: tx.update(vary(w, frozenset(["data"])), tx.init(w), w)[0])


def parameters_by_hand() -> None:
    """Parameters that are changed by a device's own batch or place, and not by the
    reduced gradient, at any depth of the step.
    """

    def step(change: Any) -> Any:
        def run(tree: Any, state: Any, x: Any) -> Any:
            grads = jax.grad(lambda tree: loss_fn(tree["w"], x) + 0 * tree["mean"])(
                tree
            )
            updates, state = TX.update(grads, state, tree)
            return change(optax.apply_updates(tree, updates), x), state

        return run

    def with_mean(tree: Any, mean: Any) -> Any:
        return {**tree, "mean": 0.9 * tree["mean"] + mean}

    tree = {"w": W, "mean": jnp.zeros(())}
    wrong = {
        "['mean']": lambda tree, x: with_mean(tree, x.mean()),
        "[0]['mean']": lambda tree, x: jax.jit(with_mean)(tree, x.mean()),
        "step returned, [0]": lambda tree, x: with_mean(
            tree, jax.lax.axis_index("data").astype(float)
        ),
    }
    for name, change in wrong.items():
        with refused(
            gradaccum.UsageError, name, "made of a device's own batch", "pmean"
        ):
            over(step(change))(tree, over(TX.init)(tree), X)
    right = over(
        step(lambda tree, x: jax.jit(with_mean)(tree, jax.lax.pmean(x.mean(), "data")))
    )
    after, state = right(tree, over(TX.init)(tree), X)
    assert right(after, state, X)[0]["mean"] == 0.9 * 3.5 + 3.5
    within = over(
        jax.jit(
            jax.checkpoint(
                step(
                    lambda tree, x: jax.lax.cond(
                        tree["mean"] > 9, with_mean, with_mean, tree, 1.0
                    )
                )
            )
        )
    )
    assert within(tree, over(TX.init)(tree), X)[0]["mean"] == 1


def beside_the_state() -> None:
    """A number kept beside the state, such as PPO's KL coefficient, wherever JAX's
    types tell that each device has its own.
    """
    lax, data = jax.lax, frozenset(["data"])
    wrong = {
        "where": lambda beta, x: jnp.where(x[0] > 2.5, 2 * beta, beta / 2),
        "scan": lambda beta, x: lax.scan(
            lambda b, row: (b + row, None), vary(beta, data), x
        )[0],
        "all_to_all": lambda beta, x: lax.all_to_all(jnp.arange(4.0), "data", 0, 0)[0],
        "psum_scatter": lambda beta, x: lax.psum_scatter(jnp.arange(4.0), "data"),
    }
    right = {
        "psum": lambda beta, x: lax.cond(
            lax.psum(x[0], "data") > 9, lambda b: 2 * b, lambda b: b / 2, beta
        ),
        "pmax": lambda beta, x: lax.fori_loop(
            0, 2, lambda _, b: b + lax.pmax(x[1], "data"), beta
        ),
        "named": lambda beta, x: checkpoint_name(beta, "data"),
        "reduced": lambda beta, x: lax.pmin(vary(x[1], data), "data"),
    }

    def step(change: Any) -> Any:
        def run(w: Any, state: Any, x: Any) -> Any:
            updates, tx_state = TX.update(jax.grad(loss_fn)(w, x), state[0], w)
            return w + updates, (tx_state, change(state[1], x))

        return run

    state = (over(TX.init)(W), jnp.ones(()))
    for change in wrong.values():
        with refused(
            gradaccum.UsageError,
            "what step returned, [1][1]: expected",
            "made of a device's own batch",
            "pmean",
        ):
            over(step(change))(W, state, X)
    for (name, change), expected in zip(
        right.items(), (2.0, 15.0, 1.0, 1.0), strict=True
    ):
        beta = over(step(change))(W, state, X)[1][1]
        assert {float(np.asarray(shard.data)) for shard in beta.addressable_shards} == {
            expected
        }, name


def own_derivative() -> None:
    """A step whose loss has a derivative of its own cannot be traced with parameters
    that are the same on all devices, and is right.
    """

    @jax.custom_vjp
    def scaled(w: Any, x: Any) -> Any:
        return w.sum() * x.mean()

    scaled.defvjp(
        lambda w, x: (scaled(w, x), (w, x)),
        lambda kept, g: (g * kept[1].mean() * jnp.ones(3), jnp.zeros_like(kept[1])),
    )

    def step(w: Any, state: Any, x: Any) -> Any:
        updates, state = TX.update(jax.grad(scaled)(w, x), state, w)
        return w + updates, state

    carried = (W, over(TX.init)(W))
    for _ in range(2):
        carried = over(step)(*carried, X)
    np.testing.assert_array_equal(carried[0], np.full(3, 1 - 3.5))


def differing_state() -> None:
    """A window whose end would differ from device to device: its devices would wait for
    one another for ever.
    """

    def step(w: Any, x: Any) -> Any:
        state = TX.init(w)
        state = state._replace(
            micro_step=state.micro_step + (x[0] > 2).astype(jnp.int32)
        )
        return TX.update(x[0] * vary(w, frozenset(["data"])), state, w)[0]

    with refused(
        gradaccum.UsageError,
        "state['micro_step']: expected a value that is the same on all devices",
    ):
        inside(step)


def reducing_optimizer() -> None:
    def update(gradients: Any, state: Any, params: Any = None) -> Any:
        return jax.lax.psum(gradients, "data"), state

    tx = gradaccum.wrap(
        optax.GradientTransformation(lambda params: optax.EmptyState(), update),
        steps=2,
        axis_name="data",
    )
    with refused(
        gradaccum.UsageError,
        "optimizer: expected one that does not reduce",
        "over ['data']",
    ):
        over(step_of(tx))(W, over(tx.init)(W), X)
