"""A program on four devices: a large batch that is spread over them is cut by each and
reduced once per call.

    python jax_large_batch_devices.py

The tests run it in a process of its own, since JAX fixes the number of devices when it
starts.
"""

from __future__ import annotations

import os
import re

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
os.environ["JAX_PLATFORMS"] = "cpu"

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import gradaccum
import gradaccum_jax
from conformance_tests.framework_tests.jax_large_batch import (
    close,
    data,
    errors,
    mean_loss,
    model,
    numbers,
)
from conformance_tests.framework_tests.jax_versions import on_mesh, shard_map
from conformance_tests.framework_tests.refusing import refused

jax.config.update("jax_enable_x64", True)
ITEMS, DEVICES, TENSORS = 24, 4, 3
WHOLE, SPREAD = PartitionSpec(), PartitionSpec("data")
MESH = jax.make_mesh((DEVICES,), ("data",), axis_types=(AxisType.Auto,))
ALL_IN_ONE = jax.__version_info__ >= (0, 10)
"""XLA for the CPU makes one collective of many from JAX 0.10 on; before, one for each
tensor and one for the loss.
"""


def spread(*arrays: Any) -> list[Any]:
    return [jax.device_put(array, NamedSharding(MESH, SPREAD)) for array in arrays]


def collectives(compiled: Any) -> list[str]:
    return re.findall(
        r" (all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute)(?:-start)?\(",
        compiled.as_text(),
    )


def inside(function: Any, batch: int = 2, out_specs: Any = WHOLE) -> Any:
    """`function` of replicated parameters and a spread batch, on each device."""
    return jax.jit(
        shard_map(
            function,
            mesh=MESH,
            in_specs=(WHOLE, *[SPREAD] * batch),
            out_specs=out_specs,
        )
    )


def one_reduction_per_call() -> None:
    x, y = data(ITEMS)
    for steps in (1, 2, 6, 4):  # the last one is ragged
        compiled = (
            inside(
                gradaccum_jax.value_and_grad(mean_loss, steps=steps, axis_name="data")
            )
            .lower(model(), *spread(x, y))
            .compile()
        )
        assert collectives(compiled) == ["all-reduce"] * (
            1 if ALL_IN_ONE else TENSORS + 1
        ), collectives(compiled)
        close(
            compiled(model(), *spread(x, y)),
            jax.value_and_grad(mean_loss)(model(), x, y),
        )


def in_parts_of_a_program() -> None:
    """Inside `jax.shard_map` without the axis: what `jax.value_and_grad` gives
    there.
    """
    x, y = data(ITEMS)

    def with_(value_and_grad: Any) -> Any:
        def local(params: Any, x: Any, y: Any) -> Any:
            loss, gradient = value_and_grad(params, x, y)
            return jax.lax.pmean(loss, "data"), gradient

        return inside(local)

    mine = with_(gradaccum_jax.value_and_grad(mean_loss, steps=3))
    close(mine(model(), x, y), with_(jax.value_and_grad(mean_loss))(model(), x, y))
    assert collectives(mine.lower(model(), x, y).compile()) == ["all-reduce"] * (
        1 if ALL_IN_ONE else TENSORS + 1
    )


def explicit_mesh() -> None:
    """The types of the batch say how it is sharded."""
    mesh = jax.make_mesh((DEVICES,), ("data",), axis_types=(AxisType.Explicit,))
    x, _ = data(ITEMS)
    with on_mesh(mesh):
        given = jax.device_put(x, NamedSharding(mesh, SPREAD))
        whole = jax.device_put(
            np.ones((x.shape[1], 4), x.dtype), NamedSharding(mesh, WHOLE)
        )
        call = gradaccum_jax.coupled_value_and_grad(
            lambda w, x: x @ w, lambda w, z: (z**2).mean(), steps=2
        )
        close(
            call(whole, given),
            jax.value_and_grad(lambda w: ((x @ w) ** 2).mean())(np.asarray(whole)),
        )
        with refused(
            gradaccum.UsageError,
            "batch: expected rows that are whole on each device",
            "shard_map",
            "AxisType.Auto",
        ):
            gradaccum_jax.value_and_grad(
                lambda w, x: ((x @ w).mean(), x),
                has_aux=True,
                aux="concatenate",
                micro_batch_weight=12,
                weight=np.ones(ITEMS),
            )(whole, given)


def derivative_of_the_loss() -> None:
    """The loss has a derivative, and the aux too, beside a weight that has none."""
    x, y = data(ITEMS)
    tokens = np.arange(ITEMS) + 1.0

    def loss(params: Any, x: Any, y: Any, tokens: Any) -> Any:
        return jnp.sum(errors(params, x, y) * tokens) / jnp.sum(tokens), jnp.sum(
            errors(params, x, y)
        )

    options: Any = {
        "has_aux": True,
        "aux": "sum",
        "weight": lambda x, y, tokens: tokens.sum(),
    }
    call = inside(
        gradaccum_jax.value_and_grad(loss, steps=3, axis_name="data", **options), 3
    )
    for wrapped in (lambda f: f, jax.jit):
        for part in (0, 1):
            made = jax.grad(
                wrapped(lambda params, part=part: call(params, x, y, tokens)[0][part])
            )(model())
            close(
                made,
                jax.grad(lambda params, part=part: loss(params, x, y, tokens)[part])(
                    model()
                ),
            )


def wide_loss(w: Any, x: Any, y: Any) -> Any:
    return jnp.mean((jnp.tanh(x @ w).sum(1) - y) ** 2)


def wide_data() -> tuple[Any, Any, Any]:
    """Parameters with a row for each device, and a batch for them."""
    x, y = data(ITEMS)
    return jnp.asarray(numbers(DEVICES, 3)), np.tile(x, (1, DEVICES))[:, :DEVICES], y


def without_an_axis() -> None:
    """Parameters and batch are sharded, and the call is told no axis: XLA partitions
    it, or the user gathers the parameters.
    """
    w, x, y = wide_data()
    wanted = jax.value_and_grad(wide_loss)(w, x, y)
    given = spread(w, x, y)
    call = gradaccum_jax.value_and_grad(wide_loss, steps=3)
    shardings = NamedSharding(MESH, WHOLE), NamedSharding(MESH, SPREAD)
    alone = jax.jit(call, out_shardings=shardings).lower(*given).compile()
    close(alone(*given), wanted)
    loop = re.search(r"= (\(.*\)) while\(", alone.as_text())
    assert loop is not None
    assert "f64[1,3]" in loop[1], "each device has its part of the sum"

    def gathering(w: Any, x: Any, y: Any) -> Any:
        whole = lambda w, x, y: wide_loss(  # noqa: E731
            jax.lax.all_gather(w, "data", tiled=True), x, y
        )
        value, gradient = gradaccum_jax.value_and_grad(whole, steps=3)(w, x, y)
        return jax.lax.pmean(value, "data"), gradient / DEVICES

    close(
        jax.jit(
            shard_map(gathering, mesh=MESH, in_specs=SPREAD, out_specs=(WHOLE, SPREAD))
        )(*given),
        wanted,
    )


def weights_and_aux() -> None:
    """Tokens differ between devices; extremes, sums and rows are those of all items,
    along another axis too.
    """
    x, y = data(ITEMS)
    tokens = np.arange(ITEMS) % 7

    def loss(params: Any, x: Any, y: Any, tokens: Any) -> Any:
        found = errors(params, x.T, y)
        aux = {
            "max": y.max(),
            "mean": jnp.sum(y * tokens) / tokens.sum(),
            "sum": tokens.sum(),
            "rows": found,
            "weighted": jnp.sum(y * tokens) / tokens.sum(),
        }
        return jnp.sum(found * tokens) / jnp.sum(tokens), aux

    kinds = {
        "max": "max",
        "mean": "mean",
        "sum": "sum",
        "rows": "concatenate",
        "weighted": "weighted_mean",
    }
    wanted = jax.value_and_grad(loss, has_aux=True)(model(), x.T, y, tokens)
    specs = (WHOLE, PartitionSpec(None, "data"), SPREAD, SPREAD)
    out_specs = (
        (
            WHOLE,
            {
                name: SPREAD if kind == "concatenate" else WHOLE
                for name, kind in kinds.items()
            },
        ),
        WHOLE,
    )
    options: Any = {
        "has_aux": True,
        "aux": kinds,
        "axes": (1, 0, 0),
        "weight": lambda x, y, tokens: tokens.sum(),
    }
    call = gradaccum_jax.value_and_grad(
        loss, micro_batch_size=4, axis_name="data", **options
    )
    close(
        jax.jit(shard_map(call, mesh=MESH, in_specs=specs, out_specs=out_specs))(
            model(), x.T, y, tokens
        ),
        wanted,
    )


def keys_differ_between_devices() -> None:
    def loss(params: Any, x: Any, key: Any) -> Any:
        return jnp.mean(params * x), jax.random.key_data(key)[None]

    key, x = jax.random.key(5), np.ones(16)
    call = gradaccum_jax.value_and_grad(
        loss, has_aux=True, aux="concatenate", steps=2, axis_name="data"
    )
    lifted = shard_map(
        call,
        mesh=MESH,
        in_specs=(WHOLE, SPREAD, WHOLE),
        out_specs=((WHOLE, SPREAD), WHOLE),
    )
    (_, drawn), _ = jax.jit(lifted)(jnp.ones(()), x, key)
    wanted = [
        jax.random.key_data(jax.random.fold_in(key, i)) for i in range(2 * DEVICES)
    ]
    np.testing.assert_array_equal(drawn, wanted)


def shared_window() -> None:
    """`value_and_update` in `data_parallel`: the devices share the window, and the
    update is that of one large batch.
    """
    x, y = data(ITEMS)
    tx = gradaccum.wrap(optax.adam(0.1), steps=None, clip_norm=0.1, axis_name="data")
    call = gradaccum_jax.value_and_update(mean_loss, tx, steps=3)

    def step(params: Any, state: Any, x: Any, y: Any) -> Any:
        loss, updates, state = call(params, state, x, y)
        return optax.apply_updates(params, updates), state, loss

    state = gradaccum_jax.data_parallel(tx.init, MESH, "data")(model())
    params, state, loss = gradaccum_jax.data_parallel(step, MESH, "data")(
        model(), state, x, y
    )
    inner = optax.chain(optax.clip_by_global_norm(0.1), optax.adam(0.1))
    wanted, gradient = jax.value_and_grad(mean_loss)(model(), x, y)
    close(
        params,
        optax.apply_updates(
            model(), inner.update(gradient, inner.init(model()), model())[0]
        ),
        1e-12,
    )
    np.testing.assert_allclose(loss, wanted, rtol=1e-13)
    assert gradaccum_jax.result(state).applied


def coupled() -> None:
    """The outputs of all devices are gathered; the loss's own parameter is
    differentiated once, not once per device.
    """
    x = numbers(ITEMS, 3)
    params = {"w": jnp.asarray(numbers(3, 2)), "temperature": jnp.asarray(0.3)}

    def outputs(params: Any, x: Any) -> Any:
        return jnp.tanh(x @ params["w"])

    def loss(params: Any, z: Any) -> Any:
        return (
            -jnp.mean(
                jnp.diag(jax.nn.log_softmax(z @ z.T * jnp.exp(params["temperature"])))
            ),
            z.std(),
        )

    call = gradaccum_jax.coupled_value_and_grad(
        outputs, loss, has_aux=True, steps=2, axis_name="data"
    )
    made = inside(call, 1)(params, *spread(x))
    close(
        made,
        jax.value_and_grad(
            lambda params: loss(params, outputs(params, x)), has_aux=True
        )(params),
    )


def refusals() -> None:
    x, y = data(ITEMS)
    with refused(gradaccum.UsageError, "axis_name"):
        gradaccum_jax.value_and_grad(mean_loss, steps=2, axis_name="data")(
            model(), x, y
        )


if __name__ == "__main__":
    checks = (
        one_reduction_per_call,
        in_parts_of_a_program,
        explicit_mesh,
        weights_and_aux,
        keys_differ_between_devices,
        shared_window,
    )
    checks += (derivative_of_the_loss, coupled, refusals)
    # gradaccum refuses a mesh axis by name before
    for check in (
        without_an_axis,
        *(checks if hasattr(jax, "shard_map") else ()),
    ):
        check()
        print(check.__name__, "holds")
