"""The quality question's torch runs: each trains in place, epoch by epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

import gradaccum
from benchmarks.contestants.digits import (
    LEARNING_RATE,
    MOMENTUM,
    STEPS,
    Batch,
    Parameters,
    Window,
    whole,
)
from benchmarks.contestants.runs import GRADACCUM, LARGE, Run


def runs() -> dict[str, Callable[[Parameters], Run]]:
    """By contestant; each is given the first parameters."""
    found: dict[str, Callable[[Parameters], Run]] = {
        LARGE: LargeBatch,
        GRADACCUM: Gradaccum,
        "hand-written loop": HandWritten,
    }
    return found | ({"Accelerate": Accelerate} if find_spec("accelerate") else {})


class LargeBatch:
    """The truth: one backward pass and one update for each window."""

    def __init__(self, first: Parameters) -> None:
        (inputs, hidden), (_, classes) = first[0].shape, first[2].shape
        self.model = nn.Sequential(
            nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, classes)
        )
        for parameter, value in zip(self.model.parameters(), first, strict=True):
            parameter.data = torch.tensor(value.T).contiguous()
        self.optimizer: Any = torch.optim.SGD(
            self.model.parameters(), LEARNING_RATE, momentum=MOMENTUM
        )

    def epoch(self, windows: Iterable[Window]) -> None:
        for window in windows:
            self.window(window)

    def window(self, window: Window) -> None:
        self.loss(whole(window)).backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad()

    def parameters(self) -> Parameters:
        return [
            parameter.detach().numpy().T.copy() for parameter in self.model.parameters()
        ]

    def loss(self, batch: Batch) -> Tensor:
        return nn.functional.cross_entropy(
            self.model(torch.from_numpy(batch[0])), torch.from_numpy(batch[1])
        )


class Gradaccum(LargeBatch):
    """Each micro-batch with its number of items as its weight, and a flush at the
    epoch's end.
    """

    def __init__(self, first: Parameters) -> None:
        super().__init__(first)
        self.optimizer = gradaccum.wrap(self.optimizer, steps=STEPS)

    def epoch(self, windows: Iterable[Window]) -> None:
        super().epoch(windows)
        self.optimizer.flush()

    def window(self, window: Window) -> None:
        for batch in window:
            self.optimizer.backward(self.loss(batch), weight=len(batch[1]))
            self.optimizer.step()
            self.optimizer.zero_grad()


class HandWritten(LargeBatch):
    """``loss / steps`` whatever the window holds, and every micro-batch as if it were
    as large as the others.
    """

    def window(self, window: Window) -> None:
        for batch in window:
            (self.loss(batch) / STEPS).backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad()


class Accelerate(LargeBatch):
    """``accelerator.accumulate`` over a prepared loader, at whose end it applies an
    update of what there is.
    """

    def __init__(self, first: Parameters) -> None:
        from accelerate import Accelerator

        super().__init__(first)
        self.accelerator = Accelerator(gradient_accumulation_steps=STEPS, cpu=True)
        self.model, self.optimizer = self.accelerator.prepare(
            self.model, self.optimizer
        )

    def epoch(self, windows: Iterable[Window]) -> None:
        batches = [batch for window in windows for batch in window]
        loader = torch.utils.data.DataLoader(batches, batch_size=None)  # type: ignore[arg-type, var-annotated]
        for x, y in self.accelerator.prepare_data_loader(loader):
            with self.accelerator.accumulate(self.model):
                self.accelerator.backward(
                    nn.functional.cross_entropy(
                        self.model(torch.as_tensor(x)), torch.as_tensor(y)
                    )
                )
                self.optimizer.step()
                self.optimizer.zero_grad()
