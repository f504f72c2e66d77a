"""The vectors of the specification: each backend passes all that it offers, and it
offers all of them.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from gradaccum_conformance.harness import Harness
from gradaccum_conformance.vectors.run import KINDS, run
from gradaccum_conformance.vectors.session import SessionImplementation


@pytest.mark.parametrize("kind", KINDS)
def test_vectors_pass(backend: Harness, kind: str) -> None:
    with np.errstate(over="ignore", invalid="ignore"):
        verdicts = run(partial(SessionImplementation, backend), kind)
    differences = {name: words for name, words in verdicts.items() if words}
    assert verdicts
    assert not differences
