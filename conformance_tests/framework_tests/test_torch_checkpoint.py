"""Saving, loading, copying and pickling a wrapped optimizer in the middle of a
window.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import gradaccum
from gradaccum import CheckpointError

from .torch_model import same

X = torch.arange(24, dtype=torch.float32).reshape(8, 3) / 8
KINDS: list[dict] = [
    {},
    {"loss_scale": gradaccum.DynamicLossScale(init_scale=4.0, growth_interval=2)},
    {"accumulate_dtype": torch.float64},
    {"on_overflow": "drop_micro_batch"},
    {"separate_sums": True},
]


class Run:
    """A model and its optimizer."""

    def __init__(self, dtype: torch.dtype = torch.float32, **options: object) -> None:
        torch.manual_seed(0)
        layers = nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)
        self.dtype, self.model = dtype, nn.Sequential(*layers).to(dtype)
        inner = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.opt: Any = gradaccum.wrap(inner, **{"steps": 3, **options})

    def backward(self, index: int, weight: float | None = None) -> None:
        x = X[index % 8 : index % 8 + 1].to(self.dtype)
        weight = 1 + index % 3 if weight is None else weight
        self.opt.backward(self.model(x).square().sum(), weight=weight)

    def train(self, first: int, last: int) -> None:
        for index in range(first, last):
            self.backward(index)
            self.opt.step()


def trained(last: int, **options: Any) -> Run:
    run = Run(**options)
    run.train(0, last)
    return run


def assert_same(run: Run, other: Run) -> None:
    assert run.opt.result == other.opt.result
    assert same(run.model, other.model)
    ours, theirs = run.opt.state_dict(), other.opt.state_dict()
    assert ours["gradaccum"]["sums"].keys() == theirs["gradaccum"]["sums"].keys()
    for index, entries in ours["state"].items():
        assert all(
            torch.equal(entries[name], theirs["state"][index][name]) for name in entries
        )


@pytest.mark.parametrize(
    "options", [*KINDS, {"dtype": torch.float16, "master_weights": True}], ids=str
)
@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda run: pickle.loads(pickle.dumps(run))]
)
@pytest.mark.parametrize("pending", [False, True])
def test_copy_with_its_model_trains_alike(
    options: dict, copied: Callable[[Run], Run], pending: bool
) -> None:
    run = trained(4, **options)
    if pending:
        run.backward(0, weight=2)
    twin = copied(run)
    params = zip(
        twin.model.parameters(), twin.opt.param_groups[0]["params"], strict=True
    )
    assert all(p is q for p, q in params)
    for each in (run, twin):
        if pending:
            each.opt.step()
        each.train(5, 12)
    assert_same(run, twin)
    assert run.opt.result.optimizer_step >= 3


def test_copy_notices_changed_gradients() -> None:
    """The change comes after the copy, or before it to the original."""
    run = trained(1)
    twin = copy.deepcopy(run)
    nn.utils.clip_grad_norm_(twin.model.parameters(), 1e-3)
    for parameter in run.model.parameters():
        parameter.grad.mul_(2)
    for changed in (twin.opt, copy.deepcopy(run.opt)):
        with pytest.raises(gradaccum.UsageError, match="clip_norm="):
            changed.step()


def test_bare_state_loads_as_empty_window() -> None:
    """A bare optimizer loads the wrapper's state, too."""
    run, reference = trained(1), Run()
    weight, twin_weight = run.model[0].weight, reference.model[0].weight
    bare = torch.optim.AdamW(reference.model.parameters(), lr=0.1)
    reference.model(X).sum().backward()
    bare.step()
    run.opt.load_state_dict(copy.deepcopy(bare.state_dict()))
    assert run.opt.result.micro_step == 0
    moments = run.opt.state[weight]["exp_avg"], bare.state[twin_weight]["exp_avg"]
    assert torch.equal(*moments)
    assert all(p.grad is None for p in run.model.parameters())
    run.train(0, 4)
    bare.load_state_dict(run.opt.state_dict())
    assert bare.state[twin_weight]["step"] == 2


@pytest.mark.parametrize("options", KINDS, ids=str)
def test_training_leaves_loaded_state_alone(options: dict) -> None:
    """The sums in the loaded dictionary keep their values."""
    saved = copy.deepcopy(trained(4, **options).opt.state_dict()["gradaccum"])
    run = Run(**options)
    state = {**run.opt.state_dict(), "gradaccum": copy.deepcopy(saved)}
    run.opt.load_state_dict(state)
    run.train(4, 6)
    assert saved["sums"]
    assert all(
        torch.equal(total, saved["sums"][index])
        for index, total in state["gradaccum"]["sums"].items()
    )


def test_loading_drops_pending_micro_batch() -> None:
    run = trained(4)
    saved = copy.deepcopy(run.opt.state_dict())
    run.backward(0, weight=7)
    run.opt.load_state_dict(saved)
    run.backward(0, weight=2)
    run.opt.step()
    weights = [s["gradaccum"]["weight"] for s in (run.opt.state_dict(), saved)]
    assert weights[0] == weights[1] + 2


DAMAGE: dict[str, Callable[[Any, Any], object]] = {
    "no field": lambda state, entry: entry.pop("weight"),
    "another format": lambda state, entry: entry.update(format=2),
    "another shape": lambda state, entry: entry["parameters"][0].__setitem__(0, [5, 3]),
    "another dtype": lambda state, entry: entry["parameters"][0].__setitem__(
        1, "torch.float16"
    ),
    "fewer parameters": lambda state, entry: entry["parameters"].pop(),
    "an overfull window": lambda state, entry: entry.update(micro_step=4),
    "another sum": lambda state, entry: entry["sums"].update(
        {0: entry["sums"][0].double()}
    ),
    "more groups": lambda state, entry: state["param_groups"].append(
        state["param_groups"][0]
    ),
    "no entry": lambda state, entry: state.update(gradaccum=None),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_refused_state_changes_nothing(damage: str) -> None:
    run = trained(4)
    state = copy.deepcopy(trained(5).opt.state_dict())
    DAMAGE[damage](state, state["gradaccum"])
    with pytest.raises(CheckpointError):
        run.opt.load_state_dict(state)
    run.train(4, 9)
    assert_same(run, trained(9))


def test_other_parameter_names_are_refused() -> None:
    def named(prefix: str) -> Any:
        parameters = nn.Linear(2, 2).named_parameters()
        given = [(prefix + name, parameter) for name, parameter in parameters]
        return gradaccum.wrap(torch.optim.SGD(given, lr=0.1), steps=2)

    named("a.").load_state_dict(named("a.").state_dict())
    with pytest.raises(CheckpointError, match=r"a\.weight"):
        named("b.").load_state_dict(named("a.").state_dict())


def test_state_dict_hooks_run_in_order() -> None:
    opt = Run().opt
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
    run = Run()
    run.model(X).sum().backward()
    assert run.opt.state_dict()["gradaccum"]["sums"] == {}


# A state loaded under other options: a scaler of the user keeps its own scale.


def make_scaled(**options: Any) -> tuple[nn.Parameter, Any]:
    parameter = nn.Parameter(torch.ones(2))
    inner = torch.optim.SGD([parameter], lr=1.0)
    return parameter, gradaccum.wrap(inner, **{"steps": 2, **options})


def train_scaled(parameter: nn.Parameter, opt: Any, micro_batches: int = 2) -> None:
    for _ in range(micro_batches):
        opt.backward(parameter.sum())
        opt.step()


def saved_scaled(scale: Any) -> Any:
    parameter, opt = make_scaled(loss_scale=scale)
    train_scaled(parameter, opt)
    return opt.state_dict()


@pytest.mark.parametrize("saved", [None, 8.0, 1024.0], ids=str)
def test_given_scaler_keeps_its_scale(saved: float | None) -> None:
    """The user may have loaded the scaler from a file of its own after wrapping."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    parameter, opt = make_scaled(loss_scale=scaler)
    scaler.load_state_dict(
        {**scaler.state_dict(), "scale": 512.0, "_growth_tracker": 7}
    )
    opt.load_state_dict(saved_scaled(saved))
    assert (scaler.get_scale(), scaler.state_dict()["_growth_tracker"]) == (512.0, 7)
    train_scaled(parameter, opt)
    assert parameter.tolist() == [0.0, 0.0]
    assert scaler.state_dict()["_growth_tracker"] == 8


def test_scaler_takes_saved_dynamic_scale() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    _, opt = make_scaled(loss_scale=scaler)
    opt.load_state_dict(saved_scaled(gradaccum.DynamicLossScale(init_scale=1024.0)))
    assert (scaler.get_scale(), scaler.state_dict()["_growth_tracker"]) == (1024.0, 1)


def test_exhausted_schedule_can_be_saved() -> None:
    """The list has a size for one window, and no second window begins."""
    parameter, opt = make_scaled(steps=lambda step: [2][step])
    train_scaled(parameter, opt)
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
    with pytest.raises(CheckpointError, match="steps"):
        opt.load_state_dict(saved)
    sizes[0] = 3
    opt.load_state_dict(saved)
    train_scaled(parameter, opt)
    assert opt.result.applied
