"""float32 masters in torch: the inner optimizer updates them, they cost one copy, and a
write into the model overrides them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradaccum

STEP = 2.0**-13


HALF = [torch.float16, torch.bfloat16]


INNER = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=STEP),
    "adamw_fused": lambda ps: torch.optim.AdamW(
        ps, lr=STEP, weight_decay=0.0, fused=True
    ),
    "adamw_foreach": lambda ps: torch.optim.AdamW(
        ps, lr=STEP, weight_decay=0.0, foreach=True
    ),
}


by_inner = pytest.mark.parametrize("inner", INNER)


by_dtype = pytest.mark.parametrize("dtype", HALF, ids=str)


def make(
    dtype: torch.dtype, inner: str = "sgd", **options: Any
) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 4)).to(dtype)
    return model, gradaccum.wrap(
        INNER[inner](model.parameters()),
        **{"steps": 2, "master_weights": True, **options},
    )


def train(model: nn.Module, opt: Any, micro_batches: int, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    dtype = next(model.parameters()).dtype
    for _ in range(micro_batches):
        loss = (
            model(torch.randn(4, 8, generator=generator).to(dtype))
            .float()
            .square()
            .mean()
        )
        opt.scale(loss).backward()
        opt.step()
        opt.zero_grad()


def masters_of(opt: Any) -> list[Tensor]:
    """The tensors that the inner optimizer updates: a master, or the parameter itself
    if it has none.
    """
    return [
        opt.master_weights.get(index, own)
        for index, own in enumerate(opt._window.masters.parameters())
    ]


@by_dtype
@by_inner
def test_update_equals_float32_optimizer(dtype: torch.dtype, inner: str) -> None:
    """A float32 optimizer with the same gradients makes the same masters, bit for
    bit.
    """
    model, opt = make(dtype, inner)
    twins = [p.detach().float().requires_grad_() for p in model.parameters()]
    bare = INNER[inner](twins)
    seen: list[list[Tensor]] = []
    opt.register_step_pre_hook(
        lambda *_: seen.append([master.grad.clone() for master in masters_of(opt)])
    )
    train(model, opt, 12)
    assert len(seen) == 6
    for gradients in seen:
        for twin, gradient in zip(twins, gradients, strict=True):
            twin.grad = gradient
        bare.step()
    for parameter, master, twin in zip(
        model.parameters(), masters_of(opt), twins, strict=True
    ):
        assert torch.equal(master, twin)
        assert torch.equal(parameter, twin.to(dtype))
    assert {
        value.dtype
        for state in opt.state.values()
        for value in state.values()
        if isinstance(value, Tensor)
    } <= {torch.float32}


def test_post_hook_sees_the_rounded_model() -> None:
    model, opt = make(torch.bfloat16, "adamw_fused")
    checked = []

    def hook(*_: object) -> None:
        checked.append(
            all(
                torch.equal(p, m.to(p.dtype))
                for p, m in zip(model.parameters(), masters_of(opt), strict=True)
            )
        )

    opt.register_step_post_hook(hook)
    train(model, opt, 4)
    assert checked == [True, True]


def test_sum_is_the_masters_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A half-precision parameter has one master, whose gradient is the sum itself and
    no copy.
    """
    model, opt = make(torch.float16)
    gradient_sum = opt._window.gradient_sum
    given: list[tuple[set[int], set[int], bool]] = []

    def before(*_: object) -> None:
        held = {total.data_ptr() for total in gradient_sum.gradients().values()}
        handed = {master.grad.data_ptr() for master in masters_of(opt)}
        given.append(
            (held, handed, any(p.grad is not None for p in model.parameters()))
        )

    opt.register_step_pre_hook(before)
    train(model, opt, 4)
    for held, handed, model_has_gradients in given:
        assert held == handed
        assert not model_has_gradients
    assert [master.dtype for master in masters_of(opt)] == [torch.float32] * 3
    assert [master.numel() for master in masters_of(opt)] == [
        p.numel() for p in model.parameters()
    ]
    assert all(
        tensor.grad is None for tensor in (*model.parameters(), *masters_of(opt))
    )


@by_dtype
@pytest.mark.parametrize(
    "options",
    [
        {"accumulate_dtype": "parameter"},
        {"on_overflow": "drop_micro_batch"},
        {"accumulate_dtype": "float64"},
    ],
)
def test_place_of_the_sum_changes_nothing(dtype: torch.dtype, options: dict) -> None:
    options = {
        name: str(dtype).removeprefix("torch.") if value == "parameter" else value
        for name, value in options.items()
    }
    model, opt = make(dtype, loss_scale=8.0, **options)
    plain, reference = make(dtype)
    train(model, opt, 4)
    train(plain, reference, 4)
    assert opt.result.applied
    for a, b in zip(masters_of(opt), masters_of(reference), strict=True):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a, b, rtol=0, atol=STEP * 2.0**-6)


def test_bare_half_state_becomes_float32() -> None:
    model = nn.Linear(4, 2).to(torch.bfloat16)
    bare = torch.optim.SGD(model.parameters(), lr=STEP, momentum=0.9)
    model(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
    bare.step()
    bare.zero_grad()
    momenta = [bare.state[p]["momentum_buffer"].clone() for p in model.parameters()]
    opt: Any = gradaccum.wrap(bare, steps=1, master_weights=True)
    for parameter, momentum in zip(model.parameters(), momenta, strict=True):
        assert opt.state[parameter]["momentum_buffer"].dtype == torch.float32
        assert torch.equal(opt.state[parameter]["momentum_buffer"], momentum.float())


def test_added_group_has_masters_too() -> None:
    model, opt = make(torch.float16)
    train(model, opt, 1)
    late = torch.ones(2, dtype=torch.float16, requires_grad=True)
    opt.add_param_group({"params": [late]})
    with pytest.raises(ValueError, match="more than one parameter group"):
        opt.add_param_group({"params": (p for p in [late])})
    assert len(opt.param_groups) == 2
    (late.sum() + model(torch.ones(1, 8, dtype=torch.float16)).sum()).backward()
    opt.step()
    assert opt.result.applied
    assert masters_of(opt)[-1].tolist() == [1 - STEP / 2] * 2


def test_rewrapped_optimizer_keeps_its_masters() -> None:
    (model, opt), (other, reference) = (
        make(torch.float16, "adamw_fused"),
        make(torch.float16, "adamw_fused"),
    )
    train(model, opt, 2)
    train(other, reference, 2)
    inner = opt.optimizer
    del opt
    with pytest.raises(gradaccum.ArgumentValueError, match="master_weights=True"):
        gradaccum.wrap(inner, steps=2)
    again = gradaccum.wrap(inner, steps=2, master_weights=True)
    train(model, again, 2, seed=1)
    train(other, reference, 2, seed=1)
    for a, b in zip(
        (*model.parameters(), *masters_of(again)),
        (*other.parameters(), *masters_of(reference)),
        strict=True,
    ):
        assert torch.equal(a, b)


@by_dtype
def test_zero_grad_clears_model_gradients(dtype: torch.dtype) -> None:
    model, opt = make(dtype, on_overflow="drop_micro_batch")
    for set_to_none in (True, False):
        (1000 * model(torch.ones(1, 8, dtype=dtype)).sum()).backward()
        opt.zero_grad(set_to_none=set_to_none)
        assert all(p.grad is None or not p.grad.any() for p in model.parameters())


def make_pair(lr: float = STEP, **options: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)).to(torch.bfloat16)
    return model, gradaccum.wrap(
        torch.optim.SGD(model.parameters(), lr=lr),
        **{"steps": 2, "master_weights": True, **options},
    )


def train_pair(model: nn.Module, opt: Any, micro_batches: int = 2) -> None:
    for _ in range(micro_batches):
        opt.backward(
            model(torch.ones(2, 8, dtype=torch.bfloat16)).float().square().mean()
        )
        opt.step()


def through_vector(parameters: list[nn.Parameter]) -> None:
    nn.utils.vector_to_parameters(
        nn.utils.parameters_to_vector(parameters) * 0.5, parameters
    )


def through_data(parameters: list[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.data.mul_(0.5)


def through_numpy_like_view(parameters: list[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.detach().view(torch.int16).copy_(
            (parameter.detach() * 0.5).view(torch.int16)
        )


@pytest.mark.parametrize(
    "write", [through_vector, through_data, through_numpy_like_view]
)
@pytest.mark.parametrize("reach", ["model", "groups"])
def test_write_through_data_reaches_the_masters(
    write: Callable[[list[nn.Parameter]], None], reach: str
) -> None:
    """The tensor's version does not count such a write. The groups show the model's
    parameters.
    """
    model, opt = make_pair(lr=0.0)
    train_pair(model, opt)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    write(
        list(model.parameters())
        if reach == "model"
        else [p for group in opt.param_groups for p in group["params"]]
    )
    train_pair(model, opt)
    for parameter, old in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter, old * 0.5)


def test_one_written_element_keeps_other_masters() -> None:
    parameter = torch.ones(3, dtype=torch.bfloat16, requires_grad=True)
    opt: Any = gradaccum.wrap(
        torch.optim.SGD([parameter], lr=STEP), steps=1, master_weights=True
    )
    for index in range(3):
        if index == 1:
            parameter.data.clamp_(max=2.0)
            parameter.data[0] = 3.0
        opt.backward(parameter.sum())
        opt.step()
    assert opt.master_weights[0].tolist() == [3 - 2 * STEP, 1 - 3 * STEP, 1 - 3 * STEP]


@pytest.mark.parametrize(
    "options",
    [
        {"accumulate_dtype": "bfloat16"},
        {"on_overflow": "drop_micro_batch", "clip_norm": 1.0},
    ],
    ids=str,
)
def test_clipping_over_the_groups_is_noticed(options: dict[str, Any]) -> None:
    """The groups hold the parameters whose ``.grad`` autograd fills."""
    model, opt = make_pair(**options)
    opt.backward(model(torch.ones(2, 8, dtype=torch.bfloat16)).float().square().sum())
    assert (
        nn.utils.clip_grad_norm_(
            [p for group in opt.param_groups for p in group["params"]], 1e-3
        )
        > 1e-3
    )
    with pytest.raises(gradaccum.UsageError, match="clip_norm="):
        opt.step()


def test_masters_show_only_in_a_step() -> None:
    """Outside a step, groups and state show the model's parameters."""
    model, opt = make_pair(lr=STEP)
    opt.optimizer.defaults["momentum"] = opt.param_groups[0]["momentum"] = 0.9
    seen: list[Any] = []
    opt.register_step_pre_hook(lambda *_: seen.extend(opt.param_groups[0]["params"]))
    train_pair(model, opt)
    assert [id(own) for own in seen] == [
        id(master) for master in opt.master_weights.values()
    ]
    assert all(
        own is parameter
        for own, parameter in zip(
            opt.param_groups[0]["params"], model.parameters(), strict=True
        )
    )
    assert {id(own) for own in opt.state} == {
        id(parameter) for parameter in model.parameters()
    }
    assert all(
        entries["momentum_buffer"].dtype == torch.float32
        for entries in opt.state.values()
    )
    assert opt.optimizer.state_dict()["state"].keys() == {0, 1, 2, 3}


class Averaging(torch.optim.SGD):
    """Switches between its weights and their average, as schedulefree's optimizers do,
    through ``.data`` or not.
    """

    through_data = False

    def eval(self) -> None:
        self._switch(0.5)

    def train(self) -> None:
        self._switch(2.0)

    def _switch(self, factor: float) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                with torch.no_grad():
                    (parameter.data if self.through_data else parameter).mul_(factor)


@pytest.mark.parametrize("through_data", [False, True])
def test_switched_weights_reach_the_model(
    through_data: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Averaging, "through_data", through_data)
    model = make_pair()[0]
    opt: Any = gradaccum.wrap(
        Averaging(model.parameters(), lr=STEP), steps=2, master_weights=True
    )
    train_pair(model, opt, 3)
    weights, masters = (
        [t.detach().clone() for t in ts]
        for ts in (model.parameters(), opt.master_weights.values())
    )
    opt.eval()
    assert all(
        torch.equal(p, w * 0.5)
        for p, w in zip(model.parameters(), weights, strict=True)
    )
    opt.train()
    assert all(
        torch.equal(p, w) for p, w in zip(model.parameters(), weights, strict=True)
    )
    assert all(
        torch.equal(p, w)
        for p, w in zip(opt.master_weights.values(), masters, strict=True)
    ), "no bit of the masters is lost"
    assert opt.result.micro_step == 1


def test_idle_method_writes_nothing() -> None:
    """Autograd would refuse the backward pass of a graph whose parameters were
    overwritten.
    """
    model, opt = make_pair()
    loss = model(torch.ones(2, 8, dtype=torch.bfloat16)).float().sum()
    opt.optimizer.prefetch = lambda: None
    opt.prefetch()
    opt.backward(loss)
    opt.step()
    assert opt.result.micro_step == 1


def test_replaced_parameter_has_a_new_master() -> None:
    """Code that grows a model puts a new parameter into the group like this."""
    model, opt = make_pair()
    train_pair(model, opt)
    group = opt.param_groups[0]
    model[1].weight = nn.Parameter(model[1].weight.detach().clone())
    group["params"][2] = model[1].weight
    opt.add_param_group({"params": [nn.Parameter(torch.ones(1, dtype=torch.bfloat16))]})
    assert len(opt.master_weights) == 5
    before = model[1].weight.detach().clone()
    for _ in range(64):
        train_pair(model, opt)
    assert not torch.equal(model[1].weight, before)


def test_method_in_inner_hook_undoes_nothing() -> None:
    """During the inner post-hook the masters are ahead of the model. The model gets
    them after it.
    """
    (model, opt), (other, reference) = make_pair(), make_pair()
    opt.optimizer.nothing = lambda: None
    opt.optimizer.register_step_post_hook(lambda *_: opt.nothing())
    for m, o in ((model, opt), (other, reference)):
        train_pair(m, o, 8)
    assert all(
        torch.equal(opt.master_weights[index], master)
        for index, master in reference.master_weights.items()
    )
    assert all(
        torch.equal(p, q)
        for p, q in zip(model.parameters(), other.parameters(), strict=True)
    )


def test_model_cast_to_float32_trains_on() -> None:
    """Model and masters then have the same dtype, and the comparison of the two must
    write neither.
    """
    model, opt = make_pair(accumulate_dtype="float32")
    train_pair(model, opt)
    masters = [master.clone() for master in opt.master_weights.values()]
    model.float()
    for _ in range(4):
        opt.backward(sum((parameter * 0).sum() for parameter in model.parameters()))
        opt.step()
    for parameter, master in zip(model.parameters(), masters, strict=True):
        assert torch.equal(parameter, master.to(torch.bfloat16).float())
