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

from .torch_model import same, values

STEP = 2.0**-13
NO_DECAY: dict[str, Any] = {"lr": STEP, "weight_decay": 0.0}
INNER: dict[str, Callable[[Any], Any]] = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=STEP),
    "adamw_fused": lambda ps: torch.optim.AdamW(ps, **NO_DECAY, fused=True),
    "adamw_foreach": lambda ps: torch.optim.AdamW(ps, **NO_DECAY, foreach=True),
}


def make(
    dtype: torch.dtype = torch.bfloat16,
    inner: Callable[[Any], Any] = INNER["sgd"],
    **options: Any,
) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 4)).to(dtype)
    options = {"steps": 2, "master_weights": True, **options}
    return model, gradaccum.wrap(inner(model.parameters()), **options)


def train(model: nn.Module, opt: Any, micro_batches: int = 2, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    dtype = next(model.parameters()).dtype
    for _ in range(micro_batches):
        x = torch.randn(4, 8, generator=generator).to(dtype)
        opt.backward(model(x).float().square().mean())
        opt.step()
        opt.zero_grad()


def masters_of(opt: Any) -> list[Tensor]:
    return list(opt.master_weights.values())


def all_equal(some: list[Tensor], others: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("inner", INNER)
def test_update_equals_float32_optimizer(dtype: torch.dtype, inner: str) -> None:
    """A float32 optimizer with the same gradients makes the same masters, bit for
    bit.
    """
    model, opt = make(dtype, INNER[inner])
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
    assert all_equal(masters_of(opt), twins)
    assert same(model, [twin.to(dtype) for twin in twins])
    assert {
        value.dtype
        for state in opt.state.values()
        for value in state.values()
        if isinstance(value, Tensor)
    } <= {torch.float32}


def test_bare_half_state_becomes_float32() -> None:
    model = nn.Linear(4, 2).to(torch.bfloat16)
    bare = torch.optim.SGD(model.parameters(), lr=STEP, momentum=0.9)
    model(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
    bare.step()
    bare.zero_grad()
    momenta = [bare.state[p]["momentum_buffer"].float() for p in model.parameters()]
    opt: Any = gradaccum.wrap(bare, steps=1, master_weights=True)
    widened = [opt.state[p]["momentum_buffer"] for p in model.parameters()]
    assert all_equal(widened, momenta)


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
        make(torch.float16, INNER["adamw_fused"]) for _ in range(2)
    )
    train(model, opt)
    train(other, reference)
    inner = opt.optimizer
    del opt
    with pytest.raises(gradaccum.ArgumentValueError, match="master_weights=True"):
        gradaccum.wrap(inner, steps=2)
    again = gradaccum.wrap(inner, steps=2, master_weights=True)
    train(model, again, seed=1)
    train(other, reference, seed=1)
    assert same(model, other)
    assert all_equal(masters_of(again), masters_of(reference))


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
    model, opt = make(inner=lambda ps: torch.optim.SGD(ps, lr=0.0))
    train(model, opt)
    before = values(model)
    write(
        list(model.parameters()) if reach == "model" else opt.param_groups[0]["params"]
    )
    train(model, opt)
    assert same(model, [old * 0.5 for old in before])


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


def test_masters_show_only_in_a_step() -> None:
    """Outside a step, groups and state show the model's parameters."""
    model, opt = make(inner=lambda ps: torch.optim.SGD(ps, lr=STEP, momentum=0.9))
    seen: list[Any] = []
    opt.register_step_pre_hook(lambda *_: seen.extend(opt.param_groups[0]["params"]))
    train(model, opt)
    parameters = list(map(id, model.parameters()))
    assert list(map(id, seen)) == list(map(id, masters_of(opt)))
    assert list(map(id, opt.param_groups[0]["params"])) == parameters
    assert set(map(id, opt.state)) == set(parameters)
    assert {each["momentum_buffer"].dtype for each in opt.state.values()} == {
        torch.float32
    }
    assert opt.optimizer.state_dict()["state"].keys() == {0, 1, 2}


class Averaging(torch.optim.SGD):
    """Switches between its weights and their average, as schedulefree's optimizers do,
    through ``.data`` or not.
    """

    through_data = False

    def eval(self) -> None:
        self._switch(0.5)

    def train(self) -> None:
        self._switch(2.0)

    @torch.no_grad()
    def _switch(self, factor: float) -> None:
        for parameter in self.param_groups[0]["params"]:
            (parameter.data if self.through_data else parameter).mul_(factor)


@pytest.mark.parametrize("through_data", [False, True])
def test_switched_weights_reach_the_model(
    through_data: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No bit of the masters is lost."""
    monkeypatch.setattr(Averaging, "through_data", through_data)
    model, opt = make(inner=lambda ps: Averaging(ps, lr=STEP))
    train(model, opt, 3)
    weights = values(model)
    masters = [master.clone() for master in masters_of(opt)]
    opt.eval()
    assert same(model, [weight * 0.5 for weight in weights])
    opt.train()
    assert same(model, weights)
    assert all_equal(masters_of(opt), masters)
    assert opt.result.micro_step == 1


def test_idle_method_writes_nothing() -> None:
    """Autograd would refuse the backward pass of a graph whose parameters were
    overwritten.
    """
    model, opt = make()
    loss = model(torch.ones(2, 8, dtype=torch.bfloat16)).float().sum()
    opt.optimizer.prefetch = lambda: None
    opt.prefetch()
    opt.backward(loss)
    opt.step()
    assert opt.result.micro_step == 1


def test_replaced_parameter_has_a_new_master() -> None:
    """Code that grows a model puts a new parameter into the group like this."""
    model, opt = make()
    train(model, opt)
    model[1].weight = nn.Parameter(model[1].weight.detach().clone())
    opt.param_groups[0]["params"][1] = model[1].weight
    opt.add_param_group({"params": [nn.Parameter(torch.ones(1, dtype=torch.bfloat16))]})
    assert len(opt.master_weights) == 4
    before = model[1].weight.detach().clone()
    train(model, opt, 128)
    assert not torch.equal(model[1].weight, before)


def test_method_in_inner_hook_undoes_nothing() -> None:
    """During the inner post-hook the masters are ahead of the model. The model gets
    them after it.
    """
    (model, opt), (other, reference) = make(), make()
    opt.optimizer.nothing = lambda: None
    opt.optimizer.register_step_post_hook(lambda *_: opt.nothing())
    train(model, opt, 8)
    train(other, reference, 8)
    assert all_equal(masters_of(opt), masters_of(reference))
    assert same(model, other)


def test_model_cast_to_float32_trains_on() -> None:
    """Model and masters then have the same dtype, and the comparison of the two must
    write neither.
    """
    model, opt = make(accumulate_dtype="float32")
    train(model, opt)
    masters = [master.clone() for master in masters_of(opt)]
    model.float()
    for _ in range(4):
        opt.backward(sum((parameter * 0).sum() for parameter in model.parameters()))
        opt.step()
    assert same(model, [master.to(torch.bfloat16).float() for master in masters])
