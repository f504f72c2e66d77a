"""Losses that compare items across the batch: exact in two passes, and wrong by plain
accumulation.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import gradaccum_jax
from conformance_tests.framework_tests.jax_large_batch import close, in_float64, numbers  # noqa: F401

ITEMS, EXPERTS = 12, 3


def tower(params: Any, x: Any) -> Any:
    return jnp.tanh(x @ params["w"]) @ params["v"]


def two_towers(params: Any, x: Any, y: Any) -> Any:
    return {"image": tower(params["image"], x), "text": tower(params["text"], y)}


def info_nce(params: Any, outputs: Any) -> Any:
    """CLIP's loss (Radford et al., 2021, figure 3), with a learned temperature."""
    images, texts = (
        z / jnp.linalg.norm(z, axis=-1, keepdims=True)
        for z in (outputs["image"], outputs["text"])
    )
    logits = images @ texts.T * jnp.exp(params["temperature"])
    both = (jax.nn.log_softmax(logits, axis) for axis in (0, 1))
    return -sum(jnp.mean(jnp.diag(matrix)) for matrix in both) / 2


def experts(params: Any, x: Any, y: Any) -> Any:
    """Router probabilities, and the expert of each item: an output of integers, which
    gets no gradient.
    """
    probabilities = jax.nn.softmax(
        tower(params["image"], x)[:, :EXPERTS] * jnp.exp(params["temperature"])
    )
    return probabilities, jnp.argmax(probabilities, axis=-1), tower(params["text"], y)


def balance(params: Any, outputs: Any) -> Any:
    """Switch Transformer's auxiliary loss over the global batch (Fedus et al., 2022,
    equation 4), beside a mean.
    """
    probabilities, chosen, z = outputs
    share = jnp.mean(jax.nn.one_hot(chosen, EXPERTS), axis=0)
    return (
        EXPERTS * jnp.sum(share * probabilities.mean(0))
        + jnp.mean(z**2) * params["temperature"]
    )


def parameters() -> Any:
    towers = {
        name: {
            "w": jnp.asarray(numbers(5, 8, seed=i)),
            "v": jnp.asarray(numbers(8, 4, seed=i)),
        }
        for i, name in enumerate(("image", "text"))
    }
    return {**towers, "temperature": jnp.asarray(0.7)}


def data(items: int = ITEMS) -> tuple[Any, Any]:
    x = numbers(items, 5)
    return x, x + 0.5 * numbers(items, 5, seed=9)


def whole(
    params: Any, *batch: Any, outputs: Any = two_towers, loss: Any = info_nce
) -> Any:
    """The large batch's loss and gradient."""
    return jax.value_and_grad(lambda params: loss(params, outputs(params, *batch)))(
        params
    )


def test_integers_among_outputs() -> None:
    """Both functions read the temperature."""
    made = gradaccum_jax.coupled_value_and_grad(experts, balance, micro_batch_size=3)(
        parameters(), *data()
    )
    close(made, whole(parameters(), *data(), outputs=experts, loss=balance))


def test_dropout_is_replayed() -> None:
    """Micro-batch i drops by fold_in(key, i) in both passes."""
    key, (x, y) = jax.random.key(3), data(7)

    def outputs(params: Any, x: Any, y: Any, key: Any) -> Any:
        made = two_towers(params, x, y)
        return {
            **made,
            "image": made["image"]
            * jax.random.bernoulli(key, 0.7, made["image"].shape)
            / 0.7,
        }

    def by_hand(params: Any) -> Any:
        parts = [
            outputs(params, x[s : s + 3], y[s : s + 3], jax.random.fold_in(key, i))
            for i, s in enumerate((0, 3, 6))
        ]
        return info_nce(
            params, jax.tree.map(lambda *rows: jnp.concatenate(rows), *parts)
        )

    made = gradaccum_jax.coupled_value_and_grad(outputs, info_nce, micro_batch_size=3)(
        parameters(), x, y, key
    )
    close(made, jax.value_and_grad(by_hand)(parameters()))


def test_aux_and_rows_that_are_no_items() -> None:
    """Two rows per item; the loss returns an aux; a packed batch comes back in
    order.
    """
    weights = np.array([1, 4, 1, 1, 4, 1])

    def outputs(params: Any, x: Any) -> Any:
        return jnp.repeat(x * params, 2)

    def loss(params: Any, rows: Any) -> Any:
        return jnp.std(rows) * params, rows

    step = gradaccum_jax.coupled_value_and_grad(
        outputs, loss, has_aux=True, micro_batch_weight=5, weight=weights
    )
    x, params = numbers(6), jnp.asarray(1.5)
    made = step(params, x)
    close(
        made,
        jax.value_and_grad(
            lambda params: loss(params, outputs(params, x)), has_aux=True
        )(params),
    )


def test_checkpointed_outputs() -> None:
    made = gradaccum_jax.coupled_value_and_grad(
        jax.checkpoint(two_towers), info_nce, steps=4
    )(parameters(), *data())
    close(made, whole(parameters(), *data()))


def test_under_jit_and_vmap() -> None:
    step = gradaccum_jax.coupled_value_and_grad(two_towers, info_nce, steps=4)
    params = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf / 2]), parameters())
    wanted = jax.vmap(lambda params: whole(params, *data()))(params)
    close(jax.jit(jax.vmap(lambda params: step(params, *data())))(params), wanted)


def test_half_precision_is_summed_in_float32() -> None:
    """Gradients of 2048 and of 1024 ones: in half precision the ones would vanish."""
    x = jnp.asarray([2048.0] + [1.0] * 1024, jnp.bfloat16)
    step = gradaccum_jax.coupled_value_and_grad(
        lambda p, x: p * x,
        lambda p, o: jnp.sum(o.astype(jnp.float32)),
        micro_batch_size=1,
    )
    gradient = step(jnp.ones((), jnp.bfloat16), x)[1]
    assert gradient.dtype == jnp.bfloat16
    assert float(gradient) == 3072


def test_memory_is_one_micro_batch() -> None:
    """The scratch of a wide hidden layer: the same for 4 micro-batches and for 16."""

    def outputs(params: Any, x: Any) -> Any:
        return jnp.tanh(x @ params["w"]) @ params["v"]

    def scratch(items: int) -> int:
        params = {
            "w": jax.ShapeDtypeStruct((8, 4096), jnp.float32),
            "v": jax.ShapeDtypeStruct((4096, 2), jnp.float32),
        }
        step = gradaccum_jax.coupled_value_and_grad(
            outputs, lambda params, z: jnp.std(z), micro_batch_size=16
        )
        compiled = (
            jax.jit(step)
            .lower(params, jax.ShapeDtypeStruct((items, 8), jnp.float32))
            .compile()
        )
        return int(compiled.memory_analysis().temp_size_in_bytes)

    hidden = 16 * 4096 * 4
    assert scratch(256) - scratch(64) < 192 * 8 * 4 + 2**12 < hidden
