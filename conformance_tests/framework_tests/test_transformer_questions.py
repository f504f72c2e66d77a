"""The benchmark questions for a GPU: their count of operations per window is right, and
a tiny model runs without a GPU.
"""

from __future__ import annotations

from importlib import import_module

import pytest

from benchmarks.contestants.transformer import GPT2_SMALL, TINY
from benchmarks.rounds import Plan
from benchmarks.run_question import _timed


def test_window_operations() -> None:
    """By hand: 6 x (12 x 2 x 32^2 + 128 x 32) + 12 x 2 x 32 x 16 for each of 8 x 2 x 16
    tokens.
    """
    assert TINY.window_flops == 184320 * 256
    per_token = GPT2_SMALL.window_flops / GPT2_SMALL.tokens
    assert per_token == pytest.approx(6 * 124e6 + 12 * 12 * 768 * 1024, rel=0.01), (
        "124 million weights, as published"
    )


@pytest.mark.deep
@pytest.mark.parametrize(
    ("question", "framework"),
    [("torch_transformer", "torch"), ("jax_transformer", "optax")],
)
def test_questions_run_tiny(question: str, framework: str) -> None:
    pytest.importorskip(framework, reason=f"needs {framework}")
    for case in import_module(f"benchmarks.questions.{question}").cases(quick=True):
        record = _timed(case, Plan(rounds=1))
        assert {"gradaccum", case.baseline} <= {
            row["contestant"] for row in record["rows"]
        }
        assert all(row["counts"]["tokens/s"] > 0 for row in record["rows"])
