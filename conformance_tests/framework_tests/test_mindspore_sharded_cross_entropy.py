"""`gradaccum_mindspore.sharded_cross_entropy`: one worker against
`mindspore.ops.cross_entropy`, and what is refused.
"""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, ops

import gradaccum
from gradaccum_mindspore import sharded_cross_entropy, verify_loss_scaling
from gradaccum_mindspore.workers.cross_entropy import ClassShardedLosses

LOGITS, LABELS = (
    Tensor(np.random.RandomState(0).randn(3, 4), ms.float32),
    Tensor([1, -100, 3], ms.int32),
)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_one_worker(reduction, smoothing):
    """Without any group: 16 roundings of logits of less than four, a loss of less than
    eight.
    """
    options = {"reduction": reduction, "label_smoothing": smoothing}
    mine, dense = (
        ms.value_and_grad(lambda x, f=function: f(x, LABELS, **options).sum())(LOGITS)
        for function in (sharded_cross_entropy, ops.cross_entropy)
    )
    for one, other in zip(mine, dense, strict=True):
        np.testing.assert_allclose(
            one.asnumpy(), other.asnumpy(), rtol=0, atol=16 * 8 * 2.0**-24
        )


class IgnoresUpstream(ClassShardedLosses):
    """The mistake that is often made: right for a loss that is the last call, and wrong
    for a scaled one.
    """

    def bprop(
        self, shard, index, maximum, total, target, even, share, uniform, out, dout
    ):
        return super().bprop(
            shard,
            index,
            maximum,
            total,
            target,
            even,
            share,
            uniform,
            out,
            ops.ones_like(dout),
        )


@pytest.mark.parametrize(
    ("cell", "culprits"),
    [(ClassShardedLosses, ()), (IgnoresUpstream, ("IgnoresUpstream",))],
)
def test_loss_scaling(cell, culprits, monkeypatch):
    monkeypatch.setattr(
        "gradaccum_mindspore.workers.cross_entropy.CLASS_SHARDED_LOSSES", cell()
    )
    weight = ms.Parameter(LOGITS, name="weight")
    report = verify_loss_scaling(
        lambda y: sharded_cross_entropy(weight * 2, y), weight, LABELS
    )
    assert (report.linear, report.culprits) == (not culprits, culprits), str(report)


@pytest.mark.parametrize(
    ("name", "arguments", "options"),
    [
        ("logits_shard", (LOGITS.astype(ms.int32), LABELS), {}),
        ("logits_shard", (LOGITS[:, :0], LABELS), {}),
        ("group", (LOGITS, LABELS), {"group": 3}),
        ("shard_sizes", (LOGITS, LABELS), {"shard_sizes": (3,)}),
        ("shard_sizes", (LOGITS, LABELS), {"shard_sizes": "four"}),
    ],
)
def test_bad_input(name, arguments, options):
    with pytest.raises(
        (gradaccum.ArgumentTypeError, gradaccum.ArgumentValueError),
        match=rf"^{name}: expected",
    ):
        sharded_cross_entropy(*arguments, **options)


def test_a_group_without_communication():
    with pytest.raises(
        gradaccum.UsageError, match=r"^group: .*mindspore\.communication\.init"
    ):
        sharded_cross_entropy(LOGITS, LABELS, group="workers")
