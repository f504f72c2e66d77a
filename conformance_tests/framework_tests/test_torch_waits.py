"""The host's waits for the device: one at the end of a window, none inside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs PyTorch")

import torch
from torch import Tensor

from conformance_tests.framework_tests.test_torch_half_precision import SCALES, loss_of, make
from gradaccum_torch import window

STRATEGIES: dict[str, tuple[torch.dtype, dict]] = {
    "in .grad": (torch.float32, {}),
    "in buffers": (torch.bfloat16, {}),
    "in float64": (torch.float32, {"accumulate_dtype": "float64"}),
    "masters": (torch.float16, {"master_weights": True}),
    "masters, half sums": (torch.bfloat16, {"master_weights": True, "accumulate_dtype": "bfloat16"}),
    "clipped": (torch.float32, {"clip_norm": 1e-3, "skip_norm": 1e6}),
}


def waits(action: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> int:
    """How often the host reads a tensor: by ``item``, called directly or not, and by ``tolist``, which the profiler does not show."""
    lists = 0
    tolist = Tensor.tolist

    def counted(tensor: Tensor) -> Any:
        nonlocal lists
        lists += 1
        return tolist(tensor)

    with monkeypatch.context() as patched, torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        patched.setattr(Tensor, "tolist", counted)
        action()
    return lists + sum(event.count for event in profiler.key_averages() if event.key == "aten::_local_scalar_dense")


SCALINGS = [*((scale, False) for scale in SCALES), ("a GradScaler", True)]
USUAL = [*((place, *SCALINGS[2]) for place in STRATEGIES), *(("masters", *scaling) for scaling in SCALINGS)]


@pytest.mark.parametrize(
    ("place", "scale", "through_scaler"),
    [
        pytest.param(place, *scaling, marks=() if (place, *scaling) in USUAL else pytest.mark.deep)
        for place in STRATEGIES
        for scaling in SCALINGS
    ],
)
def test_only_window_ends_wait(place: str, scale: str, through_scaler: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host waits for the device once at the end of a window and never inside it."""
    monkeypatch.setattr(window, "as_told", lambda loss: loss.detach().clone())  # As a loss on an accelerator is kept.
    dtype, options = STRATEGIES[place]
    scaling: Any = SCALES[scale]()
    model, opt = make(dtype, steps=3, loss_scale=scaling, **options)

    def micro_batch() -> None:
        if through_scaler:
            scaling.scale(loss_of(model)).backward()
            scaling.step(opt)
            scaling.update()
        else:
            opt.scale(loss_of(model)).backward()
            opt.step()
        opt.zero_grad()

    measured = [waits(micro_batch, monkeypatch) for _ in range(9)]
    assert measured[3:] == [0, 0, 1, 0, 0, 1]
    assert measured[:3] in ([2, 2, 3], [0, 0, 1]), "the first window compares values, the windows after it do not"
    assert opt.result.optimizer_step == 3


def test_dropping_waits_once_per_micro_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    model, opt = make(steps=2, on_overflow="drop_micro_batch")

    def micro_batch() -> None:
        loss_of(model).backward()
        opt.step()

    assert [waits(micro_batch, monkeypatch) for _ in range(6)][2:] == [1, 2, 1, 2]
