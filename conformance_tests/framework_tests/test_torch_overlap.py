"""The collectives of a window that is reduced under its last backward pass, in a group
whose ranks bring what this one brings.
"""

from __future__ import annotations

import pytest
import torch

if not torch.distributed.is_available():
    pytest.skip(
        "this torch was built without torch.distributed", allow_module_level=True
    )

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import gradaccum
from benchmarks.cost_law import ONCE, WAYS, Sent, Window
from conformance_tests.framework_tests.torch_fsdp import REASON, RUNS_ON_CPU
from conformance_tests.framework_tests.torch_mirror import mirror


@pytest.mark.parametrize("workers", [2, 64, 1024])
@pytest.mark.parametrize(
    ("tensors", "elements", "buckets"), [(30, 2**19, 3), (2, 2**20, 2)]
)
def test_window_sends_what_the_law_says(
    workers: int, tensors: int, elements: int, buckets: int
) -> None:
    """The buckets, under the pass where the one before was the only one of its
    micro-batch; then the numbers.
    """
    sent: list[Sent] = []
    with mirror(workers) as calls:
        parameters = [nn.Parameter(torch.ones(elements)) for _ in range(tensors)]
        opt = gradaccum.wrap(
            torch.optim.SGD(parameters, lr=0.5), steps=2, process_group=dist.group.WORLD
        )
        for index in range(4):
            calls.clear()
            opt.backward(sum((each.sum() for each in parameters), torch.zeros(())))
            if index % 2:
                assert len(calls) == buckets, "while the pass ran"
            opt.step()
            if index % 2:
                sent.append(Sent(len(calls), sum(call.bytes for call in calls)))
    window = Window(4 * tensors * elements, workers, 2, tensors)
    assert sent == [WAYS[ONCE].law(window)["allreduce", workers]] * 2
    assert all(bool((each == 0).all()) for each in parameters)


@pytest.mark.skipif(not RUNS_ON_CPU, reason=REASON)
def test_fsdp_reduces_under_the_last_pass() -> None:
    """Where every worker has a gradient of each parameter before it."""
    with mirror(4) as calls:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        mesh = init_device_mesh("cpu", (4,))
        for each in (model[0], model[2], model):
            fully_shard(each, mesh=mesh)
        opt = gradaccum.wrap(
            torch.optim.SGD(model.parameters(), lr=0.1),
            steps=3,
            module=model,
            gradient_sync="window",
        )
        for index in range(5):
            calls.clear()
            opt.backward(model(torch.randn(3, 8)).square().mean())
            names = [call.name for call in calls]
            assert names.count("reduce_scatter") == (2 if index == 2 else 0)
            opt.step()
        calls.clear()
        opt.flush()
        names = [call.name for call in calls]
        assert names.count("reduce_scatter") == 2, "after the pass that was not known"
