"""The careless loop: no everyday mistake is silent, the last window of a loader ends in
the step, and the state is right from the start.
"""

from __future__ import annotations

import copy
import inspect
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradaccum
import gradaccum_jax
from conformance_tests.framework_tests.jax_versions import needs_shard_map

X = np.random.default_rng(0).normal(size=(10, 4, 3)).astype(np.float32)
PARAMS = jnp.ones(3)
REFUSED = gradaccum.ArgumentTypeError


def loss_fn(params: Any, x: Any) -> Any:
    return jnp.mean((x @ params - 1) ** 2)


def step_of(tx: Any) -> Callable[..., Any]:
    def step(params: Any, state: Any, x: Any, last: Any = None) -> Any:
        updates, state = tx.update(
            jax.grad(loss_fn)(params, x), state, params, weight=len(x), last=last
        )
        return optax.apply_updates(params, updates), state

    return step


def flushed(tx: Any, batches: Any) -> Any:
    """Return parameters and state after a loop that flushes at its end, in a program of
    its own.
    """
    step, params, state = jax.jit(step_of(tx)), PARAMS, tx.init(PARAMS)
    for x in batches:
        params, state = step(params, state, x)
    updates, state = gradaccum_jax.flush(tx, state, params)
    return optax.apply_updates(params, updates), state


def assert_same(a: Any, b: Any) -> None:
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-7), a, b
    )


@pytest.mark.parametrize(
    "steps",
    [4, [(0, 3), (1, 4)], gradaccum.until_weight(16)],
    ids=["int", "pairs", "weight"],
)
def test_the_last_window_of_a_loader_ends_in_the_step(steps: Any) -> None:
    """Ten micro-batches: one program, no flush, and the parameters of the loop that
    flushes. The next pass begins a window of its own.
    """
    tx = gradaccum.wrap(optax.adam(0.1), steps=steps)
    step, params, state = jax.jit(step_of(tx)), PARAMS, tx.init(PARAMS)
    for x, last in gradaccum_jax.epoch(iter(X)):
        params, state = step(params, state, x, last)
    wanted = flushed(tx, X)
    assert_same(params, wanted[0])
    assert state.micro_step == 0
    assert gradaccum_jax.result(state).applied
    assert state.optimizer_step == wanted[1].optimizer_step == 3
    assert step._cache_size() == 1
    params, state = step(params, state, X[0], False)
    assert state.micro_step == 1


def test_windows_that_only_last_ends() -> None:
    """With ``steps=None`` the flag takes the place of a flush: outside of jit, in a
    scan, and in an ensemble whose members end apart.
    """
    tx = gradaccum.wrap(optax.sgd(0.5, momentum=0.9), steps=None, clip_norm=0.3)
    ends = np.isin(np.arange(10), (2, 3, 9))
    wanted, held = PARAMS, tx.init(PARAMS)
    for window in (X[:3], X[3:4], X[4:]):
        large = gradaccum.wrap(optax.sgd(0.5, momentum=0.9), steps=1, clip_norm=0.3)
        updates, held = large.update(
            jax.grad(loss_fn)(wanted, window.reshape(-1, 3)), held, wanted
        )
        wanted = optax.apply_updates(wanted, updates)

    def trained(x: Any, ends: Any) -> Any:
        return jax.lax.scan(
            lambda carry, given: (step_of(tx)(*carry, *given), None),
            (PARAMS, tx.init(PARAMS)),
            (x, ends),
        )[0]

    assert_same(jax.jit(trained)(X, ends)[0], wanted)
    params, state = PARAMS, tx.init(PARAMS)
    for x, last in zip(X, ends.tolist(), strict=True):
        params, state = step_of(tx)(params, state, x, last)
    assert_same(params, wanted)
    apart = jnp.stack([ends, np.arange(10) == 9])
    members = jax.vmap(trained, in_axes=(None, 0))(X, apart)
    assert members[1].optimizer_step.tolist() == [3, 1]
    assert_same(members[0][0], wanted)
    assert_same(members[0][1], trained(X, apart[1])[0])


def test_flag_that_is_not_given_costs_nothing() -> None:
    tx = gradaccum.wrap(optax.adam(0.1), steps=4)
    state = tx.init(PARAMS)

    def equations(**given: Any) -> int:
        return str(
            jax.make_jaxpr(lambda s: tx.update(PARAMS, s, PARAMS, **given))(state)
        ).count("\n")

    assert equations() < equations(last=True) <= equations() + 3


def test_epoch_of_a_loader() -> None:
    drawn: list[int] = []
    loader = (drawn.append(i) or i for i in range(3))  # type: ignore[func-returns-value]
    passing = gradaccum_jax.epoch(loader)
    assert drawn == []
    assert next(passing) == (0, False)
    assert drawn == [0, 1]
    assert list(passing) == [(1, False), (2, True)]
    assert list(gradaccum_jax.epoch([])) == []
    with pytest.raises(REFUSED, match="loader: expected an iterable"):
        gradaccum_jax.epoch(4)  # type: ignore[arg-type]
    assert gradaccum.updates_in(X, steps=4, epochs=2) == 6


@pytest.mark.parametrize("last", [1, "yes", np.ones(2, bool), jnp.ones(())], ids=str)
def test_flag_that_is_none_is_refused(last: Any) -> None:
    tx = gradaccum.wrap(optax.sgd(0.1), steps=4)
    with pytest.raises(
        REFUSED, match=r"last: expected True or False.*Write last=True or last=False"
    ):
        tx.update(PARAMS, tx.init(PARAMS), PARAMS, last=last)


def test_flag_of_numpy() -> None:
    tx = gradaccum.wrap(optax.sgd(0.1), steps=4)
    for last in (True, False):
        state = tx.update(PARAMS, tx.init(PARAMS), last=np.bool_(last))[1]
        assert int(state.optimizer_step) == last


def test_arguments_of_the_last_micro_batch_alone_are_refused() -> None:
    tx = gradaccum.wrap(optax.lbfgs(), steps=None)
    with pytest.raises(
        gradaccum.UsageError,
        match="value_fn: expected nothing in a window of several micro-batches",
    ):
        tx.update(
            PARAMS, tx.init(PARAMS), PARAMS, value_fn=lambda params: 0.0, last=True
        )


def greedy(gradients: Any, state: Any, params: Any = None, *, widht: Any = 1.0) -> Any:
    return jax.tree.map(lambda g: -widht * g, gradients), state


INNER = {
    "open": (optax.adam(0.1), "wieght", r"Did you mean weight=\?"),
    "close to another": (optax.adam(0.1), "vlaue", r"Did you mean value=\?"),
    "closed": (
        optax.GradientTransformation(lambda p: (), lambda g, s, p=None: (g, s)),
        "momentum",
        "Leave it out",
    ),
    "declaring": (
        optax.GradientTransformationExtraArgs(lambda p: (), greedy),
        "width",
        "Leave it out",
    ),
}


@pytest.mark.parametrize("case", INNER)
def test_argument_that_nobody_takes_is_refused(case: str) -> None:
    """What was accumulated stays, and the right name goes on."""
    inner, name, fix = INNER[case]
    tx = gradaccum.wrap(inner, steps=2)
    _, state = tx.update(PARAMS, tx.init(PARAMS), PARAMS)
    with pytest.raises(
        REFUSED, match=f"^{name}: expected an argument of this call.*{fix}"
    ):
        tx.update(PARAMS, state, PARAMS, **{name: 3.0})
    assert tx.update(PARAMS, state, PARAMS, weight=3.0)[1].optimizer_step == 1


@pytest.mark.parametrize(
    ("name", "right"),
    [
        ("num_tokens", "weight"),
        ("batch_size", "weight"),
        ("n_items", "weight"),
        ("num_items", "weight"),
        ("tokens", "weight"),
        ("items", "weight"),
        ("sample_weight", "weight"),
        ("loss", "value"),
        ("is_last", "last"),
        ("final", "last"),
        ("last_batch", "last"),
        ("divisor", "denominator"),
    ],
)
def test_argument_by_another_name_is_refused(name: str, right: str) -> None:
    """A chain would take it and ignore it. An optimizer that declares the name keeps
    it, inside of a chain too.
    """
    message = rf"^{name}: .*Did you mean {right}=\?"
    tx = gradaccum.wrap(optax.adamw(0.1), steps=2)
    state = tx.init(PARAMS)
    with pytest.raises(REFUSED, match=message):
        tx.update(PARAMS, state, PARAMS, **{name: 3.0})
    with pytest.raises(REFUSED, match=message):
        gradaccum_jax.flush(tx, state, PARAMS, **{name: 3.0})

    def update(gradients: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        return jax.tree.map(lambda g: -extra[name] * g, gradients), state

    declared = [
        inspect.Parameter(each, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        for each in ("gradients", "state", "params")
    ]
    own = inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY)
    rest = inspect.Parameter("extra", inspect.Parameter.VAR_KEYWORD)
    update.__signature__ = inspect.Signature([*declared, own, rest])  # type: ignore[attr-defined]
    reading = optax.GradientTransformationExtraArgs(lambda params: (), update)
    for inner in (
        reading,
        optax.chain(optax.clip(9.0), reading),
        optax.masked(optax.chain(reading), True),
        optax.partition({"all": reading}, "all"),
    ):
        tx = gradaccum.wrap(inner, steps=1)
        updates, _ = tx.update(PARAMS, tx.init(PARAMS), PARAMS, **{name: 3.0})
        assert updates.tolist() == [-3.0] * 3


@pytest.mark.parametrize("name", ["epoch", "result", "flush", "step", "zero_grad"])
def test_method_of_another_framework_says_what_to_call(name: str) -> None:
    tx = gradaccum.wrap(optax.sgd(0.1), steps=2)
    call = {"step": r"tx\.update\(", "zero_grad": "nothing"}.get(
        name, rf"gradaccum_jax\.{name}\("
    )
    with pytest.raises(AttributeError, match=rf"^tx\.{name}: .*Write .*{call}"):
        getattr(tx, name)
    assert not hasattr(tx, name)
    with pytest.raises(AttributeError, match=r"^'Wrapped' object has no .*'colour'$"):
        tx.colour  # noqa: B018


def test_it_is_a_transformation_like_any_other() -> None:
    tx = gradaccum.wrap(optax.sgd(0.1), steps=2)
    init, update = tx
    assert isinstance(tx, optax.GradientTransformationExtraArgs)
    assert optax.with_extra_args_support(tx) is tx
    assert (tx._fields, tx.init, tx.update) == (("init", "update"), init, update)
    for other in (copy.copy(tx), tx._replace(init=init), jax.tree.map(lambda f: f, tx)):
        assert other == tx
        assert type(other) is type(tx)
    assert hash(tx) == hash(copy.copy(tx))
    state = jax.jit(lambda params: update(params, init(params))[1])(PARAMS)
    assert state.micro_step == 1


def test_argument_that_the_inner_optimizer_takes_is_passed_on() -> None:
    """A declared name, however close to one of gradaccum's; any other where the inner
    optimizer takes all; optax's own everywhere.
    """
    tx = gradaccum.wrap(
        optax.GradientTransformationExtraArgs(lambda params: (), greedy), steps=1
    )
    assert (
        tx.update(PARAMS, tx.init(PARAMS), PARAMS, widht=2.0)[0].tolist() == [-2.0] * 3
    )
    for inner, more in (
        (optax.sgd(1.0), {"temperature": 1.0}),
        (optax.scale(-1.0), {}),
    ):
        tx = gradaccum.wrap(inner, steps=1)
        assert (
            tx.update(PARAMS, tx.init(PARAMS), PARAMS, grad=PARAMS, **more)[
                1
            ].optimizer_step
            == 1
        )


def test_weight_of_a_flush_is_refused() -> None:
    tx = gradaccum.wrap(optax.sgd(0.1), steps=None)
    _, state = tx.update(PARAMS, tx.init(PARAMS), PARAMS)
    with pytest.raises(
        REFUSED, match=r"weight: expected.*denominator= to gradaccum_jax\.flush"
    ):
        gradaccum_jax.flush(tx, state, PARAMS, weight=3.0)


def test_denominator_under_jit() -> None:
    """A traced one: the sum divided by it, once; one that is no number > 0 makes no
    update.
    """
    tx = gradaccum.wrap(optax.sgd(1.0), steps=None, reduction="sum", loss_scale=8.0)
    state = tx.init(PARAMS)
    for factor in (1.0, 2.0):
        _, state = tx.update(
            jax.tree.map(lambda p, factor=factor: 8 * factor * p, PARAMS),
            state,
            PARAMS,
            value=jnp.asarray(factor),
        )
    flush = jax.jit(
        lambda state, denominator: gradaccum_jax.flush(
            tx, state, PARAMS, denominator=denominator
        )
    )
    updates, ended = flush(state, 4)
    assert updates.tolist() == [-0.75] * 3
    assert (
        gradaccum_jax.result(ended).loss,
        gradaccum_jax.result(ended).optimizer_step,
    ) == (0.75, 1)
    for wrong in (0.0, np.nan):
        updates, ended = flush(state, wrong)
        assert not updates.any()
        assert gradaccum_jax.result(ended).skipped
    with pytest.raises(REFUSED, match="denominator: expected a real number"):
        flush(state, np.ones(2, np.float32))


@needs_shard_map
def test_four_devices() -> None:
    """`init` outside of `data_parallel`, in a process of its own: the mesh is told, or
    set around the call.
    """
    pytest.importorskip("flax", reason="flax is not installed")
    script = Path(__file__).with_name("jax_everyday_devices.py")
    ran = subprocess.run(
        [sys.executable, "-W", "error", script],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
