"""Recomputation changes no bit of a gradient, a buffer or a random number."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from conformance_tests.framework_tests.torch_recompute import WAYS, Average, data, make, recomputed, same, state, trained
from gradaccum_torch.recomputation import function, recompute


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["float32", "float64", "bfloat16", "autocast"])
def test_same_bits(way: str, kind: str) -> None:
    """The input needs no gradient, and the first layer trains."""
    dtype = torch.float32 if kind == "autocast" else getattr(torch, kind)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=kind == "autocast"):
        model = recomputed(way, make(dtype))
        got, expected = trained(model), trained(make(dtype))
    assert same(got, expected)
    assert model[0].weight.grad is not None
    assert [each.num_batches_tracked.item() for each in model if isinstance(each, nn.BatchNorm1d)] == [1, 1]


def test_dropout_is_drawn_anew_without_rng_state() -> None:
    assert not same(trained(recompute(make(), preserve_rng_state=False)), trained(make()))


def of_self(model: nn.Sequential) -> Callable[[Tensor], Tensor]:
    return recompute(model.forward)


def of_closure(model: nn.Sequential) -> Callable[[Tensor], Tensor]:
    return recompute(lambda x: model(x))


def of_partial(model: nn.Sequential) -> Callable[[Tensor], Tensor]:
    return recompute(functools.partial(lambda layers, x: layers(x), model))


def of_argument(model: nn.Sequential) -> Callable[[Tensor], Tensor]:
    return functools.partial(recompute(lambda x, model: model(x)), model=model)


def of_hidden(model: nn.Sequential) -> Callable[[Tensor], Tensor]:
    """Found by nothing but its call."""
    hidden = type("Hidden", (), {"model": model})
    return recompute(lambda x: hidden.model(x))


def of_method(model: nn.Sequential) -> Callable[[Tensor], Tensor]:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        @recompute
        def forward(self, x: Tensor) -> Tensor:
            return self.model(x)

    return Outer()


@pytest.mark.parametrize("way", [of_method, of_self, of_closure, of_partial, of_argument, of_hidden])
def test_functions_same_bits(way: Any) -> None:
    model = make()
    assert same(trained(model, way(model)), trained(make()))


def test_function_of_statistics() -> None:
    """A change of these is not counted by torch, and the module is never called."""
    got, expected = nn.BatchNorm1d(8), nn.BatchNorm1d(8)

    def normalised(norm: nn.BatchNorm1d, x: Tensor) -> Tensor:
        return F.batch_norm(x, norm.running_mean, norm.running_var, norm.weight, norm.bias, training=True)

    assert same(trained(got, recompute(lambda x: normalised(got, x))), trained(expected, functools.partial(normalised, expected)))


by_change = pytest.mark.parametrize("inplace", [True, False])


def both_orders(call: Callable[[Tensor], Tensor], model: nn.Module, size: int) -> list[Tensor]:
    """Two forward passes before the backward passes, one of which comes twice."""
    x = torch.linspace(0, 1, 2 * size).reshape(2, size).requires_grad_()
    first, second = call(x).sum(), call(2 * x).sum()
    for loss in (first, second, first):
        loss.backward(retain_graph=True)
    assert x.grad is not None
    return [x.grad, *model.buffers()]


@by_change
@pytest.mark.parametrize("size", [4, function.SMALL + 1])
def test_each_replay_finds_its_own_average(size: int, inplace: bool) -> None:
    got, expected = Average(size, inplace), Average(size, inplace)
    assert same(both_orders(recompute(got), got, size), both_orders(expected, expected, size))


@by_change
@pytest.mark.parametrize("shared", ["module", "buffer"])
@pytest.mark.parametrize("way", ["known", "hidden"])
def test_average_used_twice(inplace: bool, shared: str, way: str) -> None:
    """By one module that is called twice, or by two modules; found beforehand, or as they are called."""

    def pair() -> nn.Sequential:
        average = Average(4, inplace)
        other = average if shared == "module" else Average(4, inplace)
        other.mean = average.mean
        return nn.Sequential(average, nn.Tanh(), other)

    got, expected = pair(), pair()
    part = recompute(got, segments=1) if way == "known" else of_hidden(got)
    assert same(both_orders(part, got, 4), both_orders(expected, expected, 4))


def test_written_large_buffer_without_version() -> None:
    class Written(Average):
        def forward(self, x: Tensor) -> Tensor:
            self.mean.data.add_(1)
            return torch.tanh(x - self.mean)

    got, expected = Written(function.SMALL + 1), Written(function.SMALL + 1)
    for model in (recompute(got), expected):
        model(torch.zeros(1, function.SMALL + 1, requires_grad=True)).sum().backward()
    assert torch.equal(got.mean, expected.mean)


def test_buffer_of_two_modules_stays_one() -> None:
    def twins() -> nn.Module:
        model = nn.Sequential(nn.BatchNorm1d(8), nn.BatchNorm1d(8), nn.Linear(8, 8))
        model[1].running_mean = model[0].running_mean
        return model

    torch.manual_seed(0)
    got = twins()
    expected = copy.deepcopy(got)
    assert same(trained(recompute(got, segments=1)), trained(expected))
    assert got[0].running_mean is got[1].running_mean


def test_retained_graph_and_second_order() -> None:
    def both(model: nn.Module) -> list[Tensor]:
        torch.manual_seed(1)
        loss = model(data()).square().sum()
        loss.backward(retain_graph=True)
        first = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        sum(each.square().sum() for each in first).backward()
        return state(model)

    assert same(both(recompute(make())), both(make()))


def test_mode_is_that_of_the_forward() -> None:
    """``eval()`` comes before ``backward()``."""

    def both(model: nn.Module) -> list[Tensor]:
        torch.manual_seed(1)
        loss = model(data()).sum()
        model.eval()
        loss.backward()
        assert not any(each.training for each in model.modules())
        return state(model)

    assert same(both(recompute(make())), both(make()))
