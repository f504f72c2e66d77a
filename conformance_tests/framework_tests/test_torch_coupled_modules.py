"""Coupled losses of modules that are fetched where they are called, and of recomputed ones: every buffer moves once."""

from __future__ import annotations

import copy
import weakref
from contextlib import nullcontext
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs PyTorch")

import torch
from torch import Tensor, nn

import gradaccum
from gradaccum_torch.large_batch import coupled_backward
from gradaccum_torch.recomputation import recompute


@pytest.mark.parametrize("fails", [False, True])
def test_modules_fetched_elsewhere(fails: bool) -> None:
    """No look into the closure finds them: they are noted as they are called. Each moves once, or not at all after an error."""
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


def test_compiled_functions() -> None:
    """Looking out for modules must not disturb the compiler, nor make it warn."""
    model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4))
    for compiled in (
        torch.compile(model, backend="eager", fullgraph=True),
        torch.compile(lambda x: model(x), backend="eager", fullgraph=True),
    ):
        before = int(model[1].num_batches_tracked)
        coupled_backward(compiled, Tensor.std, torch.randn(8, 8), steps=4)
        assert int(model[1].num_batches_tracked) == before + 4


@pytest.mark.parametrize("options", [{}, {"segments": 2}, {"submodules": ["0", "1", "2"]}], ids=str)
@pytest.mark.parametrize("wrapped", [False, True])
def test_recomputed_model(options: dict[str, Any], wrapped: bool) -> None:
    """The same bits as without recomputation: dropout draws the same four times over, and statistics move once."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 4)).double()
    models = plain, recompute(copy.deepcopy(plain), **options)
    x = torch.linspace(-1, 2, 64, dtype=torch.float64).reshape(8, 8).sin()
    start, states = plain[0].weight.detach().clone(), []
    for model in models:
        opt = gradaccum.wrap(torch.optim.SGD(model.parameters(), lr=1.0), steps=None, loss_scale=8.0) if wrapped else None
        torch.manual_seed(1)
        coupled_backward(model, lambda o: torch.cov(o.T).square().sum(), x, steps=3, optimizer=opt)
        gradients = [] if wrapped else [p.grad for p in model.parameters()]
        states.append([*model.state_dict().values(), *gradients, torch.get_rng_state()])
    assert all(map(torch.equal, *states))
    assert not torch.equal(models[1][0].weight if wrapped else models[1][0].weight.grad, start)
