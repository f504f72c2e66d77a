"""Recomputed models under the wrappers of several workers, here of one: the wrapper
exchanges parameters while a replay runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

if not (torch.distributed.is_available() and torch.distributed.is_gloo_available()):
    pytest.skip("this torch was built without gloo", allow_module_level=True)

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from conformance_tests.framework_tests.torch_fsdp import NEEDS_FSDP2_ON_CPU
from conformance_tests.framework_tests.torch_recompute import data, make, same
from gradaccum_torch.recomputation import recompute


@pytest.fixture(autouse=True)
def alone(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1
    )
    yield
    dist.destroy_process_group()


def blocks() -> nn.Sequential:
    return nn.Sequential(make()[:6], make()[5:10], make()[9:])


def trained(model: Any) -> list[Tensor]:
    """After two micro-batches."""
    torch.manual_seed(1)
    for index in range(2):
        model(data() + index).square().sum().backward()
    gradients = [
        getattr(p.grad, "full_tensor", lambda p=p: p.grad)() for p in model.parameters()
    ]
    return [*gradients, *model.buffers(), torch.get_rng_state()]


@pytest.mark.parametrize("options", [{}, {"static_graph": True}], ids=str)
def test_data_parallel(options: dict[str, Any]) -> None:
    model = blocks()
    recompute(model, submodules=model)
    assert same(
        trained(nn.parallel.DistributedDataParallel(model, **options)),
        trained(blocks()),
    )


@NEEDS_FSDP2_ON_CPU
@pytest.mark.parametrize(
    "where", ["around segments", "around parts", "inside of parts"]
)
def test_fully_sharded(where: str) -> None:
    model, mesh = blocks(), init_device_mesh("cpu", (1,))
    if where == "around segments":
        recompute(model, segments=2)
    if where == "around parts":
        recompute(model, submodules=model)
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if where == "inside of parts":
        recompute(model, submodules=model)
    assert same(trained(model), trained(blocks()))
