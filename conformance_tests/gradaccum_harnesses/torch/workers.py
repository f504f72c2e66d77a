"""The workers that the conformance suite starts: processes of one gloo group, around
`DistributedDataParallel` modules.
"""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import ClassVar

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import gradaccum
from gradaccum_conformance import (
    Array,
    Session,
    Setup,
    ShardedLossCall,
    ShardedLossHarness,
)
from gradaccum_harnesses.torch.session import (
    SpecModel,
    TorchHarness,
    TorchSession,
    make_optimizer,
    to_numpy,
)
from gradaccum_torch import sharded_cross_entropy

TIMEOUT = datetime.timedelta(seconds=60)
"""For a worker that another one waits for."""


class TorchWorkers(TorchHarness, ShardedLossHarness):
    """The harness, with processes that `join`."""

    worker_modes: ClassVar[tuple[str, ...]] = ("eager",)

    def join(self, rank: int, workers: int, folder: Path, port: int) -> None:
        torch.set_num_threads(1)  # The workers share the cores.
        store = (folder / "store").resolve().as_uri()
        dist.init_process_group(
            "gloo", init_method=store, rank=rank, world_size=workers, timeout=TIMEOUT
        )

    def start_shared(self, setup: Setup) -> Session:
        module = SpecModel(setup.model, setup.weights, setup.dtype)
        # A forward pass that sends it must not meet another's flush.
        module.register_buffer("sent", torch.zeros(1), persistent=False)
        parallel = DistributedDataParallel(module, find_unused_parameters=True)
        inner = make_optimizer(module, setup.optimizer)
        return TorchSession(
            module,
            inner,
            gradaccum.wrap(inner, **(setup.options or {}), module=parallel),
            forward=parallel,
        )

    def sharded_cross_entropy(self, call: ShardedLossCall) -> tuple[Array, Array]:
        logits = torch.tensor(
            call.logits, dtype=getattr(torch, call.dtype), requires_grad=True
        )
        loss = sharded_cross_entropy(
            logits, torch.tensor(call.labels), shard_sizes=call.sizes, **call.options
        )
        (gradient,) = torch.autograd.grad(
            loss,
            logits,
            torch.tensor(call.upstream, dtype=loss.dtype).expand(loss.shape),
        )
        return to_numpy(loss), to_numpy(gradient)
