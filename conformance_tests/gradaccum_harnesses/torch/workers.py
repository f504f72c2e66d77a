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
from gradaccum_conformance import Session, Setup, WorkersHarness
from gradaccum_harnesses.torch.session import (
    SpecModel,
    TorchHarness,
    TorchSession,
    make_optimizer,
)

TIMEOUT = datetime.timedelta(seconds=60)
"""For a worker that another one waits for."""


class TorchWorkers(TorchHarness, WorkersHarness):
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
