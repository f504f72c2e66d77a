"""The ready-made listener for TensorBoard with TensorBoard's own writer, read back by
TensorBoard's own reader.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs PyTorch")
pytest.importorskip("tensorboard", reason="needs TensorBoard")

import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import gradaccum
from gradaccum.watching import ClosedWindow, TensorBoard


def points(folder: Path, name: str) -> list[tuple[int, float]]:
    read = EventAccumulator(str(folder))
    read.Reload()
    return [(event.step, event.value) for event in read.Scalars(f"gradaccum/{name}")]


def run(listener: Any) -> list[ClosedWindow]:
    """Six windows, of which the fifth is skipped."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    opt = gradaccum.wrap(
        torch.optim.SGD(model.parameters(), lr=0.1),
        steps=2,
        loss_scale=gradaccum.DynamicLossScale(2.0**10),
    )
    heard: list[ClosedWindow] = []
    for each in (heard.append, listener):
        opt.add_listener(each)
    for index in range(12):
        x = torch.randn(4, 3) * (float("inf") if index == 8 else 1.0)
        opt.backward(model(x).square().mean(), weight=4)
        opt.step()
        opt.zero_grad()
    return heard


@pytest.mark.parametrize("kind", ["directory", "writer"])
def test_curves_are_the_windows(kind: str, tmp_path: Path) -> None:
    if kind == "directory":
        with TensorBoard(tmp_path) as listener:
            heard = run(listener)
    else:
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(str(tmp_path))
        with TensorBoard(writer) as listener:
            heard = run(listener)
        writer.add_scalar("gradaccum/still_open", 1.0, 1)
        writer.close()
        assert points(tmp_path, "still_open") == [(1, 1.0)]
    assert [window.skipped for window in heard] == [False] * 4 + [True, False]
    for name in ("grad_norm", "loss_scale", "weight", "micro_batches", "skipped"):
        expected = [
            (window.optimizer_step, torch.tensor(float(getattr(window, name))).item())
            for window in heard
        ]
        assert points(tmp_path, name) == expected, name
    losses = [
        (window.optimizer_step, pytest.approx(window.loss, rel=1e-6))
        for window in heard
        if not window.skipped
    ]
    assert points(tmp_path, "loss") == losses, "a window without a loss has no point"
