"""A large batch that is sharded over eight devices, in one call: each device computes
its share of every micro-batch, and nothing gathers the batch.
"""

from __future__ import annotations

import re
from contextlib import nullcontext
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from numpy.testing import assert_array_equal

import gradaccum_jax

from ..jax_versions import on_mesh
from .common import COLLECTIVE, P

ITEMS = 1024
WIDTH = 32
RNG = np.random.default_rng(0)
PARAMS = {"w": RNG.normal(size=(WIDTH, WIDTH)).astype(np.float32)}
X, Y = RNG.normal(size=(2, ITEMS, WIDTH)).astype(np.float32)


class Layout(NamedTuple):
    """A mesh, and where the batch lies on it."""

    axes: dict[str, int]
    """Names and sizes of the mesh's axes."""
    spec: Any
    """The partition of the items."""
    kind: Any = AxisType.Auto

    @property
    def mesh(self) -> Mesh:
        sizes = tuple(self.axes.values())
        devices = np.array(jax.devices()[: np.prod(sizes)]).reshape(sizes)
        return Mesh(devices, tuple(self.axes), axis_types=(self.kind,) * len(sizes))

    @property
    def shards(self) -> int:
        shape = NamedSharding(self.mesh, self.spec).shard_shape((ITEMS,))
        return ITEMS // int(shape[0])

    def context(self) -> Any:
        return on_mesh(self.mesh) if self.kind == AxisType.Explicit else nullcontext()

    def put(self, tree: Any, spec: Any = None) -> Any:
        spec = self.spec if spec is None else spec
        return jax.device_put(tree, NamedSharding(self.mesh, spec))


ONE_AXIS = {"data": 8}
TWO_AXES = {"data": 4, "model": 2}
LAYOUTS = [
    Layout({"data": 2}, P("data")),
    Layout(TWO_AXES, P("model")),
    Layout(TWO_AXES, P(("data", "model"))),
    Layout(ONE_AXIS, P("data"), AxisType.Explicit),
    Layout(TWO_AXES, P("data"), AxisType.Explicit),
]
EIGHT = Layout(ONE_AXIS, P("data"))


def loss_fn(params: Any, x: Any, y: Any) -> Any:
    losses = jnp.mean((jnp.tanh(x @ params["w"]) - y) ** 2, axis=1)
    return losses.mean(), losses


truth = jax.value_and_grad(loss_fn, has_aux=True)


def call_with(steps: int, **options: Any) -> Any:
    return gradaccum_jax.value_and_grad(
        loss_fn, has_aux=True, merge_aux="concatenate", steps=steps, **options
    )


def near(made: Any, wanted: Any, rtol: float = 1e-5) -> None:
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=1e-6),
        made,
        wanted,
    )


def collectives(compiled: Any) -> set[str]:
    return set(COLLECTIVE.findall(compiled.as_text()))


def rows(compiled: Any) -> int:
    """Return the most rows of a matrix product with the parameters on one device."""
    text = compiled.as_text()
    products = re.findall(rf"f32\[(\d+),{WIDTH}\]\S* (?:dot|custom-call)\(", text)
    return max(map(int, products))


def fair_share() -> None:
    """Each device costs what one device with its items alone would, and the devices
    reduce; the losses of single items stay where their items are.
    """
    wanted = truth(PARAMS, X, Y)
    for layout in LAYOUTS:
        items = ITEMS // layout.shards
        for steps in (4, 16):
            call = jax.jit(call_with(steps))
            with layout.context():
                params = layout.put(PARAMS, P())
                batch = layout.put((X, Y))
                compiled = call.lower(params, *batch).compile()
                (loss, losses), grads = compiled(params, *batch)
            near(((loss, losses), grads), wanted)
            assert losses.sharding.is_equivalent_to(batch[0].sharding, 1)
            alone = call.lower(PARAMS, X[:items], Y[:items]).compile()
            flops = compiled.cost_analysis()["flops"]
            assert collectives(compiled) == {"all-reduce"}
            assert rows(compiled) == max(WIDTH, items // steps)
            assert flops < 1.05 * alone.cost_analysis()["flops"]


def outside_of_jit() -> None:
    """A call that compiles itself sees the sharding: sizes that the devices cannot share
    are rounded up, and each device has as many items in every micro-batch.
    """
    for steps, items, sizes in ((4, 24, {8}), (3, 1000, {336, 328}), (5, 8, {8})):
        seen: list[int] = []

        def loss(params: Any, x: Any, y: Any, seen: list[int] = seen) -> Any:
            seen.append(len(x))
            return loss_fn(params, x, y)

        call = gradaccum_jax.value_and_grad(
            loss, has_aux=True, merge_aux="concatenate", steps=steps
        )
        x = X[:items]
        y = Y[:items]
        made = call(PARAMS, *EIGHT.put((x, y)))
        near(made, truth(PARAMS, x, y))
        assert set(seen) == sizes, (seen, sizes)
        assert made[0][1].sharding.is_equivalent_to(EIGHT.put(y).sharding, 1)


def uneven_under_jit() -> None:
    """Right for each number of items and steps, on each mesh; the sizes stay as they are
    where a rounded one would be much larger.
    """
    for layout in (*LAYOUTS, Layout(TWO_AXES, P())):
        for steps, items in ((7, 40), (3, 1000), (8, 8)):
            x = X[:items]
            y = Y[:items]
            with layout.context():
                params = layout.put(PARAMS, P())
                made = jax.jit(call_with(steps))(params, *layout.put((x, y)))
            near(made, truth(PARAMS, x, y))


def in_shardings() -> None:
    """A traced NumPy batch names no mesh; the parameters do, or the mesh that is set."""
    on_data = NamedSharding(EIGHT.mesh, P("data"))
    step = jax.jit(call_with(4), in_shardings=(None, on_data, on_data))
    wanted = truth(PARAMS, X, Y)
    for params, context in (
        (EIGHT.put(PARAMS, P()), nullcontext()),
        (PARAMS, on_mesh(EIGHT.mesh)),
    ):
        with context:
            compiled = step.lower(params, X, Y).compile()
            near(compiled(params, X, Y), wanted)
        assert collectives(compiled) == {"all-reduce"}
        assert rows(compiled) == ITEMS // 4 // 8


def whole_batches() -> None:
    """A batch that no devices share keeps its consecutive micro-batches and its bits."""
    tens = np.arange(16, dtype=np.float32)

    def first(params: Any, x: Any) -> Any:
        return jnp.mean(params * x), x[0]

    call = gradaccum_jax.value_and_grad(first, has_aux=True, steps=4)
    one = jnp.ones(())
    explicit = EIGHT._replace(kind=AxisType.Explicit)
    wanted = jax.jit(call)(one, tens)
    assert_array_equal(wanted[0][1], [0, 4, 8, 12])
    with explicit.context():
        arguments = explicit.put(one, P()), explicit.put(tens, P())
        on_explicit_mesh = jax.jit(call)(*arguments)
    for made in (call(one, tens), call(one, EIGHT.put(tens, P())), on_explicit_mesh):
        jax.tree.map(assert_array_equal, made, wanted)


def nested_batches() -> None:
    """Axes, keys, weights of single items, and rows of several kinds."""
    layout = Layout(TWO_AXES, P("data"))
    tokens = np.arange(ITEMS, dtype=np.float32) % 7
    batch = {"x": X.T, "pair": (Y, tokens)}
    spec = {"x": P(None, "data"), "pair": (P("data"), P("data"))}
    shared = jax.tree.map(layout.put, batch, spec)
    axes = ({"x": 1, "pair": 0}, "key", None)

    def loss(params: Any, batch: Any, key: Any, scale: Any) -> Any:
        y, tokens = batch["pair"]
        found = jnp.mean((jnp.tanh(batch["x"].T @ params["w"]) - y) ** 2, axis=1)
        aux = {"rows": found, "two": jnp.repeat(y, 2, axis=0)}
        total = jnp.maximum(tokens.sum(), 1)
        return scale * jnp.sum(found * tokens) / total, aux

    key = jax.random.key(0)
    scale = np.float32(2)
    wanted = jax.value_and_grad(loss, has_aux=True)(PARAMS, batch, key, scale)
    call = gradaccum_jax.value_and_grad(
        loss, has_aux=True, merge_aux="concatenate", steps=8, axes=axes, weight=tokens
    )
    for function in (call, jax.jit(call)):
        near(function(PARAMS, shared, key, scale), wanted)


def coupled_batch() -> None:
    """The loss sees the rows in the order of the items, and each item's gradient finds
    its way back.
    """

    def outputs(params: Any, x: Any) -> Any:
        return {"z": jnp.tanh(x @ params["w"]), "both": jnp.repeat(x[:, 0], 2)}

    def loss(params: Any, made: Any) -> Any:
        weights = jnp.arange(len(made["z"])) / 100
        both = made["both"].reshape(-1, 2).sum(1)
        products = made["z"].mean(0) @ params["w"]
        return jnp.mean(weights * both * made["z"][:, 1]) + products.sum()

    for items, steps in ((64, 4), (1000, 3)):
        x = X[:items]
        wanted = jax.value_and_grad(lambda p, x=x: loss(p, outputs(p, x)))(PARAMS)
        call = gradaccum_jax.coupled_value_and_grad(outputs, loss, steps=steps)
        near(call(PARAMS, EIGHT.put(x)), wanted, 1e-4)
        near(jax.jit(call)(PARAMS, EIGHT.put(x)), wanted, 1e-4)
    compiled = jax.jit(call).lower(PARAMS, EIGHT.put(X)).compile()
    assert "all-gather" not in collectives(compiled)
