"""A limit in bytes for automatic sizes: what counts, what does not, and that a CPU needs one."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs PyTorch")

import torch
from torch import Tensor, nn

from gradaccum import ArgumentValueError, AutoMicroBatchSize, UsageError
from gradaccum_torch.large_batch import backward
from gradaccum_torch.large_batch.auto import key_of

X = torch.linspace(-1, 2, 64, dtype=torch.float64).reshape(8, 8).sin()
NO_LIMIT = 2**40


@pytest.fixture(autouse=True, scope="module")
def _small_heap() -> Iterator[None]:
    """A retry collects garbage. The objects of torch itself, a million, need not be looked at each time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def wide_loss(model: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda x: model(x).square().mean()


def wide() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 512, dtype=torch.float64), nn.Tanh(), nn.Linear(512, 8, dtype=torch.float64), nn.Tanh())


@pytest.mark.parametrize(("items", "expected"), [(8, 8), (7, 4), (4, 4), (3, 2), (1, 1)])
def test_memory_limit_on_a_cpu(items: int, expected: int) -> None:
    """Per item autograd keeps the outputs of both tanh in float64; no parameters, and no part of the batch."""
    model, other = wide(), wide()
    sizes = AutoMicroBatchSize(memory_limit=(512 + 8) * 8 * items)
    got = backward(wide_loss(model), X, micro_batch_size=sizes)
    assert sizes.size == expected
    assert torch.equal(got, backward(wide_loss(other), X, micro_batch_size=expected))
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), other.parameters(), strict=True))


def test_memory_limit_counts_no_frozen_parameter() -> None:
    """A layer's weight is kept for the gradient of its input."""
    model = wide()
    model[2].requires_grad_(False)
    sizes = AutoMicroBatchSize(memory_limit=(512 + 8) * 8 * 2)
    backward(wide_loss(model), X, micro_batch_size=sizes)
    assert sizes.size == 2


def test_memory_limit_counts_no_leaf() -> None:
    """Of no module, and kept as a view."""
    scale, weight = (torch.ones(*shape, dtype=torch.float64, requires_grad=True) for shape in ((8,), (512, 8)))
    sizes = AutoMicroBatchSize(memory_limit=8 * 8 * 8)
    backward(lambda x: nn.functional.linear(x * scale, weight).mean(), X, micro_batch_size=sizes)
    assert sizes.size == 8


@pytest.mark.filterwarnings("ignore:Sparse CSR:UserWarning")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_memory_limit_of_sparse_tensors(layout: torch.layout) -> None:
    weight = torch.ones(8, 2, dtype=torch.float64, requires_grad=True)
    sizes = AutoMicroBatchSize(memory_limit=1000)
    backward(lambda x: torch.sparse.mm(x.to_sparse(layout=layout), weight).mean(), X, micro_batch_size=sizes)
    assert sizes.size == 8
    with pytest.raises(UsageError):
        backward(lambda x: torch.sparse.mm(x.to_sparse(layout=layout), weight).mean(), X, micro_batch_size=AutoMicroBatchSize(8))


def test_memory_limit_too_small() -> None:
    model = wide()
    with pytest.raises(UsageError, match="does not fit into 100 bytes") as raised:
        backward(wide_loss(model), X, micro_batch_size=AutoMicroBatchSize(memory_limit=100))
    assert "memory_limit is 100" in str(raised.value.__cause__)
    assert all(p.grad is None for p in model.parameters())


def test_memory_limit_notices_writes() -> None:
    """Autograd leaves this check to whoever keeps its tensors."""
    weight = torch.ones(8, dtype=torch.float64, requires_grad=True)

    def loss_fn(x: Tensor) -> Tensor:
        out = (x * weight).exp()
        loss = out.mean()
        with torch.no_grad():
            out.add_(1)
        return loss

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        backward(loss_fn, X, micro_batch_size=AutoMicroBatchSize(NO_LIMIT))
    assert weight.grad is None


@pytest.mark.parametrize("size", ["auto", AutoMicroBatchSize()])
def test_unknown_limit_is_refused(size: Any) -> None:
    calls: list[Tensor] = []
    with pytest.raises(ArgumentValueError, match=r"micro_batch_size: .*memory_limit="):
        backward(calls.append, X, micro_batch_size=size)
    assert not calls


def test_keys_tell_functions_and_shapes() -> None:
    first, second = wide_loss(wide()), (lambda x: x.sum())
    assert key_of(first, [X]) == key_of(wide_loss(wide()), [X[:3]]) != key_of(second, [X])
    assert key_of(first, [X]) == key_of(first, [X[:, :5]]) != key_of(first, [X[:, :4]])
    assert key_of(first, [X]) != key_of(first, [X.float()])
