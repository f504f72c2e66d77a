"""The garbage collector looks at no more than what a file's own tests make.

Three frameworks, and what they keep of each compiled program, are a million objects. A
full collection walks all of them, and MindSpore and the tests of freed memory ask for
many: for a tenth of the whole run.
"""

from __future__ import annotations

import gc

import pytest


@pytest.fixture(autouse=True, scope="module")
def only_new_objects_are_collected() -> None:
    gc.collect()
    gc.freeze()
