"""Half precision in torch: memory at the peak, and what the host waits for and looks
at.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

import gradaccum
from gradaccum_torch import window

from .torch_model import PLACES, loss_of, make
from .torch_operations import Operations, Peak

LAYERS = 6
SIZE = 32
ONE = SIZE * SIZE
ALL = LAYERS * SIZE * SIZE


@pytest.mark.parametrize("master_weights", [False, True])
def test_peak_is_sum_and_one_gradient(master_weights: bool) -> None:
    """Gradients move into float32 sums one by one, and out of them again at the update,
    with a float32 quotient between. A master's gradient is the sum itself.
    """
    layers = [nn.Linear(SIZE, SIZE, bias=False) for _ in range(LAYERS)]
    model = nn.Sequential(*layers).bfloat16()
    inner = SGD(model.parameters())
    opt = gradaccum.wrap(inner, steps=2, master_weights=master_weights)
    x = torch.ones(2, SIZE, dtype=torch.bfloat16)
    with Peak() as memory:
        for _ in range(4):
            model(x).float().square().mean().backward()
            opt.step()
    assert opt.result.optimizer_step == 2
    assert 4 * ALL <= memory.peak <= 4 * ALL + (4 + 2) * ONE
    assert memory.live == 0


# What the host waits for and looks at.


def waits(action: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> int:
    """How often the host reads a tensor: by ``item``, called directly or not, and by
    ``tolist``, which is no operation.
    """
    lists = []
    tolist = Tensor.tolist

    def counted(tensor: Tensor) -> Any:
        lists.append(tensor)
        return tolist(tensor)

    with monkeypatch.context() as patched, Operations() as operations:
        patched.setattr(Tensor, "tolist", counted)
        action()
    return len(lists) + operations.counts["_local_scalar_dense"]


DROPPING = "kept apart"
DYNAMIC = gradaccum.DynamicLossScale(init_scale=8.0)


@pytest.mark.parametrize(
    ("place", "options"),
    [
        *((place, {"loss_scale": DYNAMIC}) for place in PLACES),
        ("in .grad", {"loss_scale": DYNAMIC, "clip_norm": 1e-3, "skip_norm": 1e6}),
        *((place, {"on_overflow": "ignore"}) for place in PLACES if place != DROPPING),
    ],
    ids=str,
)
def test_only_window_ends_wait(
    place: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host waits for the device once at the end of a window and never inside it;
    where micro-batches are dropped, once for each too, and never if nothing is measured.
    """
    # As a loss on an accelerator is kept.
    monkeypatch.setattr(window, "as_number", lambda loss: loss.detach().clone())
    model, opt = make(place, steps=3, **options)

    def micro_batch():
        opt.scale(loss_of(model)).backward()
        opt.step()
        opt.zero_grad()

    measured = [waits(micro_batch, monkeypatch) for _ in range(9)]
    each = int(place == DROPPING)
    end = int("on_overflow" not in options)
    assert measured[3:] == [each, each, each + end] * 2
    assert opt.result.optimizer_step == 3


@pytest.mark.skipif(
    not hasattr(Tensor, "grad_dtype"), reason="this torch has one dtype per gradient"
)
@pytest.mark.parametrize(
    ("dtype", "grad_dtype"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)],
)
def test_gradients_in_a_dtype_that_the_user_has_set_are_summed_in_float32(
    dtype: torch.dtype, grad_dtype: torch.dtype
) -> None:
    """In bfloat16 each small gradient would vanish beside the first one."""
    weight = torch.zeros(2, dtype=dtype, requires_grad=True)
    weight.grad_dtype = grad_dtype
    dtypes = []
    inner = SGD([weight], lr=1.0)
    inner.register_step_pre_hook(lambda *_: dtypes.append(weight.grad.dtype))
    opt = gradaccum.wrap(inner, steps=5, reduction="sum")
    for factor in [1.0, *[2.0**-9] * 4]:
        opt.backward((weight * factor).sum())
        opt.step()
    assert dtypes == [grad_dtype]
    assert weight.tolist() == [-1 - 2**-7] * 2


def test_norm_of_faint_float16_sums_is_right() -> None:
    weight = torch.zeros(2, dtype=torch.float16, requires_grad=True)
    inner = SGD([weight])
    opt = gradaccum.wrap(inner, steps=1, accumulate_dtype="float16")
    opt.backward((weight * 2.0**-14).sum())
    opt.step()
    assert opt.result.grad_norm == pytest.approx(2.0**-13.5)


def test_quotient_that_float16_does_not_hold_is_an_overflow() -> None:
    """Although the sum, which was multiplied by the weight, fits."""
    weight = torch.zeros(2, dtype=torch.float16, requires_grad=True)
    opt = gradaccum.wrap(SGD([weight]), steps=1)
    gradient = torch.tensor(4.0, dtype=torch.float16)
    opt.backward((weight * 2.0**15).sum(), weight=2.0**-10, gradient=gradient)
    opt.step()
    assert opt.result.overflow


def test_empty_parameter_fits_into_any_dtype() -> None:
    """The window's norm is larger than any float16."""
    wide = torch.zeros(2, requires_grad=True)
    empty = torch.zeros(0, dtype=torch.float16, requires_grad=True)
    opt = gradaccum.wrap(SGD([wide, empty], lr=1.0), steps=1)
    opt.backward(wide.sum() * 1e6 + empty.sum())
    opt.step()
    assert opt.result.applied
