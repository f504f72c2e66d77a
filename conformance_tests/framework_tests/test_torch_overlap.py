"""What a window of several workers sends where it is reduced under its last backward
pass, in a group whose ranks bring what this one brings.
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

import gradaccum
from benchmarks.cost_law import UNDER_PASS, WAYS, Sent, Window
from conformance_tests.framework_tests.torch_mirror import mirror


@pytest.mark.parametrize("workers", [2, 64, 1024])
@pytest.mark.parametrize(
    ("tensors", "elements", "buckets"), [(30, 2**19, 3), (2, 2**20, 2)]
)
def test_window_sends_what_the_law_says(
    workers: int, tensors: int, elements: int, buckets: int
) -> None:
    """A vote, the buckets, and the numbers."""
    with mirror(workers) as calls:
        parameters = [nn.Parameter(torch.ones(elements)) for _ in range(tensors)]
        opt = gradaccum.wrap(
            torch.optim.SGD(parameters, lr=0.5), steps=2, process_group=dist.group.WORLD
        )
        for index in range(4):
            calls.clear()
            opt.backward(sum((each.sum() for each in parameters), torch.zeros(())))
            if index == 3:
                assert len(calls) == 1 + buckets, "while the pass ran"
            opt.step()
        sent = Sent(len(calls), sum(call.bytes for call in calls))
    window = Window(4 * tensors * elements, workers, 2, tensors)
    assert sent == WAYS[UNDER_PASS].law(window)["allreduce", workers]
    assert all(bool((each == 0).all()) for each in parameters)
