"""A call that raises leaves the state before the call or the state after it. Otherwise
the next calls are refused.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import gradaccum
from conformance_tests.framework_tests.torch_model import loss_of, make_model, rows_of
from gradaccum_torch import arithmetic, update

PLACES: dict[str, tuple[torch.dtype, dict]] = {
    "in .grad": (torch.float32, {}),
    "half precision": (torch.bfloat16, {}),
    "in float64": (torch.float32, {"accumulate_dtype": "float64"}),
    "masters": (torch.bfloat16, {"master_weights": True}),
    "masters, half sums": (
        torch.bfloat16,
        {"master_weights": True, "accumulate_dtype": "bfloat16"},
    ),
    "kept apart": (torch.float32, {"on_overflow": "drop_micro_batch"}),
}
by_place = pytest.mark.parametrize("place", PLACES)
BITS = {torch.float32: 2.0**-20, torch.bfloat16: 2.0**-7}


class Failure(Exception):
    """Raised by a hook, a kernel or the user (Ctrl-C)."""


def make(place: str, **more: Any) -> tuple[nn.Module, Any]:
    dtype, options = PLACES[place]
    model = make_model().to(dtype)
    return model, gradaccum.wrap(
        torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9),
        **{"steps": 3, **options, **more},
    )


def loss(model: nn.Module, index: int) -> torch.Tensor:
    dtype = next(model.parameters()).dtype
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
        return loss_of(model, rows_of(index))


def micro_batches(
    model: nn.Module, opt: Any, number: int = 3, *, first: int = 0
) -> None:
    for index in range(first, number):
        opt.backward(loss(model, index))
        opt.step()


def failing(*_: object) -> None:
    raise Failure


def assert_as_uninterrupted(
    place: str, model: nn.Module, opt: Any, windows: int = 1
) -> None:
    other, reference = make(place)
    for _ in range(windows):
        micro_batches(other, reference)
    assert opt.result.optimizer_step == reference.result.optimizer_step
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=BITS[p.dtype], atol=BITS[p.dtype])


@by_place
def test_raising_post_hook_keeps_the_update(place: str) -> None:
    model, opt = make(place)
    handle = opt.register_step_post_hook(failing)
    with pytest.raises(Failure):
        micro_batches(model, opt)
    handle.remove()
    assert opt.result.applied
    opt.flush()
    assert_as_uninterrupted(place, model, opt)
    micro_batches(model, opt)
    assert_as_uninterrupted(place, model, opt, windows=2)


@by_place
def test_raising_pre_hook_leaves_window_open(place: str) -> None:
    """The update is made by the next flush, here and in a wrapper that has loaded the
    state.
    """
    model, opt = make(place)
    handle = opt.register_step_pre_hook(failing)
    with pytest.raises(Failure):
        micro_batches(model, opt)
    handle.remove()
    assert all(master.grad is None for master in opt.master_weights.values())
    resumed, again = make(place)
    resumed.load_state_dict(model.state_dict())
    again.load_state_dict(copy.deepcopy(opt.state_dict()))
    for each, own in ((model, opt), (resumed, again)):
        assert own.result.micro_step == 3
        own.flush()
        assert_as_uninterrupted(place, each, own)


@pytest.mark.parametrize(
    "place", ["half precision", "in float64", "masters, half sums"]
)
@pytest.mark.parametrize("when", ["before", "after"])
def test_out_of_memory_while_narrowing(
    place: str, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory runs out before the third sum is divided and cast, or right after."""
    model, opt = make(place)
    micro_batches(model, opt, 2)
    opt.backward(loss(model, 2))
    narrowed, calls = arithmetic.narrowed, []

    def raising(*arguments: Any) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 3:
            if when == "after":
                narrowed(*arguments)
            raise Failure
        return narrowed(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(update, "narrowed", raising)
        with pytest.raises(Failure):
            opt.step()
    assert opt.result.micro_step == 3
    opt.flush()
    assert_as_uninterrupted(place, model, opt)


def test_window_clipped_before_raising_is_refused() -> None:
    """One pre-hook clips, the next one raises. The window's own gradient is lost, so
    the window is refused.
    """
    model, opt = make("in .grad")
    opt.register_step_pre_hook(
        lambda *_: nn.utils.clip_grad_value_(model.parameters(), 1e-3)
    )
    handle = opt.register_step_pre_hook(failing)
    with pytest.raises(Failure):
        micro_batches(model, opt)
    handle.remove()
    with pytest.raises(gradaccum.UsageError, match=r"discard\(\)"):
        opt.flush()
    opt.discard()
    micro_batches(model, opt)
    assert opt.result.applied


@by_place
@pytest.mark.parametrize("when", ["pre", "post"])
@pytest.mark.parametrize("fused", [False, True])
def test_inner_step_that_raised_is_refused(place: str, when: str, fused: bool) -> None:
    """Nobody looks how far it came: the next calls are refused until `discard` or a
    load.
    """
    model, opt = make(place)
    opt.optimizer.param_groups[0]["fused"] = fused
    state, weights = copy.deepcopy(opt.state_dict()), copy.deepcopy(model.state_dict())
    handle = getattr(opt.optimizer, f"register_step_{when}_hook")(failing)
    for way_out in (opt.discard, lambda: opt.load_state_dict(state)):
        with pytest.raises(Failure):
            micro_batches(model, opt)
        for call in (
            opt.step,
            opt.flush,
            opt.state_dict,
            lambda: opt.backward(loss(model, 0)),
        ):
            with pytest.raises(gradaccum.UsageError, match="checkpoint"):
                call()
        assert opt.result.optimizer_step == 0
        way_out()
    handle.remove()
    model.load_state_dict(weights)
    micro_batches(model, opt)
    assert_as_uninterrupted(place, model, opt)


@by_place
@pytest.mark.parametrize("by", ["opt.backward", "loss.backward"])
@pytest.mark.parametrize("micro_batch", [0, 1])
def test_half_made_backward_can_be_repeated(
    place: str, by: str, micro_batch: int
) -> None:
    """`opt.backward` or `zero_grad` takes the part that arrived out of the sum. If it
    cannot, calls are refused until `discard`.
    """
    model, opt = make(place)
    micro_batches(model, opt, micro_batch)

    def backward() -> None:
        if by == "opt.backward":
            opt.backward(loss(model, micro_batch))
        else:
            loss(model, micro_batch).backward()

    handle = model[0].weight.register_hook(failing)
    with pytest.raises(Failure):
        backward()
    handle.remove()
    apart = micro_batch == 0 or place == "kept apart"
    if by == "loss.backward" or not apart:
        calls = (
            (opt.step, opt.flush)
            if place == "kept apart"
            else (opt.step, opt.flush, opt.state_dict)
        )
        for call in calls:
            with pytest.raises(gradaccum.UsageError, match=r"opt\.discard\(\)"):
                call()
        if apart:
            opt.zero_grad()
        else:
            opt.discard()
            micro_batches(model, opt, micro_batch)
    backward()
    opt.step()
    for index in range(micro_batch + 1, 3):
        opt.backward(loss(model, index))
        opt.step()
    assert_as_uninterrupted(place, model, opt)


def test_raise_in_backward_leaves_what_was_told_before() -> None:
    """A loss that was scaled before may be differentiated after it."""
    model, opt = make("in .grad", loss_scale=8.0)
    scaled = opt.scale(loss(model, 0))
    handle = model[0].weight.register_hook(failing)
    with pytest.raises(Failure):
        opt.backward(loss(model, 1))
    handle.remove()
    scaled.backward()
    opt.step()
    micro_batches(model, opt, first=1)
    assert_as_uninterrupted("in .grad", model, opt)


def test_early_raise_in_backward_changes_nothing() -> None:
    """No gradient has arrived when the backward pass raises."""
    model, opt = make("in .grad")
    micro_batches(model, opt, 1)
    handle = model[2].weight.register_hook(failing)
    bias = model[2].bias.register_hook(failing)
    with pytest.raises(Failure):
        opt.backward(loss(model, 1))
    handle.remove()
    bias.remove()
    micro_batches(model, opt, first=1)
    assert_as_uninterrupted("in .grad", model, opt)


@pytest.mark.parametrize("steps", [1, 2])
def test_raising_post_hook_moves_the_scaler(steps: int) -> None:
    model = make_model()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
    opt: Any = gradaccum.wrap(
        torch.optim.SGD(model.parameters(), lr=0.5), steps=steps, loss_scale=scaler
    )
    opt.register_step_post_hook(failing)
    for index in range(steps):
        scaler.scale(loss(model, index)).backward()
        if index == steps - 1:
            with pytest.raises(Failure):
                scaler.step(opt)
        else:
            scaler.step(opt)
            scaler.update()
    assert opt.result.optimizer_step == 1
    assert scaler.get_scale() == opt.result.loss_scale == 16.0
