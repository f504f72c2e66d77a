"""`gradaccum_torch.sharded_cross_entropy`: its peak of memory, and what it refuses in
one process.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip(
    "torch.distributed.fsdp", reason="needs a torch with distributed support"
)

import torch
import torch.distributed as dist

import gradaccum
from conformance_tests.framework_tests.torch_operations import Peak
from gradaccum_torch import sharded_cross_entropy

pytestmark = pytest.mark.skipif(
    not dist.is_gloo_available(), reason="this torch was built without gloo"
)

MEBI = 2**20


@pytest.fixture
def one_worker() -> Iterator[None]:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_a_million_classes_cost_one_gradient(
    one_worker: None, dtype: Any, smoothing: float
) -> None:
    """Forward a sixteenth of the shard; backward the gradient and twice that, in
    float32: two temporaries may live for a moment.
    """
    shard = torch.zeros(16, 10**6, dtype=dtype, requires_grad=True)
    labels = torch.arange(16) * 60000
    size, block = shard.numel() * shard.itemsize, shard.numel() * 4 // 16
    with Peak() as forward:
        loss = sharded_cross_entropy(shard, labels, label_smoothing=smoothing)
    with Peak() as backward:
        loss.backward()
    assert 0 < forward.peak <= 2 * block + MEBI
    assert size < backward.peak <= size + 2 * block + MEBI
    assert shard.grad is not None
    assert shard.grad.dtype == dtype


def test_without_a_process_group() -> None:
    with pytest.raises(gradaccum.UsageError, match=r"^group: .*init_process_group"):
        sharded_cross_entropy(torch.zeros(2, 3), torch.tensor([0, 1]))


LOGITS, LABELS = torch.zeros(2, 3), torch.tensor([0, 1])


@pytest.mark.parametrize(
    ("name", "arguments", "options"),
    [
        ("logits_shard", ([[0.0]], LABELS), {}),
        ("logits_shard", (LOGITS.int(), LABELS), {}),
        ("labels", (LOGITS, [0, 1]), {}),
        ("labels", (LOGITS, torch.zeros(2, 3)), {}),
        ("labels", (torch.zeros(()), LABELS), {}),
        ("labels", (LOGITS.T, LABELS), {}),
        ("labels", (LOGITS, LABELS.to("meta")), {}),
    ],
)
def test_bad_input(
    one_worker: None, name: str, arguments: tuple[Any, Any], options: dict[str, Any]
) -> None:
    with pytest.raises(
        (gradaccum.ArgumentTypeError, gradaccum.ArgumentValueError),
        match=rf"^{name}: expected",
    ):
        sharded_cross_entropy(*arguments, **options)


def test_a_second_derivative_is_refused(one_worker: None) -> None:
    shard = torch.zeros(2, 3, requires_grad=True)
    loss = sharded_cross_entropy(shard, LABELS)
    with pytest.raises(gradaccum.UsageError, match=r"^create_graph"):
        torch.autograd.grad(loss, shard, create_graph=True)
