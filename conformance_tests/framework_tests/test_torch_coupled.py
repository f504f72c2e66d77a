"""Losses that couple the items of a batch, beyond the shared suite: random numbers,
statistics, wrapped optimizers and dtypes.
"""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

import gradaccum
from gradaccum import ArgumentValueError
from gradaccum_torch import coupled_backward

from .torch_large_batch import ITEMS, X, assert_close, gradients, truth


class Scored(nn.Sequential):
    """A model with dropout, and the temperature of its own loss."""

    def __init__(self, dropout: float = 0.0) -> None:
        torch.manual_seed(0)
        super().__init__(
            nn.Linear(6, 8), nn.Dropout(dropout), nn.Tanh(), nn.Linear(8, 4)
        )
        self.temperature = nn.Parameter(torch.tensor(0.3))
        self.double()

    def loss(self, outputs: Tensor) -> Tensor:
        outputs = nn.functional.normalize(outputs)
        scores = self.temperature.exp() * outputs @ outputs.T
        return nn.functional.cross_entropy(scores, torch.arange(len(scores)).roll(1))


def draw() -> Tensor:
    """A noise of each global source."""
    noise = torch.rand(4, dtype=X.dtype) + torch.from_numpy(np.random.rand(4))
    return noise + random.random()


def seed() -> None:
    torch.manual_seed(1)
    np.random.seed(1)
    random.seed(1)


def test_randomness_is_replayed() -> None:
    """Dropout and noise of any source are the same in both passes, differ between
    micro-batches, and go on as after one pass.
    """
    model = Scored(dropout=0.5)
    noises = []

    def outputs_fn(x: Tensor) -> Tensor:
        noise = draw()
        noises.append(noise.tolist())
        return model(x) * noise

    def loss_fn(outputs: Tensor) -> Tensor:
        return model.loss(outputs + draw())

    seed()
    value, expected = truth(
        model, lambda: loss_fn(torch.cat([outputs_fn(part) for part in X.split(2)]))
    )
    after, once = draw(), list(noises)
    noises.clear()
    seed()
    loss = coupled_backward(outputs_fn, loss_fn, X, steps=5)
    assert float(loss) == pytest.approx(float(value), rel=1e-14)
    assert torch.equal(draw(), after)
    assert_close(model, expected)
    assert noises == once * 2
    assert len(set(map(tuple, once))) == 5


def test_statistics_move_once() -> None:
    """A batch norm's, and those of the loss's own modules."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4)).double()
    head = nn.BatchNorm1d(4).double()
    modules = nn.ModuleList([model, head])
    other = copy.deepcopy(modules)
    coupled_backward(
        model, lambda outputs: head(outputs).square().mean(1).std(), X, steps=5
    )
    outputs = torch.cat([other[0](part) for part in X.split(2)])
    other[1](outputs).square().mean(1).std().backward()
    pair = gradients(modules), gradients(other)
    torch.testing.assert_close(*pair, rtol=1e-11, atol=1e-14)
    assert all(map(torch.equal, modules.buffers(), other.buffers()))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"loss_scale": 1024.0},
        {"loss_scale": gradaccum.DynamicLossScale()},
        {"reduction": "sum"},
        {"reduction": "sum_per_item", "loss_scale": 3.0},
    ],
    ids=str,
)
def test_wrapped_optimizer(options: dict[str, Any]) -> None:
    """One update with the large batch's gradient, whatever the reduction; the scale
    reaches outputs and temperature.
    """
    model, large = Scored(), Scored()
    opt = gradaccum.wrap(SGD(model.parameters(), lr=1.0), steps=None, **options)
    inner = SGD(large.parameters(), lr=1.0)
    for update in range(2):
        inner.zero_grad()
        value = large.loss(large(X))
        value.backward()
        size = float(nn.utils.clip_grad_norm_(large.parameters(), 1e9))
        inner.step()
        loss = coupled_backward(model, model.loss, X, steps=3, optimizer=opt)
        assert float(loss) == pytest.approx(float(value.detach()), rel=1e-12)
        assert opt.result.applied
        assert opt.result.optimizer_step == update + 1
        assert opt.result.grad_norm == pytest.approx(size, rel=1e-6)
    pair = [*model.parameters()], [*large.parameters()]
    torch.testing.assert_close(*pair, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wrapped", [False, True])
def test_half_precision_sums(dtype: torch.dtype, wrapped: bool) -> None:
    """1024 equal parts would stop growing at 256 in bfloat16 and 2048 in float16."""
    weight = nn.Parameter(torch.zeros(1, dtype=dtype))
    x = torch.ones(1024, 1, dtype=dtype) * (1 if dtype is torch.bfloat16 else 4)
    inner = SGD([weight], lr=1.0)
    coupled_backward(
        lambda x: x * weight,
        lambda outputs: outputs.float().sum(),
        x,
        micro_batch_size=1,
        optimizer=gradaccum.wrap(inner, None, loss_scale=2.0) if wrapped else None,
    )
    gradient = -weight.detach() if wrapped else weight.grad
    assert float(gradient) == 1024 * float(x[0])


def test_rows_other_than_items() -> None:
    """Tokens of all items in one axis, integers among the outputs, a frozen tower, an
    output the loss does not use.
    """
    torch.manual_seed(0)
    model, frozen = nn.Linear(6, 3).double(), nn.Linear(6, 3).double()
    frozen.requires_grad_(False)
    lengths = torch.arange(ITEMS) % 3 + 1

    def outputs_fn(x: Tensor, lengths: Tensor) -> tuple[Tensor, ...]:
        tokens = x.repeat_interleave(lengths, 0)
        return model(tokens), frozen(tokens), lengths, model(x)

    def loss_fn(outputs: tuple[Tensor, ...]) -> Tensor:
        tokens, other, lengths, _ = outputs
        assert len(tokens) == int(lengths.sum())
        return torch.cdist(tokens, other).logsumexp((0, 1)) * lengths.sum()

    _, expected = truth(model, lambda: loss_fn(outputs_fn(X, lengths)))
    coupled_backward(outputs_fn, loss_fn, X, lengths, steps=4)
    assert_close(model, expected, bound=1e-12)
    assert frozen.weight.grad is None


def test_output_without_rows_is_refused() -> None:
    """As CLIP's `logit_scale`."""
    scale = torch.ones((), requires_grad=True)
    with pytest.raises(ArgumentValueError, match=r"got shape \(\) for a micro-batch"):
        coupled_backward(lambda x: (x, scale), lambda _: scale, X, steps=4)
