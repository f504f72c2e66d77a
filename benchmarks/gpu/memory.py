"""Stage 7: the memory of a window at its worst moment, beside the bare loop and
Accelerate; and ``micro_batch_size="auto"`` where memory really runs out.

What is counted comes on top of the parameters and the optimizer's state. On a GPU its
allocator counts; on a CPU each operation's tensors are followed.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import gradaccum
import gradaccum_torch
from benchmarks.contestants.torch_loops import (
    STEPS,
    accelerate,
    hand_written,
    wrapped,
)
from benchmarks.gpu.problem import backward as run_backward
from benchmarks.gpu.problem import flat, gradients_of, mean_loss
from benchmarks.gpu.records import (
    NOT_INSTALLED,
    Check,
    Measured,
    Setting,
    is_installed,
    mebibytes,
)
from benchmarks.peak import live_bytes

BOUND = 1.02
"""Of the bare loop's memory: ``.grad`` itself holds the sum."""
FLOAT32_BOUND = 2.0**-12
MEBIBYTE = 2**20


def make_layers(setting: Setting, dtype: torch.dtype) -> nn.Sequential:
    width = setting.size(64, 2048)
    torch.manual_seed(0)
    layers = [
        nn.Sequential(nn.Linear(width, width), nn.GELU())
        for _ in range(setting.size(6, 12))
    ]
    return nn.Sequential(*layers).to(setting.device, dtype)


def make_batch(setting: Setting, items: int, dtype: torch.dtype) -> Tensor:
    width = setting.size(64, 2048)
    return torch.randn(items, width, device=setting.device, dtype=dtype)


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def tensors_of(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """Yield the parameters, and the tensors of their state."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            yield parameter
            for value in optimizer.state[parameter].values():
                if isinstance(value, Tensor):
                    yield value


def peak(
    setting: Setting, run: Callable[[], object], optimizer: torch.optim.Optimizer
) -> float:
    """Return the MiB by which a second run of a window raises what is allocated."""
    run()
    gc.collect()
    if setting.device == "cpu":
        return live_bytes(run, list(tensors_of(optimizer)))[0] / MEBIBYTE
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / MEBIBYTE


def window_peak(
    setting: Setting,
    dtype: torch.dtype,
    has_bound: bool,
    clip_norm: float | None = None,
    **options: Any,
) -> Measured:
    x = make_batch(setting, setting.size(4, 64), dtype)

    def loss(model: nn.Module) -> Tensor:
        output: Tensor = model(x)
        return output.float().square().mean()

    def peak_of(recipe: Callable[..., Callable[[], object]], **given: Any) -> float:
        model = make_layers(setting, dtype)
        optimizer = make_optimizer(model)
        return peak(setting, recipe(model, optimizer, loss, **given), optimizer)

    clip = {} if clip_norm is None else {"clip_norm": clip_norm}
    ours = peak_of(wrapped, **clip, **options)
    usual = peak_of(hand_written, **clip)
    if is_installed("accelerate"):
        theirs = mebibytes(peak_of(accelerate, **clip))
    else:
        theirs = NOT_INSTALLED
    passed = ours <= BOUND * usual if has_bound else None
    bound = f"{BOUND} of the bare loop" if has_bound else ""
    return Measured(passed, mebibytes(ours), bound, mebibytes(usual), theirs)


def large_batch_peak(setting: Setting) -> Measured:
    """Measure `gradaccum_torch.backward`, and all items in one backward pass."""
    x = make_batch(setting, setting.size(512, 16384), torch.float32)

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        output: Tensor = model(x)
        return output.square().mean()

    model = make_layers(setting, torch.float32)
    inner = make_optimizer(model)
    opt = gradaccum.wrap(inner, None)

    def divided() -> None:
        loss = partial(loss_fn, model)
        gradaccum_torch.backward(loss, x, steps=STEPS, optimizer=opt)

    other = make_layers(setting, torch.float32)
    optimizer = make_optimizer(other)

    def at_once() -> None:
        run_backward(loss_fn(other, x))
        optimizer.step()
        optimizer.zero_grad()

    ours = peak(setting, divided, inner)
    usual = peak(setting, at_once, optimizer)
    return Measured(
        ours < usual / 2,
        mebibytes(ours),
        "half of one backward pass",
        mebibytes(usual),
    )


def layered_peak(setting: Setting) -> Measured:
    """Measure a window layer by layer, with one layer's gradients alive, and the usual
    one.
    """
    x = make_batch(setting, setting.size(8, 64), torch.float32)
    y = torch.zeros_like(x)

    def optimizer_of(model: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
        inner = make_optimizer(model)
        return inner, gradaccum.wrap(inner, None, on_overflow="ignore")

    model = make_layers(setting, torch.float32)
    inner, opt = optimizer_of(model)

    def layered() -> None:
        gradaccum_torch.layered_backward(
            model, nn.functional.mse_loss, x, y, steps=4, optimizer=opt
        )

    other = make_layers(setting, torch.float32)
    other_inner, other_opt = optimizer_of(other)

    def usual() -> None:
        gradaccum_torch.backward(
            lambda x, y: mean_loss(other, x, y), x, y, steps=4, optimizer=other_opt
        )

    ours = peak(setting, layered, inner)
    whole = peak(setting, usual, other_inner)
    text = f"{mebibytes(ours)}; the usual window {mebibytes(whole)}"
    return Measured(ours < whole / 2, text, "half of the usual window")


def automatic_size(setting: Setting) -> Measured:
    """Limit this process's memory, and let ``"auto"`` run into the limit; a second call
    begins with the size that fitted.
    """
    items = 2**16
    x = make_batch(setting, items, torch.float32)
    model = make_layers(setting, torch.float32)

    def loss_fn(x: Tensor) -> Tensor:
        output: Tensor = model(x)
        return output.square().mean()

    def exhausted() -> int:
        return int(torch.cuda.memory_stats()["num_ooms"])

    run_backward(loss_fn(x[:64]))  # Makes the libraries' own buffers.
    model.zero_grad()
    torch.cuda.empty_cache()
    room = 2**31
    total = torch.cuda.get_device_properties(0).total_memory
    fraction = (torch.cuda.memory_reserved() + room) / total
    sizes = gradaccum.AutoMicroBatchSize()
    before = exhausted()
    torch.cuda.set_per_process_memory_fraction(fraction)
    try:
        gradaccum_torch.backward(loss_fn, x, micro_batch_size=sizes)
        first = exhausted() - before
        gradients = [each.cpu() for each in gradients_of(model)]
        model.zero_grad()
        gradaccum_torch.backward(loss_fn, x, micro_batch_size=sizes)
        second = exhausted() - before - first
        model.zero_grad()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    size = sizes.size
    assert size is not None
    for part in x.chunk(64):
        run_backward(loss_fn(part) / 64)
    expected = flat(gradients_of(model))
    got = flat(gradients).to(setting.device)
    off = float((got - expected).norm() / expected.norm())
    passed = size < items and first > 0 and second == 0 and off <= FLOAT32_BOUND
    text = f"{size} of {items} items; exhausted {first} times, then {second};"
    return Measured(
        passed,
        f"{text} distance {off:.1e}",
        f"exhausted, then 0; distance {FLOAT32_BOUND:.1e}",
    )


FLOAT32 = torch.float32
BFLOAT16 = torch.bfloat16
CHECKS = (
    Check("window, float32", partial(window_peak, dtype=FLOAT32, has_bound=True)),
    Check(
        "window, float32, clipped",
        partial(window_peak, dtype=FLOAT32, has_bound=True, clip_norm=1.0),
    ),
    Check(
        "window, bfloat16, summed in float32",
        partial(window_peak, dtype=BFLOAT16, has_bound=False),
    ),
    Check(
        "window, bfloat16, master weights",
        partial(window_peak, dtype=BFLOAT16, has_bound=False, master_weights=True),
    ),
    Check("gradaccum_torch.backward, 8 micro-batches", large_batch_peak),
    Check("gradaccum_torch.layered_backward", layered_peak),
    Check('micro_batch_size="auto"', automatic_size, needs_gpu=True),
)
