"""Saving, loading, copying and pickling a wrapped optimizer in the middle of a
window.
"""

from __future__ import annotations

import copy
import operator
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import gradaccum
from gradaccum_torch import AccumulatingOptimizer

X = torch.arange(24, dtype=torch.float32).reshape(8, 3) / 8
KINDS: list[dict] = [
    {},
    {"loss_scale": gradaccum.DynamicLossScale(init_scale=4.0, growth_interval=2)},
    {"accumulate_dtype": torch.float64},
    {"on_overflow": "drop_micro_batch"},
    {"separate_sums": True},
]


def make(
    dtype: torch.dtype = torch.float32, **options: object
) -> tuple[nn.Module, AccumulatingOptimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).to(dtype)
    return model, gradaccum.wrap(
        torch.optim.AdamW(model.parameters(), lr=0.1), **{"steps": 3, **options}
    )


def train(model: nn.Module, opt: AccumulatingOptimizer, first: int, last: int) -> None:
    for index in range(first, last):
        opt.backward(
            model(X[index % 8 : index % 8 + 1].to(next(model.parameters()).dtype))
            .square()
            .sum(),
            weight=1 + index % 3,
        )
        opt.step()


def assert_same(
    model: nn.Module,
    opt: AccumulatingOptimizer,
    other: nn.Module,
    twin: AccumulatingOptimizer,
) -> None:
    assert opt.result == twin.result
    assert all(
        torch.equal(p, q)
        for p, q in zip(model.parameters(), other.parameters(), strict=True)
    )
    ours, theirs = opt.state_dict(), twin.state_dict()
    assert ours["gradaccum"]["sums"].keys() == theirs["gradaccum"]["sums"].keys()
    for index, entries in ours["state"].items():
        assert all(
            torch.equal(entries[name], theirs["state"][index][name]) for name in entries
        )


@pytest.mark.parametrize(
    "options", [*KINDS, {"dtype": torch.float16, "master_weights": True}], ids=str
)
@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
@pytest.mark.parametrize("pending", [False, True])
def test_copy_with_its_model_trains_alike(
    options: dict, how: str, pending: bool
) -> None:
    model, opt = make(**options)
    dtype = options.get("dtype", torch.float32)
    train(model, opt, 0, 4)
    if pending:
        opt.backward(model(X[:1].to(dtype)).square().sum(), weight=2)
    other, twin = (
        copy.deepcopy((model, opt))
        if how == "deepcopy"
        else pickle.loads(pickle.dumps((model, opt)))
    )
    assert all(
        p is q
        for p, q in zip(other.parameters(), twin.param_groups[0]["params"], strict=True)
    )
    for m, o in ((model, opt), (other, twin)):
        if pending:
            o.step()
        train(m, o, 5, 12)
    assert_same(model, opt, other, twin)
    assert opt.result.optimizer_step >= 3


def test_copy_notices_changed_gradients() -> None:
    """The change comes after the copy, or before it to the original."""
    model, opt = make()
    train(model, opt, 0, 1)
    other, twin = copy.deepcopy((model, opt))
    nn.utils.clip_grad_norm_(other.parameters(), 1e-3)
    model_changed = [p.grad.mul_(2) for p in model.parameters()]
    assert model_changed
    third = copy.deepcopy(opt)
    for changed in (twin, third):
        with pytest.raises(gradaccum.UsageError, match="clip_norm="):
            changed.step()


def test_bare_state_loads_as_empty_window() -> None:
    """A bare optimizer loads the wrapper's state, too."""
    model, opt = make()
    reference, _ = make()
    bare = torch.optim.AdamW(reference.parameters(), lr=0.1)
    reference(X).sum().backward()
    bare.step()
    train(model, opt, 0, 1)
    opt.load_state_dict(copy.deepcopy(bare.state_dict()))
    assert opt.result.micro_step == 0
    assert torch.equal(
        opt.state[model[0].weight]["exp_avg"],
        bare.state[reference[0].weight]["exp_avg"],
    )
    assert all(p.grad is None for p in model.parameters())
    train(model, opt, 0, 4)
    bare.load_state_dict(opt.state_dict())
    assert bare.state[reference[0].weight]["step"] == 2


@pytest.mark.parametrize("options", KINDS)
def test_training_leaves_loaded_state_alone(options: dict) -> None:
    """The sums in the loaded dictionary keep their values."""
    model, opt = make(**options)
    train(model, opt, 0, 4)
    saved = copy.deepcopy(opt.state_dict()["gradaccum"])
    other, twin = make(**options)
    state = {**twin.state_dict(), "gradaccum": copy.deepcopy(saved)}
    twin.load_state_dict(state)
    train(other, twin, 4, 6)
    assert all(
        torch.equal(total, saved["sums"][index])
        for index, total in state["gradaccum"]["sums"].items()
    )


def test_loading_drops_pending_micro_batch() -> None:
    model, opt = make()
    train(model, opt, 0, 4)
    saved = copy.deepcopy(opt.state_dict())
    opt.backward(model(X[:1]).sum(), weight=7)
    opt.load_state_dict(saved)
    opt.backward(model(X[:1]).sum(), weight=2)
    opt.step()
    assert opt.state_dict()["gradaccum"]["weight"] == saved["gradaccum"]["weight"] + 2


DAMAGE: dict[str, Callable[[Any], object]] = {
    "no field": lambda state: state["gradaccum"].pop("weight"),
    "another format": lambda state: state["gradaccum"].update(format=2),
    "another shape": lambda state: operator.setitem(
        state["gradaccum"]["parameters"][0], 0, [5, 3]
    ),
    "another dtype": lambda state: operator.setitem(
        state["gradaccum"]["parameters"][0], 1, "torch.float16"
    ),
    "fewer parameters": lambda state: state["gradaccum"]["parameters"].pop(),
    "an overfull window": lambda state: state["gradaccum"].update(micro_step=4),
    "another sum": lambda state: state["gradaccum"]["sums"].update(
        {0: state["gradaccum"]["sums"][0].double()}
    ),
    "more groups": lambda state: state["param_groups"].append(state["param_groups"][0]),
    "no entry": lambda state: state.update(gradaccum=None),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_refused_state_changes_nothing(damage: str) -> None:
    model, opt = make()
    train(model, opt, 0, 4)
    other, twin = copy.deepcopy((model, opt))
    train(other, twin, 4, 5)
    state = copy.deepcopy(twin.state_dict())
    DAMAGE[damage](state)
    with pytest.raises(gradaccum.CheckpointError):
        opt.load_state_dict(state)
    reference, third = make()
    train(reference, third, 0, 4)
    for m, o in ((model, opt), (reference, third)):
        train(m, o, 4, 9)
    assert_same(model, opt, reference, third)


def test_other_parameter_names_are_refused() -> None:
    def named(prefix: str) -> AccumulatingOptimizer:
        model = nn.Linear(2, 2)
        return gradaccum.wrap(
            torch.optim.SGD(
                [(prefix + name, p) for name, p in model.named_parameters()], lr=0.1
            ),
            steps=2,
        )

    named("a.").load_state_dict(named("a.").state_dict())
    with pytest.raises(gradaccum.CheckpointError, match=r"a\.weight"):
        named("b.").load_state_dict(named("a.").state_dict())


def test_state_dict_hooks_run_in_order() -> None:
    _, opt = make()
    seen: list[str] = []
    opt.register_state_dict_pre_hook(lambda o: seen.append("pre"))
    opt.register_state_dict_post_hook(lambda o, state: {**state, "extra": 1})
    opt.register_load_state_dict_pre_hook(
        lambda o, state: seen.append(f"load {state.pop('extra')}")
    )
    opt.register_load_state_dict_post_hook(lambda o: seen.append("post"))
    opt.optimizer.register_state_dict_pre_hook(lambda o: seen.append("inner"))
    opt.load_state_dict(opt.state_dict())
    assert seen == ["pre", "inner", "load 1", "post"]


def test_uncounted_micro_batch_is_not_saved() -> None:
    """The window is empty until the first step(), so a backward pass before it does not
    forbid saving.
    """
    model, opt = make()
    model(X).sum().backward()
    assert opt.state_dict()["gradaccum"]["sums"] == {}


# A state loaded under other options: the same loss scale multiplies and divides, and a
# scaler of the user keeps its own scale.


DYNAMIC = gradaccum.DynamicLossScale(init_scale=1024.0)
NO_SCALE: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "disabled": lambda: torch.amp.GradScaler("cpu", enabled=False),
}


def make_scaled(**options: Any) -> tuple[torch.nn.Parameter, Any]:
    parameter = torch.nn.Parameter(torch.ones(2))
    return parameter, gradaccum.wrap(
        torch.optim.SGD([parameter], lr=1.0), **{"steps": 2, **options}
    )


def train_scaled(
    parameter: torch.nn.Parameter, opt: Any, micro_batches: int, weight: float = 1.0
) -> None:
    for _ in range(micro_batches):
        opt.backward(parameter.sum(), weight)
        opt.step()


@pytest.mark.parametrize("scale", NO_SCALE)
def test_plain_backward_after_scaled_run(scale: str) -> None:
    """A float16 run goes on in bfloat16 without a scale: nothing multiplies the loss,
    so nothing divides the sum.
    """
    first, saved = make_scaled(loss_scale=DYNAMIC)
    train_scaled(first, saved, 2)
    parameter, opt = make_scaled(loss_scale=NO_SCALE[scale]())
    opt.load_state_dict(saved.state_dict())
    for _ in range(2):
        parameter.sum().backward()
        opt.step()
    assert parameter.tolist() == [0.0, 0.0]
    assert opt.result.loss_scale == 1.0
    assert opt.result.optimizer_step == 2


@pytest.mark.parametrize("saved", [None, 8.0, 1024.0], ids=str)
def test_given_scaler_keeps_its_scale(saved: float | None) -> None:
    """The user may have loaded the scaler from a file of its own after wrapping."""
    first, old = make_scaled(loss_scale=saved)
    train_scaled(first, old, 2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    parameter, opt = make_scaled(loss_scale=scaler)
    scaler.load_state_dict(
        {**scaler.state_dict(), "scale": 512.0, "_growth_tracker": 7}
    )
    opt.load_state_dict(old.state_dict())
    assert (scaler.get_scale(), scaler.state_dict()["_growth_tracker"]) == (512.0, 7)
    train_scaled(parameter, opt, 2)
    assert parameter.tolist() == [0.0, 0.0]
    assert scaler.state_dict()["_growth_tracker"] == 8


def test_scaler_takes_saved_dynamic_scale() -> None:
    first, old = make_scaled(loss_scale=DYNAMIC)
    train_scaled(first, old, 2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    _, opt = make_scaled(loss_scale=scaler)
    opt.load_state_dict(old.state_dict())
    assert (scaler.get_scale(), scaler.state_dict()["_growth_tracker"]) == (1024.0, 1)


def test_exhausted_schedule_can_be_saved() -> None:
    """The list has a size for one window, and no second window begins."""
    parameter, opt = make_scaled(steps=lambda step: [2][step])
    train_scaled(parameter, opt, 2)
    assert opt.state_dict()["gradaccum"]["terms"]["steps"] is None


def test_open_window_keeps_its_size() -> None:
    """A state says which size its open window has. It loads only where the schedule
    gives the same size.
    """
    sizes = [3]
    parameter, opt = make_scaled(steps=lambda step: sizes[0])
    train_scaled(parameter, opt, 1)
    sizes[0] = 5
    saved = copy.deepcopy(opt.state_dict())
    assert saved["gradaccum"]["terms"] == {
        "reduction": "mean",
        "on_overflow": "skip_window",
        "scale": "unused",
        "steps": 3,
    }
    with pytest.raises(gradaccum.CheckpointError, match="steps"):
        opt.load_state_dict(saved)
    sizes[0] = 3
    opt.load_state_dict(saved)
    train_scaled(parameter, opt, 2)
    assert opt.result.applied
