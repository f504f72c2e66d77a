"""Four workers in one process, as threads: two copies of the parameters, each split in two (HSDP), and all split in four.

``python -m conformance_tests.framework_tests.torch_shards.hybrid``
"""

from __future__ import annotations

import math
import os
import threading
import traceback
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.multi_threaded_pg import ProcessLocalGroup, _install_threaded_pg

import gradaccum
from conformance_tests.framework_tests.torch_shards.common import (
    Way,
    alone,
    batches,
    counted,
    learn,
    numbers,
    require_equal,
    require_same_everywhere,
    sharded,
    train,
    windows_of,
    wrap,
)

WORKERS, SECONDS = 4, 400
SMALL = 100
"""Bytes: a quarter or a half of the first layer has more than the numbers that travel beside the gradients."""
_MEET = threading.Barrier(WORKERS, timeout=SECONDS)
WAYS = [Way(sync, (2, 2)) for sync in ("micro_batch", "window", "all_reduce_per_window")] + [Way("window", (4,))]
OPTIONS: list[dict[str, Any]] = [{"clip_norm": 0.05}, {"reduction": "sum"}, {"loss_scale": 1024.0}]


def run(rank: int) -> None:
    for options in OPTIONS:
        reference, other = alone(windows_of((3, 1), WORKERS), **options)
        for way in WAYS:
            model = sharded(way)
            opt = wrap(model, way, **options)
            train(model, opt, rank, 4)
            opt.flush()
            require_equal(model, reference)
            assert math.isclose(opt.result.grad_norm, other.result.grad_norm, rel_tol=1e-12), way
            require_same_everywhere(opt.result)
    for way in WAYS:
        overflow(way, rank)
        divide(way, rank)
        weigh_nothing(way, rank)
    count(rank)


def overflow(way: Way, rank: int) -> None:
    model = sharded(way)
    before = numbers(model)
    opt = wrap(model, way, steps=1, loss_scale=gradaccum.DynamicLossScale(1024.0))
    learn(model, opt, (batches(rank)[0][0] * (math.inf if rank == 3 else 1), False))
    assert opt.result.overflow
    assert all(map(torch.equal, numbers(model), before))
    require_same_everywhere(opt.result)


def divide(way: Way, rank: int) -> None:
    model = sharded(way)
    model.set_gradient_divide_factor(3.0)
    opt = wrap(model, way, reduction="sum")
    train(model, opt, rank, 3)
    require_equal(model, alone(windows_of((3,), WORKERS), reduction="sum")[0])


def weigh_nothing(way: Way, rank: int) -> None:
    """One worker's first micro-batch has weight 0, and a loss that is not finite."""
    model = sharded(way)
    opt = wrap(model, way, steps=2)
    for index, (x, rare) in enumerate(batches(rank, 2)):
        off = rank == 3 and index == 0
        opt.backward(model(x, rare).square().mean(1).mean() * (math.nan if off else 1), weight=0 if off else len(x))
        opt.step()
    window = [batch for worker in range(WORKERS) for index, batch in enumerate(batches(worker, 2)) if (worker, index) != (3, 0)]
    require_equal(model, alone([window])[0])


def count(rank: int) -> None:
    """Once per window, with zeros, FSDP2 reduce-scatters beside its all-reduce, which has no gradients of its own by then."""
    steps, units = 3, 2
    for way, scatters, reductions in ((WAYS[0], steps, steps), (WAYS[1], 1, 1), (WAYS[2], steps + 1, 1)):
        model = sharded(way)
        opt = wrap(model, way, steps=steps)
        train(model, opt, rank, steps)
        _MEET.wait()
        with counted() if rank == 0 else nullcontext([]) as called:
            _MEET.wait()
            train(model, opt, rank, steps)
            _MEET.wait()
        if rank == 0:
            assert sum(name == "reduce_scatter_single" for name, _ in called) == WORKERS * units * scatters, (way, called)
            assert sum(name == "all_reduce" and size > SMALL for name, size in called) == WORKERS * units * reductions, (way, called)


def work(rank: int, store: Any, failures: list[str]) -> None:
    try:
        dist.init_process_group("threaded", rank=rank, world_size=WORKERS, store=store)
        run(rank)
    except BaseException as error:
        failures.append(traceback.format_exc())
        ProcessLocalGroup.exception_handle(error)


def main() -> None:
    torch.set_num_threads(1)
    _install_threaded_pg()
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    store, failures = dist.HashStore(), list[str]()
    workers = [threading.Thread(target=work, args=(rank, store, failures), daemon=True) for rank in range(WORKERS)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(SECONDS)
    if failures or any(worker.is_alive() for worker in workers):
        print("\n".join(failures) or "the workers wait for each other", flush=True)
        os._exit(1)


if __name__ == "__main__":
    main()
