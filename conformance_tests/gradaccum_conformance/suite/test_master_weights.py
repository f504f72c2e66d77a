"""float32 masters of half-precision parameters: small updates add up, the model holds
the rounded copy, a resumed run has both.
"""

import math
from pathlib import Path

import numpy as np
import pytest

import gradaccum
from gradaccum_conformance.deep import deep_but
from gradaccum_conformance.harness import Dtype, Harness, Option, Setup
from gradaccum_conformance.scenarios import poisoned, random_tree, refuses_to_load, same
from gradaccum_conformance.specs import LINEAR, Arrays, Optimizer

HALF = ("float16", "bfloat16")
STEP = 2.0**-13
"""The size of an update: less than half the distance from 1 to the next float16 number,
and far less for bfloat16.
"""
RATE = 0.125


def ones(value: float = 1.0) -> Arrays:
    return {
        name: np.full(shape, value) for name, shape in LINEAR.parameter_shapes().items()
    }


def begin(backend: Harness, dtype: Dtype, **options: Option):
    settings = {"steps": 2, "master_weights": True, **options}
    mode = settings.pop("mode", None)
    return backend.start(
        Setup(LINEAR, ones(), Optimizer("capture", RATE), dtype, mode, settings)
    )


def elements(tree: Arrays) -> set[float]:
    return {float(x) for array in tree.values() for x in array.flat}


@pytest.mark.parametrize("dtype", deep_but(("float16",), HALF))
def test_small_updates_add_up(backend: Harness, mode: str, dtype: Dtype) -> None:
    with_masters, without = (
        begin(backend, dtype, mode=mode),
        begin(backend, dtype, mode=mode, master_weights=False),
    )
    for session in (with_masters, without):
        for _ in range(2 * 64):
            session.gradients(ones(-STEP / RATE))
    assert elements(with_masters.masters()) == {1 + 64 * STEP}
    assert elements(with_masters.parameters()) == {1 + 64 * STEP}, (
        "64 small updates are a number of the half-precision dtype"
    )
    assert elements(without.parameters()) == {1.0}, (
        "without masters each update is lost: the test would prove nothing otherwise"
    )


@pytest.mark.parametrize("dtype", deep_but(("bfloat16",), HALF))
def test_model_holds_the_rounded_masters(
    backend: Harness, mode: str, dtype: Dtype
) -> None:
    session = begin(backend, dtype, mode=mode)
    for seed in range(6):
        session.gradients(random_tree(LINEAR, seed))
        masters = session.masters()
        assert {array.dtype.name for array in masters.values()} == {"float32"}
        rounded = backend.start(
            Setup(
                LINEAR,
                {name: m.astype(np.float64) for name, m in masters.items()},
                Optimizer("capture"),
                dtype,
            )
        )
        assert same(session.parameters(), rounded.parameters())
    assert session.captured().calls == 3


def test_optimizer_gets_float32_gradients(backend: Harness) -> None:
    session = begin(backend, "bfloat16", steps=3)
    for value in (1.0, 0.5, 0.25):
        session.gradients(ones(value))
    gradient = session.captured().gradient or {}
    assert {array.dtype.name for array in gradient.values()} == {"float32"}
    assert elements(gradient) == {float(np.float32(1.75) / np.float32(3))}


def test_float32_parameters_need_no_masters(backend: Harness) -> None:
    with_masters, without = (
        begin(backend, "float32"),
        begin(backend, "float32", master_weights=False),
    )
    for session in (with_masters, without):
        for seed in range(4):
            session.gradients(random_tree(LINEAR, seed))
    assert same(with_masters.parameters(), without.parameters())


@pytest.mark.parametrize("dtype", deep_but(("bfloat16",), HALF))
@pytest.mark.parametrize("stop", [1, 2, 5])
def test_masters_survive_a_checkpoint(
    backend: Harness, mode: str, tmp_path: Path, dtype: Dtype, stop: int
) -> None:
    whole, first, resumed = (begin(backend, dtype, mode=mode) for _ in range(3))
    for step in range(stop):
        for session in (whole, first):
            session.gradients(random_tree(LINEAR, step, 2.0**-6))
    first.save(tmp_path)
    resumed.load(tmp_path)
    for step in range(stop, 8):
        for session in (whole, resumed):
            session.gradients(random_tree(LINEAR, step, 2.0**-6))
    assert same(resumed.masters(), whole.masters())
    assert same(resumed.parameters(), whole.parameters())
    assert same(resumed.optimizer_state(), whole.optimizer_state())
    assert resumed.state() == whole.state()


@pytest.mark.parametrize("value", [1, "yes", None], ids=repr)
def test_master_weights_must_be_bool(backend: Harness, value: Option) -> None:
    with pytest.raises(gradaccum.ArgumentTypeError, match="master_weights"):
        begin(backend, "float16", master_weights=value)


@pytest.mark.parametrize(
    "saved", [True, False], ids=["saved with masters", "saved without"]
)
def test_checkpoint_must_agree_on_masters(
    backend: Harness, tmp_path: Path, saved: bool
) -> None:
    first, second = (
        begin(backend, "float16", steps=4, master_weights=masters)
        for masters in (saved, not saved)
    )
    for seed in range(3):
        first.gradients(random_tree(LINEAR, seed))
    second.gradients(random_tree(LINEAR, 3))
    first.save(tmp_path)
    refuses_to_load(second, tmp_path)


def test_overflow_moves_no_master(backend: Harness, mode: str) -> None:
    session = begin(backend, "float16", steps=1, mode=mode)
    session.gradients(ones(-STEP))
    before = session.masters(), session.parameters()
    session.gradients(poisoned(ones(), math.inf))
    assert session.result().overflow
    assert same(session.masters(), before[0])
    assert same(session.parameters(), before[1])
