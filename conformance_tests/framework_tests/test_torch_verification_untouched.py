"""`gradaccum_torch.verify` leaves everything of the user's as it was, wherever the loss raises."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import gradaccum
from conformance_tests.framework_tests.torch_cases import classes, cross_entropy, inputs, net, one_thread  # noqa: F401


class Everything(nn.Module):
    """State of every kind: buffers, attributes, a list, a generator, a mode of its own, hooks, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = net(nn.BatchNorm1d(4), nn.Dropout(0.5))
        self.calls, self.seen, self.notes, self.generator = 0, [], {}, torch.Generator().manual_seed(3)
        self.register_buffer("mean", torch.zeros(3))
        self.average = nn.Parameter(torch.zeros(3), requires_grad=False)
        self.inner[2].eval()
        self.inner[0].register_forward_hook(lambda *_: None)
        self.inner[0].weight.register_hook(lambda gradient: gradient * 2)

    def forward(self, x: Tensor) -> Tensor:
        out = self.inner(x * 1.0) + torch.randn(3, generator=self.generator)
        self.calls += 1
        self.seen.append(len(x))
        self.notes["last"] = out
        self.mean = self.mean + out.detach().mean(0)
        with torch.no_grad():
            self.average.mul_(0.5).add_(out.mean(0))
        random.random()
        np.random.rand()
        x.zero_()
        return out


def everything(model: Everything, outside: dict[str, Any], batch: tuple[Tensor, ...]) -> tuple[list[Any], list[Any]]:
    """(objects whose identity must stay, values)."""
    same: list[Any] = [*model.parameters(), *model.buffers(), *(p.grad for p in model.parameters()), model.seen, model.notes, model.mean]
    values: list[Any] = [tensor.detach().clone() for tensor in (*model.parameters(), *model.buffers(), *batch)]
    values += [p.grad if p.grad is None else p.grad.clone() for p in model.parameters()]
    values += [model.calls, list(model.seen), dict(model.notes), model.generator.get_state(), torch.get_rng_state()]
    values += [random.getstate(), np.random.get_state()[1].copy(), [module.training for module in model.modules()], copy.deepcopy(outside)]
    values += [[list(module._forward_hooks), list(module._forward_pre_hooks)] for module in model.modules()]
    values += [parameter._version for parameter in model.inner.parameters()]
    return same, values


def unchanged(before: tuple[list[Any], list[Any]], after: tuple[list[Any], list[Any]]) -> None:
    assert all(a is b for a, b in zip(before[0], after[0], strict=True))
    for a, b in zip(before[1], after[1], strict=True):
        assert torch.equal(a, b) if isinstance(a, Tensor) else np.array_equal(a, b) if isinstance(a, np.ndarray) else a == b


@pytest.mark.parametrize("raises_at", [None, 1, 2, 5, 20, 60, 90])
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_nothing_of_the_users_changes(raises_at: int | None, error: type[BaseException]) -> None:
    torch.manual_seed(1)
    model, outside = Everything(), {"baseline": 0.0, "list": []}
    batch = (inputs(5), classes())
    cross_entropy(model, batch[0].clone(), batch[1]).backward()

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        found = cross_entropy(model, x, y) - outside["baseline"]
        outside["baseline"] += 1.0
        outside["list"].append(1)
        counter[0] += 1
        if counter[0] == raises_at:
            raise error("in the middle")
        return found

    counter = np.zeros(1, dtype=int)  # An array's numbers are out of reach, so that it can count.
    before = everything(model, outside, batch)
    if raises_at is None:
        assert not gradaccum.verify(model, loss, batch).equivalent
        assert counter[0] > 90
    else:
        with pytest.raises(error, match="in the middle"):
            gradaccum.verify(model, loss, batch)
    unchanged(before, everything(model, outside, batch))


def test_tensor_that_is_given_whole_is_a_copy() -> None:
    """The loss may write into it."""
    table = torch.zeros(3)

    def loss(model: nn.Module, x: Tensor, y: Tensor, whole: Tensor) -> Tensor:
        whole.add_(1.0)
        return cross_entropy(model, x, y)

    assert gradaccum.verify(net(), loss, (inputs(5), classes(), table), axes=(0, 0, None)).equivalent
    assert not table.any()


def test_list_of_items() -> None:
    """One dict per item, as in training."""
    meta = [{"w": torch.ones(1), "sizes": [2, 3]} for _ in range(8)]

    def loss(model: nn.Module, x: Tensor, y: Tensor, meta: list[dict[str, Tensor]]) -> Tensor:
        return torch.cat([each["w"] for each in meta]).sum() * cross_entropy(model, x, y) / len(y)

    assert gradaccum.verify(net(), loss, (inputs(5), classes(), meta), axes=(0, 0, "items")).equivalent
    with pytest.raises(gradaccum.ArgumentValueError, match=r"batch\[2\]: expected a list that axes= speak of"):
        gradaccum.verify(net(), loss, (inputs(5), classes(), meta))


@pytest.mark.parametrize("retain", [True, False])
@pytest.mark.parametrize("detach", [True, False])
def test_loss_that_calls_backward_is_refused(retain: bool, detach: bool) -> None:
    """A whole training step in place of the loss: ``.grad`` stays what it was, object and numbers."""
    model, batch = net(), (inputs(5), classes())
    model[0].weight.grad = gradient = torch.ones_like(model[0].weight)

    def training_step(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        loss = cross_entropy(model, x, y)
        loss.backward(retain_graph=retain)
        return loss.detach() if detach else loss

    with pytest.raises(gradaccum.UsageError, match=r"calls backward\(\).*Leave backward\(\) out"):
        gradaccum.verify(model, training_step, batch)
    assert model[0].weight.grad is gradient
    assert torch.equal(gradient, torch.ones_like(gradient))
    assert model[0].bias.grad is None


def test_open_window_is_left_alone() -> None:
    """A wrapped optimizer watches ``.grad`` and its parameters: it must not see anything."""
    model, (x, y) = net(), (inputs(5), classes())
    opt = gradaccum.wrap(torch.optim.SGD(model.parameters(), lr=0.1), steps=2)
    opt.backward(cross_entropy(model, x[:4], y[:4]))
    opt.step()
    assert gradaccum.verify(model, cross_entropy, (x, y)).equivalent
    assert opt.result.micro_step == 1
    opt.backward(cross_entropy(model, x[4:], y[4:]))
    opt.step()
    assert opt.result.applied
