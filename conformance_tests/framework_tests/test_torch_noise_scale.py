"""The noise scale, wherever the sum lives: measuring changes nothing else, and what spoils a window makes that window tell nothing."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import gradaccum
from gradaccum import UsageError
from gradaccum_torch.sums import arithmetic as sums


def made(noise_scale: Any = 0.5, dtype: torch.dtype = torch.float32, loss_scale: Any = None, **options: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = torch.nn.ParameterList([torch.ones(3, 4, dtype=dtype), torch.ones(7, dtype=dtype)])
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0) if loss_scale == "scaler" else None
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    return model, gradaccum.wrap(inner, **{"steps": 3, **options}, noise_scale=noise_scale, loss_scale=scaler or loss_scale)


def gradients_of(model: Any, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.ones(p.shape) + 3 * torch.randn(p.shape, generator=generator) for p in model.parameters()]


def loss_of(model: Any, seed: int) -> torch.Tensor:
    return sum((p.float() * g).sum() for p, g in zip(model.parameters(), gradients_of(model, seed), strict=True))  # type: ignore[return-value]


def feed(model: Any, opt: Any, *seeds: int) -> None:
    summed = opt._options.reduction != "mean"
    for seed in seeds:
        weight = 1 + seed % 4
        opt.backward(loss_of(model, seed) * (weight if summed else 1), weight=weight)
        opt.step()
        opt.zero_grad()


def test_clearing_to_zeros_is_as_without_it() -> None:
    """A window that began with a part of the parameters was measured and discarded: the zeros are those of the last closed one."""
    model, opt = made()
    feed(model, opt, 1, 2, 3)
    opt.backward(model[0].sum())
    opt.step()
    opt.discard()
    opt.zero_grad(set_to_none=False)
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


def test_off_measures_once_per_window(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = {}
    for noise_scale in (False, True):
        model, opt = made(noise_scale=noise_scale)
        feed(model, opt, 1, 2, 3)
        seen: list[int] = []
        with monkeypatch.context() as patched:
            original = sums.norms_in_few_calls
            patched.setattr(sums, "norms_in_few_calls", lambda *args, seen=seen, original=original: seen.append(1) or original(*args))
            feed(model, opt, 4, 5, 6)
        counts[noise_scale] = len(seen)
        assert ("noise" in opt.state_dict()["gradaccum"]) == noise_scale
    assert counts == {False: 1, True: 2}


@pytest.mark.parametrize("when", ["at once", "after the first"])
def test_clipping_by_hand_is_still_noticed(when: str) -> None:
    model, opt = made()
    if when == "after the first":
        feed(model, opt, 1)
    opt.backward(loss_of(model, 2))
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    with pytest.raises(UsageError, match="clip_norm"):
        opt.step()
    opt.discard()
    assert math.isnan(opt.result.noise_scale)


@pytest.mark.parametrize("change", ["group", "frozen", "nothing"])
def test_other_parameters_in_mid_window(change: str) -> None:
    """The norms before and after are of different gradients, so that this window tells nothing; the next one does."""
    model, opt = made()
    feed(model, opt, 1, 2, 3)
    before = opt.result.noise_scale
    feed(model, opt, 4)
    if change == "group":
        opt.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})
    elif change == "frozen":
        model[1].requires_grad_(False)
    feed(model, opt, 5, 6)
    assert opt.result.applied
    assert (opt.result.noise_scale == before) == (change != "nothing")
    now = opt.result.noise_scale
    feed(model, opt, 7, 8, 9)
    assert opt.result.noise_scale != now
