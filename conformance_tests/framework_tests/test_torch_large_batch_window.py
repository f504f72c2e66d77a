"""The large batch as the window of a wrapped optimizer: one call, one update, by the
wrapper's own rules.
"""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import gradaccum
from conformance_tests.framework_tests.torch_model import MAKERS, X, Y, make_model
from gradaccum_torch.large_batch import backward, coupled_backward

cross_entropy = nn.functional.cross_entropy


def split(model: nn.Module, opt: Any, **options: Any) -> Tensor:
    return backward(
        lambda x, y: cross_entropy(model(x), y),
        X,
        Y,
        **{"steps": 3, **options},
        optimizer=opt,
    )


def by_hand(model: nn.Module, opt: Any) -> None:
    """The same window, streamed: three micro-batches of 3, 3 and 2 items."""
    for rows in (slice(0, 3), slice(3, 6), slice(6, 8)):
        opt.backward(
            cross_entropy(model(X[rows]), Y[rows]), weight=rows.stop - rows.start
        )
        opt.step()
    opt.flush()


OPTIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": dict,
    "clip": lambda: {"clip_norm": 0.05},
    "skip": lambda: {"skip_norm": 1e-6},
    "static": lambda: {"loss_scale": 8.0},
    "dynamic": lambda: {"loss_scale": gradaccum.DynamicLossScale(growth_interval=1)},
    "scaler": lambda: {
        "loss_scale": torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=1)
    },
    "drop": lambda: {"on_overflow": "drop_micro_batch"},
    "float64": lambda: {"accumulate_dtype": "float64"},
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_same_bits_as_streaming(
    make: Any, options: Callable[[], dict[str, Any]]
) -> None:
    models = make_model(), make_model()
    opts = [
        gradaccum.wrap(make(model.parameters()), steps=None, **options())
        for model in models
    ]
    for _ in range(2):
        split(models[0], opts[0])
        by_hand(models[1], opts[1])
        assert opts[0].result == opts[1].result
    assert all(
        torch.equal(p, q)
        for p, q in zip(*(model.parameters() for model in models), strict=True)
    )


@pytest.mark.parametrize(
    "scale",
    [
        lambda: None,
        lambda: 1024.0,
        lambda: torch.amp.GradScaler("cpu", init_scale=64.0),
    ],
)
@pytest.mark.parametrize("coupled", [False, True])
def test_leaves_beside_the_optimizer(scale: Callable[[], Any], coupled: bool) -> None:
    """A critic that the generator's loss goes through gets the large batch's gradient,
    freed of scale and weights.
    """
    generator, critic = make_model(), nn.Linear(2, 1)
    held = critic.weight.grad = torch.ones_like(critic.weight)
    other_generator, other = copy.deepcopy(generator), copy.deepcopy(critic)
    opt = gradaccum.wrap(
        torch.optim.SGD(generator.parameters(), lr=0.5), steps=None, loss_scale=scale()
    )
    if coupled:
        coupled_backward(
            lambda x: critic(generator(x)), lambda o: o.std(), X, steps=3, optimizer=opt
        )
        other(other_generator(X)).std().backward()
    else:
        backward(
            lambda x: critic(generator(x)).square().mean(), X, steps=3, optimizer=opt
        )
        other(other_generator(X)).square().mean().backward()
    assert critic.weight.grad is held
    torch.testing.assert_close(
        critic.weight.grad - 1, other.weight.grad, rtol=1e-4, atol=1e-6
    )
    torch.testing.assert_close(critic.bias.grad, other.bias.grad, rtol=1e-4, atol=1e-6)
    for p, q in zip(generator.parameters(), other_generator.parameters(), strict=True):
        torch.testing.assert_close(p, q - 0.5 * q.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("state", ["open", "under_way", "stale", "apart"])
def test_begun_window_is_refused(state: str) -> None:
    """And is left as it is."""
    model = make_model()
    opt = gradaccum.wrap(
        torch.optim.SGD(model.parameters(), lr=0.5),
        steps=None,
        separate_sums=state == "apart",
    )
    cross_entropy(model(X), Y).backward()
    if state in ("open", "apart"):
        opt.step()
    elif state == "stale":
        gradients = [p.grad for p in model.parameters()]
        opt.discard()
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = gradient
    held = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    micro_step = opt.result.micro_step
    with pytest.raises(gradaccum.UsageError, match=r"discard|zero_grad"):
        split(model, opt)
    assert opt.result.micro_step == micro_step
    assert all(
        map(
            torch.equal,
            [p.grad for p in model.parameters() if p.grad is not None],
            held,
        )
    )


@pytest.mark.parametrize(
    "options",
    [{}, {"on_overflow": "drop_micro_batch"}, {"accumulate_dtype": "float64"}],
    ids=str,
)
@pytest.mark.parametrize("zeros", [False, True])
def test_error_leaves_the_window_closed(options: dict[str, Any], zeros: bool) -> None:
    """State and gradients are what they were, zeros too; `test_torch_auto_size.py`
    fails everywhere, and calls again.
    """
    model = make_model()
    opt = gradaccum.wrap(
        torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9), steps=None, **options
    )
    split(model, opt)
    opt.zero_grad(set_to_none=not zeros)
    gradients, state = [p.grad for p in model.parameters()], str(opt.state_dict())
    fine = iter((True, True, False))
    handle = model[0].weight.register_hook(lambda _: None if next(fine) else 1 / 0)
    with pytest.raises(ZeroDivisionError):
        split(model, opt)
    handle.remove()
    assert all(
        a is b
        for a, b in zip([p.grad for p in model.parameters()], gradients, strict=True)
    )
    assert all(g is None or not g.any() for g in gradients)
    assert str(opt.state_dict()) == state


def test_failed_update_leaves_the_window_full() -> None:
    """As after `flush()`: it can be flushed again, and the batch need not be computed
    again.
    """
    model, other = make_model(), make_model()

    def fail(*_: Any) -> None:
        raise RuntimeError("no step")

    opts = [
        gradaccum.wrap(torch.optim.SGD(each.parameters(), lr=0.5), steps=None)
        for each in (model, other)
    ]
    handle = opts[0].register_step_pre_hook(fail)
    with pytest.raises(RuntimeError, match="no step"):
        split(model, opts[0])
    assert opts[0].result.micro_step == 3
    handle.remove()
    opts[0].flush()
    split(other, opts[1])
    assert all(
        torch.equal(p, q)
        for p, q in zip(model.parameters(), other.parameters(), strict=True)
    )


def moving_model() -> nn.Module:
    """Has a dropout and a batch norm."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2)
    )


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
def test_error_leaves_everything(
    kind: type[BaseException], place: str, before: str, precision: Any, coupled: bool
) -> None:
    """The third micro-batch raises: gradients, random states and statistics are
    bit-identical to before. Then the call can be repeated.
    """
    model = precision(moving_model())
    if before == "some":
        for p in list(model.parameters())[:3]:
            p.grad = torch.full_like(p, 0.1)
    gradients = [p.grad for p in model.parameters()]
    contents, state = copy.deepcopy(gradients), copy.deepcopy(model.state_dict())
    torch.manual_seed(3)
    random_states = (
        torch.get_rng_state(),
        np.random.get_state()[1].copy(),
        random.getstate(),
    )
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
    assert all(
        a is b
        for a, b in zip([p.grad for p in model.parameters()], gradients, strict=True)
    )
    assert all(
        a is b or torch.equal(a, b) for a, b in zip(gradients, contents, strict=True)
    )
    assert all(
        torch.equal(a, b)
        for a, b in zip(model.state_dict().values(), state.values(), strict=True)
    )
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
def test_interrupt_at_the_end_waits(
    coupled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that comes while the sums are added to what was in `.grad` is raised when all
    are.
    """
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
    assert all(
        torch.equal(p.grad, q.grad)
        for p, q in zip(model.parameters(), other.parameters(), strict=True)
    )
