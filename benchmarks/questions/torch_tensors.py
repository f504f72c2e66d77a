"""torch: time of a window as a model of constant size is cut into ever more tensors.

Autograd adds to each tensor by itself, and the inner optimizer and the norm go over all
of them; a micro-batch of gradaccum touches none.
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.axes import LARGE, STEPS, TENSORS, in_words
from benchmarks.case import Case
from benchmarks.questions.torch_window_length import make_case


def cases(quick: bool) -> Iterator[Case]:
    for tensors in TENSORS[:2] if quick else TENSORS:
        yield make_case(
            in_words(tensors, LARGE),
            tensors,
            steps=STEPS,
            tensors=tensors,
            elements=LARGE,
            run=STEPS,
        )
