"""Gradients of every kind: half precision, sparse, missing, huge, not finite; and where
their sum lives.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import gradaccum
from gradaccum_torch.arithmetic import measure


def test_mixed_dtypes_in_one_optimizer() -> None:
    """Each is divided, here by no number of float32, in its own dtype."""
    half, full, double = (
        nn.Parameter(torch.zeros(2, dtype=dtype))
        for dtype in (torch.bfloat16, torch.float32, torch.float64)
    )
    opt = gradaccum.wrap(
        torch.optim.SGD([half, full, double], lr=1.0), steps=2, clip_norm=1.0
    )
    for _ in range(2):
        ((half * 3).sum().float() + (full * 4).sum() + (double * 5).sum()).backward()
        opt.step()
    assert opt.result.grad_norm == pytest.approx(10)
    torch.testing.assert_close(
        double.detach(),
        torch.full_like(double, -5 / opt.result.grad_norm),
        rtol=1e-12,
        atol=0,
    )
    torch.testing.assert_close(full.detach(), torch.full((2,), -4 / 10))
    torch.testing.assert_close(
        half.detach().float(), torch.full((2,), -3 / 10), rtol=1e-2, atol=0
    )


def test_unfrozen_half_parameter_is_summed() -> None:
    half = nn.Parameter(torch.zeros(2, dtype=torch.bfloat16), requires_grad=False)
    other = nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
    opt = gradaccum.wrap(torch.optim.SGD([half, other], lr=1.0), steps=3)
    half.requires_grad_(True)
    for gradient in (1.0, 2.0, 3.0):
        ((half * gradient).sum() + other.sum()).backward()
        opt.step()
    assert torch.equal(half.detach(), torch.full((2,), -2.0, dtype=torch.bfloat16))


SPARSE = {
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
    "sparse_adam": torch.optim.SparseAdam,
}


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
@pytest.mark.parametrize("name", SPARSE)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"accumulate_dtype": torch.float64},
        {"on_overflow": "drop_micro_batch"},
        {"separate_sums": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("clip_norm", [None, 0.5])
def test_sparse_gradients_equal_the_large_batch(
    name: str, options: dict, clip_norm: float | None
) -> None:
    words = [torch.tensor([1, 1, 2]), torch.tensor([2, 3, 1])]
    rows = torch.arange(1.0, 7.0).reshape(2, 3, 1)

    def make() -> nn.Embedding:
        torch.manual_seed(0)
        return nn.Embedding(5, 2, sparse=True)

    model, reference = make(), make()
    opt = gradaccum.wrap(
        SPARSE[name](model.parameters(), lr=0.1),
        steps=2,
        clip_norm=clip_norm,
        **options,
    )
    for index in range(2):
        opt.backward((model(words[index]) * rows[index]).sum())
        opt.step()
    bare = SPARSE[name](reference.parameters(), lr=0.1)
    (
        sum((reference(words[index]) * rows[index]).sum() for index in range(2)) / 2
    ).backward()
    gradient = reference.weight.grad.coalesce()
    norm = float(gradient.values().norm())
    reference.weight.grad = (
        gradient if clip_norm is None else gradient * (clip_norm / norm)
    )
    bare.step()
    assert opt.result.grad_norm == pytest.approx(norm)
    torch.testing.assert_close(model.weight.detach(), reference.weight.detach())


def test_dense_gradient_after_a_sparse_one() -> None:
    for options in ({}, {"accumulate_dtype": torch.float64}):
        model = nn.Embedding(4, 2, sparse=True)
        before = model.weight.detach().clone()
        opt = gradaccum.wrap(
            torch.optim.SGD(model.parameters(), lr=1.0), steps=2, **options
        )
        model(torch.tensor([1, 1])).sum().backward()
        opt.step()
        model.weight.sum().backward()
        opt.step()
        torch.testing.assert_close(
            before - model.weight.detach(),
            torch.tensor([[0.5, 0.5], [1.5, 1.5], [0.5, 0.5], [0.5, 0.5]]),
        )


def test_huge_squares_are_no_overflow() -> None:
    """The squares of these gradients overflow. The gradients and their norm are
    finite.
    """
    large = torch.full((4,), torch.finfo(torch.float32).max / 4)
    norm, finite, *_ = measure([large, torch.zeros(3), torch.zeros(0)])
    assert finite
    assert norm == pytest.approx(2 * float(large[0]))
    assert measure([large, torch.tensor([math.nan])])[:3] == (math.inf, False)
    assert measure([torch.tensor([-math.inf])]) == (math.inf, False)
    assert measure([])[:3] == (0.0, True)


def test_complex_parameters_are_trained() -> None:
    parameter = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    opt = gradaccum.wrap(torch.optim.SGD([parameter], lr=1.0), steps=2)
    for _ in range(2):
        (parameter * (3 + 4j)).real.sum().backward()
        opt.step()
    assert opt.result.grad_norm == pytest.approx(math.sqrt(50))
    torch.testing.assert_close(
        parameter.detach(), torch.full((2,), -3 + 4j, dtype=torch.complex64)
    )


def test_sparse_and_complex() -> None:
    tiny = 2.0**-100
    for gradient in (
        torch.tensor([0.0, 3.0, 0.0, 4.0]).to_sparse() * tiny,
        torch.tensor([3 + 4j], dtype=torch.complex64) * tiny,
    ):
        assert measure([gradient]).norm == pytest.approx(5 * tiny, rel=1e-6, abs=0)
