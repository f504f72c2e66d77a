"""The list of checks, each run in both processes at once; the first one before
communication is initialised.
"""

from __future__ import annotations

from collections.abc import Callable

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor
from mindspore.communication import get_group_size, get_rank, init

import gradaccum
from gradaccum_mindspore import sharded_cross_entropy

Check = Callable[[int], None]
"""A function of the rank; it raises if the check fails."""
CHECKS: dict[str, Check] = {}


def check(function: Check) -> Check:
    CHECKS[function.__name__] = function
    return function


@check
def communication_must_be_initialised(rank: int) -> None:
    with pytest.raises(gradaccum.UsageError, match=r"^group: .*communication\.init"):
        sharded_cross_entropy(
            Tensor(np.zeros((2, 4)), ms.float32), Tensor([0, 1], ms.int32)
        )
    init()
    assert (get_rank(), get_group_size()) == (rank, 2)
