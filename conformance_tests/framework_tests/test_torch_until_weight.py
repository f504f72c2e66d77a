"""Windows that end by their weight, where torch asks for a window's size: closures, checkpoints, where the sum lives, `repr`."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch", reason="needs PyTorch")

import torch

import gradaccum
from gradaccum import UsageError


def setting(steps: Any, dtype: torch.dtype = torch.float32, **options: Any) -> tuple[torch.nn.Parameter, Any]:
    parameter = torch.nn.Parameter(torch.tensor([1.0, -1.0], dtype=dtype))
    return parameter, gradaccum.wrap(torch.optim.SGD([parameter], lr=0.5), steps=steps, **options)


def feed(parameter: torch.nn.Parameter, opt: Any, *weights: float) -> list[int]:
    """The update at which each of these micro-batches left the run."""
    updates = []
    for weight in weights:
        opt.backward(parameter.square().sum(), weight=weight)
        opt.step()
        opt.zero_grad()
        updates.append(opt.result.optimizer_step)
    return updates


@pytest.mark.parametrize("options", [{}, {"separate_sums": True}, {"dtype": torch.bfloat16}, {"on_overflow": "drop_micro_batch"}], ids=str)
def test_ends(options: dict[str, Any]) -> None:
    """A window of one micro-batch, where the weight is reached at once, is not taken for one that is known to have one."""
    parameter, opt = setting(gradaccum.until_weight(1), **options)
    assert feed(parameter, opt, 1, 0, 0.5, 0.5, 7) == [1, 1, 1, 2, 3]


@pytest.mark.parametrize("given", [0, 2.5, None, True])
def test_bad_answers_are_refused_at_step(given: object) -> None:
    parameter, opt = setting(gradaccum.until_weight(lambda step: given))
    opt.backward(parameter.sum())
    with pytest.raises((TypeError, ValueError), match=r"until_weight\(\.\.\.\)\(0\)"):
        opt.step()
    assert opt.result.micro_step == 0


def test_repr() -> None:
    parameter, opt = setting(gradaccum.until_weight(128))
    feed(parameter, opt, 64, 32)
    assert repr(opt) == "AccumulatingOptimizer(SGD, steps=until_weight(128) | micro-batch 2, weight 96 of 128, update 0)"


def test_closures() -> None:
    parameter, opt = setting(gradaccum.until_weight(3))
    for expected in (0, 0, 1):
        opt.step(lambda: opt.backward(parameter.sum()))
        assert opt.result.optimizer_step == expected


def test_clipping_by_hand_is_refused() -> None:
    """Also in the micro-batch by which a window of weight 1 ends only perhaps."""
    parameter, opt = setting(gradaccum.until_weight(2))
    opt.backward(parameter.square().sum())
    torch.nn.utils.clip_grad_norm_([parameter], 0.1)
    with pytest.raises(UsageError, match="clip_norm"):
        opt.step()
