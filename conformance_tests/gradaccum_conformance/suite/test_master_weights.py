"""float32 masters of half-precision parameters: small updates add up, the model holds
the rounded copy, a resumed run has both.
"""

import math
from pathlib import Path

import numpy as np
import pytest

from gradaccum_conformance.deep import deep_but
from gradaccum_conformance.harness import Dtype, Harness, Option, Session, Setup
from gradaccum_conformance.scenarios import (
    constant_tree,
    contents_of,
    elements_of,
    feed_gradients,
    poisoned,
    random_tree,
    refuses_to_load,
    require_same_contents,
    same,
)
from gradaccum_conformance.specs import LINEAR, Optimizer

HALF = ("float16", "bfloat16")
by_half = pytest.mark.parametrize("dtype", deep_but(("bfloat16",), HALF))
STEP = 2.0**-13
"""The size of an update: less than half the distance from 1 to the next float16 number,
and far less for bfloat16.
"""
RATE = 0.125
ONES = constant_tree(LINEAR, 1.0)
TREES = [random_tree(LINEAR, seed, 2.0**-6) for seed in range(8)]


def begin(
    backend: Harness, dtype: Dtype, mode: str | None = None, **options: Option
) -> Session:
    options = {"steps": 2, "master_weights": True, **options}
    return backend.start(
        Setup(LINEAR, ONES, Optimizer("capture", RATE), dtype, mode, options)
    )


@pytest.mark.parametrize("dtype", deep_but(("float16",), HALF))
def test_small_updates_add_up(backend: Harness, mode: str, dtype: Dtype) -> None:
    """Without masters each of the 64 updates is lost."""
    with_masters = begin(backend, dtype, mode)
    without = begin(backend, dtype, mode, master_weights=False)
    for session in (with_masters, without):
        feed_gradients(session, [constant_tree(LINEAR, -STEP / RATE)] * 128)
    assert elements_of(with_masters.masters()) == {1 + 64 * STEP}
    assert elements_of(with_masters.parameters()) == {1 + 64 * STEP}
    assert elements_of(without.parameters()) == {1.0}


@by_half
def test_model_holds_the_rounded_masters(
    backend: Harness, mode: str, dtype: Dtype
) -> None:
    session = begin(backend, dtype, mode)
    for tree in TREES[:6]:
        session.gradients(tree)
        masters = session.masters()
        assert {array.dtype.name for array in masters.values()} == {"float32"}
        wide = {name: master.astype(np.float64) for name, master in masters.items()}
        rounded = backend.start(Setup(LINEAR, wide, Optimizer("capture"), dtype))
        assert same(session.parameters(), rounded.parameters())
    assert session.captured().calls == 3


def test_optimizer_gets_float32_gradients(backend: Harness) -> None:
    session = begin(backend, "bfloat16", steps=3)
    feed_gradients(
        session, [constant_tree(LINEAR, value) for value in (1.0, 0.5, 0.25)]
    )
    gradient = session.captured().gradient
    assert {array.dtype.name for array in gradient.values()} == {"float32"}
    assert elements_of(gradient) == {float(np.float32(1.75) / np.float32(3))}


def test_float32_parameters_need_no_masters(backend: Harness) -> None:
    with_masters, without = (
        begin(backend, "float32", master_weights=masters) for masters in (True, False)
    )
    for session in (with_masters, without):
        feed_gradients(session, TREES[:4])
    assert same(with_masters.parameters(), without.parameters())


@by_half
@pytest.mark.parametrize("stop", [1, 2, 5])
def test_masters_survive_a_checkpoint(
    backend: Harness, mode: str, tmp_path: Path, dtype: Dtype, stop: int
) -> None:
    whole, first, resumed = (begin(backend, dtype, mode) for _ in range(3))
    for session in (whole, first):
        feed_gradients(session, TREES[:stop])
    first.save(tmp_path)
    resumed.load(tmp_path)
    for session in (whole, resumed):
        feed_gradients(session, TREES[stop:])
    assert same(resumed.masters(), whole.masters())
    require_same_contents(resumed, contents_of(whole))


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
    feed_gradients(first, TREES[:3])
    second.gradients(TREES[3])
    first.save(tmp_path)
    refuses_to_load(second, tmp_path)


def test_overflow_moves_no_master(backend: Harness, mode: str) -> None:
    session = begin(backend, "float16", mode, steps=1)
    session.gradients(constant_tree(LINEAR, -STEP))
    before = session.masters(), session.parameters()
    session.gradients(poisoned(ONES, math.inf))
    assert session.result().overflow
    assert same(session.masters(), before[0])
    assert same(session.parameters(), before[1])
