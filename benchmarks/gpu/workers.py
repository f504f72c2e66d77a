"""Stage 11: DistributedDataParallel and FSDP2 with one process, on NCCL, or on gloo on a
CPU: the collectives run, though there is nobody to talk to.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradaccum
from benchmarks.gpu.exact import CLIP_NORM, ragged, windows_of
from benchmarks.gpu.problem import (
    FLOAT64_BOUND,
    STEPS,
    backward,
    distance,
    flat,
    inner_optimizer,
    make_items,
    make_model,
    mean_loss,
    train,
    train_large,
)
from benchmarks.gpu.records import Check, Measured, Setting
from benchmarks.rounds import Plan, measure


@contextmanager
def one_process(setting: Setting) -> Iterator[None]:
    """Open the default process group with this process alone."""
    engine = "nccl" if setting.device == "cuda" else "gloo"
    with tempfile.TemporaryDirectory() as folder:
        address = f"file://{Path(folder) / 'rendezvous'}"
        dist.init_process_group(engine, init_method=address, rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()


def data_parallel(setting: Setting) -> Measured:
    with one_process(setting):
        parallel = DistributedDataParallel(make_model(setting))
        model = parallel.module
        opt = gradaccum.wrap(
            inner_optimizer(model), STEPS, clip_norm=CLIP_NORM, module=parallel
        )
        train(parallel, opt, ragged(setting))
        expected = expected_model(setting)
        found = distance(model, expected, make_model(setting))
    return within(found)


def expected_model(setting: Setting) -> nn.Module:
    model = make_model(setting)
    train_large(model, windows_of(ragged(setting)), CLIP_NORM)
    return model


def within(found: float) -> Measured:
    return Measured(found <= FLOAT64_BOUND, f"{found:.1e}", f"{FLOAT64_BOUND:.0e}")


def fully_sharded(setting: Setting, gradient_sync: Any) -> Measured:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    with one_process(setting):
        mesh = init_device_mesh(setting.device, (1,))
        model = make_model(setting)
        for layer in (model[0], model[2], model):
            fully_shard(layer, mesh=mesh)
        opt = gradaccum.wrap(
            inner_optimizer(model),
            STEPS,
            clip_norm=CLIP_NORM,
            module=model,
            gradient_sync=gradient_sync,
        )
        train(model, opt, ragged(setting))
        ended = flat(complete(parameter) for parameter in model.parameters())
    expected = flat(expected_model(setting).parameters())
    moved = (expected - flat(make_model(setting).parameters())).norm()
    return within(float((ended - expected).norm() / moved))


def complete(parameter: Tensor) -> Tensor:
    """Return all of a `DTensor`'s elements."""
    sharded: Any = parameter
    tensor: Tensor = sharded.full_tensor()
    return tensor


def time_beside_no_sync(setting: Setting) -> Measured:
    """Measure a window under DDP beside the one that is written with `no_sync`."""
    x, y = make_items(setting, 8, torch.float32)

    def parallel() -> DistributedDataParallel:
        return DistributedDataParallel(make_model(setting, torch.float32))

    def synchronized(window: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            window()
            if setting.device == "cuda":
                torch.cuda.synchronize()

        return run

    with one_process(setting):
        ours = parallel()
        opt = gradaccum.wrap(inner_optimizer(ours), STEPS, module=ours)
        usual = parallel()
        optimizer = inner_optimizer(usual)

        def wrapped() -> None:
            train(ours, opt, [(x, y)] * STEPS)

        def by_hand() -> None:
            with usual.no_sync():
                for _ in range(STEPS - 1):
                    backward(mean_loss(usual, x, y) / STEPS)
            backward(mean_loss(usual, x, y) / STEPS)
            optimizer.step()
            optimizer.zero_grad()

        plan = Plan(rounds=100, least=3, seconds=setting.seconds(0.2))
        contestants = {
            "no_sync": synchronized(by_hand),
            "gradaccum": synchronized(wrapped),
        }
        no_sync, found = measure(contestants, "no_sync", plan)
    text = f"{found.ratio:.2f} ({found.ratio_low:.2f} to {found.ratio_high:.2f})"
    return Measured(None, text, bare=f"{no_sync.median_ms:.2f} ms")


FSDP2_RUNS_ON_CPU = hasattr(torch.cpu.Stream, "record_event")
"""FSDP2 asks a CPU's streams for events, which they have from torch 2.8 on."""
CHECKS = (
    Check("DistributedDataParallel, ragged, clipped", data_parallel),
    Check(
        'FSDP2, gradient_sync="micro_batch"',
        partial(fully_sharded, gradient_sync="micro_batch"),
        needs_gpu=not FSDP2_RUNS_ON_CPU,
    ),
    Check(
        'FSDP2, gradient_sync="window"',
        partial(fully_sharded, gradient_sync="window"),
        needs_gpu=not FSDP2_RUNS_ON_CPU,
    ),
    Check("DDP, time of a window beside no_sync", time_beside_no_sync),
)
