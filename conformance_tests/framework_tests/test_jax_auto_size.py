"""The largest micro-batch that fits is found from the compiled programs, and nothing
but memory makes it smaller.
"""

from __future__ import annotations

import gc
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradaccum
import gradaccum_jax
from conformance_tests.framework_tests.jax_large_batch import assert_same_bits
from gradaccum_jax.large_batch import auto

ITEMS, WIDTH = 16, 64
EXHAUSTED = "RESOURCE_EXHAUSTED: Out of memory allocating 4 bytes."
PARAMS = {
    "w": jnp.asarray(np.random.default_rng(0).normal(size=(4, WIDTH)), jnp.float32)
}
BATCH = jnp.asarray(np.random.default_rng(1).normal(size=(ITEMS, 4)), jnp.float32)


def loss(params: Any, x: Any) -> Any:
    """Each item has some 64 KiB of activations."""
    hidden = jnp.tanh(x @ params["w"])
    return jnp.mean(
        jnp.sum(
            jnp.sin(hidden[:, :, None] * hidden[:, None, :] * 1.5) ** 2, axis=(1, 2)
        )
    )


def need(size: int) -> int:
    """The bytes that a program of this size asks for, by a second door."""
    step = gradaccum_jax.value_and_grad(loss, micro_batch_size=size)
    stats = jax.jit(step).lower(PARAMS, BATCH).compile().memory_analysis()
    assert stats is not None
    return int(
        stats.temp_size_in_bytes
        + stats.output_size_in_bytes
        - stats.alias_size_in_bytes
        + stats.generated_code_size_in_bytes
    )


@pytest.fixture(scope="module")
def between() -> int:
    """A limit that four items fit and eight do not."""
    four, eight = need(4), need(8)
    assert four < eight < need(16)
    return (four + eight) // 2


@pytest.fixture
def compiled_sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes that are compiled, in their order."""
    sizes: list[int] = []
    original = auto.Fitting._compiled
    monkeypatch.setattr(
        auto.Fitting,
        "_compiled",
        lambda self, given, source: (
            sizes.append(source.cuts[0].items) or original(self, given, source)
        ),
    )
    return sizes


def failing(monkeypatch: pytest.MonkeyPatch, fail: Any) -> None:
    """Call `fail` with the size of a micro-batch before each run of a program."""
    original = auto.Fitting._compiled

    def compiled(self: Any, given: Any, source: Any) -> Any:
        program = original(self, given, source)

        class Failing:
            memory_analysis = staticmethod(program.memory_analysis)

            def __call__(self, given: Any, source: Any) -> Any:
                fail(source.cuts[0].items, given)
                return program(given, source)

        return Failing()

    monkeypatch.setattr(auto.Fitting, "_compiled", compiled)


def test_decides_before_running(between: int, compiled_sizes: list[int]) -> None:
    sizes = gradaccum.AutoMicroBatchSize(memory_limit=between)
    step = gradaccum_jax.value_and_grad(loss, micro_batch_size=sizes)
    found = step(PARAMS, BATCH)
    assert (compiled_sizes, sizes.size) == ([16, 8, 4], 4)
    assert_same_bits(
        found, gradaccum_jax.value_and_grad(loss, micro_batch_size=4)(PARAMS, BATCH)
    )
    step(PARAMS, BATCH + 1)  # The choice and its program are remembered.
    assert compiled_sizes == [16, 8, 4]
    step(PARAMS, BATCH[:8])
    assert (compiled_sizes, sizes.size) == ([16, 8, 4, 8, 4], 4)
    sizes.forget()
    step(PARAMS, BATCH)
    assert sizes.size == 4


def test_whole_batch_where_it_fits() -> None:
    sizes = gradaccum.AutoMicroBatchSize(memory_limit=need(16))
    found = gradaccum_jax.value_and_grad(loss, micro_batch_size=sizes)(PARAMS, BATCH)
    assert sizes.size == 16
    assert_same_bits(found, jax.jit(jax.value_and_grad(loss))(PARAMS, BATCH))


def test_items_of_one_do_not_fit() -> None:
    sizes = gradaccum.AutoMicroBatchSize(memory_limit=1)
    with pytest.raises(gradaccum.UsageError, match=r"one item to fit.* 1 bytes"):
        gradaccum_jax.value_and_grad(loss, micro_batch_size=sizes)(PARAMS, BATCH[:2])
    assert sizes.size is None


def test_unknown_limit() -> None:
    """A CPU states none."""
    with pytest.raises(
        gradaccum.ArgumentValueError, match=r"AutoMicroBatchSize\(memory_limit"
    ):
        gradaccum_jax.value_and_grad(loss, micro_batch_size="auto")(PARAMS, BATCH)


def test_limit_of_the_device(between: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is free: the limit less what is in use. A GPU's arguments are in use
    already.
    """
    stats = {"bytes_limit": between + 10**6, "bytes_in_use": 10**6}

    class Device:
        device_kind, platform = "a device", "gpu"

        def memory_stats(self) -> dict[str, int]:
            return stats

    monkeypatch.setattr(auto, "_devices_of", lambda arguments: {Device()})
    sizes = gradaccum.AutoMicroBatchSize()
    gradaccum_jax.value_and_grad(loss, micro_batch_size=sizes)(PARAMS, BATCH)
    assert sizes.size == 4
    stats["bytes_in_use"] = 0
    stats["bytes_limit"] = need(16)
    sizes.forget()
    gradaccum_jax.value_and_grad(loss, micro_batch_size=sizes)(PARAMS, BATCH)
    assert sizes.size == 16


def test_exhausted_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    """The analysis lets all pass; the device does not. What the failed frame held is
    dead when the next attempt begins.
    """
    held: list[Any] = []
    seen: list[tuple[int, bool]] = []
    most = [4]

    def fail(size: int, given: Any) -> None:
        gc.collect()
        seen.append((size, any(one() is not None for one in held)))
        array = np.ones(3)
        held.append(weakref.ref(array))
        if size > most[0]:
            raise jax.errors.JaxRuntimeError(EXHAUSTED)

    failing(monkeypatch, fail)
    sizes = gradaccum.AutoMicroBatchSize(memory_limit=10**9)
    step = gradaccum_jax.value_and_grad(loss, micro_batch_size=sizes)
    found = step(PARAMS, BATCH)
    assert (seen, sizes.size) == ([(16, False), (8, False), (4, False)], 4)
    assert_same_bits(
        found, gradaccum_jax.value_and_grad(loss, micro_batch_size=4)(PARAMS, BATCH)
    )
    seen.clear()
    most[0] = (
        3  # A remembered size can stop fitting when something else takes the memory.
    )
    step(PARAMS, BATCH)
    assert ([size for size, _ in seen][-1], sizes.size) == (2, 2)


def test_exhausted_at_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(size: int, given: Any) -> None:
        raise jax.errors.JaxRuntimeError(EXHAUSTED)

    failing(monkeypatch, fail)
    step = gradaccum_jax.value_and_grad(
        loss, micro_batch_size=gradaccum.AutoMicroBatchSize(memory_limit=10**9)
    )
    with pytest.raises(gradaccum.UsageError, match="one item") as caught:
        step(PARAMS, BATCH[:2])
    assert isinstance(caught.value.__cause__, jax.errors.JaxRuntimeError)


@pytest.mark.parametrize(
    "error",
    [
        jax.errors.JaxRuntimeError("INTERNAL: broken"),
        ValueError("mine"),
        KeyboardInterrupt(),
    ],
)
def test_other_errors_pass(
    error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []

    def fail(size: int, given: Any) -> None:
        seen.append(size)
        raise error

    failing(monkeypatch, fail)
    sizes = gradaccum.AutoMicroBatchSize(memory_limit=10**9)
    with pytest.raises(type(error)) as caught:
        gradaccum_jax.value_and_grad(loss, micro_batch_size=sizes)(PARAMS, BATCH)
    assert caught.value is error
    assert (seen, sizes.size) == ([16], None)


def test_real_exhaustion() -> None:
    """XLA:CPU itself refuses 2**49 bytes, more than any address space has; the analysis
    is told that all fits.
    """

    def hungry(params: Any, x: Any) -> Any:
        if len(x) > 4:
            huge = jnp.sort(
                jax.lax.iota(jnp.float32, 2**30).reshape(2**10, 2**20)[:, :, None]
                * jnp.ones(2**17)
                * x[0, 0],
                axis=0,
            )
            return loss(params, x) + huge[0, 0, 0]
        return loss(params, x)

    sizes = gradaccum.AutoMicroBatchSize(memory_limit=2**62)
    found = gradaccum_jax.value_and_grad(hungry, micro_batch_size=sizes)(PARAMS, BATCH)
    assert sizes.size == 4
    assert_same_bits(
        found, gradaccum_jax.value_and_grad(loss, micro_batch_size=4)(PARAMS, BATCH)
    )


def test_window_of_an_optimizer(between: int) -> None:
    """One window closes, whatever was tried before; sums of micro-batches that came
    before it are in it once.
    """
    tx = gradaccum.wrap(optax.adam(0.1), steps=None, clip_norm=1.0)
    sizes = gradaccum.AutoMicroBatchSize(memory_limit=between)
    state = tx.update(
        jax.grad(loss)(PARAMS, BATCH[:3]), tx.init(PARAMS), PARAMS, weight=3
    )[1]
    found = gradaccum_jax.value_and_update(loss, tx, micro_batch_size=sizes)(
        PARAMS, state, BATCH
    )
    assert sizes.size is not None
    assert_same_bits(
        found,
        gradaccum_jax.value_and_update(loss, tx, micro_batch_size=sizes.size)(
            PARAMS, state, BATCH
        ),
    )
    assert found[2].optimizer_step == 1


def test_coupled_losses(between: int) -> None:
    def outputs(params: Any, x: Any) -> Any:
        hidden = jnp.tanh(x @ params["w"])
        return jnp.sum(jnp.sin(hidden[:, :, None] * hidden[:, None, :]), axis=2)

    def coupled(params: Any, rows: Any) -> Any:
        return jax.nn.logsumexp(rows @ rows.T)

    sizes = gradaccum.AutoMicroBatchSize(memory_limit=between)
    found = gradaccum_jax.coupled_value_and_grad(
        outputs, coupled, micro_batch_size=sizes
    )(PARAMS, BATCH)
    assert sizes.size in (1, 2, 4, 8)
    assert_same_bits(
        found,
        gradaccum_jax.coupled_value_and_grad(
            outputs, coupled, micro_batch_size=sizes.size
        )(PARAMS, BATCH),
    )


def test_plain_values_and_trees_of_one_shape() -> None:
    """They are constants of the program: each value has a program of its own, and each
    tree.
    """
    step = gradaccum_jax.value_and_grad(
        lambda params, x, how: (
            params * jnp.mean(x) * (how["double"] + 1 if "double" in how else 7)
        ),
        micro_batch_size=gradaccum.AutoMicroBatchSize(memory_limit=10**9),
    )
    for how, expected in (
        ({"double": True}, 2),
        ({"double": 3}, 4),
        ({"single": 3}, 7),
        ({"double": 0.5}, 1.5),
    ):
        assert step(jnp.ones(()), jnp.ones(4), how) == (expected, expected)


def test_traced_call() -> None:
    step = gradaccum_jax.value_and_grad(
        loss, micro_batch_size=gradaccum.AutoMicroBatchSize(memory_limit=10**9)
    )
    with pytest.raises(gradaccum.ArgumentTypeError, match=r"outside of jax\.jit"):
        jax.jit(step)(PARAMS, BATCH)
