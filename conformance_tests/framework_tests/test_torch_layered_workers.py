"""The layered window of several workers: two processes, and a process group that
mirrors 64.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch

pytest.importorskip(
    "torch.distributed.fsdp", reason="needs a torch with distributed support"
)
if not torch.distributed.is_gloo_available():
    pytest.skip("this torch was built without gloo", allow_module_level=True)

import gradaccum
from conformance_tests.framework_tests.test_torch_mirror import fsdp, two_layers
from conformance_tests.framework_tests.torch_fsdp import NEEDS_FSDP2_ON_CPU
from conformance_tests.framework_tests.torch_layers import CHECKS, runs
from conformance_tests.framework_tests.torch_mirror import mirror
from conformance_tests.framework_tests.torch_workers.jobs import (
    reports_of,
    require_passed,
)
from gradaccum_torch import layered_backward

pytestmark = pytest.mark.xdist_group("torch_layers")


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """One run for all tests."""
    return reports_of(
        "conformance_tests.framework_tests.torch_layers",
        tmp_path_factory.mktemp("layers"),
    )


@pytest.mark.parametrize("name", CHECKS)
def test_two_workers(name: str, reports: list[dict[str, str]]) -> None:
    if not runs(name):
        pytest.skip("this torch has no FSDP2 on a CPU, or none that averages float32")
    require_passed(name, reports)


@NEEDS_FSDP2_ON_CPU
@pytest.mark.parametrize("steps", [1, 4])
def test_sixty_four_workers(steps: int) -> None:
    """Each layer is gathered twice and reduced once; the bytes do not depend on the
    number of micro-batches.
    """
    x, y = torch.randn(8, 3).double(), torch.randn(8, 128).double()
    alone = two_layers(64)
    (alone(x) - y).square().mean().backward()
    expected = [p.detach() - p.grad for p in alone.parameters()]
    with mirror(64) as calls:
        job = fsdp(64, "micro_batch")
        opt = gradaccum.wrap(
            torch.optim.SGD(job.model.parameters(), lr=1.0),
            None,
            module=job.model,
            on_overflow="ignore",
        )
        calls.clear()
        layered_backward(
            job.model, torch.nn.functional.mse_loss, x, y, steps=steps, optimizer=opt
        )
        sent = Counter(call.name for call in calls)
        assert (sent["allgather"], sent["reduce_scatter"]) == (4, 2)
        assert sum(
            call.bytes for call in calls if call.name == "reduce_scatter"
        ) == sum(p.nbytes for p in alone.parameters())
        for p, value in zip(job.model.parameters(), expected, strict=True):
            torch.testing.assert_close(
                p.to_local(), value.chunk(64)[0], rtol=1e-12, atol=1e-14
            )
