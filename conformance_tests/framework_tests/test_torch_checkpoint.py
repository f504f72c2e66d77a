"""Saving, loading, copying and pickling a wrapped optimizer in the middle of a window."""

from __future__ import annotations

import copy
import io
import pickle

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


def make(dtype: torch.dtype = torch.float32, **options: object) -> tuple[nn.Module, AccumulatingOptimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).to(dtype)
    return model, gradaccum.wrap(torch.optim.AdamW(model.parameters(), lr=0.1), **{"steps": 3, **options})


def train(model: nn.Module, opt: AccumulatingOptimizer, first: int, last: int) -> None:
    for index in range(first, last):
        opt.backward(model(X[index % 8 : index % 8 + 1].to(next(model.parameters()).dtype)).square().sum(), weight=1 + index % 3)
        opt.step()


def assert_same(model: nn.Module, opt: AccumulatingOptimizer, other: nn.Module, twin: AccumulatingOptimizer) -> None:
    assert opt.result == twin.result
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True))
    ours, theirs = opt.state_dict(), twin.state_dict()
    assert ours["gradaccum"]["sums"].keys() == theirs["gradaccum"]["sums"].keys()
    for index, entries in ours["state"].items():
        assert all(torch.equal(entries[name], theirs["state"][index][name]) for name in entries)


@pytest.mark.parametrize("options", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("at", [3, 4, 5])
def test_file_resumes_bitwise(options: dict, dtype: torch.dtype, at: int) -> None:
    """A state in a file, of an open window too, loads into another wrapper, which trains on bit for bit alike."""
    model, opt = make(dtype, **options)
    train(model, opt, 0, at)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": opt.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    other, twin = make(dtype, **options)
    train(other, twin, 0, 2)
    other.load_state_dict(saved["model"])
    twin.load_state_dict(saved["optimizer"])
    for m, o in ((model, opt), (other, twin)):
        train(m, o, at, 10)
    assert_same(model, opt, other, twin)


@pytest.mark.parametrize("options", KINDS)
@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
@pytest.mark.parametrize("pending", [False, True])
def test_copy_with_its_model_trains_alike(options: dict, how: str, pending: bool) -> None:
    model, opt = make(**options)
    train(model, opt, 0, 4)
    if pending:
        opt.backward(model(X[:1]).square().sum(), weight=2)
    other, twin = copy.deepcopy((model, opt)) if how == "deepcopy" else pickle.loads(pickle.dumps((model, opt)))
    assert all(p is q for p, q in zip(other.parameters(), twin.param_groups[0]["params"], strict=True))
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
    assert torch.equal(opt.state[model[0].weight]["exp_avg"], bare.state[reference[0].weight]["exp_avg"])
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
    assert all(torch.equal(total, saved["sums"][index]) for index, total in state["gradaccum"]["sums"].items())


def test_loading_drops_pending_micro_batch() -> None:
    model, opt = make()
    train(model, opt, 0, 4)
    saved = copy.deepcopy(opt.state_dict())
    opt.backward(model(X[:1]).sum(), weight=7)
    opt.load_state_dict(saved)
    opt.backward(model(X[:1]).sum(), weight=2)
    opt.step()
    assert opt.state_dict()["gradaccum"]["weight"] == saved["gradaccum"]["weight"] + 2


def entry(state: dict) -> dict:
    return state["gradaccum"]


def drop_field(state: dict) -> None:
    del entry(state)["weight"]


def other_format(state: dict) -> None:
    entry(state)["format"] = 2


def other_shape(state: dict) -> None:
    entry(state)["parameters"][0][0] = [5, 3]


def other_dtype(state: dict) -> None:
    entry(state)["parameters"][0][1] = "torch.float16"


def other_count(state: dict) -> None:
    entry(state)["parameters"].pop()


def overfull_window(state: dict) -> None:
    entry(state)["micro_step"] = 4


def other_sum(state: dict) -> None:
    entry(state)["sums"][0] = entry(state)["sums"][0].double()


def other_groups(state: dict) -> None:
    state["param_groups"].append(state["param_groups"][0])


def no_entry(state: dict) -> None:
    state["gradaccum"] = None


@pytest.mark.parametrize(
    "damage", [drop_field, other_format, other_shape, other_dtype, other_count, overfull_window, other_sum, other_groups, no_entry]
)
def test_refused_state_changes_nothing(damage: object) -> None:
    model, opt = make()
    train(model, opt, 0, 4)
    other, twin = copy.deepcopy((model, opt))
    train(other, twin, 4, 5)
    state = copy.deepcopy(twin.state_dict())
    damage(state)
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
        return gradaccum.wrap(torch.optim.SGD([(prefix + name, p) for name, p in model.named_parameters()], lr=0.1), steps=2)

    named("a.").load_state_dict(named("a.").state_dict())
    with pytest.raises(gradaccum.CheckpointError, match=r"a\.weight"):
        named("b.").load_state_dict(named("a.").state_dict())


def test_state_dict_hooks_run_in_order() -> None:
    _, opt = make()
    seen: list[str] = []
    opt.register_state_dict_pre_hook(lambda o: seen.append("pre"))
    opt.register_state_dict_post_hook(lambda o, state: {**state, "extra": 1})
    opt.register_load_state_dict_pre_hook(lambda o, state: seen.append(f"load {state.pop('extra')}"))
    opt.register_load_state_dict_post_hook(lambda o: seen.append("post"))
    opt.optimizer.register_state_dict_pre_hook(lambda o: seen.append("inner"))
    opt.load_state_dict(opt.state_dict())
    assert seen == ["pre", "inner", "load 1", "post"]


def test_uncounted_micro_batch_is_not_saved() -> None:
    """The window is empty until the first step(), so a backward pass before it does not forbid saving."""
    model, opt = make()
    model(X).sum().backward()
    assert opt.state_dict()["gradaccum"]["sums"] == {}
