"""JAX: time and memory of a window as a model of constant size is cut into ever more
tensors.

Every tensor is an operation of its own in the program and an argument of each call, for
whoever accumulates. The seconds that compiling takes are among the counts;
``benchmarks/README.md`` says what they go to.
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.axes import COMPILED_TENSORS, LARGE, STEPS, in_words
from benchmarks.case import Case
from benchmarks.questions.jax_window_length import make_case


def cases(quick: bool) -> Iterator[Case]:
    for tensors in COMPILED_TENSORS[:1] if quick else COMPILED_TENSORS:
        yield make_case(
            in_words(tensors, LARGE),
            tensors,
            steps=STEPS,
            tensors=tensors,
            elements=LARGE,
            run=STEPS,
        )
