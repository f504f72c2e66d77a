"""``separate_sums=True``: between two steps ``.grad`` is the user's. Loops that the default refuses equal the large batch."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs PyTorch")

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

import gradaccum
from conformance_tests.framework_tests.refusing import refused
from gradaccum import UsageError
from gradaccum_torch.optimizer import AccumulatingOptimizer

X, Y = torch.randn(8, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1)), torch.arange(8.0, dtype=torch.float64)[:, None]
PARTS = [(X[i : i + 2], Y[i : i + 2]) for i in range(0, 8, 2)]


def make_model(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1)).to(dtype)


def mse(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return (model(x) - y).square().mean()


def wrapped(model: nn.Module, steps: Any = 4, **options: Any) -> AccumulatingOptimizer:
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return gradaccum.wrap(inner, steps=steps, **{"separate_sums": True, **options})


def large(updates: int = 1, change: Callable[[nn.Module], object] = lambda model: None) -> list[Tensor]:
    model = make_model()
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(updates):
        opt.zero_grad()
        mse(model, X, Y).backward()
        change(model)
        opt.step()
    return list(model.parameters())


def assert_same(model: nn.Module, expected: list[Tensor], bound: float = 1e-13) -> None:
    for mine, wanted in zip(model.parameters(), expected, strict=True):
        assert float((mine - wanted).detach().abs().max()) <= bound * float(wanted.detach().abs().max())


def before_clear(model: nn.Module, opt: AccumulatingOptimizer, x: Tensor, y: Tensor) -> None:
    model.zero_grad()
    mse(model, x, y).backward()
    opt.step()


def after_clear(model: nn.Module, opt: AccumulatingOptimizer, x: Tensor, y: Tensor) -> None:
    mse(model, x, y).backward()
    opt.step()
    model.zero_grad(set_to_none=False)


def no_clear(model: nn.Module, opt: AccumulatingOptimizer, x: Tensor, y: Tensor) -> None:
    mse(model, x, y).backward()
    opt.step()


def logged_norm(model: nn.Module, opt: AccumulatingOptimizer, x: Tensor, y: Tensor) -> None:
    mse(model, x, y).backward()
    clip_grad_norm_(model.parameters(), float("inf"))
    opt.step()
    model.zero_grad()


def assigned(model: nn.Module, opt: AccumulatingOptimizer, x: Tensor, y: Tensor) -> None:
    """The loop goes on to use the tensors that it assigned."""
    gradients = torch.autograd.grad(mse(model, x, y), list(model.parameters()))
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        parameter.grad = gradient
    opt.step()
    for gradient in gradients:
        gradient.fill_(float("nan"))


def functional(model: nn.Module, opt: AccumulatingOptimizer, x: Tensor, y: Tensor) -> None:
    def loss(parameters: dict[str, Tensor]) -> Tensor:
        return (torch.func.functional_call(model, parameters, x) - y).square().mean()

    named = dict(model.named_parameters())
    for name, gradient in torch.func.grad(loss)({name: each.detach() for name, each in named.items()}).items():
        named[name].grad = gradient
    opt.step()


def flat_views(model: nn.Module, opt: AccumulatingOptimizer, x: Tensor, y: Tensor) -> None:
    """Every ``.grad`` is a part of one buffer that the loop keeps, as reducers do."""
    gradients = torch.autograd.grad(mse(model, x, y), list(model.parameters()))
    buffer = torch.cat([gradient.flatten() for gradient in gradients])
    parts = buffer.split([gradient.numel() for gradient in gradients])
    for parameter, part in zip(model.parameters(), parts, strict=True):
        parameter.grad = part.view_as(parameter)
    opt.step()
    buffer.zero_()


def polluted(model: nn.Module, opt: AccumulatingOptimizer, x: Tensor, y: Tensor) -> None:
    """As a discriminator, through which the generator's loss goes after its own step."""
    opt.zero_grad()
    mse(model, x, y).backward()
    opt.step()
    (1e3 * model(x).sum()).backward()


def with_scaled_data(model: nn.Module, opt: AccumulatingOptimizer, x: Tensor, y: Tensor) -> None:
    """A backward pass that raises is tried again, as after running out of memory."""
    model.zero_grad()
    (handle,) = [model[0].weight.register_hook(_raising)]
    with pytest.raises(ZeroDivisionError):
        mse(model, x, y).backward()
    handle.remove()
    model.zero_grad()
    mse(model, x, y).backward()
    opt.step()


def _raising(gradient: Tensor) -> None:
    raise ZeroDivisionError


def closed_over(model: nn.Module, opt: AccumulatingOptimizer, x: Tensor, y: Tensor) -> None:
    def closure() -> Tensor:
        model.zero_grad()
        loss = mse(model, x, y)
        loss.backward()
        return loss

    assert isinstance(opt.step(closure), Tensor)


LOOPS = [before_clear, after_clear, no_clear, logged_norm, assigned, functional, flat_views, polluted, with_scaled_data, closed_over]


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
@pytest.mark.parametrize("options", [{}, {"on_overflow": "drop_micro_batch"}], ids=["plain", "dropping"])
def test_loop_equals_large_batch(loop: Callable[..., None], options: dict[str, Any]) -> None:
    model = make_model()
    opt = wrapped(model, **options)
    for _ in range(3):
        for x, y in PARTS:
            loop(model, opt, x, y)
    assert_same(model, large(3))
    assert opt.result.optimizer_step == 3


@pytest.mark.parametrize("loop", [before_clear, logged_norm, assigned, functional, flat_views], ids=lambda loop: loop.__name__)
def test_default_refuses_by_name(loop: Callable[..., None]) -> None:
    """What it cannot do right it refuses, and the error names the way out."""

    def epoch() -> None:
        model = make_model()
        opt = wrapped(model, separate_sums=False)
        for x, y in PARTS:
            loop(model, opt, x, y)

    with refused(UsageError, "separate_sums=True"):
        epoch()


def test_clip_per_micro_batch() -> None:
    """Each micro-batch is clipped by the user, the mean of the clipped ones by nobody."""
    model, shadow = make_model(), make_model()
    opt = wrapped(model)
    bare = torch.optim.SGD(shadow.parameters(), lr=0.1, momentum=0.9)
    total = [torch.zeros_like(each) for each in shadow.parameters()]
    for x, y in PARTS:
        mse(model, x, y).backward()
        clip_grad_norm_(model.parameters(), 0.1)
        opt.step()
        shadow.zero_grad()
        mse(shadow, x, y).backward()
        clip_grad_norm_(shadow.parameters(), 0.1)
        total = [a + each.grad / 4 for a, each in zip(total, shadow.parameters(), strict=True)]
    for each, gradient in zip(shadow.parameters(), total, strict=True):
        each.grad = gradient
    bare.step()
    assert_same(model, list(shadow.parameters()))


def test_flush_leaves_what_is_in_grad() -> None:
    """Between backward and step it is the next window's; the inner optimizer does not see it."""
    model = make_model()
    opt = wrapped(model, steps=None)
    for x, y in PARTS:
        mse(model, x, y).backward()
        opt.step()
    mse(model, X, Y).backward()
    held = [each.grad for each in model.parameters()]
    opt.flush()
    assert_same(model, large())
    assert all(each.grad is gradient for each, gradient in zip(model.parameters(), held, strict=True))
    opt.step()
    opt.flush()
    assert opt.result.optimizer_step == 2


def test_flush_of_skipped_window_leaves_grad() -> None:
    model = make_model()
    opt = wrapped(model, steps=None, skip_norm=1e-9)
    mse(model, X, Y).backward()
    opt.step()
    mse(model, X, Y).backward()
    held = [each.grad for each in model.parameters()]
    opt.flush()
    assert opt.result.skipped
    assert all(each.grad is gradient for each, gradient in zip(model.parameters(), held, strict=True))


def test_inner_optimizer_that_raises_leaves_window() -> None:
    model = make_model()
    opt = wrapped(model, steps=None)
    for x, y in PARTS:
        mse(model, x, y).backward()
        opt.step()
    mse(model, X, Y).backward()
    held = [each.grad for each in model.parameters()]
    handle = opt.register_step_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        opt.flush()
    handle.remove()
    assert all(each.grad is gradient for each, gradient in zip(model.parameters(), held, strict=True))
    opt.flush()
    assert_same(model, large())


def test_discard_forgets_grad_too() -> None:
    model = make_model()
    opt = wrapped(model)
    mse(model, X, Y).backward()
    opt.step()
    mse(model, X, Y).backward()
    opt.discard()
    assert all(each.grad is None for each in model.parameters())
    for x, y in PARTS:
        before_clear(model, opt, x, y)
    assert_same(model, large())


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))], ids=["deepcopy", "pickle"])
def test_copy_in_mid_window(copied: Callable[..., Any]) -> None:
    model = make_model()
    opt = wrapped(model)
    for x, y in PARTS[:2]:
        before_clear(model, opt, x, y)
    model, opt = copied((model, opt))
    for x, y in PARTS[2:]:
        logged_norm(model, opt, x, y)
    assert_same(model, large())


@pytest.mark.parametrize("saved_separate", [True, False])
def test_checkpoint_in_mid_window(saved_separate: bool) -> None:
    """The sum is saved as ever: either kind loads the other's."""
    model = make_model()
    opt = wrapped(model, separate_sums=saved_separate)
    for x, y in PARTS[:2]:
        mse(model, x, y).backward()
        opt.step()
    state, weights = opt.state_dict(), copy.deepcopy(model.state_dict())
    fresh = make_model()
    fresh.load_state_dict(weights)
    other = wrapped(fresh, separate_sums=not saved_separate)
    other.load_state_dict(state)
    for x, y in PARTS[2:]:
        mse(fresh, x, y).backward()
        other.step()
    assert_same(fresh, large())


def test_inf_poisons_no_later_window() -> None:
    model = make_model()
    opt = wrapped(model)
    for index, (x, y) in enumerate([*PARTS, *PARTS]):
        before_clear(model, opt, x * (float("inf") if index == 1 else 1.0), y)
    assert opt.result.optimizer_step == 1
    assert_same(model, large())


def test_dropping_leaves_bad_micro_batch_out() -> None:
    model = make_model()
    opt = wrapped(model, steps=5, on_overflow="drop_micro_batch")
    for x, y in [PARTS[0], (PARTS[0][0] * float("nan"), PARTS[0][1]), *PARTS[1:]]:
        before_clear(model, opt, x, y)
    assert_same(model, large())


def test_weights_and_scale() -> None:
    model = make_model()
    opt = wrapped(model, steps=2, loss_scale=1024.0)
    for x, y in ((X[:6], Y[:6]), (X[6:], Y[6:])):
        model.zero_grad()
        opt.backward(mse(model, x, y), weight=len(x))
        opt.step()
    assert_same(model, large())


def test_plain_backward_under_scale_is_refused() -> None:
    model = make_model()
    opt = wrapped(model, loss_scale=1024.0)
    mse(model, X, Y).backward()
    with pytest.raises(UsageError, match="loss scale"):
        opt.step()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_summed_in_float32(dtype: torch.dtype) -> None:
    weight = nn.Parameter(torch.zeros(1, dtype=dtype))
    opt = gradaccum.wrap(torch.optim.SGD([weight], lr=1.0), steps=5, reduction="sum", separate_sums=True)
    for value in (2048.0, 1.0, 1.0, 1.0, 1.0):
        weight.grad = torch.full((1,), value, dtype=dtype)
        opt.step()
    assert float(weight.detach()) == float(torch.tensor(-2052.0, dtype=dtype))


def test_sparse_gradients() -> None:
    def run(separate: bool) -> Tensor:
        torch.manual_seed(0)
        table = nn.Embedding(6, 3, sparse=True)
        opt = gradaccum.wrap(torch.optim.SparseAdam(table.parameters()), steps=2, separate_sums=separate)
        for indices in ([0, 1, 1], [1, 4, 0]) * 2:
            table(torch.tensor(indices)).square().sum().backward()
            opt.step()
            opt.zero_grad()
        return table.weight.detach()

    assert torch.equal(run(True), run(False))


def test_one_buffer_more() -> None:
    """Between two steps the sums alone live; the default holds them in ``.grad``."""
    model = make_model()
    opt = wrapped(model)
    before_clear(model, opt, *PARTS[0])
    assert all(each.grad is None for each in model.parameters())
    assert len(opt.state_dict()["gradaccum"]["sums"]) == 4


def test_closure_runs_once_per_micro_batch() -> None:
    """By default too: Lightning hands one over in each step."""
    model = make_model()
    opt, calls = wrapped(model, separate_sums=False, clip_norm=1e3), []

    def closure_of(x: Tensor, y: Tensor) -> Callable[[], Tensor]:
        def closure() -> Tensor:
            calls.append(len(x))
            opt.zero_grad()
            loss = mse(model, x, y)
            loss.backward()
            return loss

        return closure

    with torch.no_grad():
        losses = [opt.step(closure_of(x, y)) for x, y in PARTS]
    assert calls == [2, 2, 2, 2]
    assert float(sum(losses).detach() / 4) == pytest.approx(float(mse(make_model(), X, Y).detach()))
    assert_same(model, large())


def test_closure_that_raises_counts_nothing() -> None:
    model = make_model()
    opt = wrapped(model)
    with pytest.raises(ZeroDivisionError):
        opt.step(lambda: 1 / 0)
    assert opt.result.micro_step == 0
    for x, y in PARTS:
        closed_over(model, opt, x, y)
    assert_same(model, large())


def test_lbfgs_needs_the_true_gradient() -> None:
    model = make_model()
    opt = gradaccum.wrap(torch.optim.LBFGS(model.parameters()), steps=1, separate_sums=True)
    with pytest.raises(UsageError, match="separate_sums"):
        opt.step(lambda: mse(model, X, Y))


def test_not_a_bool() -> None:
    with pytest.raises(gradaccum.ArgumentTypeError, match="separate_sums"):
        wrapped(make_model(), separate_sums=1)
