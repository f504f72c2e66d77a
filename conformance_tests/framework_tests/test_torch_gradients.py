"""Gradients of every kind: half precision, sparse, complex, huge, not finite."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.testing import assert_close

import gradaccum
from gradaccum import UsageError

from .torch_model import PLACES, by_float_place

SPARSE = {"sgd": SGD, "sparse_adam": torch.optim.SparseAdam}


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
@pytest.mark.parametrize("name", SPARSE)
@by_float_place
@pytest.mark.parametrize("clip_norm", [1e9, 0.5])
def test_sparse_gradients_equal_the_large_batch(
    name: str, place: str, clip_norm: float
) -> None:
    """The second loss of a micro-batch brings rows that the first one had not."""
    model = nn.Embedding(5, 2, sparse=True)
    large = copy.deepcopy(model)
    inner = SPARSE[name](model.parameters(), lr=0.1)
    opt = gradaccum.wrap(inner, steps=2, clip_norm=clip_norm, **PLACES[place])
    for words in ([1, 1, 2], [2, 3, 1]):
        for factor, part in ((1.0, words), (2.0, words[1:])):
            (model(torch.tensor(part)) * factor).sum().backward()
            (large(torch.tensor(part)) * factor / 2).sum().backward()
        opt.step()
        opt.zero_grad()
    gradient = large.weight.grad.coalesce()
    norm = float(gradient.values().norm())
    large.weight.grad = gradient * min(1.0, clip_norm / norm)
    SPARSE[name](large.parameters(), lr=0.1).step()
    assert opt.result.grad_norm == pytest.approx(norm)
    assert_close(model.weight.detach(), large.weight.detach())


@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
def test_gradient_of_a_linear_loss_may_have_a_graph() -> None:
    table = nn.Embedding(5, 2, sparse=True)
    opt = gradaccum.wrap(SGD(table.parameters()), steps=2)
    for _ in range(2):
        opt.backward(table(torch.tensor([1])).sum(), create_graph=True)
        opt.step()


@pytest.mark.parametrize("set_to_none", [True, False])
def test_sparse_gradients_may_not_be_cleared_in_a_window(set_to_none: bool) -> None:
    table = nn.Embedding(5, 2, sparse=True)
    inner = torch.optim.SparseAdam(table.parameters())
    opt = gradaccum.wrap(inner, steps=2)
    table(torch.tensor([1, 2])).sum().backward()
    opt.step()
    table.zero_grad(set_to_none)
    table(torch.tensor([1, 3])).sum().backward()
    with pytest.raises(UsageError, match=r"^\.grad: .* opt\.discard\(\)"):
        opt.step()


@by_float_place
def test_dense_gradient_is_added_to_a_sparse_sum(place: str) -> None:
    """As of an embedding whose weight is the output layer's too."""
    table = nn.Embedding(2, 1, sparse=True)
    before = table.weight.detach().clone()
    inner = SGD(table.parameters(), lr=1.0)
    opt = gradaccum.wrap(inner, steps=2, **PLACES[place])
    for loss in ((2 * table(torch.tensor([0]))).sum(), table.weight.sum()):
        loss.backward()
        opt.step()
    assert_close(before - table.weight, torch.tensor([[1.5], [0.5]]))


def test_complex_parameters_are_trained() -> None:
    parameter = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    opt = gradaccum.wrap(SGD([parameter], lr=1.0), steps=2)
    for _ in range(2):
        (parameter * (3 + 4j)).real.sum().backward()
        opt.step()
    assert opt.result.grad_norm == pytest.approx(math.sqrt(50))
    assert parameter.tolist() == [-3 + 4j] * 2


def test_parameter_without_axes_is_divided_as_others_are() -> None:
    """A clipped window's divisor has more digits than float32."""
    gradient = torch.linspace(0.1, 9.7, 97)
    scalars = [nn.Parameter(torch.zeros(())) for _ in gradient]
    vector = nn.Parameter(torch.zeros(97))
    sgd = SGD([*scalars, vector], lr=1.0)
    opt = gradaccum.wrap(sgd, steps=1, clip_norm=1.0)
    opt.backward((torch.stack(scalars) + vector) @ gradient)
    opt.step()
    assert torch.equal(torch.stack(scalars), vector)


def test_default_device_need_not_be_the_parameters() -> None:
    weight = nn.Parameter(torch.zeros(3))
    opt = gradaccum.wrap(SGD([weight], lr=1.0), steps=2)
    for _ in range(2):
        opt.backward(weight.sum())
        with torch.device("meta"):
            opt.step()
    assert weight.tolist() == [-1.0] * 3
