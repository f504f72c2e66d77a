"""The loss of a window: from whatever tells it, through whatever happens in between; NaN where a part of it is not known."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs PyTorch")

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.utils._python_dispatch import TorchDispatchMode

import gradaccum
import gradaccum_torch
from gradaccum_torch import window as window_module
from gradaccum_torch.knowledge import as_told

X = torch.arange(12.0, dtype=torch.float64).reshape(6, 2) / 10


def made(**options: Any) -> tuple[torch.nn.Linear, Any]:
    model = torch.nn.Linear(2, 1, bias=False, dtype=torch.float64)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0, -0.5]]))
    return model, gradaccum.wrap(torch.optim.SGD(model.parameters(), lr=0.1), **{"steps": 2, **options})


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


@pytest.mark.parametrize("way", ["scale", "two losses", "closure", "closure and backward", "number"])
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


def test_lbfgs_tells_where_it_began() -> None:
    """It evaluates the model again and again. The window's loss is the one before the parameters moved, as LBFGS returns it."""
    model = made()[0]
    opt = gradaccum.wrap(torch.optim.LBFGS(model.parameters(), max_iter=4), steps=1)
    for own_backward in (False, True):
        expected = near(model)

        def closure(own_backward: bool = own_backward) -> Tensor:
            opt.zero_grad()
            loss = loss_of(model)
            if own_backward:
                opt.backward(loss)
            else:
                loss.backward()
            return loss

        returned = opt.step(closure)
        assert opt.result.loss == expected == returned.item()


def test_what_is_dropped_is_not_in_it() -> None:
    model, opt = made(steps=1, separate_sums=True)
    opt.backward(loss_of(model) * 100)
    opt.zero_grad()
    expected = near(model)
    feed(model, opt, X)
    assert opt.result.loss == expected
    opt.discard()
    assert opt.result.loss == expected, "the last closed window's"
    model, opt = made()
    feed(model, opt, X[:1])
    opt.discard()
    feed(model, opt, X[:3], X[3:])
    assert opt.result.loss == near(made()[0])


def test_errors_on_the_way() -> None:
    """A backward pass that raises tells nothing, and an update that raises and is made later tells its window's loss once."""
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


def test_interrupt_that_loses_a_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """The micro-batch is counted, and its loss is not: the window's is not known, rather than too small."""
    model, opt = made(steps=3)
    feed(model, opt, X[:2])

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(opt._window._knowledge, "counted", interrupt)
        with pytest.raises(KeyboardInterrupt):
            feed(model, opt, X[2:4])
    opt.zero_grad()
    feed(model, opt, X[4:])
    assert opt.result.applied
    assert math.isnan(opt.result.loss)
    expected = near(model)
    feed(model, opt, X[:2], X[2:4], X[4:])
    assert opt.result.loss == expected


def through_state(model: Any, opt: Any) -> tuple[Any, Any]:
    other, resumed = made()
    resumed.load_state_dict(copy.deepcopy(opt.state_dict()))
    return other, resumed


def through_checkpoint(model: Any, opt: Any) -> tuple[Any, Any]:
    other, resumed = made()
    set_optimizer_state_dict(other, resumed, get_optimizer_state_dict(model, opt))
    return other, resumed


def through_copy(model: Any, opt: Any) -> tuple[Any, Any]:
    return copy.deepcopy((model, opt))


def through_pickle(model: Any, opt: Any) -> tuple[Any, Any]:
    loaded: tuple[Any, Any] = pickle.loads(pickle.dumps((model, opt)))
    return loaded


@pytest.mark.parametrize("way", [through_state, through_checkpoint, through_copy, through_pickle])
def test_goes_on_elsewhere(way: Callable[..., tuple[Any, Any]]) -> None:
    """In mid-window, and the last closed window's."""
    model, opt = made()
    feed(model, opt, X[:2], X[2:], X[:3])
    other, resumed = way(model, opt)
    assert resumed.result.loss == opt.result.loss
    with torch.no_grad():
        other.weight.copy_(model.weight)
    expected = near(model)
    feed(other, resumed, X[3:])
    assert resumed.result.loss == expected


def test_copy_in_the_midst_of_a_micro_batch() -> None:
    model, opt = made()
    feed(model, opt, X[:3])
    opt.backward(loss_of(model, X[3:]), weight=3)
    resumed = through_copy(model, opt)[1]
    resumed.step()
    assert resumed.result.loss == near(model)


@pytest.mark.parametrize("open_window", [False, True])
def test_older_states_load(open_window: bool) -> None:
    """They say nothing of losses: the open window's stays unknown."""
    model, opt = made()
    feed(model, opt, *((X[:3],) if open_window else ()))
    state = opt.state_dict()
    for name in ("loss", "window_loss"):
        del state["gradaccum"][name]
    opt.load_state_dict(state)
    feed(model, opt, *((X[3:],) if open_window else (X[:3], X[3:])))
    assert opt.result.applied
    assert math.isnan(opt.result.loss) == open_window


def test_older_checkpoints_of_torch_load() -> None:
    model, opt = made()
    feed(model, opt, X[:3], X[3:])
    state = get_optimizer_state_dict(model, opt)
    state["param_groups"][0]["gradaccum"]["grad_norm"] = 2.5
    other, resumed = made()
    set_optimizer_state_dict(other, resumed, state)
    assert (resumed.result.grad_norm, resumed.result.optimizer_step) == (2.5, 1)
    assert math.isnan(resumed.result.loss)


def test_large_batch_in_one_call() -> None:
    model, opt = made(steps=None)
    loss = gradaccum_torch.backward(lambda rows: loss_of(model, rows), X, steps=4, optimizer=opt)
    assert opt.result.loss == pytest.approx(loss.item(), rel=1e-13)
    covariance = gradaccum_torch.coupled_backward(model, lambda z: (z - z.mean(0)).square().sum(), X, steps=3, optimizer=opt)
    assert opt.result.loss == pytest.approx(covariance.item(), rel=1e-13)


class Reads(TorchDispatchMode):
    """Counts what waits for a device."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket.__name__ == "_local_scalar_dense"
        return func(*args, **(kwargs or {}))


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses stay tensors, as those on an accelerator do."""
    monkeypatch.setattr(window_module, "as_told", lambda loss: loss.detach().clone())


@pytest.mark.parametrize("options", [{}, {"on_overflow": "ignore"}, {"reduction": "sum"}, {"reduction": "item_mean"}], ids=str)
def test_losses_that_stay_on_their_device(on_device: None, options: dict[str, Any]) -> None:
    """They are read in the one transfer at the window's end; without one, when the result is asked for."""
    (model, opt), (other, plain) = made(**options), made(**options)
    feed(model, opt, X[:2], X[2:], X[:4])
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(window_module, "as_told", as_told)
        feed(other, plain, X[:2], X[2:], X[:4], X[4:])
    resumed = copy.deepcopy((model, opt))
    opt.backward(loss_of(model, X[4:]), weight=2)
    with Reads() as reads:
        opt.step()
    assert reads.count == (0 if options.get("on_overflow") else reads.count)
    assert not opt._window._knowledge.unread
    with Reads() as reads:
        loss, again = opt.result.loss, opt.result.loss
    assert reads.count == (1 if options.get("on_overflow") else 0), "the copy has read the other one"
    assert loss == again == pytest.approx(plain.result.loss, rel=1e-14)
    feed(*resumed, X[4:])
    assert resumed[1].result.loss == loss, "the copy has the losses of before"


def test_end_waits_once(on_device: None) -> None:
    """The vector of norm and losses is read whole."""
    model, opt = made()
    feed(model, opt, X[:2], X[2:], X[:4])
    opt.backward(loss_of(model, X[4:]), weight=2)
    seen: list[int] = []
    original = Tensor.tolist
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Tensor, "tolist", lambda tensor: seen.append(tensor.numel()) or original(tensor))
        opt.step()
    assert seen == [3], "a norm and two losses"


def test_unknown_shapes() -> None:
    assert math.isnan(as_told(torch.ones(2)))
    assert math.isnan(as_told(None))
    assert as_told(torch.tensor([2.5])) == as_told(2.5) == 2.5
    meta = as_told(torch.ones((), device="meta"))
    assert isinstance(meta, Tensor), "not on the CPU: it is not asked"
