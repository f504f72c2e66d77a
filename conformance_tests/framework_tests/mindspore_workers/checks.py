"""The list of checks, each run in both processes at once; the first one before
communication is initialised.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from mindspore import Parameter, Tensor, nn
from mindspore.communication import get_group_size, get_rank, init

import gradaccum

Check = Callable[[int], None]
"""A function of the rank; it raises if the check fails."""
CHECKS: dict[str, Check] = {}


def check(function: Check) -> Check:
    CHECKS[function.__name__] = function
    return function


@check
def communication_must_be_initialised(rank: int) -> None:
    inner = nn.SGD([Parameter(Tensor([1.0]), name="p")], 1.0)
    with pytest.raises(
        gradaccum.UsageError, match=r"^data_parallel: .*communication\.init"
    ):
        gradaccum.wrap(inner, steps=2, data_parallel=True)
    init()
    assert get_rank() == rank
    assert get_group_size() == 2
