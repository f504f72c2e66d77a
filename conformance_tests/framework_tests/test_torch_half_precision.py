"""Half precision in torch: memory at the peak, and infs and NaNs out of float16 autograd."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs PyTorch")

import torch
from torch import Tensor, nn

import gradaccum
from gradaccum_torch import buffers

LAYERS, SIZE = 6, 32
HALF = [torch.float16, torch.bfloat16]
by_dtype = pytest.mark.parametrize("dtype", HALF, ids=str)


def make(dtype: torch.dtype = torch.float32, **options: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(SIZE, SIZE, bias=False) for _ in range(LAYERS))).to(dtype)
    return model, gradaccum.wrap(torch.optim.SGD(model.parameters(), lr=0.25), **{"steps": 2, **options})


def loss_of(model: nn.Module, factor: float = 1.0) -> Tensor:
    dtype = next(model.parameters()).dtype
    return (model(torch.full((2, SIZE), 0.5, dtype=dtype)) * factor).float().square().mean()


def live_bytes(tensors: Iterable[Tensor | None]) -> int:
    """The bytes of all storages, each counted once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t is not None}
    return sum(storages.values())


ONE, ALL = SIZE * SIZE, LAYERS * SIZE * SIZE


@by_dtype
@pytest.mark.parametrize("master_weights", [False, True])
def test_peak_is_sum_and_one_gradient(dtype: torch.dtype, master_weights: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, opt = make(dtype, master_weights=master_weights)
    inner = [*model.parameters(), *opt.master_weights.values()]
    peaks: list[int] = []

    def note(*_: object) -> None:
        gradients = (t.grad for t in (*model.parameters(), *inner))
        peaks.append(live_bytes([*opt._window.strategy.sums(), *gradients]))

    def noting(*arguments: Any) -> Tensor:
        result = narrowed(*arguments)
        peaks.append(live_bytes([*opt._window.strategy.sums(), *(p.grad for p in model.parameters()), result]))
        return result

    narrowed = buffers.narrowed
    monkeypatch.setattr(buffers, "narrowed", noting)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(note)
    opt.register_step_pre_hook(note)
    for _ in range(4):
        loss_of(model).backward()
        opt.step()
    assert all(tensor.grad is None for tensor in (*model.parameters(), *inner)), "the update's gradients are freed with it"
    assert max(peaks) <= 4 * ALL + 2 * ONE
    assert max(peaks) >= 4 * ALL, "nothing was measured"
    at_update = peaks[-1]
    assert at_update == (4 if master_weights else 2) * ALL


@by_dtype
def test_raising_update_can_be_repeated(dtype: torch.dtype) -> None:
    (model, opt), (other, reference) = make(dtype), make(dtype)
    failing = [True]

    def fail(*_: object) -> None:
        if failing.pop():
            failing.append(False)
            raise RuntimeError("hook")

    opt.register_step_pre_hook(fail)
    for index in range(2):
        loss_of(model).backward()
        loss_of(other).backward()
        reference.step()
        if index:
            with pytest.raises(RuntimeError, match="hook"):
                opt.step()
        else:
            opt.step()
    assert {total.dtype for total in opt._window.strategy.sums()} == {torch.float32}
    opt.flush()
    assert opt.result.applied
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("value", [65504.0, 65519.0, 65520.0, 1e9])
@pytest.mark.parametrize("options", [{}, {"master_weights": True}, {"clip_norm": 1.0}])
def test_cast_to_float16_decides_the_overflow(value: float, options: dict) -> None:
    """A sum that the cast rounds to 65504 is no overflow. Clipping comes after the check, so it does not make a larger sum fit."""
    parameter = torch.zeros(3, dtype=torch.float16, requires_grad=True)
    opt: Any = gradaccum.wrap(torch.optim.SGD([parameter], lr=2.0**-16), steps=None, reduction="sum", **options)
    (parameter.float() * 32752.0).sum().backward()
    opt.step()
    opt._window.strategy.load([torch.tensor([0.0, -value, 1.0])])
    opt.flush()
    overflow = not math.isfinite(torch.tensor(value).half().item()) and "master_weights" not in options
    assert opt.result.overflow == overflow
    assert opt.result.applied == (not overflow)


@pytest.mark.parametrize("options", [{}, {"accumulate_dtype": "float64"}, {"loss_scale": 8.0}])
def test_other_dtypes_skip_the_range_check(options: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> bool:
        raise AssertionError("the elements were looked at")

    monkeypatch.setattr(buffers, "fits", never)
    for dtype in (torch.float32, torch.bfloat16):
        model, opt = make(dtype, **options)
        for _ in range(2):
            opt.scale(loss_of(model)).backward()
            opt.step()
        assert opt.result.applied


SCALES: dict[str, Callable[[], Any]] = {
    "no scale": lambda: None,
    "a number": lambda: 8.0,
    "dynamic": lambda: gradaccum.DynamicLossScale(init_scale=8.0),
    "a GradScaler": lambda: torch.amp.GradScaler("cpu", init_scale=8.0),
}


@pytest.mark.parametrize("master_weights", [False, True])
@pytest.mark.parametrize("position", [0, 1, 2])
@pytest.mark.parametrize("window", [0, 1, "all"])
@pytest.mark.parametrize("scaled", ["dynamic", "a GradScaler"])
def test_float16_autograd_overflows_anywhere(master_weights: bool, position: int, window: Any, scaled: str) -> None:
    """The loss is so large that float16 gradients become inf, and NaN further down. The windows without it train on."""
    scaling: Any = SCALES[scaled]()
    model, opt = make(torch.float16, steps=3, loss_scale=scaling, master_weights=master_weights)
    skipped, scale = [], [8.0]
    for index in range(3):
        start = [p.detach().clone() for p in model.parameters()]
        for micro_batch in range(3):
            bad = micro_batch == position and window in (index, "all")
            opt.scale(loss_of(model, 6e4 if bad else 1.0) * (1e8 if bad else 1.0)).backward()
            opt.step()
        same = all(torch.equal(p, q) for p, q in zip(model.parameters(), start, strict=True))
        assert same == opt.result.overflow == opt.result.skipped
        skipped.append(opt.result.skipped)
        scale.append(opt.result.loss_scale)
    expected = [window in (index, "all") for index in range(3)]
    assert skipped == expected
    assert scale == [8.0 / 2 ** sum(expected[:n]) for n in range(4)]
    assert all(torch.isfinite(p).all() for p in model.parameters())


@by_dtype
def test_requested_half_sum_stays_in_grad(dtype: torch.dtype) -> None:
    model, opt = make(dtype, accumulate_dtype=str(dtype).removeprefix("torch."))
    loss_of(model).backward()
    opt.step()
    held = opt._window.strategy.sums()
    assert [total.data_ptr() for total in held] == [p.grad.data_ptr() for p in model.parameters()]


def test_resumed_window_has_the_same_norm() -> None:
    """To the last bit. Autograd delivers the last layer's gradient first, a saved window holds the first layer's first."""

    def made() -> tuple[list[torch.nn.Parameter], Any]:
        torch.manual_seed(0)
        ps = [torch.nn.Parameter(torch.randn(1 + index).to(torch.bfloat16)) for index in range(40)]
        return ps, gradaccum.wrap(torch.optim.SGD(ps, lr=0.0), steps=None)

    (ps, opt), (_, resumed) = made(), made()
    for index in range(3):
        total = torch.zeros(())
        for p in ps:
            total = (total + (p.float() * (index + 1)).exp().sum()).sin() + total
        opt.backward(total)
        opt.step()
    resumed.load_state_dict(opt.state_dict())
    for each in (opt, resumed):
        each.flush()
    assert opt.result.grad_norm == resumed.result.grad_norm


@pytest.mark.parametrize(("before", "then"), [(1, 4), (4, 1)])
def test_callable_that_changes_its_mind_between_two_windows(before: int, then: int) -> None:
    """The window has the size of its first ``step``, and ``zero_grad`` keeps the sum."""
    sizes = [before]
    model = torch.nn.Linear(4, 2).bfloat16()
    opt = gradaccum.wrap(torch.optim.SGD(model.parameters(), lr=0.0), steps=lambda _: sizes[0])
    sizes[0] = then
    norms = []
    for x in torch.randn(then, 3, 4).bfloat16():
        loss = model(x).float().square().mean()
        norms.append(torch.cat([g.float().flatten() for g in torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)]))
        loss.backward()
        opt.step()
        opt.zero_grad()
    assert opt.result.applied
    assert opt.result.grad_norm == pytest.approx(float(torch.stack(norms).mean(0).norm()), rel=1e-4)
