"""JAX: time and memory of a window as a model of constant size is cut into ever more tensors.

Every tensor is an operation of its own in the program and an argument of each call, for whoever accumulates. The compiler's time ends it,
and grows faster than the tensors: a program that can end a window also measures each of them, twice if the first measure is out of range,
and has 11 to 13 kernels for a tensor where `optax.MultiSteps` has 7 or 8. What each takes to compile is among the counts; at 2000 tensors
it is 50 seconds for `optax.MultiSteps` and 130 here, on one core. From 1000 tensors on, JAX's own handling of thousands of
arguments and results is most of a micro-batch, whatever the program does.
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.axes import COMPILED_TENSORS, LARGE, STEPS, in_words
from benchmarks.case import Case
from benchmarks.jax_scaling import make_case


def cases(quick: bool) -> Iterator[Case]:
    for tensors in COMPILED_TENSORS[:1] if quick else COMPILED_TENSORS:
        yield make_case(in_words(tensors, LARGE), tensors, steps=STEPS, tensors=tensors, elements=LARGE, run=STEPS)
