"""FSDP2 on a CPU, on which torch before 2.8 raises."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

RUNS_ON_CPU = hasattr(FSDPModule, "set_gradient_divide_factor")
IMITATES_STREAMS = not hasattr(torch.cpu.Stream, "record_event")
GLOO_SUMS = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 11)
"""FSDP2 asks gloo for an average of float32, and gloo returns the sum. Measured: in
torch 2.8, not 2.11.
"""
REASON = "torch before 2.8: FSDP2 raises on a CPU, whose streams have no events"
NEEDS_FSDP2_ON_CPU = pytest.mark.skipif(not RUNS_ON_CPU, reason=REASON)


def imitate_streams() -> None:
    """Give the CPU's streams the two methods, which do nothing: FSDP2 then runs as it
    does on a GPU.
    """
    if IMITATES_STREAMS:
        torch.cpu.Stream.record_event = lambda self: torch.cpu.Event()  # type: ignore[method-assign, assignment, return-value]
        torch.cpu.Stream.wait_event = lambda self, event: None  # type: ignore[method-assign, assignment]
