"""The loss of a window, from whatever tells it, through errors and interrupts; NaN
where a part of it is not known.
"""

from __future__ import annotations

import copy
import math
from functools import partial
from typing import Any

import pytest
import torch

from gradaccum_torch import window as window_module

from . import torch_model
from .torch_model import loss_of

make = partial(torch_model.make, dtype=torch.float64)


def feed(model: Any, opt: Any, *parts: slice) -> None:
    for rows in parts:
        opt.backward(loss_of(model, rows), weight=rows.stop - rows.start)
        opt.step()
        opt.zero_grad()


FIRST = slice(0, 3)
LAST = slice(3, 8)


@pytest.mark.parametrize("mixed", ["with nothing", "with opt.backward", "with closure"])
def test_plain_backward_tells_nothing(mixed: str) -> None:
    """Beside others too: the loss of the window would lack a part."""
    model, opt = make(steps=1)

    def closure():
        loss = loss_of(model)
        loss.backward()
        return loss

    loss_of(model).backward()
    if mixed == "with opt.backward":
        opt.backward(loss_of(model))
    opt.step(closure if mixed == "with closure" else None)
    opt.zero_grad()
    assert math.isnan(opt.result.loss)


@pytest.mark.parametrize(
    "way", ["scale", "two losses", "closure", "closure and backward", "number"]
)
def test_each_way_to_tell(way: str) -> None:
    model, opt = make(steps=2, loss_scale=4.0 if way == "scale" else None)
    expected = pytest.approx(loss_of(model).item(), rel=1e-13)

    def closure(rows):
        opt.zero_grad()
        loss = loss_of(model, rows)
        if way == "closure and backward":
            opt.backward(loss)
            return None
        loss.backward()
        return loss.item() if way == "number" else loss

    for rows in (slice(0, 4), slice(4, 8)):
        if way == "scale":
            opt.scale(loss_of(model, rows)).backward()
            opt.step()
        elif way == "two losses":
            for factor in (0.25, 0.75):
                gradient = torch.tensor(factor).double()
                opt.backward(loss_of(model, rows), gradient=gradient)
            opt.step()
        else:
            opt.step(lambda rows=rows: closure(rows))
    assert opt.result.loss == expected


@pytest.mark.parametrize(
    "options", [{}, {"on_overflow": "ignore"}, {"reduction": "sum_per_item"}], ids=str
)
def test_losses_that_stay_on_their_device(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are read when the result is asked for."""
    (model, opt), (other, plain) = (make(steps=2, **options) for _ in range(2))
    feed(other, plain, FIRST, LAST, FIRST, LAST)
    # As a loss on an accelerator is kept.
    monkeypatch.setattr(window_module, "as_number", lambda loss: loss.detach().clone())
    feed(model, opt, FIRST, LAST, FIRST)
    resumed = copy.deepcopy((model, opt))
    for run in ((model, opt), resumed):
        feed(*run, LAST)
        for _ in range(2):
            loss = run[1].result.loss
            assert loss == pytest.approx(plain.result.loss, rel=1e-14)
