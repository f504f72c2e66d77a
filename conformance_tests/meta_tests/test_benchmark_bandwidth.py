"""The bandwidth questions: the triad is right, only bytes that must move are counted,
and every contestant really adds.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks import triad
from benchmarks.case import Case

TENSORS = 2
SHAPE = (3, 4)
RUNS = 5


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triad, "TENSORS", TENSORS)
    monkeypatch.setattr(triad, "SHAPE", SHAPE)
    monkeypatch.setattr(triad, "ELEMENTS", 24)
    monkeypatch.setattr(triad, "BLOCK", 7)


def require_whole(case: Case) -> None:
    """Every contestant runs, and has its bytes."""
    assert case.baseline == triad.NAME
    assert set(case.contestants) == set(case.rates)
    for run in case.contestants.values():
        run()


def test_triad_is_right_in_blocks() -> None:
    a, b, c = (
        np.empty(24, np.float32),
        np.arange(24, dtype=np.float32),
        np.full(24, 3, np.float32),
    )
    triad.triad(a, b, c)
    np.testing.assert_array_equal(a, b + np.float32(triad.SCALE) * c)


def test_bytes_count_reads_and_writes() -> None:
    assert triad.moved(4, 4, 4) == 24 * 12
    assert triad.moved(4, 2, 4) == 24 * 10


def test_arrays_exceed_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """The three arrays together are six times a cache of 32 MiB."""
    monkeypatch.undo()
    assert triad.FLOAT32 >= 6 * 32 * 2**20
    assert triad.TENSORS * int(np.prod(triad.SHAPE)) == triad.ELEMENTS


def test_torch_contestants_add(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    import gradaccum
    from benchmarks.questions import torch_bandwidth

    require_whole(torch_bandwidth._float32())
    require_whole(torch_bandwidth._bfloat16())
    wrapped, wrap = [], gradaccum.wrap
    monkeypatch.setattr(
        gradaccum,
        "wrap",
        lambda *args, **options: wrapped.append(wrap(*args, **options)) or wrapped[-1],
    )
    for dtype in (torch.float32, torch.bfloat16):
        micro_batch = torch_bandwidth._gradaccum(dtype)
        for _ in range(RUNS):
            micro_batch()
        sums = wrapped[-1]._window.gradient_sum.gradients().values()
        assert [
            (total.dtype, float(total.min()), float(total.max())) for total in sums
        ] == [(torch.float32, RUNS * triad.GRADIENT, RUNS * triad.GRADIENT)] * TENSORS


def test_jax_contestants_add() -> None:
    optax = pytest.importorskip("optax", reason="needs optax")
    import jax.numpy as jnp

    import gradaccum
    from benchmarks.questions import jax_bandwidth

    steps = {
        "whole": jax_bandwidth._whole_step(
            gradaccum.wrap(optax.sgd(0.1), steps=jax_bandwidth.MANY), jnp.bfloat16
        ),
        "alone": jax_bandwidth._sum_alone(
            gradaccum.wrap(optax.sgd(0.1), steps=None), jnp.float32
        ),
    }
    for run in steps.values():
        for _ in range(RUNS - 1):
            run()
        state = run()[-1]
        assert int(state.micro_step) == RUNS
        assert [float(total.max()) for total in state.accumulator] == [
            RUNS * triad.GRADIENT
        ] * TENSORS


def test_questions_stay_on_one_core() -> None:
    """Otherwise NumPy's one thread would run against all threads of a framework."""
    files = sorted((Path(triad.__file__).parent / "questions").glob("*_bandwidth.py"))
    assert len(files) == 3
    assert all("triad.one_core()" in file.read_text(encoding="utf-8") for file in files)
