"""The largest micro-batch that fits is found from the compiled programs, and nothing
but memory makes it smaller.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.errors import JaxRuntimeError

import gradaccum
import gradaccum_jax
from gradaccum_jax.large_batch import auto

from .jax_large_batch import assert_same_bits

ITEMS = 16
WIDTH = 64
EXHAUSTED = "RESOURCE_EXHAUSTED: Out of memory allocating 4 bytes."
RNG = np.random.default_rng(0)
PARAMS = {"w": jnp.asarray(RNG.normal(size=(4, WIDTH)), jnp.float32)}
BATCH = jnp.asarray(RNG.normal(size=(ITEMS, 4)), jnp.float32)


def rows(params: Any, x: Any) -> Any:
    """Each item has some 64 KiB of activations."""
    hidden = jnp.tanh(x @ params["w"])
    return jnp.sum(jnp.sin(hidden[:, :, None] * hidden[:, None, :] * 1.5) ** 2, axis=2)


def loss(params: Any, x: Any) -> Any:
    return jnp.mean(rows(params, x))


def step_with(size: Any, loss_fn: Any = loss) -> Any:
    return gradaccum_jax.value_and_grad(loss_fn, micro_batch_size=size)


def automatic(limit: int) -> Any:
    return gradaccum.AutoMicroBatchSize(memory_limit=limit)


def need(size: int) -> int:
    """The bytes that a program of this size asks for, by a second door."""
    stats = jax.jit(step_with(size)).lower(PARAMS, BATCH).compile().memory_analysis()
    return int(
        stats.temp_size_in_bytes
        + stats.output_size_in_bytes
        - stats.alias_size_in_bytes
        + stats.generated_code_size_in_bytes
    )


@pytest.fixture(scope="module")
def between() -> int:
    """A limit that four items fit and eight do not."""
    four = need(4)
    eight = need(8)
    assert four < eight < need(16)
    return (four + eight) // 2


class Runs:
    """The sizes that are compiled and run, in their order; `fail` is called before each
    run, with the size.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.compiled: list[int] = []
        self.run: list[int] = []
        self.fail: Callable[[int], None] = lambda size: None
        original = auto.SizeSearch.compile

        def compiled(search: Any, given: Any, batch: Any) -> Any:
            size = batch.size
            program = original(search, given, batch)
            self.compiled.append(size)

            class Program:
                memory_analysis = staticmethod(program.memory_analysis)

                def __call__(_, given: Any, batch: Any) -> Any:
                    self.run.append(size)
                    self.fail(size)
                    return program(given, batch)

            return Program()

        patch.setattr(auto.SizeSearch, "compile", compiled)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Runs:
    return Runs(monkeypatch)


def test_decides_before_running(between: int, runs: Runs) -> None:
    """The choice and its program are remembered for each shape."""
    sizes = automatic(between)
    step = step_with(sizes)
    assert_same_bits(step(PARAMS, BATCH), step_with(4)(PARAMS, BATCH))
    step(PARAMS, BATCH + 1)
    assert runs.compiled == [16, 8, 4]
    assert runs.run == [4, 4]
    assert sizes.size == 4
    step(PARAMS, BATCH[:8])
    assert runs.compiled[3:] == [8, 4]
    assert sizes.size == 4


def test_limit_of_the_device(between: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is free: the limit less what is in use. A GPU's arguments are in use
    already. A CPU states none.
    """
    with pytest.raises(
        gradaccum.ArgumentValueError, match=r"AutoMicroBatchSize\(memory_limit"
    ):
        step_with("auto")(PARAMS, BATCH)
    stats = {"bytes_limit": between + 10**6, "bytes_in_use": 10**6}

    class Device:
        device_kind = "a device"
        platform = "gpu"

        def memory_stats(self):
            return stats

    monkeypatch.setattr(auto, "devices_of", lambda arguments: {Device()})
    sizes = gradaccum.AutoMicroBatchSize()
    step_with(sizes)(PARAMS, BATCH)
    assert sizes.size == 4
    stats.update(bytes_in_use=0, bytes_limit=need(16))
    sizes.forget()
    found = step_with(sizes)(PARAMS, BATCH)
    assert sizes.size == 16
    assert_same_bits(found, jax.jit(jax.value_and_grad(loss))(PARAMS, BATCH))


def test_exhausted_halves(runs: Runs) -> None:
    """The analysis lets all pass; the device does not. What the failed frame held is
    dead when the next attempt begins.
    """
    held: list[Any] = []
    most = 4

    def fail(size):
        gc.collect()
        assert not any(one() is not None for one in held)
        array = np.ones(3)
        held.append(weakref.ref(array))
        if size > most:
            raise JaxRuntimeError(EXHAUSTED)

    runs.fail = fail
    sizes = automatic(10**9)
    step = step_with(sizes)
    found = step(PARAMS, BATCH)
    assert runs.run == [16, 8, 4]
    assert sizes.size == 4
    assert_same_bits(found, step_with(4)(PARAMS, BATCH))
    most = 3  # something else takes the memory of a remembered size
    step(PARAMS, BATCH)
    assert runs.run[-1] == 2
    assert sizes.size == 2
    most = 0
    with pytest.raises(gradaccum.UsageError, match="one item") as caught:
        step(PARAMS, BATCH)
    assert isinstance(caught.value.__cause__, JaxRuntimeError)


def test_other_errors_pass(runs: Runs) -> None:
    error = JaxRuntimeError("INTERNAL: broken")

    def fail(size):
        raise error

    runs.fail = fail
    sizes = automatic(10**9)
    with pytest.raises(JaxRuntimeError, match="INTERNAL: broken"):
        step_with(sizes)(PARAMS, BATCH)
    assert (runs.run, sizes.size) == ([16], None)


def test_real_exhaustion() -> None:
    """XLA:CPU itself refuses 2**49 bytes, more than any address space has; the analysis
    is told that all fits.
    """

    def hungry(params, x):
        if len(x) <= 4:
            return loss(params, x)
        numbers = jax.lax.iota(jnp.float32, 2**30).reshape(2**10, 2**20)[:, :, None]
        huge = jnp.sort(numbers * jnp.ones(2**17) * x[0, 0], axis=0)
        return loss(params, x) + huge[0, 0, 0]

    sizes = automatic(2**62)
    found = step_with(sizes, hungry)(PARAMS, BATCH)
    assert sizes.size == 4
    assert_same_bits(found, step_with(4)(PARAMS, BATCH))
