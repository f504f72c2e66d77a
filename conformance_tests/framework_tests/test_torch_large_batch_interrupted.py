"""A call with the large batch that raises half-way, or is interrupted, leaves everything as it was."""

from __future__ import annotations

import copy
import random
import sys
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs PyTorch")

import torch
from torch import Tensor, nn

from conformance_tests.framework_tests.torch_model import X, Y, make_model
from gradaccum_torch.large_batch import backward, coupled_backward

cross_entropy = nn.functional.cross_entropy


def moving_model() -> nn.Module:
    """Has a dropout and a batch norm."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))


def half(model: nn.Module) -> nn.Module:
    """The last layer in bfloat16: its gradients are moved into float32 sums."""
    model[3].bfloat16()
    return nn.Sequential(*model[:3], Cast(), model[3], Cast(torch.float32))


class Cast(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        return x.to(self.dtype)


KINDS = {"error": RuntimeError, "interrupt": KeyboardInterrupt}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("place", ["forward", "backward"])
@pytest.mark.parametrize("before", ["none", "some"])
@pytest.mark.parametrize("precision", [nn.Module.float, half])
@pytest.mark.parametrize("coupled", [False, True])
def test_error_leaves_everything(kind: type[BaseException], place: str, before: str, precision: Any, coupled: bool) -> None:
    """The third micro-batch raises: gradients, random states and statistics are bit-identical to before. Then the call can be repeated."""
    model = precision(moving_model())
    if before == "some":
        for p in list(model.parameters())[:3]:
            p.grad = torch.full_like(p, 0.1)
    gradients = [p.grad for p in model.parameters()]
    contents, state = copy.deepcopy(gradients), copy.deepcopy(model.state_dict())
    torch.manual_seed(3)
    random_states = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    calls: list[int] = []
    failing = True

    def fail(*_: Any) -> None:
        if failing and len(calls) == 3:
            raise kind

    handle = model[0].weight.register_hook(fail) if place == "backward" else None

    def outputs_fn(x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            calls.append(len(x))
        np.random.rand()
        random.random()
        outputs = model(x)
        if place == "forward":
            fail()
        return outputs

    def run() -> Tensor:
        calls.clear()
        if coupled:
            return coupled_backward(outputs_fn, lambda o: o.std(), X, steps=4)
        return backward(lambda x: outputs_fn(x).std(), X, steps=4)

    with pytest.raises(kind):
        run()
    assert len(calls) == 3
    assert all(a is b for a, b in zip([p.grad for p in model.parameters()], gradients, strict=True))
    assert all(a is b or torch.equal(a, b) for a, b in zip(gradients, contents, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), state.values(), strict=True))
    assert torch.equal(torch.get_rng_state(), random_states[0])
    assert (np.random.get_state()[1] == random_states[1]).all()
    assert random.getstate() == random_states[2]
    failing = False
    other = copy.deepcopy(model)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        q.grad = None if p.grad is None else p.grad.clone()
    first = run()
    torch.set_rng_state(random_states[0])
    model = other
    assert torch.equal(first, run())
    if handle is not None:
        handle.remove()


@pytest.mark.parametrize("coupled", [False, True])
def test_interrupt_at_the_end_waits(coupled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that comes while the sums are added to what was in `.grad` is raised when all are."""
    model, other = make_model(), make_model()
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        p.grad, q.grad = torch.ones_like(p), torch.ones_like(q)
    module = sys.modules["gradaccum_torch.large_batch.gradients"]
    plain, calls = module.add, []

    def interrupted(held: Tensor, gradient: Tensor) -> Tensor:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return plain(held, gradient)

    def run(model: nn.Module) -> None:
        if coupled:
            coupled_backward(lambda x: model(x), lambda o: o.std(), X, steps=3)
        else:
            backward(lambda x, y: cross_entropy(model(x), y), X, Y, steps=3)

    with monkeypatch.context() as patch:
        patch.setattr(module, "add", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(model)
    run(other)
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), other.parameters(), strict=True))
