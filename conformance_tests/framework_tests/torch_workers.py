"""Run by two processes: windows over both against one process that has all micro-batches. Each check writes its own line of the report."""

from __future__ import annotations

import copy
import datetime
import json
import math
import pickle
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import gradaccum
from gradaccum_torch.workers.reduction import all_reduce

WORLD = 2
COUNTS = (6, 3)
"""Micro-batches on each worker: in windows of four a whole one, and a tail that only one worker has."""
Check = Callable[[int], None]
CHECKS: dict[str, Check] = {}


def check(function: Check) -> Check:
    CHECKS[function.__name__] = function
    return function


class Branches(nn.Module):
    """A model with a branch that few micro-batches take."""

    def __init__(self, recomputed: bool = False) -> None:
        super().__init__()
        self.first, self.usual, self.rare = nn.Linear(4, 8), nn.Linear(8, 2), nn.Linear(8, 2)
        self.recomputed = recomputed

    def forward(self, x: Tensor, rare: bool = False) -> Tensor:
        head = self.rare if rare else self.usual
        return checkpoint(self.both, x, head, use_reentrant=False) if self.recomputed else self.both(x, head)

    def both(self, x: Tensor, head: nn.Module) -> Tensor:
        return head(torch.tanh(self.first(x)))


Batch = tuple[Tensor, Tensor, bool]


def micro_batches(rank: int, dtype: torch.dtype = torch.float64) -> list[Batch]:
    """Of unequal sizes; one of the second worker takes the rare branch."""
    generator = torch.Generator().manual_seed(rank)
    sizes = [3 + rank + index for index in range(COUNTS[rank])]
    draw = [(torch.randn(n, 4, generator=generator), torch.randn(n, 2, generator=generator)) for n in sizes]
    return [(x.to(dtype), y.to(dtype), rank == 1 and index == 1) for index, (x, y) in enumerate(draw)]


def build(dtype: torch.dtype = torch.float64, **options: Any) -> Branches:
    torch.manual_seed(0)
    return Branches(**options).to(dtype)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def learn(model: nn.Module, opt: Any, batch: Batch) -> None:
    x, y, rare = batch
    off = (model(x, rare) - y).to(torch.promote_types(x.dtype, torch.float32))
    opt.backward(off.square().mean(), len(x))
    opt.step()
    opt.zero_grad()


def alone(windows: list[list[Batch]], dtype: torch.dtype = torch.float64, **options: Any) -> tuple[nn.Module, Any]:
    """One process with all micro-batches, each list a window."""
    model = build(dtype)
    opt = gradaccum.wrap(sgd(model), steps=None, **options)
    for window in windows:
        for batch in window:
            learn(model, opt, batch)
        opt.flush()
    return model, opt


def all_windows(dtype: torch.dtype = torch.float64, steps: int = 4) -> list[list[Batch]]:
    workers = [micro_batches(rank, dtype) for rank in range(WORLD)]
    return [[batch for worker in workers for batch in worker[first : first + steps]] for first in range(0, max(COUNTS), steps)]


def together(
    rank: int, dtype: torch.dtype = torch.float64, module: dict[str, Any] | None = None, model: nn.Module | None = None, **options: Any
) -> tuple[nn.Module, Any, nn.Module]:
    """The share of one worker: the model, the optimizer and the parallel module, after its micro-batches and a flush."""
    model = build(dtype) if model is None else model
    parallel = DistributedDataParallel(model, **({"find_unused_parameters": True} if module is None else module))
    opt = gradaccum.wrap(sgd(model), steps=4, module=parallel, **options)
    for batch in micro_batches(rank, dtype):
        learn(parallel, opt, batch)
    opt.flush()
    return model, opt, parallel


def require_equal(model: nn.Module, reference: nn.Module, off: float = 1e-13) -> None:
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=off, atol=off, msg=lambda text, name=name: f"{name}: {text}")


def require_same_everywhere(value: Any) -> None:
    everyone: list[Any] = [None] * WORLD
    dist.all_gather_object(everyone, value)
    assert everyone[0] == everyone[1], everyone


def numbers(model: nn.Module) -> list[list[float]]:
    return [p.detach().double().flatten().tolist() for p in model.parameters()]


@contextmanager
def refused(kind: type[Exception], *words: str) -> Iterator[None]:
    try:
        yield
    except kind as error:
        said = str(error)
    else:
        raise AssertionError(f"no {kind.__name__} about {words}")
    assert all(word in said for word in words), said


@check
def unequal_workers_make_the_large_batch(rank: int) -> None:
    """Items, numbers of micro-batches and branches differ; the second window is empty on one worker."""
    for options in ({}, {"clip_norm": 0.05}, {"reduction": "sum"}, {"loss_scale": 1024.0}, {"accumulate_dtype": "float64"}):
        model, opt, _ = together(rank, **options)
        reference, other = alone(all_windows(), **options)
        require_equal(model, reference)
        assert opt.result.optimizer_step == other.result.optimizer_step == 2
        assert math.isclose(opt.result.grad_norm, other.result.grad_norm, rel_tol=1e-12)
        require_same_everywhere((numbers(model), opt.result))


@check
def every_kind_of_module(rank: int) -> None:
    reference, _ = alone(all_windows())
    for kind in ({"static_graph": True}, {"gradient_as_bucket_view": True}, {"bucket_cap_mb": 1e-6}):
        require_equal(together(rank, module=kind)[0], reference)
    require_equal(together(rank, model=build(recomputed=True))[0], reference)
    compiled = build()
    compiled.compile(backend="eager")
    require_equal(together(rank, model=compiled)[0], reference)


@check
def half_precision_is_summed_in_float32(rank: int) -> None:
    for options in ({}, {"master_weights": True}, {"loss_scale": gradaccum.DynamicLossScale(1024.0)}):
        model, opt, _ = together(rank, torch.bfloat16, **options)
        reference, other = alone(all_windows(torch.bfloat16), torch.bfloat16, **options)
        require_equal(model, reference, off=0)
        assert math.isclose(opt.result.grad_norm, other.result.grad_norm, rel_tol=1e-6)
        require_same_everywhere((numbers(model), opt.result))


@check
def overflow_on_one_worker_skips_on_all(rank: int) -> None:
    model = build()
    before = numbers(model)
    parallel = DistributedDataParallel(model, find_unused_parameters=True)
    opt = gradaccum.wrap(sgd(model), steps=2, module=parallel, loss_scale=gradaccum.DynamicLossScale(1024.0))
    for index, (x, y, rare) in enumerate(micro_batches(rank)[:2]):
        learn(parallel, opt, (x * (math.inf if rank == 1 and index == 0 else 1), y, rare))
    assert opt.result.skipped
    assert opt.result.overflow
    assert opt.result.loss_scale == 512.0
    assert numbers(model) == before
    for batch in micro_batches(rank)[:2]:
        learn(parallel, opt, batch)
    assert opt.result.applied
    require_same_everywhere((numbers(model), opt.result))


@check
def dropped_micro_batch_is_left_out(rank: int) -> None:
    model = build()
    parallel = DistributedDataParallel(model, find_unused_parameters=True)
    opt = gradaccum.wrap(sgd(model), steps=4, module=parallel, on_overflow="drop_micro_batch", loss_scale=gradaccum.DynamicLossScale(64.0))
    for index, (x, y, rare) in enumerate(micro_batches(rank)):
        learn(parallel, opt, (x * (math.nan if rank == 0 and index == 0 else 1), y, rare))
    opt.flush()
    first, second = all_windows()
    reference, _ = alone([first[1:], second])
    require_equal(model, reference)
    assert opt.result.loss_scale == 32.0
    require_same_everywhere(opt.result)


@check
def norm_to_skip_is_that_of_all(rank: int) -> None:
    norm = alone(all_windows()[:1])[1].result.grad_norm
    for limit, applied in ((0.99 * norm, False), (1.01 * norm, True)):
        model = build()
        parallel = DistributedDataParallel(model, find_unused_parameters=True)
        opt = gradaccum.wrap(sgd(model), steps=None, module=parallel, skip_norm=limit)
        for batch in micro_batches(rank)[:4]:
            learn(parallel, opt, batch)
        opt.flush()
        assert opt.result.applied is applied


@check
def two_reductions_per_window(rank: int) -> None:
    """One of a few numbers and one of the sums, whatever the number of micro-batches."""
    called: list[int] = []
    original = dist.all_reduce

    def counting(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        called.append(tensor.numel())
        return original(tensor, *args, **kwargs)

    dist.all_reduce = counting
    try:
        together(rank)
    finally:
        dist.all_reduce = original
    size = sum(p.numel() for p in Branches().parameters())
    rare = sum(p.numel() for p in Branches().rare.parameters())
    assert [count for count in called if count > 20] == [size, size - rare]
    assert len(called) == 4


@check
def grad_scaler_moves_once_per_window(rank: int) -> None:
    model = build(torch.float32)
    parallel = DistributedDataParallel(model, find_unused_parameters=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
    opt = gradaccum.wrap(sgd(model), steps=2, module=parallel, loss_scale=scaler)
    for index, (x, y, rare) in enumerate([*micro_batches(rank, torch.float32)[:2]] * 2):
        bad = math.inf if rank == 1 and index == 2 else 1
        scaler.scale((parallel(x * bad, rare) - y).square().mean()).backward()
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
    assert scaler.get_scale() == 8.0, "doubled after the first window, halved after the second"
    require_same_everywhere((numbers(model), scaler.state_dict(), opt.result))


@check
def failed_update_is_not_reduced_twice(rank: int) -> None:
    model = build()
    parallel = DistributedDataParallel(model, find_unused_parameters=True)
    opt = gradaccum.wrap(sgd(model), steps=4, module=parallel)
    hook = opt.register_step_pre_hook(lambda *_: (_ for _ in ()).throw(ZeroDivisionError))
    batches = micro_batches(rank)
    with refused(ZeroDivisionError):
        for batch in batches[:4]:
            learn(parallel, opt, batch)
        opt.flush()
    hook.remove()
    with refused(gradaccum.UsageError, "flush()"):
        opt.state_dict()
    opt.flush()
    require_equal(model, alone(all_windows()[:1])[0])


@check
def resumed_window_is_bitwise_the_same(rank: int) -> None:
    model, _, _ = together(rank)
    halfway = build()
    parallel = DistributedDataParallel(halfway, find_unused_parameters=True)
    opt = gradaccum.wrap(sgd(halfway), steps=4, module=parallel)
    batches = micro_batches(rank)
    for batch in batches[:2]:
        learn(parallel, opt, batch)
    saved = copy.deepcopy(opt.state_dict())
    again = build()
    again.load_state_dict(halfway.state_dict())
    parallel = DistributedDataParallel(again, find_unused_parameters=True)
    opt = gradaccum.wrap(sgd(again), steps=4, module=parallel)
    opt.load_state_dict(saved)
    for batch in batches[2:]:
        learn(parallel, opt, batch)
    opt.flush()
    assert numbers(again) == numbers(model)


@check
def empty_windows_change_nothing(rank: int) -> None:
    model = build()
    opt = gradaccum.wrap(sgd(model), steps=4, module=DistributedDataParallel(model))
    opt.flush()
    assert not opt.result.closed
    assert numbers(model) == numbers(build())


@check
def discarded_window_is_one_worker_s_own(rank: int) -> None:
    model = build()
    parallel = DistributedDataParallel(model, find_unused_parameters=True)
    opt = gradaccum.wrap(sgd(model), steps=None, module=parallel)
    for batch in micro_batches(rank)[:3]:
        learn(parallel, opt, batch)
    if rank == 1:
        opt.discard()
    opt.flush()
    require_equal(model, alone([micro_batches(0)[:3]])[0])


@check
def buffers_follow_the_first_worker(rank: int) -> None:
    """DistributedDataParallel sends them with the first forward pass after an update."""
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    parallel = DistributedDataParallel(model)
    opt = gradaccum.wrap(sgd(model), steps=2, module=parallel)
    for x, _, _ in micro_batches(rank, torch.float32)[:2]:
        parallel(x).square().mean().backward()
        opt.step()
    seen: list[list[float]] = []
    model[0].register_forward_pre_hook(lambda *_: seen.append(model[1].running_mean.tolist()))
    parallel(micro_batches(rank, torch.float32)[2][0])
    require_same_everywhere(seen)


@check
def plain_loop_without_the_module_names_it(rank: int) -> None:
    model = build(torch.float32)
    parallel = DistributedDataParallel(model, find_unused_parameters=True)
    opt = gradaccum.wrap(sgd(model), steps=4)
    parallel(micro_batches(rank, torch.float32)[0][0]).square().mean().backward()
    with refused(gradaccum.UsageError, "module="):
        opt.step()


@check
def wrong_modules_are_refused(rank: int) -> None:
    model, other = build(), build()
    parallel = DistributedDataParallel(model)
    with refused(gradaccum.ArgumentTypeError, "module", "Branches"):
        gradaccum.wrap(sgd(model), steps=4, module=model)
    with refused(gradaccum.ArgumentValueError, "module", "6 of them"):
        gradaccum.wrap(sgd(other), steps=4, module=parallel)
    with refused(gradaccum.ArgumentValueError, "options", "on rank 1"):
        gradaccum.wrap(sgd(model), steps=4 + rank, module=parallel)
    parallel.register_comm_hook(None, lambda state, bucket: None)
    with refused(gradaccum.UsageError, "hook"):
        gradaccum.wrap(sgd(model), steps=4, module=parallel)


@check
def copies_and_closures_are_refused(rank: int) -> None:
    model = build()
    opt = gradaccum.wrap(sgd(model), steps=1, module=DistributedDataParallel(model))
    with refused(gradaccum.UsageError, "module"):
        pickle.dumps(opt)
    with refused(gradaccum.UsageError, "module="):
        opt.step(lambda: torch.zeros(()))


@check
def zero_redundancy_optimizer_is_an_inner_optimizer(rank: int) -> None:
    """Each worker updates its part of the parameters and sends it to the others."""
    from torch.distributed.optim import ZeroRedundancyOptimizer  # Importing it warns, which is an error where the tests are collected.

    model = build()
    parallel = DistributedDataParallel(model, find_unused_parameters=True)
    zero = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.SGD, lr=0.1, momentum=0.9)
    opt = gradaccum.wrap(zero, steps=4, module=parallel, clip_norm=0.05)
    for batch in micro_batches(rank):
        learn(parallel, opt, batch)
    opt.flush()
    require_equal(model, alone(all_windows(), clip_norm=0.05)[0])
    require_same_everywhere(opt.result)


@check
def pipeline_schedule_must_not_scale_gradients(rank: int) -> None:
    """One schedule step of two chunks is a micro-batch, if it leaves its gradients alone and the loss is divided by the chunks."""
    for scale_grads in (True, False):
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double()
        whole = copy.deepcopy(layers)
        stage = PipelineStage(layers[rank], rank, WORLD, torch.device("cpu"))
        schedule = ScheduleGPipe(stage, 2, loss_fn=lambda y, target: (y - target).square().mean() / 2, scale_grads=scale_grads)
        opt = gradaccum.wrap(sgd(layers[rank]), steps=2)
        reference = gradaccum.wrap(sgd(whole), steps=2)
        for x in torch.arange(64.0).double().reshape(2, 8, 4).sin():
            schedule.step(*([x] if rank == 0 else []), **({"target": x} if rank == 1 else {}))
            if scale_grads:
                with refused(gradaccum.UsageError, "scale_grads=False"):
                    opt.step()
                break
            opt.step()
            opt.zero_grad()
            (whole(x) - x).square().mean().backward()
            reference.step()
            reference.zero_grad()
        else:
            require_equal(layers[rank], whole[rank])


@check
def large_and_strided_sums_are_reduced(rank: int) -> None:
    """Above a mebibyte a tensor travels alone; a layout that is not contiguous, as of a convolution in channels_last, is packed."""
    tensors = [torch.full((600, 600), 1.0 + rank), torch.full((700, 600), 2.0 + rank).t(), torch.full((3, 2), 3.0 + rank).t()]
    all_reduce([tensors[0], tensors[1] if rank else tensors[1].contiguous(), tensors[2]], dist.group.WORLD)
    assert [float(tensor.min()) for tensor in (tensors[0], tensors[2])] == [3.0, 7.0]
    if rank:
        assert tensors[1].unique().tolist() == [5.0]


@check
def sparse_gradients_are_refused(rank: int) -> None:
    model = nn.Embedding(4, 2, sparse=True)
    opt = gradaccum.wrap(torch.optim.SGD(model.parameters(), lr=0.1), steps=1, module=DistributedDataParallel(model))
    opt.backward(model(torch.tensor([rank])).sum())
    with refused(gradaccum.UsageError, "dense"):
        opt.step()


@check
def missing_worker_ends_in_an_error(rank: int) -> None:
    """The last check: it leaves the process group unusable."""
    model = build()
    group = dist.new_group(timeout=datetime.timedelta(seconds=2))
    parallel = DistributedDataParallel(model, find_unused_parameters=True, process_group=group)
    opt = gradaccum.wrap(sgd(model), steps=2, module=parallel)
    batches = micro_batches(rank)
    learn(parallel, opt, batches[0])
    if rank == 0:
        with refused(gradaccum.UsageError, "rank 0", "2 micro-batches", "flush()"):
            learn(parallel, opt, batches[1])


def main(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store, timeout = f"file://{folder / 'store'}", datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=WORLD, timeout=timeout)
    report = {}
    for name, run in CHECKS.items():
        try:
            run(rank)
            report[name] = "passed"
        except Exception:
            report[name] = traceback.format_exc()
        (folder / f"{rank}.json").write_text(json.dumps(report), encoding="utf-8")
        if report[name] != "passed":
            break  # The workers may be at different calls now, and each further check would wait for the other.


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
