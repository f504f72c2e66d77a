"""A recomputed module keeps less, and is otherwise what it was: copied, hooked, compiled, nested, under a wrapped optimizer."""

from __future__ import annotations

import copy
import doctest
import functools
import inspect
import pickle
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import gradaccum
from conformance_tests.framework_tests.torch_recompute import data, kept_bytes, make, recomputed, same, state, trained
from gradaccum_torch.large_batch import backward, coupled_backward
from gradaccum_torch.recomputation import function, recompute


def test_nested_parts() -> None:
    inner = make()
    recompute(inner, submodules=["0", "1", "2", "4"])
    outer = recompute(nn.Sequential(inner), segments=1)
    assert same(trained(outer), trained(make()))


def test_micro_batches_of_a_wrapped_optimizer() -> None:
    """Float32 sums of bfloat16 gradients under a loss scale, in windows of three."""

    def parameters(model: nn.Module) -> list[Tensor]:
        opt = gradaccum.wrap(torch.optim.SGD(model.parameters(), lr=0.1), steps=3, loss_scale=1024.0, clip_norm=1.0)
        torch.manual_seed(1)
        for index in range(6):
            opt.backward(model(data(torch.bfloat16) + index).float().square().mean(), weight=index + 1)
            opt.step()
            opt.zero_grad()
        assert opt.result.optimizer_step == 2
        return [p.detach() for p in model.parameters()] + list(model.buffers())

    assert same(parameters(recompute(make(torch.bfloat16))), parameters(make(torch.bfloat16)))


def test_memory_falls() -> None:
    """Sixteen times (linear, GELU): the inputs of 6 parts in place of 32 activations."""

    def deep() -> nn.Sequential:
        return nn.Sequential(*[layer for _ in range(16) for layer in (nn.Linear(8, 8), nn.GELU())])

    one = 64 * 8 * 4
    assert kept_bytes(deep()) == 32 * one
    assert kept_bytes(recompute(deep())) == 6 * one
    assert kept_bytes(recompute(deep(), segments=2)) == 2 * one
    assert kept_bytes(recompute(deep(), segments=1)) == one


def test_no_cost_without_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    model, expected = recompute(make()).eval(), make().eval()
    monkeypatch.setattr(function, "checkpoint", None)
    monkeypatch.setattr(function.Surroundings, "__init__", None)
    with torch.no_grad():
        torch.manual_seed(0)
        got = model(data())
        torch.manual_seed(0)
        assert torch.equal(got, expected(data()))


@pytest.mark.parametrize("how", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
@pytest.mark.parametrize("way", ["default", "by name"])
def test_copies_recompute_themselves(how: Callable[[nn.Module], nn.Module], way: str) -> None:
    model = recomputed(way, make())
    twin, before = how(model), state(model)
    assert same(trained(twin), trained(make()))
    assert same(state(model)[:-1], before[:-1])
    assert kept_bytes(twin) == kept_bytes(model) < kept_bytes(make())


def test_own_forward_of_an_instance_is_kept() -> None:
    model, other = make(), make()
    for each in (model[0], other[0]):
        each.forward = functools.partial(nn.Bilinear(8, 8, 8).requires_grad_(False).forward, torch.ones(5, 8))
        torch.manual_seed(0)
        each.forward.func.__self__.reset_parameters()
    assert same(trained(recompute(model, submodules=["0"])), trained(other))


def test_module_stays_as_it_was() -> None:
    model, other = make(), make()
    assert recompute(model, submodules=["0", "4"]) is model
    assert list(model.state_dict()) == list(other.state_dict())
    assert list(map(type, model)) == list(map(type, other))
    model.load_state_dict(other.state_dict())
    assert inspect.signature(model[0].forward) == inspect.signature(other[0].forward)
    assert inspect.signature(recompute(copy.deepcopy)) == inspect.signature(copy.deepcopy)


def test_example() -> None:
    result = doctest.testmod(sys.modules["gradaccum_torch.recomputation.module"])
    assert (result.failed, result.attempted) == (0, 4)


def test_hooks() -> None:
    """Of the part itself once, inside of it in both runs."""
    calls: list[str] = []
    model = make()
    model.register_forward_hook(lambda *_: calls.append("own"))
    model[3].register_forward_hook(lambda *_: calls.append("inside"))
    trained(recompute(model, segments=1))
    assert calls == ["inside", "own", "inside"]


@pytest.mark.parametrize("coupled", [False, True])
def test_large_batch_in_one_call(coupled: bool) -> None:
    def split(model: nn.Module) -> list[Tensor]:
        torch.manual_seed(1)
        x = torch.cat([data(), -data()])
        if coupled:
            loss = coupled_backward(model, lambda out: torch.logsumexp(out, 0).sum(), x, steps=3)
        else:
            loss = backward(lambda x: model(x).square().mean(), x, steps=3)
        return [loss, *state(model)]

    assert same(split(recompute(make())), split(make()))


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("fullgraph", [False, True])
def test_compiled(fullgraph: bool) -> None:
    """Buffers move once; where the compiler would move them twice, the parts run outside of the graph, or one graph is refused."""
    torch._dynamo.reset()
    model, expected = make(), make()
    model[4] = expected[4] = nn.Identity()
    compiled = torch.compile(recompute(model), backend="aot_eager", fullgraph=fullgraph)
    if fullgraph and function.MOVES_TWICE:
        with pytest.raises(torch._dynamo.exc.Unsupported):
            compiled(data())
    else:
        assert same(trained(model, compiled)[:-1], trained(expected)[:-1])


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_compiled_function() -> None:
    """In one graph: the search for modules is not a part of it."""
    if function.MOVES_TWICE:
        pytest.skip("before torch 2.11 a recomputed part is no part of the graph")
    torch._dynamo.reset()
    model, expected = (nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh()) for _ in range(2))
    expected.load_state_dict(model.state_dict())
    compiled = torch.compile(recompute(lambda x: model(x)), backend="aot_eager", fullgraph=True)
    assert same(trained(model, compiled)[:-1], trained(expected)[:-1])
