"""The list of checks, each run in both processes at once; the first one before
communication is initialised.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from mindspore.communication import get_group_size, get_rank, init

import gradaccum
from gradaccum_mindspore import GatherItems

Check = Callable[[int], None]
"""A function of the rank; it raises if the check fails."""
CHECKS: dict[str, Check] = {}


def check(function: Check) -> Check:
    CHECKS[function.__name__] = function
    return function


@check
def communication_must_be_initialised(rank: int) -> None:
    with pytest.raises(gradaccum.UsageError, match=r"^GatherItems: .*communication\.init"):
        GatherItems()
    init()
    assert (get_rank(), get_group_size()) == (rank, 2)
