"""JAX: time and memory of a window as a model of constant size is cut into ever more tensors.

Every tensor is an operation of its own in the program and an argument of each call, for whoever accumulates. The compiler's time ends it:
a program that can end a window measures, divides and chooses for each tensor, and takes several times as long to compile as one that
selects alone. What each takes is among the counts.
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.axes import LARGE, STEPS, in_words
from benchmarks.case import Case
from benchmarks.jax_scaling import make_case

TENSORS = (10, 100, 200)
"""At 1000 the compiler takes more than a minute."""


def cases(quick: bool) -> Iterator[Case]:
    for tensors in TENSORS[:1] if quick else TENSORS:
        yield make_case(in_words(tensors, LARGE), tensors, steps=STEPS, tensors=tensors, elements=LARGE, run=STEPS)
