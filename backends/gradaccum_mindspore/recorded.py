"""MindSpore goes on recording operators after a function raised inside `mindspore.value_and_grad`, unless a Cell raised.

A later call would then be differentiated through what came before it, as a second derivative: slower, and some operators have none.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

try:
    from mindspore.graph import api
except ImportError:  # its place before MindSpore 2.9
    from mindspore.common import api

pynative_executor = api._pynative_executor


def forget_recorded() -> None:
    """Let MindSpore forget the operators that it has recorded."""
    pynative_executor.clear_res()


@contextmanager
def forgotten_on_error() -> Iterator[None]:
    """If the block raises, what it has recorded is forgotten."""
    try:
        yield
    except BaseException:
        forget_recorded()
        raise
