"""The large batch as the window of a wrapped optimizer: one call, one update, by the wrapper's own rules."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs PyTorch")

import torch
from torch import Tensor, nn

import gradaccum
from conformance_tests.framework_tests.torch_model import MAKERS, X, Y, make_model
from gradaccum_torch.large_batch import backward, coupled_backward

cross_entropy = nn.functional.cross_entropy


def split(model: nn.Module, opt: Any, **options: Any) -> Tensor:
    return backward(lambda x, y: cross_entropy(model(x), y), X, Y, **{"steps": 3, **options}, optimizer=opt)


def by_hand(model: nn.Module, opt: Any) -> None:
    """The same window, streamed: three micro-batches of 3, 3 and 2 items."""
    for rows in (slice(0, 3), slice(3, 6), slice(6, 8)):
        opt.backward(cross_entropy(model(X[rows]), Y[rows]), weight=rows.stop - rows.start)
        opt.step()
    opt.flush()


OPTIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": dict,
    "clip": lambda: {"clip_norm": 0.05},
    "skip": lambda: {"skip_norm": 1e-6},
    "static": lambda: {"loss_scale": 8.0},
    "dynamic": lambda: {"loss_scale": gradaccum.DynamicLossScale(growth_interval=1)},
    "scaler": lambda: {"loss_scale": torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=1)},
    "drop": lambda: {"on_overflow": "drop_micro_batch"},
    "float64": lambda: {"accumulate_dtype": "float64"},
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_same_bits_as_streaming(make: Any, options: Callable[[], dict[str, Any]]) -> None:
    models = make_model(), make_model()
    opts = [gradaccum.wrap(make(model.parameters()), steps=None, **options()) for model in models]
    for _ in range(2):
        split(models[0], opts[0])
        by_hand(models[1], opts[1])
        assert opts[0].result == opts[1].result
    assert all(torch.equal(p, q) for p, q in zip(*(model.parameters() for model in models), strict=True))


@pytest.mark.parametrize("scale", [lambda: None, lambda: 1024.0, lambda: torch.amp.GradScaler("cpu", init_scale=64.0)])
@pytest.mark.parametrize("coupled", [False, True])
def test_leaves_beside_the_optimizer(scale: Callable[[], Any], coupled: bool) -> None:
    """A critic that the generator's loss goes through gets the large batch's gradient, freed of scale and weights."""
    generator, critic = make_model(), nn.Linear(2, 1)
    held = critic.weight.grad = torch.ones_like(critic.weight)
    other_generator, other = copy.deepcopy(generator), copy.deepcopy(critic)
    opt = gradaccum.wrap(torch.optim.SGD(generator.parameters(), lr=0.5), steps=None, loss_scale=scale())
    if coupled:
        coupled_backward(lambda x: critic(generator(x)), lambda o: o.std(), X, steps=3, optimizer=opt)
        other(other_generator(X)).std().backward()
    else:
        backward(lambda x: critic(generator(x)).square().mean(), X, steps=3, optimizer=opt)
        other(other_generator(X)).square().mean().backward()
    assert critic.weight.grad is held
    torch.testing.assert_close(critic.weight.grad - 1, other.weight.grad, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(critic.bias.grad, other.bias.grad, rtol=1e-4, atol=1e-6)
    for p, q in zip(generator.parameters(), other_generator.parameters(), strict=True):
        torch.testing.assert_close(p, q - 0.5 * q.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("state", ["open", "under_way", "stale", "apart"])
def test_begun_window_is_refused(state: str) -> None:
    """And is left as it is."""
    model = make_model()
    opt = gradaccum.wrap(torch.optim.SGD(model.parameters(), lr=0.5), steps=None, separate_sums=state == "apart")
    cross_entropy(model(X), Y).backward()
    if state in ("open", "apart"):
        opt.step()
    elif state == "stale":
        opt = gradaccum.wrap(torch.optim.SGD(model.parameters(), lr=0.5), steps=None)
    held = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    micro_step = opt.result.micro_step
    with pytest.raises(gradaccum.UsageError, match=r"discard|zero_grad"):
        split(model, opt)
    assert opt.result.micro_step == micro_step
    assert all(map(torch.equal, [p.grad for p in model.parameters() if p.grad is not None], held))


def test_other_reduction_is_refused() -> None:
    model = make_model()
    opt = gradaccum.wrap(torch.optim.SGD(model.parameters(), lr=0.5), steps=None, reduction="sum")
    with pytest.raises(gradaccum.ArgumentValueError, match="reduction='sum'"):
        split(model, opt, reduction="mean")
    split(model, opt, reduction="sum")
    assert opt.result.applied


def test_coupled_loss_is_not_dropped_in_part() -> None:
    opt = gradaccum.wrap(torch.optim.SGD(make_model().parameters(), lr=0.5), steps=None, on_overflow="drop_micro_batch")
    with pytest.raises(gradaccum.UsageError, match="skip_window"):
        coupled_backward(make_model(), lambda o: o.std(), X, steps=2, optimizer=opt)


@pytest.mark.parametrize(
    "options", [{}, {"loss_scale": 8.0}, {"on_overflow": "drop_micro_batch"}, {"accumulate_dtype": "float64"}], ids=str
)
@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("place", ["forward", "backward"])
def test_error_leaves_the_window_closed(options: dict[str, Any], kind: type[BaseException], zeros: bool, place: str) -> None:
    """The third micro-batch raises. State, gradients and random numbers are what they were, and the next call is a window like any."""
    models = make_model(), make_model()
    opts = [gradaccum.wrap(torch.optim.SGD(m.parameters(), lr=0.5, momentum=0.9), steps=None, **options) for m in models]
    for model, opt in zip(models, opts, strict=True):
        split(model, opt)
        opt.zero_grad(set_to_none=not zeros)
    opt, model = opts[0], models[0]
    gradients, state, random_state = [p.grad for p in model.parameters()], copy.deepcopy(opt.state_dict()), torch.get_rng_state()
    calls: list[int] = []

    def fail(*_: Any) -> None:
        if len(calls) == 3:
            raise kind

    handle = model[0].weight.register_hook(fail) if place == "backward" else None

    def loss_fn(x: Tensor, y: Tensor) -> Tensor:
        calls.append(1)
        torch.rand(3)
        if place == "forward":
            fail()
        return cross_entropy(model(x), y)

    with pytest.raises(kind):
        backward(loss_fn, X, Y, steps=4, optimizer=opt)
    assert all(a is b for a, b in zip([p.grad for p in model.parameters()], gradients, strict=True))
    assert all(g is None or not g.any() for g in gradients)
    assert torch.equal(torch.get_rng_state(), random_state)
    after = opt.state_dict()
    assert after["gradaccum"].pop("parameters") == state["gradaccum"].pop("parameters")
    assert str(after) == str(state)
    if handle is not None:
        handle.remove()
    for model, opt in zip(models, opts, strict=True):
        split(model, opt)
    assert opts[0].result == opts[1].result
    assert all(torch.equal(p, q) for p, q in zip(*(model.parameters() for model in models), strict=True))


def test_failed_update_leaves_the_window_full() -> None:
    """As after `flush()`: it can be flushed again, and the batch need not be computed again."""
    model, other = make_model(), make_model()

    def fail(*_: Any) -> None:
        raise RuntimeError("no step")

    opts = [gradaccum.wrap(torch.optim.SGD(each.parameters(), lr=0.5), steps=None) for each in (model, other)]
    handle = opts[0].register_step_pre_hook(fail)
    with pytest.raises(RuntimeError, match="no step"):
        split(model, opts[0])
    assert opts[0].result.micro_step == 3
    handle.remove()
    opts[0].flush()
    split(other, opts[1])
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True))


def test_gated_scheduler_follows() -> None:
    model = make_model()
    opt = gradaccum.wrap(torch.optim.SGD(model.parameters(), lr=1.0), steps=None)
    scheduler = gradaccum.wrap(torch.optim.lr_scheduler.StepLR(opt, 1, gamma=0.5))
    for update in range(3):
        split(model, opt)
        scheduler.step()
        assert scheduler.get_last_lr() == [0.5 ** (update + 1)]
