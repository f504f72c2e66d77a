"""``separate_sums=True``: between two steps ``.grad`` is the user's. Loops that the
default refuses equal the large batch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

import gradaccum
from gradaccum import UsageError

from .torch_separate import (
    PARTS,
    X,
    Y,
    assert_same,
    before_clear,
    closed_over,
    large,
    logged_norm,
    make_model,
    mse,
    wrapped,
)


def after_clear(model: nn.Module, opt: Any, x: Tensor, y: Tensor) -> None:
    mse(model, x, y).backward()
    opt.step()
    model.zero_grad(set_to_none=False)


def no_clear(model: nn.Module, opt: Any, x: Tensor, y: Tensor) -> None:
    mse(model, x, y).backward()
    opt.step()


def gradients_of(model: nn.Module, x: Tensor, y: Tensor) -> list[tuple[Any, Tensor]]:
    parameters = list(model.parameters())
    gradients = torch.autograd.grad(mse(model, x, y), parameters)
    return list(zip(parameters, gradients, strict=True))


def assigned(model: nn.Module, opt: Any, x: Tensor, y: Tensor) -> None:
    """The loop goes on to use the tensors that it assigned."""
    pairs = gradients_of(model, x, y)
    for parameter, gradient in pairs:
        parameter.grad = gradient
    opt.step()
    for _, gradient in pairs:
        gradient.fill_(float("nan"))


def written(model: nn.Module, opt: Any, x: Tensor, y: Tensor) -> None:
    """Into the memory of zeros, by a way that torch does not count."""
    opt.zero_grad(set_to_none=False)
    for parameter, gradient in gradients_of(model, x, y):
        if parameter.grad is None:
            parameter.grad = gradient
        else:
            parameter.grad.data.copy_(gradient)
    opt.step()


def polluted(model: nn.Module, opt: Any, x: Tensor, y: Tensor) -> None:
    """As a discriminator, through which the generator's loss goes after its own
    step.
    """
    opt.zero_grad()
    no_clear(model, opt, x, y)
    (1e3 * model(x).sum()).backward()


REFUSED_BY_DEFAULT = [before_clear, logged_norm, assigned]
LOOPS = [*REFUSED_BY_DEFAULT, after_clear, no_clear, written, polluted, closed_over]


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
@pytest.mark.parametrize(
    "options", [{}, {"on_overflow": "drop_micro_batch"}], ids=["plain", "dropping"]
)
def test_loop_equals_large_batch(
    loop: Callable[..., None], options: dict[str, Any]
) -> None:
    model = make_model()
    opt = wrapped(model, **options)
    for x, y in 3 * PARTS:
        loop(model, opt, x, y)
    assert_same(model, large(3))
    assert opt.result.optimizer_step == 3


@pytest.mark.parametrize("loop", REFUSED_BY_DEFAULT, ids=lambda loop: loop.__name__)
def test_default_refuses_by_name(loop: Callable[..., None]) -> None:
    """What it cannot do right it refuses, and the error names the way out."""
    model = make_model()
    opt = wrapped(model, separate_sums=False)

    def epoch() -> None:
        for x, y in PARTS:
            loop(model, opt, x, y)

    with pytest.raises(UsageError, match="separate_sums=True"):
        epoch()


def test_clip_per_micro_batch() -> None:
    """Each micro-batch is clipped by the user, the mean of the clipped ones by
    nobody.
    """
    model = make_model()
    opt = wrapped(model)
    moved = [parameter.detach().clone() for parameter in model.parameters()]
    for x, y in PARTS:
        mse(model, x, y).backward()
        clip_grad_norm_(model.parameters(), 0.1)
        for value, parameter in zip(moved, model.parameters(), strict=True):
            value -= 0.1 * parameter.grad / 4  # type: ignore[operator]
        opt.step()
    assert_same(model, moved)


@pytest.mark.parametrize("end", ["applied", "skipped", "raised"])
def test_flush_leaves_what_is_in_grad(end: str) -> None:
    """Between backward and step it is the next window's; the inner optimizer does not
    see it.
    """
    model = make_model()
    opt = wrapped(model, steps=None, skip_norm=1e-9 if end == "skipped" else None)
    for x, y in PARTS:
        no_clear(model, opt, x, y)
    mse(model, X, Y).backward()
    held = [each.grad for each in model.parameters()]
    if end == "raised":
        handle = opt.register_step_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            opt.flush()
        handle.remove()
        assert all(p.grad is g for p, g in zip(model.parameters(), held, strict=True))
    opt.flush()
    is_skipped = end == "skipped"
    assert opt.result.skipped == is_skipped
    assert_same(model, list(make_model().parameters()) if is_skipped else large())
    assert all(p.grad is g for p, g in zip(model.parameters(), held, strict=True))
    opt.step()
    opt.flush()
    assert opt.result.optimizer_step == (0 if is_skipped else 2)


def test_parameter_outside_the_window_stays() -> None:
    """What the user has put into its ``.grad`` is no part of the window, and no update
    is made of it.
    """
    used, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    opt = gradaccum.wrap(
        torch.optim.SGD([used, other], 0.1), steps=None, separate_sums=True
    )
    used.sum().backward()
    opt.step()
    other.grad = torch.full((2,), 5.0)
    opt.flush()
    assert used.tolist() == pytest.approx([0.9, 0.9])
    assert other.tolist() == [1.0, 1.0]
    assert other.grad.tolist() == [5.0, 5.0]


@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
def test_graph_of_a_gradient_is_refused() -> None:
    """A copy would lose it; the window is as it was."""
    model = make_model()
    opt = wrapped(model)
    mse(model, X, Y).backward(create_graph=True)
    with pytest.raises(UsageError, match=r"separate_sums.*without a graph"):
        opt.step()
    assert opt.result.micro_step == 0


@pytest.mark.parametrize("options", [{}, {"steps": 1, "separate_sums": False}], ids=str)
def test_graph_of_assigned_gradients_is_left_out(options: dict[str, Any]) -> None:
    """`torch.func.grad` by parameters makes one, which nobody asked for."""
    model = make_model()
    opt = wrapped(model, **options)

    def loss_of(own: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return (torch.func.functional_call(model, own, (x,)) - y).square().mean()

    for x, y in [(X, Y)] * 2 if options else PARTS * 2:
        own = torch.func.grad(loss_of)(dict(model.named_parameters()), x, y)
        for name, parameter in model.named_parameters():
            parameter.grad = own[name]
        assert model[0].weight.grad.requires_grad
        opt.step()
        opt.zero_grad()
    assert_same(model, large(2))


def test_second_loss_of_sparse_embeddings_first_comes_later() -> None:
    """Their gradients share memory with the batch and with each other."""
    tables = [nn.Embedding(6, 3, sparse=True).double() for _ in range(2)]
    whole = copy.deepcopy(tables)
    opt, bare = (
        torch.optim.SGD([table.weight for table in each], lr=0.1)
        for each in (tables, whole)
    )
    opt = gradaccum.wrap(opt, steps=2, separate_sums=True)
    places = torch.tensor([[1, 2, 2], [0, 5, 1]])

    def loss_of(tables: list[nn.Embedding], rows: Tensor) -> Tensor:
        return (tables[0](rows) + tables[1](rows)).square().mean()

    for losses in (1, 2, 2):
        for rows in places:
            for _ in range(losses):
                loss_of(tables, rows).backward()
            opt.step()
            opt.zero_grad()
        (losses * loss_of(whole, places)).backward()
        bare.step()
        bare.zero_grad()
    assert opt.result.optimizer_step == 3
    for mine, other in zip(tables, whole, strict=True):
        torch.testing.assert_close(mine.weight, other.weight, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("saved_separate", [True, False])
def test_checkpoint_in_mid_window(saved_separate: bool) -> None:
    """The sum is saved as ever: either kind loads the other's."""
    model, fresh = make_model(), make_model()
    opt = wrapped(model, separate_sums=saved_separate)
    other = wrapped(fresh, separate_sums=not saved_separate)
    for x, y in PARTS + PARTS[:2]:
        no_clear(model, opt, x, y)
    fresh.load_state_dict(model.state_dict())
    other.load_state_dict(opt.state_dict())
    for x, y in PARTS[2:]:
        no_clear(fresh, other, x, y)
    assert_same(fresh, large(2))


def test_gradient_that_somebody_holds_stays_as_it_is() -> None:
    """Also the first one of the second window, whose sum could begin with it."""
    parameter, held = torch.zeros(2, 2, requires_grad=True), list[Any]()
    opt = gradaccum.wrap(
        torch.optim.SGD([parameter], lr=1.0), steps=2, separate_sums=True
    )
    for index in range(6):
        (parameter * (index + 1.0)).sum().backward()
        held.append(parameter.grad)
        opt.step()
    assert [float(each.max()) for each in held] == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    assert torch.equal(parameter, torch.full((2, 2), -10.5))


def two_over(model: nn.Module, **options: Any) -> tuple[Any, Any]:
    """The second one has the last layer alone."""
    shared = torch.optim.SGD(list(model.parameters())[2:], lr=0.1, momentum=0.9)
    return wrapped(model, **options), gradaccum.wrap(
        shared, steps=4, separate_sums=True, **options
    )


def test_gradient_that_another_optimizer_took_is_missed_with_an_error() -> None:
    """Bare optimizers would both see it. What each has summed stays. After `discard`
    nothing is missed: a step without a gradient counts, as after zero_grad().
    """
    model = make_model()
    first, second = two_over(model)
    for x, y in PARTS:
        no_clear(model, first, x, y)
        with pytest.raises(
            UsageError,
            match=r"separate_sums: expected a backward pass since the step\(\) of"
            r" another wrapped optimizer",
        ):
            second.step()
    assert_same(model, large())
    assert (first.result.optimizer_step, second.result.micro_step) == (1, 0)
    no_clear(model, second, X, Y)
    assert second.result.micro_step == 1
    no_clear(model, first, X, Y)
    second.discard()
    second.step()
    assert second.result.micro_step == 1


def test_optimizers_of_one_parameter_may_take_turns() -> None:
    """The second one idles, though autograd delivers to its parameters."""
    model, other = make_model(), make_model()
    first, second = two_over(model)
    for x, y in PARTS:
        no_clear(model, first, x, y)
    for x, y in PARTS:
        before_clear(model, second, x, y)
    other.load_state_dict(dict(zip(other.state_dict(), large(), strict=True)))
    mse(other, X, Y).backward()
    torch.optim.SGD(list(other.parameters())[2:], lr=0.1).step()
    assert_same(model, list(other.parameters()))


@pytest.mark.parametrize("clears", ["nothing", "optimizer", "model"])
def test_part_of_a_pass_that_raised(clears: str) -> None:
    """Out of memory, in a loop that goes on with the next micro-batch: autograd adds
    that to what had arrived. `discard` forgets that part too.
    """
    model = make_model()
    opt = wrapped(model)
    handle = model[0].bias.register_hook(lambda gradient: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        mse(model, *PARTS[0]).backward()
    handle.remove()
    assert model[4].weight.grad is not None
    if clears == "nothing":
        mse(model, *PARTS[0]).backward()
        with pytest.raises(UsageError, match=r"opt\.zero_grad\(\)"):
            opt.step()
        opt.discard()
        assert all(each.grad is None for each in model.parameters())
    (model if clears == "model" else opt).zero_grad()
    for x, y in PARTS:
        no_clear(model, opt, x, y)
    assert_same(model, large())


def test_no_memory_for_a_copy_leaves_the_window(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing was added yet: the same step again takes the micro-batch."""
    model = make_model()
    opt = wrapped(model)
    mse(model, *PARTS[0]).backward()
    with monkeypatch.context() as patch:
        patch.setattr("gradaccum_torch.gradient_sum.sum_dtype", lambda *_: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            opt.step()
    opt.step()
    for x, y in PARTS[1:]:
        no_clear(model, opt, x, y)
    assert_same(model, large())
