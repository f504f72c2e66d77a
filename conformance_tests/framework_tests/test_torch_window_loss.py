"""The loss of a window, from whatever tells it, through errors and interrupts; NaN
where a part of it is not known.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import gradaccum
from conformance_tests.framework_tests.torch_operations import Operations
from gradaccum_torch import window as window_module
from gradaccum_torch.extensions import as_number

X = torch.arange(12.0, dtype=torch.float64).reshape(6, 2) / 10


def made(bias: bool = False, **options: Any) -> tuple[torch.nn.Linear, Any]:
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1, bias=bias, dtype=torch.float64)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0, -0.5]]))
    return model, gradaccum.wrap(
        torch.optim.SGD(model.parameters(), lr=0.1), **{"steps": 2, **options}
    )


def loss_of(model: torch.nn.Module, rows: Tensor = X) -> Tensor:
    return model(rows).square().mean()


def feed(model: torch.nn.Module, opt: Any, *parts: Tensor) -> None:
    for rows in parts:
        opt.backward(loss_of(model, rows), weight=len(rows))
        opt.step()
        opt.zero_grad()


def near(model: torch.nn.Module, rows: Tensor = X) -> object:
    return pytest.approx(loss_of(model, rows).item(), rel=1e-13)


def test_plain_backward_tells_nothing() -> None:
    """Beside ``opt.backward`` too: the loss of the window would lack a part."""
    model, opt = made()
    for mixed in (False, True):
        for _ in range(2):
            loss_of(model).backward()
            if mixed:
                opt.backward(loss_of(model))
            opt.step()
            opt.zero_grad()
        assert math.isnan(opt.result.loss)
    before = near(model)
    feed(model, opt, X[:2], X[2:])
    assert opt.result.loss == before, "the next window knows its own"


@pytest.mark.parametrize(
    "way", ["scale", "two losses", "closure", "closure and backward", "number"]
)
def test_each_way_to_tell(way: str) -> None:
    model, opt = made(loss_scale=4.0 if way == "scale" else None)
    expected = near(model)

    def closure(rows: Tensor) -> Any:
        opt.zero_grad()
        loss = loss_of(model, rows)
        if way == "closure and backward":
            opt.backward(loss)
            return None
        loss.backward()
        return loss.item() if way == "number" else loss

    for rows in X.split(3):
        if way == "scale":
            opt.scale(loss_of(model, rows)).backward()
            opt.step()
        elif way == "two losses":
            for half in rows[:1], rows[1:]:
                opt.backward(loss_of(model, half) * len(half) / 3)
            opt.step()
        else:
            opt.step(lambda rows=rows: closure(rows))
    assert opt.result.loss == expected


def test_closure_that_returns_something_else() -> None:
    model, opt = made(steps=1)
    for returned in (None, "loss", torch.ones(2), True):
        opt.step(lambda returned=returned: loss_of(model).backward() or returned)
        assert opt.result.applied
        assert math.isnan(opt.result.loss)


def test_what_is_dropped_is_not_in_it() -> None:
    model, opt = made(steps=1, separate_sums=True)
    opt.backward(loss_of(model) * 100)
    opt.zero_grad()
    expected = near(model)
    feed(model, opt, X)
    assert opt.result.loss == expected
    opt.discard()
    assert opt.result.loss == expected, "the last closed window's"


def test_errors_on_the_way() -> None:
    """A backward pass that raises tells nothing, and an update that raises and is made
    later tells its window's loss once.
    """
    model, opt = made()
    expected = near(model)
    feed(model, opt, X[:3])

    def fail(*_: object) -> None:
        raise OSError("interrupted")

    handle = opt.register_step_pre_hook(fail)
    with pytest.raises(OSError, match="interrupted"):
        feed(model, opt, X[3:])
    assert math.isnan(opt.result.loss)
    handle.remove()
    opt.flush()
    assert opt.result.loss == expected
    with pytest.raises(RuntimeError):
        opt.backward(torch.zeros(()))
    expected = near(model)
    feed(model, opt, X[:3], X[3:])
    assert opt.result.loss == expected


def test_incoming_gradient_multiplies_the_loss() -> None:
    model, opt = made()
    expected = 0.5 * loss_of(model).item()
    for _ in range(2):
        opt.backward(loss_of(model), gradient=torch.tensor(0.5))
        opt.step()
    assert opt.result.loss == pytest.approx(expected)


def test_incoming_gradient_is_multiplied_by_weight_and_scale() -> None:
    """As the loss itself would be."""
    moved = []
    for factor, arguments in ((0.5, {}), (1.0, {"gradient": torch.tensor(0.5)})):
        torch.manual_seed(0)
        model = torch.nn.Linear(2, 1).double()
        inner = torch.optim.SGD(model.parameters(), lr=0.5)
        opt: Any = gradaccum.wrap(inner, steps=2, loss_scale=8.0)
        for rows in (X[:3], X[3:]):
            loss = factor * model(rows).square().mean()
            opt.backward(loss, weight=len(rows), **arguments)
            opt.step()
        assert opt.result.applied
        moved.append(list(model.parameters()))
    torch.testing.assert_close(*moved)


@pytest.mark.parametrize("steps", [1, 2])
def test_plain_backward_before_a_closure(steps: int) -> None:
    """The closure's loss is a part of the micro-batch's."""
    model, _ = made()
    opt = gradaccum.wrap(torch.optim.SGD(model.parameters(), lr=0.0), steps=steps)

    def closure() -> Tensor:
        loss = loss_of(model)
        loss.backward()
        return loss

    for _ in range(steps):
        loss_of(model).backward()
        opt.step(closure)
    assert opt.result.applied
    assert math.isnan(opt.result.loss)


READ = "_local_scalar_dense"


"""The operation that waits for a device."""


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses stay tensors, as those on an accelerator do."""
    monkeypatch.setattr(window_module, "as_number", lambda loss: loss.detach().clone())


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"on_overflow": "ignore"},
        {"reduction": "sum"},
        {"reduction": "sum_per_item"},
    ],
    ids=str,
)
def test_losses_that_stay_on_their_device(
    on_device: None, options: dict[str, Any]
) -> None:
    """They are read when the result is asked for."""
    (model, opt), (other, plain) = made(**options), made(**options)
    feed(model, opt, X[:2], X[2:], X[:4])
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(window_module, "as_number", as_number)
        feed(other, plain, X[:2], X[2:], X[:4], X[4:])
    resumed = copy.deepcopy((model, opt))
    opt.backward(loss_of(model, X[4:]), weight=2)
    with Operations() as reads:
        opt.step()
    if options.get("on_overflow"):
        assert READ not in reads.names
    with Operations() as reads:
        loss, again = opt.result.loss, opt.result.loss
    assert reads.names.count(READ) == 0, "one transfer brings them all"
    assert loss == again == pytest.approx(plain.result.loss, rel=1e-14)
    feed(*resumed, X[4:])
    assert resumed[1].result.loss == loss, "the copy has the losses of before"


def test_next_loss_takes_the_same_memory() -> None:
    """As in a captured CUDA graph, which writes every loss there."""

    class Elsewhere(Tensor):
        is_cpu = False  # type: ignore[assignment]

    loss = torch.tensor(3.0).as_subclass(Elsewhere)
    told = as_number(loss)
    loss.fill_(5.0)
    assert isinstance(told, Tensor)
    assert told.item() == 3.0


def test_clearing_to_zeros_is_as_without_it() -> None:
    """A window that began with a part of the parameters was discarded: the zeros are
    those of the last closed one.
    """
    model, opt = made(bias=True)
    feed(model, opt, X[:2], X[2:])
    opt.backward(model.bias.sum())
    opt.step()
    opt.discard()
    opt.zero_grad(set_to_none=False)
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())
