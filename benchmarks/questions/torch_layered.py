"""torch, float32, AdamW: a window layer by layer, beside the usual one and the
optimizer in the backward pass, which has one micro-batch.

All apply the update that the large batch makes. Memory is that of the tensors that a
window makes and that live at once, counted at each operation; the optimizer's state is
there before. The wide layers have few items, so that reading and writing the parameters
takes the time; the narrow ones have little work at all, and show what the layers' order
itself costs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import gradaccum
import gradaccum_torch
from benchmarks.case import Case, Curve
from benchmarks.peak import live_bytes

BASELINE = "usual window"
KEPT, RECOMPUTED, IN_BACKWARD = (
    "layered, activations kept",
    "layered, activations recomputed",
    "optimizer in the backward pass",
)
ITEMS = 4
"""Of a micro-batch."""
MICRO_BATCHES = (1, 4, 16)
SHAPES = {
    "4 layers of 1024": (4, 1024),
    "16 layers of 1024": (16, 1024),
    "16 layers of 64": (16, 64),
}


def cases(quick: bool) -> Iterator[Case | Curve]:
    gradients: dict[str, list[float]] = {}
    for name, (layers, width) in SHAPES.items():
        width = min(width, 128) if quick else width
        for micro_batches in MICRO_BATCHES:
            windows = {
                way: window(way, layers, width, micro_batches)
                for way in ways(micro_batches)
            }
            counts = {}
            for way, (run, optimizers) in windows.items():
                run()  # Makes the optimizer's state.
                peak, of_gradients = live_bytes(
                    run,
                    [
                        tensor
                        for optimizer in optimizers
                        for tensor in held_by(optimizer)
                    ],
                )
                counts[way] = {
                    "live MiB": peak / 2**20,
                    "gradients MiB": of_gradients / 2**20,
                }
                if name == "16 layers of 1024":
                    gradients.setdefault(way, []).append(of_gradients / 2**20)
            yield Case(
                f"{name}, {micro_batches} micro-batches",
                BASELINE,
                {way: run for way, (run, _) in windows.items()},
                counts,
            )
    for way, sizes in gradients.items():
        xs = MICRO_BATCHES[: len(sizes)]
        yield Curve(
            "torch: gradients of 16 layers of 1024",
            way,
            xs,
            sizes,
            "micro-batches",
            "gradients alive at once, MiB",
        )


def ways(micro_batches: int) -> list[str]:
    return [BASELINE, KEPT, RECOMPUTED, *([IN_BACKWARD] if micro_batches == 1 else [])]


def held_by(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """The parameters, and the tensors of their state."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            yield from (
                parameter,
                *(
                    each
                    for each in optimizer.state[parameter].values()
                    if isinstance(each, Tensor)
                ),
            )


def window(
    way: str, layers: int, width: int, micro_batches: int
) -> tuple[Callable[[], object], Sequence[torch.optim.Optimizer]]:
    """One update, and the optimizers that make it."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(layers))
    )
    x, y = torch.randn(2, ITEMS * micro_batches, width).unbind()
    if way == IN_BACKWARD:
        return in_backward(model, x, y)
    opt = gradaccum.wrap(
        torch.optim.AdamW(model.parameters()), None, on_overflow="ignore"
    )

    def usual() -> object:
        return gradaccum_torch.backward(
            lambda x, y: mse_loss(model(x), y),
            x,
            y,
            micro_batch_size=ITEMS,
            optimizer=opt,
        )

    def layered() -> object:
        within: Literal["keep", "recompute"] = "keep" if way == KEPT else "recompute"
        return gradaccum_torch.layered_backward(
            model, mse_loss, x, y, micro_batch_size=ITEMS, optimizer=opt, within=within
        )

    return (usual if way == BASELINE else layered), [opt]


def in_backward(
    model: nn.Module, x: Tensor, y: Tensor
) -> tuple[Callable[[], object], Sequence[torch.optim.Optimizer]]:
    """What torch's tutorial shows: an optimizer for each parameter, which steps as soon
    as the gradient is there and frees it.
    """
    optimizers = {
        parameter: torch.optim.AdamW([parameter]) for parameter in model.parameters()
    }

    def step(parameter: Tensor) -> None:
        optimizers[parameter].step()  # type: ignore[index]
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)  # type: ignore[no-untyped-call]
    return lambda: mse_loss(model(x), y).backward(), list(optimizers.values())  # type: ignore[no-untyped-call]
