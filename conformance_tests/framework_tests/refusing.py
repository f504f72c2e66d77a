"""Helpers to expect a refusal, for scripts that run beside pytest."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def refused(kind: type[Exception], *words: str) -> Iterator[None]:
    """The block raises an error of this kind whose text has all of the words."""
    try:
        yield
    except kind as error:
        said = str(error)
    else:
        raise AssertionError(f"no {kind.__name__} about {words}")
    assert all(word in said for word in words), said
