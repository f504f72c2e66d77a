"""Other outputs of the loss function, merged by kind into those of the large batch."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch", reason="needs PyTorch")

import torch
from torch import Tensor, nn

import gradaccum
from gradaccum_torch.large_batch import backward

ITEMS = 7
X = torch.arange(14, dtype=torch.float64).reshape(ITEMS, 2) ** 1.5
TOKENS = torch.tensor([2, 0, 1, 3, 1, 1, 4])
WEIGHT = nn.Parameter(torch.ones(2, dtype=torch.float64))


def loss_of(x: Tensor) -> Tensor:
    return (x * WEIGHT).sum(1).mean()


@pytest.mark.parametrize("division", [{"steps": 1}, {"steps": 3}, {"micro_batch_size": 1}, {"micro_batch_weight": 4}], ids=str)
def test_each_kind_is_the_large_batchs(division: dict[str, Any]) -> None:
    def loss_fn(x: Tensor, tokens: Tensor) -> tuple[Tensor, dict[str, Any]]:
        own = (x.sum(1) * tokens).sum() / tokens.sum()  # NaN where there is no token.
        extremes = (-x.amax(0) * WEIGHT, [x.amin(0)])
        numbers = {"count": len(x), "loss": float(x.mean()), "large": bool(x.max() > 40)}
        return loss_of(x), {"mean": x.mean(0), "own": own, "extremes": extremes, "rows": (x * WEIGHT,), "numbers": numbers}

    declared = {
        "mean": "mean",
        "own": "weighted_mean",
        "extremes": ("min", ["min"]),
        "rows": "concatenate",
        "numbers": {"count": "sum", "loss": "mean", "large": "sum"},
    }
    options = {"weight": TOKENS, **division}
    loss, aux = backward(loss_fn, X, TOKENS, aux=declared, **options)
    assert not loss.requires_grad
    torch.testing.assert_close(aux["mean"], X.mean(0), rtol=1e-14, atol=0)
    torch.testing.assert_close(aux["own"], (X.sum(1) * TOKENS).sum() / 12, rtol=1e-14, atol=0)
    assert torch.equal(aux["extremes"][0], -X[-1])
    assert torch.equal(aux["extremes"][1][0], X[0])
    assert torch.equal(aux["rows"][0], X)
    assert not aux["rows"][0].requires_grad
    assert int(aux["numbers"]["count"]) == ITEMS
    assert float(aux["numbers"]["loss"]) == pytest.approx(float(X.mean()), rel=1e-14)


def test_half_precision_and_booleans_are_widened() -> None:
    """A sum of 4096 ones is 256 in bfloat16. Booleans are counted."""
    rows = torch.ones(4096, 1, dtype=torch.bfloat16)

    def loss_fn(rows: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        return (rows * WEIGHT[:1]).mean(), (rows.sum(), (rows > 0).all())

    _, (total, hits) = backward(loss_fn, rows, aux="sum", micro_batch_size=8)
    assert float(total) == 4096
    assert total.dtype == torch.float32
    assert int(hits) == 512


BAD: dict[str, tuple[Any, Any, str]] = {
    "other_structure": ({"a": "sum"}, lambda x: (loss_of(x), {"b": x.sum()}), "aux: expected a prefix"),
    "three_returned": ("sum", lambda x: (loss_of(x), 1, 2), "loss_fn: .* got a tuple of 3"),
    "ragged_rows": ("concatenate", lambda x: (loss_of(x), x[:, : len(x) - 2]), "aux: .* to concatenate"),
    "text": ("sum", lambda x: (loss_of(x), {"a": "text"}), "aux\\['a'\\]: expected a tensor or a number"),
    "ragged_sum": ("sum", lambda x: (loss_of(x), x[:, 0]), "aux: expected the shape"),
    "varying": ("sum", lambda x: (loss_of(x), {str(len(x)): 1}), "aux: expected the leaves"),
}


@pytest.mark.parametrize(("declared", "loss_fn", "words"), BAD.values(), ids=BAD)
def test_bad_aux_is_refused(declared: Any, loss_fn: Any, words: str) -> None:
    """By name, and `.grad` is what it was, even where the outputs fail to merge at the very end."""
    held = WEIGHT.grad = torch.ones(2, dtype=torch.float64)
    state = torch.get_rng_state()
    with pytest.raises(gradaccum.GradAccumError, match=words):
        backward(lambda x: (torch.rand(1), loss_fn(x))[1], X, aux=declared, micro_batch_size=4)
    assert WEIGHT.grad is held
    assert bool((held == 1).all())
    assert torch.equal(torch.get_rng_state(), state)
