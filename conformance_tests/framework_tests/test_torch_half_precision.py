"""Half precision in torch: memory at the peak, and infs and NaNs out of float16 autograd."""

from __future__ import annotations

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
