"""The everyday mistakes of a torch loop are refused by name, or said once, and loops
that look alike stay as they are.
"""

from __future__ import annotations

import _thread
import copy
import gc
import pickle
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LinearLR, StepLR

import gradaccum
from conformance_tests.framework_tests.torch_model import (
    CAUSES,
    PLACES,
    X,
    by_place,
    clip,
    loss_of,
    make,
    make_model,
    rows_of,
    zero,
)
from gradaccum_torch.window.watch import Place, _place_of_pass


def train(model: nn.Module, opt: Any, micro_batches: int) -> None:
    for index in range(micro_batches):
        loss_of(model, rows_of(index % 4)).backward()
        opt.step()
        opt.zero_grad()


Said = Callable[[], list[str]]


@pytest.fixture
def said() -> Iterator[Said]:
    """A function that returns what gradaccum has warned of in the test, none of it from
    a line of its own.
    """

    def texts() -> list[str]:
        own = [
            each
            for each in caught
            if issubclass(each.category, gradaccum.GradAccumWarning)
        ]
        assert not any("gradaccum_torch" in Path(each.filename).parts for each in own)
        return [str(each.message) for each in own]

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", gradaccum.GradAccumWarning)
        yield texts


# A step of the inner optimizer, and a second wrapper of it.


@pytest.mark.parametrize("fused", [False, True])
def test_inner_step_is_refused(fused: bool) -> None:
    """The wrapper's own updates go on, and keep the kernel that divides by itself."""
    model = make_model()
    inner = torch.optim.AdamW(model.parameters(), lr=0.5, fused=fused)
    opt = gradaccum.wrap(inner, steps=2)
    train(model, opt, 3)
    before = [p.detach().clone() for p in model.parameters()]
    scheduler = StepLR(inner, 1)
    for call in (
        inner.step,
        lambda: inner.step(lambda: 1.0),
        lambda: torch.amp.GradScaler("cpu", enabled=False).step(inner),
    ):
        with pytest.raises(
            gradaccum.UsageError,
            match=r"AdamW\.step\(\)\. Write optimizer = gradaccum\.wrap\(AdamW",
        ):
            call()
    assert all(map(torch.equal, model.parameters(), before))
    train(model, opt, 1)
    assert opt.result.optimizer_step == 2
    del scheduler


def test_inner_optimizer_is_free_again() -> None:
    """Without its wrapper, or as a copy; a copy of the wrapper has an inner optimizer
    of its own.
    """
    _, opt = make()
    inner = opt.optimizer
    for other in (copy.deepcopy(inner), pickle.loads(pickle.dumps(inner))):
        other.step()
    copied = copy.deepcopy(opt)
    with pytest.raises(gradaccum.UsageError, match="inner optimizer's own"):
        copied.optimizer.step()
    del opt
    inner.step()
    assert not inner._optimizer_step_pre_hooks


class HandedOn(torch.optim.SGD):
    """An optimizer whose state is everything that it has, hooks too."""

    def __getstate__(self) -> dict[str, Any]:
        return dict(self.__dict__)


def test_copied_hooks_refuse_nothing() -> None:
    inner = HandedOn(make_model().parameters(), lr=0.5)
    opt = gradaccum.wrap(inner, steps=2)
    for other in (copy.deepcopy(inner), pickle.loads(pickle.dumps(inner))):
        assert other._optimizer_step_pre_hooks
        other.step()
    assert opt.optimizer is inner


def test_update_that_raised_leaves_the_inner_step_refused() -> None:
    class Raising(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            super().step()
            raise ZeroDivisionError

    model = make_model()
    inner = Raising(model.parameters(), lr=0.5)
    opt = gradaccum.wrap(inner, steps=1)
    with pytest.raises(ZeroDivisionError):
        train(model, opt, 1)
    with pytest.raises(gradaccum.UsageError, match="inner optimizer's own"):
        inner.step()


def test_second_wrapper_is_refused() -> None:
    """Until the first one is gone, even if a caught error still refers to it."""
    model, opt = make()
    inner = opt.optimizer
    with pytest.raises(
        gradaccum.ArgumentTypeError, match=r"optimizer: .* living wrapper .* SGD"
    ):
        gradaccum.wrap(inner, steps=2)
    train(model, opt, 4)
    assert opt.result.applied
    opt.itself = opt
    gc.disable()
    try:
        del opt
        again = gradaccum.wrap(inner, steps=2)
    finally:
        gc.enable()
    train(model, again, 2)
    assert again.result.applied


# Backward passes and steps: none, and several.


@by_place
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("micro_batches", [0, 1, 4, 5])
def test_step_without_backward_is_refused(
    place: str, set_to_none: bool, micro_batches: int
) -> None:
    model, opt = make(place)
    for index in range(micro_batches):
        loss_of(model, rows_of(index % 4)).backward()
        opt.step()
        opt.zero_grad(set_to_none)
    opt.zero_grad(set_to_none)
    before = opt.result
    with pytest.raises(
        gradaccum.UsageError, match=r"step\(\): expected a backward pass"
    ):
        opt.step()
    assert opt.result == before
    train(model, opt, 1)
    assert opt.result.micro_step == micro_batches % 4 + 1


def test_scaled_step_without_backward_is_refused() -> None:
    model, opt = make()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    del opt
    opt = gradaccum.wrap(
        torch.optim.SGD(model.parameters(), lr=0.5), steps=4, loss_scale=scaler
    )
    scaler.scale(loss_of(model)).backward()
    scaler.step(opt)
    scaler.update()
    with pytest.raises(
        gradaccum.UsageError, match=r"step\(\): expected a backward pass"
    ):
        scaler.step(opt)
    assert opt.result.micro_step == 1


def by_weight(model: nn.Module, opt: Any) -> None:
    opt.backward(loss_of(model), weight=0)


def by_weigh(model: nn.Module, opt: Any) -> None:
    opt.weigh(1)


def by_loss_of_others(model: nn.Module, opt: Any) -> None:
    opt.backward(torch.ones((), requires_grad=True).square())


def by_unfrozen(model: nn.Module, opt: Any) -> None:
    model[0].weight.requires_grad_(True)
    loss_of(model).backward(inputs=[model[0].weight])


WAYS = [by_weight, by_weigh, by_loss_of_others, by_unfrozen]


@by_place
@pytest.mark.parametrize("way", WAYS)
def test_what_stands_for_a_backward_pass(
    place: str, way: Callable[[nn.Module, Any], None]
) -> None:
    model = make_model()
    model[0].weight.requires_grad_(way is not by_unfrozen)
    opt = gradaccum.wrap(
        torch.optim.SGD(model.parameters(), lr=0.5), steps=4, **PLACES[place]
    )
    for _ in range(4):
        way(model, opt)
        opt.step()
    assert opt.result.optimizer_step + opt.result.skipped == 1


def test_closure_without_a_loss_is_left_out() -> None:
    """Lightning's closure returns None for a batch that `training_step` leaves out."""
    model, opt = make(steps=2)
    opt.step(lambda: None)
    train(model, opt, 1)
    assert opt.result.applied
    reference = make_model()
    loss_of(reference, rows_of(0)).backward()
    torch.optim.SGD(reference.parameters(), lr=0.5).step()
    assert all(map(torch.equal, model.parameters(), reference.parameters()))
    with pytest.raises(gradaccum.UsageError, match="expected a backward pass"):
        opt.step(lambda: torch.ones(()))


@pytest.mark.parametrize("how", ["assigned", "written", "of zeros"])
def test_gradients_of_ones_own_count(how: str) -> None:
    """With separate sums they may be assigned or written into the same memory; with one
    step they may be assigned.
    """
    for options in ({"separate_sums": True}, {"steps": 1}):
        model, opt = make(**options)
        for index in range(5):
            gradients = torch.autograd.grad(
                loss_of(model, rows_of(index % 4)), list(model.parameters())
            )
            if how == "written":
                opt.zero_grad(set_to_none=False)
            for p, gradient in zip(model.parameters(), gradients, strict=True):
                if how == "written" and p.grad is not None:
                    p.grad.data.copy_(gradient)
                else:
                    p.grad = (
                        torch.zeros_like(gradient) if how == "of zeros" else gradient
                    )
            opt.step()
        assert opt.result.optimizer_step == (5 if options == {"steps": 1} else 1)


def test_pass_through_another_wrapper_stands_for_one() -> None:
    """One optimizer for each expert: a micro-batch may reach one of them only."""
    experts = [nn.Linear(3, 1) for _ in range(2)]
    opts = [
        gradaccum.wrap(torch.optim.SGD(expert.parameters(), lr=0.5), steps=4)
        for expert in experts
    ]
    for index in range(4):
        experts[index % 2](X).sum().backward()
        for opt in opts:
            opt.step()
    assert [opt.result.optimizer_step for opt in opts] == [1, 1]
    for opt in opts:
        with pytest.raises(gradaccum.UsageError, match="expected a backward pass"):
            opt.step()


def careless(
    model: nn.Module,
    opt: Any,
    micro_batches: int,
    backward: Callable[[Tensor], None] = Tensor.backward,
) -> None:
    for i in range(micro_batches):
        loss = loss_of(model, rows_of(i % 4)) / 4
        backward(loss)
        if (i + 1) % 4 == 0:
            opt.step()
            opt.zero_grad()


def careless_while(model: nn.Module, opt: Any, micro_batches: int) -> None:
    i = 0
    while i < micro_batches:
        i += 1
        loss_of(model, rows_of(i % 4)).backward()
        if i % 3:
            continue
        opt.step()
        opt.zero_grad()


def careless_functions(model: nn.Module, opt: Any, micro_batches: int) -> None:
    def learn(i: int) -> None:
        backward(i)
        if i % 2:
            opt.step()
            opt.zero_grad()

    def backward(i: int) -> None:
        (loss_of(model, rows_of(i % 4)) / 2).backward()

    for i in range(micro_batches):
        learn(i)


@by_place
@pytest.mark.parametrize("own", [False, True])
def test_leftovers_are_said_once(place: str, own: bool, said: Said) -> None:
    model, opt = make(place)
    early: list[list[str]] = []

    def backward(loss: Tensor) -> None:
        early.append(said())
        opt.backward(loss) if own else loss.backward()

    careless(model, opt, 40, backward=backward)
    assert not any(early[:8])
    assert all(early[8:]), "said by the second step"
    (text,) = said()
    assert "`if (i + 1) % 4 == 0:`" in text
    assert "`loss / 4`" in text


@pytest.mark.parametrize(
    ("loop", "accum"), [(careless_while, 3), (careless_functions, 2)]
)
def test_leftovers_of_other_loops_are_said(
    loop: Callable[[nn.Module, Any, int], None], accum: int, said: Said
) -> None:
    """As many passes as a window has steps, or another number."""
    model, opt = make()
    loop(model, opt, 24)
    (text,) = said()
    assert f"% {accum} == 0:`" in text


def real_and_fake(model: nn.Module, opt: Any) -> None:
    loss_of(model, rows_of(0)).backward()
    loss_of(model, rows_of(1)).backward()


def losses_in_turn(model: nn.Module, opt: Any) -> None:
    losses = [loss_of(model, rows_of(index)) for index in range(2)]
    for loss in losses:
        loss.backward()


def losses_at_once(model: nn.Module, opt: Any) -> None:
    [loss_of(model, rows_of(index)).backward() for index in range(2)]


def with_generator(model: nn.Module, opt: Any) -> None:
    opt.zero_grad()
    real_and_fake(model, opt)


def retained(model: nn.Module, opt: Any) -> None:
    loss = loss_of(model)
    loss.backward(retain_graph=True)
    opt.backward(loss)


@by_place
@pytest.mark.parametrize(
    "passes", [real_and_fake, losses_in_turn, losses_at_once, with_generator, retained]
)
def test_several_losses_of_a_micro_batch_say_nothing(
    place: str, passes: Callable[[nn.Module, Any], None], said: Said
) -> None:
    """Two passes from two places of the program, or from a loop of their own, as those
    of `torch.distributed.pipelining`.
    """
    model, opt = make(place, steps=2)
    for _ in range(8):
        if passes is with_generator and opt.result.micro_step:
            opt.discard()
        passes(model, opt)
        opt.step()
    assert not said()


def test_pass_whose_gradients_are_dropped_is_no_leftover(said: Said) -> None:
    """Of every two batches the loop leaves out one."""
    model, opt = make("kept apart", steps=2)
    for index in range(8):
        loss_of(model, rows_of(index % 4)).backward()
        if index % 2:
            opt.step()
        opt.zero_grad()
    assert not said()


def test_pass_of_an_accelerator_has_the_users_place() -> None:
    """Torch runs it in a thread of its own, in which no function of the user's is
    running.
    """
    x, places = torch.ones(2, requires_grad=True), list[Place]()

    def look(gradient: Tensor) -> None:
        found = SimpleQueue[Place]()

        def begin() -> None:
            found.put(_place_of_pass())

        # Nothing but the hook and what it calls.
        _thread.start_new_thread(lambda: begin(), ())
        places.append(found.get(timeout=10))

    x.register_hook(look)
    for _ in range(2):
        x.sum().backward()
    x.sum().backward()
    assert places[0] == places[1] != places[2]
    assert (
        places[0][-2][0]
        is places[2][-2][0]
        is test_pass_of_an_accelerator_has_the_users_place.__code__
    )


@pytest.mark.parametrize("options", [{"steps": 1}, {"steps": None}], ids=str)
def test_other_windows_have_no_leftovers(options: dict[str, Any], said: Said) -> None:
    model, opt = make(**options)
    careless(model, opt, 16)
    assert not said()


# Schedulers and epochs.


RATES: dict[str, Callable[[], Any]] = {
    "float": lambda: 0.5,
    "tensor": lambda: torch.tensor(0.5),
}


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("on", ["wrapper", "inner", "by hand"])
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_ungated_scheduler_is_said_once(rate: str, on: str, said: Said) -> None:
    model = make_model()
    inner = torch.optim.AdamW(
        model.parameters(), lr=RATES[rate](), foreach=False, capturable=False
    )
    opt = gradaccum.wrap(inner, steps=2)
    scheduler: Any = (
        None
        if on == "by hand"
        else StepLR(opt if on == "wrapper" else inner, step_size=1, gamma=0.9)
    )

    def move() -> None:
        opt.param_groups[0]["lr"] = opt.param_groups[0]["lr"] * 0.9

    for _ in range(8):
        train(model, opt, 1)
        (move if scheduler is None else scheduler.step)()
    (text,) = said()
    assert "gradaccum.wrap(scheduler)" in text


def test_rates_that_move_between_windows_say_nothing(said: Said) -> None:
    """A gated scheduler, one that is called late, once per epoch after a flush, a new
    group, and a loaded state.
    """
    model, opt = make(steps=2)
    scheduler = gradaccum.wrap(LinearLR(opt, total_iters=100))
    saved = copy.deepcopy(opt.state_dict())
    for _ in range(3):
        for x in opt.epoch([0, 1, 2]):
            train(model, opt, 1)
            if x:
                scheduler.step()
        opt.param_groups[0]["lr"] *= 0.9
    train(model, opt, 1)
    scheduler.step()
    train(model, opt, 2)
    opt.add_param_group({"params": [nn.Parameter(torch.ones(1))], "lr": 7.0})
    train(model, opt, 1)
    train(model, opt, 1)
    other_model, other = make(steps=2)
    train(other_model, other, 1)
    other.load_state_dict(saved)
    train(other_model, other, 2)
    assert not said()


def test_epoch_flushes_at_its_end() -> None:
    model, opt = make()
    for index in opt.epoch(range(10)):
        train(model, opt, 1)
        assert opt.result.optimizer_step == (index + 1) // 4
    assert (opt.result.applied, opt.result.optimizer_step) == (True, 3)
    for _ in opt.epoch(range(6), carry=True):
        train(model, opt, 1)
    assert (opt.result.micro_step, opt.result.optimizer_step) == (2, 4)
    with pytest.raises(
        gradaccum.ArgumentTypeError, match="progress: expected True or False"
    ):
        opt.epoch([], progress=1)


def test_unequal_sizes_without_weights_are_said_once(said: Said) -> None:
    """Each counts the same: not the large batch, and nothing else would tell. A second
    pass says nothing, nor do sums or weights.
    """
    model = nn.Linear(2, 1)
    for options, weight in (({}, 1), ({"reduction": "sum"}, None), ({}, None)):
        assert not said()
        opt = gradaccum.wrap(
            torch.optim.SGD(model.parameters(), lr=0.1), steps=4, **options
        )
        for _ in range(2):
            for batch in opt.epoch(
                [
                    {"x": torch.ones(size, 2), "y": torch.ones(size, 1)}
                    for size in (3, 3, 2)
                ]
            ):
                opt.backward(
                    nn.functional.mse_loss(model(batch["x"]), batch["y"]), weight=weight
                )
                opt.step()
        del opt
    (text,) = said()
    assert "3 and 2 items" in text


def test_updates_are_counted_from_here() -> None:
    model, opt = make(steps=[(0, 2), (2, 4)])
    assert opt.updates_in(range(10)) == 2 + 2
    assert opt.updates_in(10, epochs=2) == 2 + 2 + 3
    for _ in opt.epoch(range(10)):
        train(model, opt, 1)
    assert opt.result.optimizer_step == 4
    assert opt.updates_in(10) == 3
    train(model, opt, 1)
    assert (opt.updates_in(3), opt.updates_in(4)) == (1, 2), "one is there already"
    with pytest.raises(gradaccum.ArgumentTypeError, match="steps: expected"):
        make(steps=None)[1].updates_in(10)


# The likeliest cause of a changed gradient.


FIXES = {
    "clip_norm=",
    r"opt\.zero_grad\(\)",
    r"torch\.autograd\.backward\(",
    "parameters of its own",
    "module=",
}


@pytest.mark.parametrize("change", CAUSES)
@pytest.mark.parametrize("then", ["nothing", "a backward pass"])
def test_change_of_grad_names_its_likeliest_cause(
    change: Callable[..., None], then: str
) -> None:
    """After zeros that autograd has added to, nobody can tell a clear from a clip."""
    model, opt = make()
    train(model, opt, 1)
    loss_of(model).backward()
    opt.step()
    change(model)
    if then != "nothing":
        loss_of(model).backward()
    with pytest.raises(gradaccum.UsageError) as caught:
        opt.step() if then != "nothing" else opt.flush()
    named = {fix for fix in FIXES if __import__("re").search(fix, str(caught.value))}
    assert named == {CAUSES[clip if change is zero and then != "nothing" else change]}
    assert len(str(caught.value)) < 550


def test_two_optimizers_over_the_same_parameters_are_named() -> None:
    """The update of the first frees the gradients that the second has summed."""
    model = make_model()
    first = gradaccum.wrap(torch.optim.SGD(model.parameters(), lr=0.5), steps=2)
    second = gradaccum.wrap(torch.optim.AdamW(model.parameters(), lr=0.5), steps=4)
    for index in range(2):
        loss_of(model, rows_of(index)).backward()
        if index == 0:
            second.step()
        first.step()
    with pytest.raises(gradaccum.UsageError, match="another wrapped optimizer has too"):
        second.step()
