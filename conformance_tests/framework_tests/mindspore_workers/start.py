"""The first check: before `mindspore.communication.init`, and that call, which all other checks need."""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor
from mindspore.communication import get_group_size, get_rank, init

import gradaccum
from conformance_tests.framework_tests.mindspore_workers.checks import check
from gradaccum_mindspore import sharded_cross_entropy


@check
def communication_must_be_initialised(rank: int) -> None:
    with pytest.raises(gradaccum.UsageError, match=r"^group: .*communication\.init"):
        sharded_cross_entropy(Tensor(np.zeros((2, 4)), ms.float32), Tensor([0, 1], ms.int32))
    init()
    assert (get_rank(), get_group_size()) == (rank, 2)
