"""Dtypes and layouts of the large batch: half precision is summed in float32, autocast and sparse gradients are as in torch."""

from __future__ import annotations

import functools

import pytest

pytest.importorskip("torch", reason="needs PyTorch")

import torch
from torch import Tensor, nn

from conformance_tests.framework_tests.torch_large_batch import X, Y, cross_entropy, make_model
from gradaccum_torch.large_batch import backward


def test_small_half_gradients_do_not_underflow() -> None:
    """Divided by the number of items before the sum, each float16 gradient would be 0."""
    weight = nn.Parameter(torch.ones(1, dtype=torch.float16))
    x = torch.full((4096, 1), 1e-5, dtype=torch.float16)
    backward(lambda x: (x * weight).mean(), x, micro_batch_size=1)
    assert weight.grad is not None
    assert float(weight.grad) == float(x[0])


@pytest.mark.parametrize(("own", "of_loss"), [(torch.float16, torch.float32), (torch.float32, torch.float16)])
def test_small_shares_do_not_underflow(own: torch.dtype, of_loss: torch.dtype) -> None:
    """Where the parameter alone or the loss alone is in half precision, a share of 1 / 2^32 would be 0 there."""
    weight = nn.Parameter(torch.ones(1, dtype=own))
    x = torch.full((4, 1), 2.0**14)
    tokens = torch.full((4,), 2.0**30)
    backward(lambda x: (x.to(of_loss) * weight.to(of_loss)).sum(), x, steps=4, reduction="item_mean", weight=tokens)
    assert weight.grad is not None
    assert float(weight.grad) == 2.0**-16


@pytest.mark.parametrize("before", [None, "sparse", "dense"])
def test_sparse_gradients(before: str | None) -> None:
    torch.manual_seed(0)
    table = nn.Embedding(7, 3, sparse=True, dtype=torch.float64)
    rows = torch.tensor([1, 1, 2, 5, 6, 1, 0, 2])
    (expected,) = torch.autograd.grad(table(rows).square().sum(1).mean(), [table.weight])
    total = expected.to_dense()
    if before:
        ones = torch.ones(7, 3, dtype=torch.float64)
        table.weight.grad = ones.to_sparse(1) if before == "sparse" else ones
        total = total + 1
    backward(lambda rows: table(rows).square().sum(1).mean(), rows, steps=3)
    assert table.weight.grad is not None
    torch.testing.assert_close(table.weight.grad.to_dense(), total, rtol=1e-14, atol=1e-14)


def test_autocast() -> None:
    """The same as the loop by hand under autocast, to the bit where weights are powers of two."""
    models = make_model(torch.float32), make_model(torch.float32)
    x = X.float()[:8]

    def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return cross_entropy(model(x), y)

    backward(functools.partial(loss_fn, models[0]), x, Y[:8], steps=4)
    for start in range(0, 8, 2):
        (loss_fn(models[1], x[start : start + 2], Y[start : start + 2]) / 4).backward()
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(*(m.parameters() for m in models), strict=True))
    model = make_model(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        backward(functools.partial(loss_fn, model), x, Y[:8], steps=4)
    for p, q in zip(model.parameters(), models[0].parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=2e-2, atol=1e-4)
