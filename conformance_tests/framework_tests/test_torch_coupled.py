"""Losses that couple the items of a batch, beyond the shared suite: random numbers,
statistics, wrapped optimizers and dtypes.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradaccum
from gradaccum_torch.large_batch import coupled_backward

ITEMS = 10


X = torch.randn(
    ITEMS, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
)


Z = torch.randn(
    ITEMS, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(2)
)


Outputs = dict[str, Tensor]


class Towers(nn.Module):
    """Two towers with dropout, a gate for experts, and the loss's own temperature."""

    def __init__(
        self, dropout: float = 0.0, dtype: torch.dtype = torch.float64
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.image = nn.Sequential(
            nn.Linear(6, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 4)
        )
        self.text = nn.Sequential(
            nn.Linear(5, 8), nn.Dropout(dropout), nn.Tanh(), nn.Linear(8, 4)
        )
        self.temperature = nn.Parameter(torch.tensor(0.3))
        self.to(dtype)

    def forward(self, x: Tensor, z: Tensor) -> Outputs:
        return {"image": self.image(x), "text": self.text(z)}


def contrast(towers: Towers, outputs: Outputs) -> Tensor:
    """CLIP's loss with a learned temperature."""
    a, b = (nn.functional.normalize(outputs[name]) for name in ("image", "text"))
    scores = towers.temperature.exp() * a @ b.T
    labels = torch.arange(len(scores))
    return (
        nn.functional.cross_entropy(scores, labels)
        + nn.functional.cross_entropy(scores.T, labels)
    ) / 2


def error(towers: Towers, expected: list[Tensor]) -> float:
    """The relative error of what is in ``.grad``, over all parameters."""
    got = [
        torch.zeros_like(p) if p.grad is None else p.grad for p in towers.parameters()
    ]
    differences = [a - b for a, b in zip(got, expected, strict=True)]
    return float(norm(differences) / norm(expected))


def norm(tensors: list[Tensor]) -> Tensor:
    return torch.stack([each.norm() for each in tensors]).norm()


@pytest.mark.parametrize("source", ["torch", "generator", "numpy", "python"])
def test_randomness_is_replayed(source: str) -> None:
    """Dropout and noise of any source are the same in both passes, differ between
    micro-batches, and go on as after one pass.
    """
    import random

    import numpy as np

    towers, generator, seen = Towers(dropout=0.5), torch.Generator().manual_seed(3), []
    draws: dict[str, Callable[[], Tensor]] = {
        "torch": lambda: torch.rand(4, dtype=torch.float64),
        "generator": lambda: torch.rand(4, dtype=torch.float64, generator=generator),
        "numpy": lambda: torch.from_numpy(np.random.rand(4)),
        "python": lambda: torch.tensor(
            [random.random() for _ in range(4)], dtype=torch.float64
        ),
    }
    draw = draws[source]

    def outputs_fn(x: Tensor, z: Tensor) -> Outputs:
        noise = draw()
        outputs = {name: output * noise for name, output in towers(x, z).items()}
        seen.append([noise, *(output.detach() for output in outputs.values())])
        return outputs

    def loss_fn(outputs: Outputs) -> Tensor:
        return contrast(
            towers, {name: output + draw() for name, output in outputs.items()}
        )

    def start() -> None:
        torch.manual_seed(1)
        np.random.seed(1)
        random.seed(1)
        generator.manual_seed(1)

    start()
    parts = [outputs_fn(X[i : i + 2], Z[i : i + 2]) for i in range(0, ITEMS, 2)]
    value = loss_fn(
        {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    )
    expected, value, after = (
        list(torch.autograd.grad(value, list(towers.parameters()))),
        value.detach(),
        draw(),
    )
    seen.clear()
    start()
    assert float(coupled_backward(outputs_fn, loss_fn, X, Z, steps=5)) == pytest.approx(
        float(value), rel=1e-14
    )
    assert torch.equal(draw(), after)
    assert error(towers, expected) <= 1e-13
    assert len(seen) == 10
    assert all(
        torch.equal(a, b)
        for first, second in zip(seen[:5], seen[5:], strict=True)
        for a, b in zip(first, second, strict=True)
    )
    assert len({tuple(noise.tolist()) for noise, *_ in seen[:5]}) == 5


def test_statistics_move_once() -> None:
    """A batch norm's, and those of the loss's own modules; as in one pass over the
    micro-batches.
    """

    def make() -> tuple[nn.Module, nn.Module]:
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Linear(6, 4), nn.BatchNorm1d(4)
        ).double(), nn.BatchNorm1d(4).double()

    (model, head), (other, other_head) = make(), make()
    loss = coupled_backward(
        model, lambda outputs: contrast_of(head(outputs)), X, steps=5
    )
    outputs = torch.cat([other(X[i : i + 2]) for i in range(0, ITEMS, 2)])
    value = contrast_of(other_head(outputs))
    value.backward()
    assert float(loss) == pytest.approx(float(value.detach()), rel=1e-14)
    for a, b in zip(
        [*model.buffers(), *head.buffers()],
        [*other.buffers(), *other_head.buffers()],
        strict=True,
    ):
        assert torch.equal(a, b)
    for p, q in zip(
        [*model.parameters(), *head.parameters()],
        [*other.parameters(), *other_head.parameters()],
        strict=True,
    ):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-11, atol=1e-14)


def contrast_of(outputs: Tensor) -> Tensor:
    scores = outputs @ outputs.T
    return nn.functional.cross_entropy(scores, torch.arange(len(scores)).roll(1))


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
    towers, large = Towers(), Towers()
    opt = gradaccum.wrap(
        torch.optim.SGD(towers.parameters(), lr=1.0), steps=None, **options
    )
    inner = torch.optim.SGD(large.parameters(), lr=1.0)
    for update in range(2):
        inner.zero_grad()
        value = contrast(large, large(X, Z))
        value.backward()
        size = float(norm([p.grad for p in large.parameters()]))
        inner.step()
        loss = coupled_backward(
            towers,
            lambda outputs: contrast(towers, outputs),
            X,
            Z,
            steps=3,
            optimizer=opt,
        )
        assert float(loss) == pytest.approx(float(value.detach()), rel=1e-12)
        assert opt.result.applied
        assert opt.result.optimizer_step == update + 1
        assert opt.result.grad_norm == pytest.approx(size, rel=1e-6)
    for p, q in zip(towers.parameters(), large.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wrapped", [False, True])
def test_half_precision_sums(dtype: torch.dtype, wrapped: bool) -> None:
    """1024 equal parts would stop growing at 256 in bfloat16 and 2048 in float16."""
    weight = nn.Parameter(torch.zeros(1, dtype=dtype))
    x = torch.ones(1024, 1, dtype=dtype) * (1 if dtype is torch.bfloat16 else 4)
    opt = (
        gradaccum.wrap(torch.optim.SGD([weight], lr=1.0), steps=None, loss_scale=2.0)
        if wrapped
        else None
    )
    coupled_backward(
        lambda x: x * weight,
        lambda outputs: outputs.float().sum(),
        x,
        micro_batch_size=1,
        optimizer=opt,
    )
    gradient = -weight.detach() if wrapped else weight.grad
    assert gradient is not None
    assert float(gradient) == 1024 * float(x[0])


def test_outer_autocast() -> None:
    """The weights that the first pass has cast without a graph are not those of the
    second.
    """
    towers, batch = Towers(dtype=torch.float32), (X.float(), Z.float())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        coupled_backward(
            towers, lambda outputs: contrast(towers, outputs), *batch, steps=5
        )
    got = [p.grad for p in towers.parameters()]
    assert all(g is not None and float(g.abs().max()) > 0 for g in got)
    towers.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        contrast(towers, towers(*batch)).backward()
    norms = [
        float((p.grad - g).norm() / p.grad.norm())
        for p, g in zip(towers.parameters(), got, strict=True)
    ]
    assert max(norms) < 0.1


def test_rows_other_than_items() -> None:
    """Tokens of all items in one axis, integers among the outputs, a frozen tower, an
    output the loss does not use.
    """
    torch.manual_seed(0)
    model, frozen = (
        nn.Linear(6, 3).double(),
        nn.Linear(6, 3).double().requires_grad_(False),
    )
    lengths = torch.arange(ITEMS) % 3 + 1

    def outputs_fn(x: Tensor, lengths: Tensor) -> tuple[Tensor, ...]:
        tokens = x.repeat_interleave(lengths, 0)
        return model(tokens), frozen(tokens), lengths, model(x)

    def loss_fn(outputs: tuple[Tensor, ...]) -> Tensor:
        tokens, other, lengths, _ = outputs
        assert len(tokens) == int(lengths.sum())
        return torch.cdist(tokens, other.detach()).logsumexp((0, 1)) * lengths.sum()

    (expected, bias) = torch.autograd.grad(
        loss_fn(outputs_fn(X, lengths)), [model.weight, model.bias]
    )
    coupled_backward(outputs_fn, loss_fn, X, lengths, steps=4)
    torch.testing.assert_close(model.weight.grad, expected, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(model.bias.grad, bias, rtol=1e-12, atol=1e-13)
    assert frozen.weight.grad is None


@pytest.mark.parametrize("fails", [False, True])
def test_modules_fetched_elsewhere(fails: bool) -> None:
    """No look into the closure finds them: they are noted as they are called. Each
    moves once, or not at all after an error.
    """
    model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4)).double()
    other, before = copy.deepcopy(model), copy.deepcopy(model.state_dict())
    x = torch.randn(8, 8, dtype=torch.float64)

    held = weakref.ref(model)

    def fetched(x: Tensor) -> Tensor:
        return held()(x)

    def loss_fn(outputs: Tensor) -> Tensor:
        if fails:
            raise KeyboardInterrupt
        return outputs.std()

    with pytest.raises(KeyboardInterrupt) if fails else nullcontext():
        coupled_backward(fetched, loss_fn, x, steps=4)
    if not fails:
        torch.cat([other(part) for part in x.split(2)]).std().backward()
        assert torch.allclose(model[0].weight.grad, other[0].weight.grad, rtol=1e-12)
    expected = before if fails else other.state_dict()
    assert all(map(torch.equal, model.state_dict().values(), expected.values()))
