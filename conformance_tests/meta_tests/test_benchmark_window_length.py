"""The window-length questions: the sum takes one gradient's bytes at every length, and peers end with the same parameters."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.axes import RUN, STEPS, TENSORS, WINDOWS, in_words, sizes

TENSORS_HERE, ELEMENTS = 3, 300


def test_tensor_sizes_are_equal() -> None:
    """Together they have every element."""
    assert sizes(3, 300) == [100, 100, 100]
    assert in_words(1000, 1_000_000) == "1,000 tensors of 1,000"
    with pytest.raises(ValueError, match="multiple of 7"):
        sizes(7, 100)


def test_runs_end_with_a_window() -> None:
    assert all(RUN % steps == 0 for steps in WINDOWS)
    assert all(sum(sizes(tensors, 1_000_000)) == 1_000_000 for tensors in TENSORS)


@pytest.mark.parametrize("steps", [2, 8])
def test_torch_holds_one_gradient(steps: int) -> None:
    pytest.importorskip("torch")
    from benchmarks.questions import torch_window_length as question

    for make in question.LOOPS.values():
        assert question.held_bytes(make(question.model(TENSORS_HERE, ELEMENTS), steps), steps) == 4 * ELEMENTS


def test_torch_peers_agree() -> None:
    pytest.importorskip("torch")
    from benchmarks.questions import torch_window_length as question

    trained = [question.model(TENSORS_HERE, ELEMENTS) for _ in question.LOOPS]
    first = [parameter.detach().clone() for parameter in trained[0]]
    for parameters, make in zip(trained, question.LOOPS.values(), strict=True):
        make(parameters, STEPS)(3 * STEPS)
    for one, other, before in zip(*trained, first, strict=True):
        np.testing.assert_allclose(one.detach(), other.detach(), rtol=1e-6, atol=1e-7)
        assert float((one.detach() - before).abs().max()) > 1e-4


def test_jax_peers_hold_one_gradient() -> None:
    """They also end with the same parameters."""
    optax = pytest.importorskip("optax")
    import gradaccum
    from benchmarks.questions import jax_window_length as question

    def model() -> list[object]:
        return question.model(TENSORS_HERE, ELEMENTS)

    made = [
        question.by_hand(model(), STEPS),
        question.one_program(optax.MultiSteps(optax.adamw(1e-4), STEPS), model()),
        question.one_program(gradaccum.wrap(optax.adamw(1e-4), steps=STEPS), model()),
    ]
    trained = [loop(3 * STEPS)[0] for loop, _ in made]
    for other in trained[1:]:
        for a, b, before in zip(trained[0], other, model(), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)
            assert float(abs(a - before).max()) > 1e-4
    assert all(4 * ELEMENTS <= held["bytes held"] < 4 * ELEMENTS + 100 for _, held in made)
