"""Recomputed functions have the numbers of plain ones, to the bit, and keep less."""

from __future__ import annotations

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.ad_checkpoint import checkpoint_name

import gradaccum
from conformance_tests.framework_tests import jax_chain as chain
from gradaccum_conformance.deep import deep_but
from gradaccum_jax import recompute

KEY = jax.random.key(3, impl="rbg")
"""Of the generator that XLA compiles fastest."""


@functools.cache
def plain() -> Any:
    return chain.gradient(chain.loss, chain.weights(), chain.inputs(), KEY)


def in_each_layer(wrap: Any) -> Any:
    """The chain's loss, with every layer in `wrap`."""
    return functools.partial(chain.loss, wrap=wrap)


def in_segments(segments: int | None) -> Any:
    return functools.partial(
        chain.chain_loss, chain=functools.partial(recompute, segments=segments)
    )


POLICIES = jax.checkpoint_policies
LOSSES: dict[str, Any] = {
    "layers": in_each_layer(recompute),
    "layers twice": in_each_layer(lambda layer: recompute(recompute(layer))),
    "dots": in_each_layer(functools.partial(recompute, policy=POLICIES.dots_saveable)),
    "offloaded": in_each_layer(
        functools.partial(
            recompute,
            policy=POLICIES.offload_dot_with_no_batch_dims("device", "pinned_host"),
        )
    ),
    "segments": in_segments(None),
    "one segment": in_segments(1),
}
DEEP: dict[str, Any] = {
    "merged": in_each_layer(functools.partial(recompute, prevent_cse=False)),
    "everything": in_each_layer(
        functools.partial(recompute, policy=POLICIES.everything_saveable)
    ),
    "two segments": in_segments(2),
    "a segment for each layer": in_segments(chain.DEPTH),
}


@pytest.mark.parametrize("name", deep_but(LOSSES, LOSSES | DEEP))
def test_same_bits(name: str) -> None:
    """Two dropouts in each layer, replayed."""
    chain.assert_same_bits(
        chain.gradient((LOSSES | DEEP)[name], chain.weights(), chain.inputs(), KEY),
        plain(),
    )


@pytest.mark.deep
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_same_bits_in_half_precision(dtype: Any) -> None:
    weights, x = chain.weights(dtype, depth=2), chain.inputs(dtype=dtype)
    found, expected = (
        chain.gradient(in_each_layer(wrap), weights, x, KEY)
        for wrap in (recompute, lambda f: f)
    )
    chain.assert_same_bits(found, expected)


def test_same_bits_with_threefry() -> None:
    key, weights = jax.random.key(3), chain.weights(depth=1)
    found, expected = (
        chain.gradient(in_each_layer(wrap), weights, chain.inputs(), key)
        for wrap in (recompute, lambda f: f)
    )
    chain.assert_same_bits(found, expected)


def scanned(wrap: Any) -> Any:
    """The chain's loss, its layers run by `jax.lax.scan`."""

    def loss(stacked: Any, x: Any) -> Any:
        body = wrap(chain.layer)
        keys = jax.random.split(KEY, len(stacked["bias"]))
        x, _ = jax.lax.scan(
            lambda x, one: (body(one[0], x, one[1]), None), x, (stacked, keys)
        )
        return jnp.mean(jnp.square(x))

    return loss


def test_same_bits_op_by_op() -> None:
    """Without `jax.jit` inside of the function, as there XLA compiles each operation
    alone.
    """

    def loss(weight: Any, wrap: Any) -> Any:
        return jnp.sum(
            wrap(lambda weight, x: jnp.sin(jnp.tanh(x @ weight)))(
                weight, chain.inputs()
            )
        )

    weight = chain.weights()[0]["in"]
    chain.assert_same_bits(
        jax.value_and_grad(loss)(weight, recompute),
        jax.value_and_grad(loss)(weight, lambda plain: plain),
    )


def test_memory_falls_in_scan() -> None:
    """The gradient keeps a layer's input, not its activations."""
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *chain.weights(depth=16))
    kept, found = (
        chain.temporary_bytes(scanned(wrap), stacked, chain.inputs(256))
        for wrap in (lambda f: f, recompute)
    )
    assert found < 0.3 * kept


def test_keeps_inputs_only() -> None:
    """On every device: what JAX itself hands from the forward pass to the backward
    pass.
    """

    def residuals(wrap: Any) -> int:
        weight = chain.weights()[0]["in"]
        _, pull_back = jax.vjp(
            wrap(lambda x: jnp.sin(jnp.tanh(jnp.sin(x @ weight)))), chain.inputs(256)
        )
        return sum(
            leaf.nbytes
            for leaf in {id(leaf): leaf for leaf in jax.tree.leaves(pull_back)}.values()
        )

    inputs = chain.inputs(256).nbytes + chain.weights()[0]["in"].nbytes
    assert residuals(recompute) <= inputs < residuals(lambda plain: plain)


def test_policy_keeps() -> None:
    """A policy that keeps everything runs nothing twice: the program has the sines of
    the plain one.
    """

    def sines(**options: Any) -> int:
        function = recompute(lambda x: jnp.sin(jnp.cos(x) * x), **options)
        return str(jax.make_jaxpr(jax.grad(function))(1.0)).count("= cos ")

    assert (
        sines(policy=POLICIES.everything_saveable)
        < sines()
        == sines(policy=POLICIES.nothing_saveable)
    )


def test_names_are_offloaded() -> None:
    """The value goes to the host's memory after the forward pass and comes back for the
    gradient.
    """
    names = {"names_which_can_be_saved": [], "names_which_can_be_offloaded": ["hidden"]}
    memories = {"offload_src": "device", "offload_dst": "pinned_host"}

    @functools.partial(
        recompute,
        policy=jax.checkpoint_policies.save_and_offload_only_these_names(
            **names, **memories
        ),
    )
    def function(weight: Any, x: Any) -> Any:
        return jnp.sum(jnp.sin(checkpoint_name(x @ weight, "hidden")))

    weight, x = chain.weights()[0]["in"], chain.inputs()
    traced = str(jax.make_jaxpr(jax.grad(function))(weight, x))
    assert traced.count("device_put") == 2
    chain.assert_same_bits(
        chain.gradient(function, weight, x)[1],
        chain.gradient(lambda w, x: jnp.sum(jnp.sin(x @ w)), weight, x)[1],
    )


def test_input_without_gradient() -> None:
    """Tokens are integers; the table, read from outside, trains."""
    tokens = jnp.asarray([2, 0, 2])

    def loss(table: Any) -> Any:
        return jnp.sum(recompute(lambda tokens: jnp.square(table[tokens]))(tokens))

    table = jnp.arange(6.0).reshape(3, 2)
    expected = 2 * table * jnp.asarray([1.0, 0.0, 2.0])[:, None]
    np.testing.assert_array_equal(jax.grad(loss)(table), expected)
    np.testing.assert_array_equal(jax.jit(jax.grad(loss))(table), expected)


def test_reads_anew() -> None:
    """`jax.checkpoint` gives a remembered value here."""
    outside = {"factor": jnp.asarray(1.0)}
    function = recompute(lambda x: x * outside["factor"])
    assert jax.grad(function)(1.0) == 1
    outside["factor"] = jnp.asarray(2.0)
    assert jax.grad(function)(1.0) == 2


def test_other_leaves_stay() -> None:
    """Flags, texts, functions and None are no arrays."""

    def function(x: Any, options: Any, *, name: str, flag: bool) -> Any:
        assert options["none"] is None
        assert name == "sine"
        return options["function"](x) if flag else x

    found = jax.grad(recompute(function))(
        0.5, {"function": jnp.sin, "none": None}, name="sine", flag=True
    )
    assert found == jnp.cos(0.5)


def test_chain_passes_further_arguments() -> None:
    layers = [
        lambda x, scale, *, shift: jnp.sin(x) * scale + shift,
        lambda x, scale, *, shift: x * x * scale - shift,
    ]
    found = recompute(layers)(jnp.asarray(0.5), 3.0, shift=0.25)
    hidden = jnp.sin(jnp.asarray(0.5)) * 3.0 + 0.25
    assert found == hidden * hidden * 3.0 - 0.25


def test_composes_with_transformations() -> None:
    def function(x: Any) -> Any:
        return jnp.sin(x) * jnp.exp(x)

    recomputed, x = recompute(function), jnp.asarray([0.1, 0.7, -2.0])
    for derive in (
        jax.grad,
        lambda f: jax.grad(jax.grad(f)),
        lambda f: lambda x: jax.jvp(f, (x,), (1.0,))[1],
        jax.hessian,
    ):
        expected, found = (jax.vmap(derive(one))(x) for one in (function, recomputed))
        np.testing.assert_allclose(found, expected, rtol=1e-6)
        np.testing.assert_allclose(
            jax.jit(jax.vmap(derive(recomputed)))(x), expected, rtol=1e-6
        )


@pytest.mark.parametrize(
    "prevent_cse", [pytest.param(True, marks=pytest.mark.deep), False]
)
def test_same_bits_in_scan(prevent_cse: bool) -> None:
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *chain.weights())
    found, expected = (
        scanned(wrap)
        for wrap in (
            functools.partial(recompute, prevent_cse=prevent_cse),
            lambda plain: plain,
        )
    )
    chain.assert_same_bits(
        chain.gradient(found, stacked, chain.inputs()),
        chain.gradient(expected, stacked, chain.inputs()),
    )


def test_returned_keys_and_integers() -> None:
    """Results of every type come out of the compiled function as they are."""

    def function(x: Any, key: Any) -> Any:
        key, drawn = jax.random.split(key)
        return {
            "key": key,
            "count": jnp.asarray(3),
            "loss": x * jax.random.normal(drawn),
        }

    expected, found = (
        jax.jit(one)(2.0, KEY) for one in (function, recompute(function))
    )
    assert (
        jax.random.key_data(found.pop("key")).tolist()
        == jax.random.key_data(expected.pop("key")).tolist()
    )
    assert found == expected


def test_window_of_recomputed_losses() -> None:
    """A wrapped optimizer with a loss scale takes the same window, to the bit."""
    tx = gradaccum.wrap(
        optax.adam(0.1), steps=2, loss_scale=gradaccum.DynamicLossScale(init_scale=4.0)
    )

    @functools.partial(jax.jit, static_argnums=0)
    def window(wrap: Any, params: Any) -> Any:
        state = tx.init(params)
        for number in range(2):
            key = jax.random.fold_in(KEY, number)
            grads = jax.grad(
                lambda params, key, scale: (
                    chain.loss(params, chain.inputs(), key, wrap) * scale
                )
            )(params, key, state.loss_scale)
            updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params = chain.weights(depth=1)
    chain.assert_same_bits(
        window(recompute, params), window(lambda plain: plain, params)
    )
    assert not np.array_equal(window(recompute, params)[0][0]["in"], params[0]["in"])


# Refusals of `recompute`: at once where possible, otherwise in the call.


@pytest.mark.parametrize(
    ("function", "options", "kind", "message"),
    [
        (3, {}, gradaccum.ArgumentTypeError, "function: expected a function"),
        ([jnp.sin, 3], {}, gradaccum.ArgumentTypeError, "function[1]"),
        ([], {}, gradaccum.ArgumentValueError, "at least one layer"),
        (
            [jnp.sin] * 3,
            {"segments": 4},
            gradaccum.ArgumentValueError,
            "segments: expected at most 3",
        ),
        ([jnp.sin] * 3, {"segments": 0}, gradaccum.ArgumentValueError, "segments"),
        ([jnp.sin] * 3, {"segments": 1.5}, gradaccum.ArgumentTypeError, "segments"),
        (
            jnp.sin,
            {"segments": 1},
            gradaccum.ArgumentValueError,
            "segments: expected a sequence",
        ),
        (
            jnp.sin,
            {"policy": "dots_saveable"},
            gradaccum.ArgumentTypeError,
            "policy=jax.checkpoint_policies.dots_saveable",
        ),
        (jnp.sin, {"policy": 3}, gradaccum.ArgumentTypeError, "policy"),
    ],
)
def test_refused_at_once(
    function: Any, options: Any, kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=re.escape(message)):
        recompute(function, **options)


def test_maker_of_policies() -> None:
    """An older JAX would take the policy that it makes for true and keep everything;
    JAX 0.10 has an error of its own.
    """
    function = recompute(
        jnp.sin, policy=lambda *names, **params: POLICIES.save_only_these_names(*names)
    )
    with pytest.raises(
        TypeError, match=r"policy.* a bool|policy that returns True or False"
    ):
        jax.grad(function)(1.0)


@pytest.mark.parametrize(
    "name",
    ["save_only_these_names", "save_any_names_but_these", "save_from_both_policies"],
)
def test_makers_of_jax(name: str) -> None:
    """Operations without parameters get as far as the check; JAX raises an error of its
    own for the others.
    """
    with pytest.raises((gradaccum.ArgumentTypeError, TypeError)):
        jax.grad(recompute(lambda x: jnp.sin(x) * x, policy=getattr(POLICIES, name)))(
            1.0
        )


@pytest.mark.parametrize("reads", [True, False])
def test_refs_from_outside(reads: bool) -> None:
    """JAX 0.10 writes twice, and reads at the second run what was written meanwhile."""
    name = next(
        (name for name in ("new_ref", "array_ref") if hasattr(jax, name)),
        "mutable_array",
    )
    make = getattr(jax if hasattr(jax, name) else jax.experimental, name, None)
    if make is None:
        pytest.skip("JAX 0.5 has no public Ref")
    ref = make(jnp.zeros(()))

    def function(x: Any) -> Any:
        if reads:
            return jnp.sin(x) * ref[...]
        ref[...] = x
        return jnp.sin(x)

    with pytest.raises(gradaccum.UsageError, match="Ref from outside"):
        jax.grad(recompute(function))(1.0)
    assert ref[...] == 0


def test_errors_pass() -> None:
    def function(x: Any) -> Any:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        jax.grad(recompute(function))(1.0)
