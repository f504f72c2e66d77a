"""Cross-entropy over class shards: its one collective, and a group of its own."""

from __future__ import annotations

from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, ops
from mindspore.communication import create_group

import gradaccum
from conformance_tests.framework_tests.mindspore_workers.checks import check
from gradaccum_mindspore import sharded_cross_entropy

LABELS = Tensor([0, 2, -100, 4, 7, 3], ms.int32)
LOGITS = 3 * np.random.default_rng(0).standard_normal((6, 8))


class Calls:
    """The collectives that are called from Python."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def instead(self, name: str) -> Any:
        real = getattr(ops, name)

        def make(*args: Any) -> Any:
            def call(x: Any) -> Any:
                self.names.append(name)
                return real(*args)(x)

            return call

        return make


@check
def sharded_loss_gathers_once(rank: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        calls = Calls()
        for name in ("AllGather", "AllReduce"):
            patch.setattr(ops, name, calls.instead(name))
        ms.value_and_grad(lambda x: sharded_cross_entropy(x, LABELS))(Tensor(LOGITS[:, 4 * rank :][:, :4], ms.float32))
        assert calls.names == ["AllGather"], "forward and backward together"


@check
def sharded_loss_within_a_group(rank: int) -> None:
    create_group(f"alone {rank}", [rank])
    logits = Tensor(LOGITS, ms.float32)
    alone = sharded_cross_entropy(logits, LABELS, group=f"alone {rank}", reduction="sum")
    np.testing.assert_allclose(alone.asnumpy(), ops.cross_entropy(logits, LABELS, reduction="sum").asnumpy(), rtol=1e-5)
    with pytest.raises(gradaccum.UsageError, match=r"^group: .*create_group"):
        sharded_cross_entropy(logits, LABELS, group="nobody")
