"""Gradients of every kind: half precision, sparse, missing, huge, not finite; and where their sum lives."""

from __future__ import annotations

import math

import pytest

pytest.importorskip("torch", reason="needs PyTorch")

import torch
from torch import nn

import gradaccum
from gradaccum_torch import AccumulatingOptimizer
from gradaccum_torch.sums import measure


def one_parameter(value: torch.Tensor, **options: object) -> tuple[nn.Parameter, AccumulatingOptimizer]:
    parameter = nn.Parameter(value)
    return parameter, gradaccum.wrap(torch.optim.SGD([parameter], lr=1.0), **{"steps": 2, **options})


def send(parameter: nn.Parameter, opt: AccumulatingOptimizer, gradient: float, weight: float | None = None) -> None:
    opt.backward((parameter * torch.full_like(parameter, gradient)).sum(), weight=weight)
    opt.step()


def test_full_precision_sums_stay_in_grad() -> None:
    parameter, opt = one_parameter(torch.zeros(3))
    send(parameter, opt, 1.0)
    held = parameter.grad
    send(parameter, opt, 2.0)
    assert torch.equal(held, torch.full((3,), 1.5))
    assert parameter.grad is None
    assert torch.equal(parameter.detach(), torch.full((3,), -1.5))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("on_overflow", ["skip_window", "drop_micro_batch"])
def test_half_gradients_are_summed_in_float32(dtype: torch.dtype, on_overflow: str) -> None:
    steps = 64
    parameter, opt = one_parameter(torch.zeros(5, dtype=dtype), steps=steps, reduction="sum", on_overflow=on_overflow)
    lost = torch.zeros(5, dtype=dtype)
    for index in range(steps):
        gradient = 64.0 if index == 0 else 0.015625
        lost += torch.full((5,), gradient, dtype=dtype)
        send(parameter, opt, gradient)
        if index < steps - 1:
            sums = opt.state_dict()["gradaccum"]["sums"]
            assert sums[0].dtype == torch.float32
    assert opt.result.applied
    exact = torch.tensor(-(64 + 63 * 0.015625)).to(dtype)
    assert not torch.equal(-lost, exact.expand(5))
    assert torch.equal(parameter.detach(), exact.expand(5))
    assert opt.result.grad_norm == pytest.approx(math.sqrt(5) * (64 + 63 * 0.015625))


def test_half_gradients_leave_grad_in_backward() -> None:
    """At no moment of the backward pass does ``.grad`` hold more than two gradients."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(6))).to(torch.bfloat16)
    opt = gradaccum.wrap(torch.optim.SGD(model.parameters(), lr=1.0), steps=2)
    alive: list[int] = []
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda _: alive.append(sum(q.grad is not None for q in model.parameters())))
    for _ in range(2):
        model(torch.ones(2, 4, dtype=torch.bfloat16)).sum().backward()
        assert sum(p.grad is not None for p in model.parameters()) == 1
        opt.step()
    assert max(alive) <= 2
    assert opt.result.applied


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_accumulate_dtype_is_used(dtype: torch.dtype) -> None:
    parameter, opt = one_parameter(torch.zeros(3), accumulate_dtype=dtype)
    send(parameter, opt, 1.0)
    assert opt.state_dict()["gradaccum"]["sums"][0].dtype == dtype
    send(parameter, opt, 3.0)
    assert torch.equal(parameter.detach(), torch.full((3,), -2.0))


def test_mixed_dtypes_in_one_optimizer() -> None:
    half, full = nn.Parameter(torch.zeros(2, dtype=torch.bfloat16)), nn.Parameter(torch.zeros(2))
    opt = gradaccum.wrap(torch.optim.SGD([half, full], lr=1.0), steps=2, clip_norm=1.0)
    for _ in range(2):
        ((half * 3).sum().float() + (full * 4).sum()).backward()
        opt.step()
    assert opt.result.grad_norm == pytest.approx(math.sqrt(50))
    torch.testing.assert_close(full.detach(), torch.full((2,), -4 / math.sqrt(50)))
    torch.testing.assert_close(half.detach().float(), torch.full((2,), -3 / math.sqrt(50)), rtol=1e-2, atol=0)


def test_half_group_joins_in_mid_window() -> None:
    full, half = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
    watched = nn.Parameter(torch.zeros(1))
    opt = gradaccum.wrap(torch.optim.SGD([full, watched], lr=1.0), steps=2)
    send(full, opt, 1.0)
    opt.add_param_group({"params": [half]})
    assert [total.dtype for total in opt.state_dict()["gradaccum"]["sums"].values()] == [torch.float32]
    ((half * 4).sum().float() + (full * 5).sum()).backward()
    assert full.grad is None
    opt.step()
    assert torch.equal(full.detach(), torch.full((2,), -3.0))
    assert torch.equal(half.detach(), torch.full((2,), -2.0, dtype=torch.bfloat16))


def test_unfrozen_half_parameter_is_summed() -> None:
    half = nn.Parameter(torch.zeros(2, dtype=torch.bfloat16), requires_grad=False)
    other = nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
    opt = gradaccum.wrap(torch.optim.SGD([half, other], lr=1.0), steps=3)
    half.requires_grad_(True)
    for gradient in (1.0, 2.0, 3.0):
        ((half * gradient).sum() + other.sum()).backward()
        opt.step()
    assert torch.equal(half.detach(), torch.full((2,), -2.0, dtype=torch.bfloat16))


SPARSE = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad, "sparse_adam": torch.optim.SparseAdam}


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
@pytest.mark.parametrize("name", SPARSE)
@pytest.mark.parametrize("options", [{}, {"accumulate_dtype": torch.float64}, {"on_overflow": "drop_micro_batch"}])
@pytest.mark.parametrize("clip_norm", [None, 0.5])
def test_sparse_gradients_equal_the_large_batch(name: str, options: dict, clip_norm: float | None) -> None:
    words = [torch.tensor([1, 1, 2]), torch.tensor([2, 3, 1])]
    rows = torch.arange(1.0, 7.0).reshape(2, 3, 1)

    def make() -> nn.Embedding:
        torch.manual_seed(0)
        return nn.Embedding(5, 2, sparse=True)

    model, reference = make(), make()
    opt = gradaccum.wrap(SPARSE[name](model.parameters(), lr=0.1), steps=2, clip_norm=clip_norm, **options)
    for index in range(2):
        opt.backward((model(words[index]) * rows[index]).sum())
        opt.step()
    bare = SPARSE[name](reference.parameters(), lr=0.1)
    (sum((reference(words[index]) * rows[index]).sum() for index in range(2)) / 2).backward()
    gradient = reference.weight.grad.coalesce()
    norm = float(gradient.values().norm())
    reference.weight.grad = gradient if clip_norm is None else gradient * (clip_norm / norm)
    bare.step()
    assert opt.result.grad_norm == pytest.approx(norm)
    torch.testing.assert_close(model.weight.detach(), reference.weight.detach())


def test_dense_gradient_after_a_sparse_one() -> None:
    for options in ({}, {"accumulate_dtype": torch.float64}):
        model = nn.Embedding(4, 2, sparse=True)
        before = model.weight.detach().clone()
        opt = gradaccum.wrap(torch.optim.SGD(model.parameters(), lr=1.0), steps=2, **options)
        model(torch.tensor([1, 1])).sum().backward()
        opt.step()
        model.weight.sum().backward()
        opt.step()
        torch.testing.assert_close(before - model.weight.detach(), torch.tensor([[0.5, 0.5], [1.5, 1.5], [0.5, 0.5], [0.5, 0.5]]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_huge_squares_are_no_overflow(dtype: torch.dtype) -> None:
    """The squares of these gradients overflow. The gradients and their norm are finite."""
    large = float(torch.finfo(dtype).max) / 4
    norm, finite, *_ = measure([torch.full((4,), large, dtype=dtype), torch.zeros(3, dtype=dtype), torch.zeros(0, dtype=dtype)])
    assert finite
    assert norm == pytest.approx(2 * large)
    assert measure([torch.full((4,), large, dtype=dtype), torch.tensor([math.nan], dtype=dtype)])[:3] == (math.inf, False, [])
    assert measure([torch.tensor([-math.inf], dtype=dtype)])[:3] == (math.inf, False, [])
    assert measure([])[:3] == (0.0, True, [])


@pytest.mark.parametrize("options", [{}, {"accumulate_dtype": torch.float64}])
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_overflowed_window_heals(options: dict, bad: float) -> None:
    """Such a window makes no update and frees ``.grad``, and the next window trains."""
    parameter, opt = one_parameter(torch.zeros(3), loss_scale=gradaccum.DynamicLossScale(init_scale=8.0), **options)
    calls: list[int] = []
    opt.register_step_pre_hook(lambda *_: calls.append(1))
    send(parameter, opt, bad)
    send(parameter, opt, 1.0)
    assert opt.result == gradaccum.StepResult(False, True, True, math.inf, 4.0, 0, 0)
    assert parameter.grad is None
    assert not calls
    send(parameter, opt, 1.0)
    send(parameter, opt, 3.0)
    assert torch.equal(parameter.detach(), torch.full((3,), -2.0))


def test_dropped_micro_batch_adds_nothing() -> None:
    """Neither its gradient nor its weight counts."""
    parameter, opt = one_parameter(torch.zeros(3), steps=3, on_overflow="drop_micro_batch", loss_scale=gradaccum.DynamicLossScale(8.0))
    send(parameter, opt, 1.0, weight=1)
    send(parameter, opt, math.nan, weight=100)
    assert opt.result.overflow
    assert not opt.result.closed
    assert parameter.grad is None
    send(parameter, opt, 4.0, weight=2)
    assert opt.result.applied
    assert opt.result.loss_scale == 4.0
    torch.testing.assert_close(parameter.detach(), torch.full((3,), -3.0))


def test_missing_last_gradient_keeps_the_sum() -> None:
    a, b = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    for options in ({}, {"accumulate_dtype": torch.float64}, {"on_overflow": "drop_micro_batch"}):
        with torch.no_grad():
            a.zero_()
            b.zero_()
        opt = gradaccum.wrap(torch.optim.SGD([a, b], lr=1.0), steps=2, **options)
        (a * 2 + b * 4).sum().backward()
        opt.step()
        (b * 4).sum().backward()
        opt.step()
        assert torch.equal(a.detach(), torch.full((2,), -1.0))
        assert torch.equal(b.detach(), torch.full((2,), -4.0))


def test_complex_parameters_are_trained() -> None:
    parameter, opt = one_parameter(torch.zeros(2, dtype=torch.complex64))
    for _ in range(2):
        (parameter * (3 + 4j)).real.sum().backward()
        opt.step()
    assert opt.result.grad_norm == pytest.approx(math.sqrt(50))
    torch.testing.assert_close(parameter.detach(), torch.full((2,), -3 + 4j, dtype=torch.complex64))


@pytest.mark.parametrize("on_overflow", ["skip_window", "drop_micro_batch"])
def test_sum_beyond_float16_is_overflow(on_overflow: str) -> None:
    """The float32 sum is finite, but a float16 parameter cannot take it."""
    parameter, opt = one_parameter(torch.zeros(3, dtype=torch.float16), reduction="sum", on_overflow=on_overflow)
    for gradient, applied in ((60000.0, False), (30000.0, True)):
        send(parameter, opt, gradient)
        send(parameter, opt, gradient)
        assert opt.result.applied == applied
        assert opt.result.overflow != applied
    assert torch.equal(parameter.detach(), torch.full((3,), -60000.0, dtype=torch.float16))


def test_older_wrapper_is_refused() -> None:
    """Only one wrapper can take a gradient. The newest does, and an older one raises at its next step."""
    parameters = [nn.Parameter(torch.zeros(size, dtype=torch.bfloat16)) for size in (1, 2, 3)]
    older, later = (gradaccum.wrap(torch.optim.SGD(parameters, lr=1.0), steps=1) for _ in range(2))
    sum((p * 2).sum() for p in parameters).backward()
    with pytest.raises(gradaccum.UsageError, match="wrapped again"):
        older.step()
    later.step()
    assert all(bool((p == -2).all()) for p in parameters)
