"""Recomputation changes no bit of a gradient, a buffer or a random number."""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gradaccum
from conformance_tests.framework_tests.torch_recompute import (
    WAYS,
    Average,
    data,
    kept_bytes,
    make,
    recomputed,
    same,
    state,
    trained,
)
from gradaccum import ArgumentTypeError, ArgumentValueError, UsageError
from gradaccum_torch.large_batch import backward, coupled_backward
from gradaccum_torch.recomputation import function, recompute


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["float32", "float64", "bfloat16", "autocast"])
def test_same_bits(way: str, kind: str) -> None:
    """The input needs no gradient, and the first layer trains."""
    dtype = torch.float32 if kind == "autocast" else getattr(torch, kind)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=kind == "autocast"):
        model = recomputed(way, make(dtype))
        got, expected = trained(model), trained(make(dtype))
    assert same(got, expected)
    assert model[0].weight.grad is not None
    assert [
        each.num_batches_tracked.item()
        for each in model
        if isinstance(each, nn.BatchNorm1d)
    ] == [1, 1]


def test_dropout_is_drawn_anew_without_rng_state() -> None:
    assert not same(
        trained(recompute(make(), preserve_rng_state=False)), trained(make())
    )


def of_hidden(model: nn.Sequential) -> Callable[[Tensor], Tensor]:
    """Found by nothing but its call."""
    hidden = type("Hidden", (), {"model": model})
    return recompute(lambda x: hidden.model(x))


def of_method(model: nn.Sequential) -> Callable[[Tensor], Tensor]:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        @recompute
        def forward(self, x: Tensor) -> Tensor:
            return self.model(x)

    return Outer()


FUNCTIONS: dict[str, Callable[[nn.Sequential], Callable[[Tensor], Tensor]]] = {
    "method of a class": of_method,
    "bound method": lambda model: recompute(model.forward),
    "closure": lambda model: recompute(lambda x: model(x)),
    "partial": lambda model: recompute(
        functools.partial(lambda layers, x: layers(x), model)
    ),
    "argument": lambda model: functools.partial(
        recompute(lambda x, model: model(x)), model=model
    ),
    "hidden": of_hidden,
}


@pytest.mark.parametrize("way", FUNCTIONS)
def test_functions_same_bits(way: str) -> None:
    model = make()
    assert same(trained(model, FUNCTIONS[way](model)), trained(make()))


def test_function_of_statistics() -> None:
    """A change of these is not counted by torch, and the module is never called."""
    got, expected = nn.BatchNorm1d(8), nn.BatchNorm1d(8)

    def normalised(norm: nn.BatchNorm1d, x: Tensor) -> Tensor:
        return F.batch_norm(
            x,
            norm.running_mean,
            norm.running_var,
            norm.weight,
            norm.bias,
            training=True,
        )

    assert same(
        trained(got, recompute(lambda x: normalised(got, x))),
        trained(expected, functools.partial(normalised, expected)),
    )


by_change = pytest.mark.parametrize("inplace", [True, False])


def both_orders(
    call: Callable[[Tensor], Tensor], model: nn.Module, size: int
) -> list[Tensor]:
    """Two forward passes before the backward passes, one of which comes twice."""
    x = torch.linspace(0, 1, 2 * size).reshape(2, size).requires_grad_()
    first, second = call(x).sum(), call(2 * x).sum()
    for loss in (first, second, first):
        loss.backward(retain_graph=True)
    assert x.grad is not None
    return [x.grad, *model.buffers()]


@by_change
@pytest.mark.parametrize("size", [4, function.SMALL + 1])
def test_each_replay_finds_its_own_average(size: int, inplace: bool) -> None:
    got, expected = Average(size, inplace), Average(size, inplace)
    assert same(
        both_orders(recompute(got), got, size), both_orders(expected, expected, size)
    )


@by_change
@pytest.mark.parametrize("shared", ["module", "buffer"])
@pytest.mark.parametrize("way", ["known", "hidden"])
def test_average_used_twice(inplace: bool, shared: str, way: str) -> None:
    """By one module that is called twice, or by two modules; found beforehand, or as
    they are called.
    """

    def pair() -> nn.Sequential:
        average = Average(4, inplace)
        other = average if shared == "module" else Average(4, inplace)
        other.mean = average.mean
        return nn.Sequential(average, nn.Tanh(), other)

    got, expected = pair(), pair()
    part = recompute(got, segments=1) if way == "known" else of_hidden(got)
    assert same(both_orders(part, got, 4), both_orders(expected, expected, 4))


def test_written_large_buffer_without_version() -> None:
    class Written(Average):
        def forward(self, x: Tensor) -> Tensor:
            self.mean.data.add_(1)
            return torch.tanh(x - self.mean)

    got, expected = Written(function.SMALL + 1), Written(function.SMALL + 1)
    for model in (recompute(got), expected):
        model(torch.zeros(1, function.SMALL + 1, requires_grad=True)).sum().backward()
    assert torch.equal(got.mean, expected.mean)


def test_buffer_of_two_modules_stays_one() -> None:
    def twins() -> nn.Module:
        model = nn.Sequential(nn.BatchNorm1d(8), nn.BatchNorm1d(8), nn.Linear(8, 8))
        model[1].running_mean = model[0].running_mean
        return model

    torch.manual_seed(0)
    got = twins()
    expected = copy.deepcopy(got)
    assert same(trained(recompute(got, segments=1)), trained(expected))
    assert got[0].running_mean is got[1].running_mean


def test_retained_graph_and_second_order() -> None:
    def both(model: nn.Module) -> list[Tensor]:
        torch.manual_seed(1)
        loss = model(data()).square().sum()
        loss.backward(retain_graph=True)
        first = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        sum(each.square().sum() for each in first).backward()
        return state(model)

    assert same(both(recompute(make())), both(make()))


def test_mode_is_that_of_the_forward() -> None:
    """``eval()`` comes before ``backward()``."""

    def both(model: nn.Module) -> list[Tensor]:
        torch.manual_seed(1)
        loss = model(data()).sum()
        model.eval()
        loss.backward()
        assert not any(each.training for each in model.modules())
        return state(model)

    assert same(both(recompute(make())), both(make()))


# Refusals of recomputation: at the call, or before a second run that would differ from
# the first.


def test_changed_parameter_is_refused() -> None:
    """Also one whose value autograd alone would not need."""
    model = recompute(make())
    loss = model(data()).sum()
    with torch.no_grad():
        model[0].bias.add_(1)
    with pytest.raises(UsageError, match="'bias' of Linear"):
        loss.backward()
    assert [
        each.num_batches_tracked.item()
        for each in model
        if isinstance(each, nn.BatchNorm1d)
    ] == [1, 1]


def test_changed_arguments_are_refused() -> None:
    with pytest.raises(UsageError, match="inplace=False"):
        recompute(nn.ReLU(inplace=True))(2 * data().requires_grad_())
    for call in (lambda f, x, y: f(x, y=y), lambda f, x, y: f(x, [y])):
        y = data()
        loss = call(
            recompute(lambda x, y: (x * (y[0] if isinstance(y, list) else y)).sum()),
            data().requires_grad_(),
            y,
        )
        y.add_(1)
        with pytest.raises(RuntimeError, match="inplace operation"):
            loss.backward()


def test_lent_parameters_are_refused() -> None:
    """`torch.func.functional_call` lends them for the forward pass alone."""
    model = recompute(make())
    lent = {
        name: (2 * p.detach()).requires_grad_() for name, p in model.named_parameters()
    }
    loss = torch.func.functional_call(model, lent, data()).sum()
    with pytest.raises(
        UsageError, match="'weight' of Linear, which was written into or replaced"
    ):
        loss.backward()


REFUSED: dict[str, tuple[type[Exception], str, Callable[[nn.Sequential], Any]]] = {
    "no function": (ArgumentTypeError, "function: ", lambda _: recompute(3)),
    "too many": (
        ArgumentValueError,
        "segments: expected at most 12",
        lambda model: recompute(model, segments=13),
    ),
    "none": (
        ArgumentValueError,
        "segments: ",
        lambda model: recompute(model, segments=0),
    ),
    "no layers": (
        ArgumentValueError,
        "recompute: .*empty chain",
        lambda _: recompute(nn.Sequential()),
    ),
    "bool": (
        ArgumentTypeError,
        "segments: ",
        lambda model: recompute(model, segments=True),
    ),
    "no sequence": (
        ArgumentTypeError,
        "segments: .*submodules=",
        lambda model: recompute(model[0], segments=1),
    ),
    "of a function": (
        ArgumentValueError,
        "segments, submodules: ",
        lambda _: recompute(len, segments=2),
    ),
    "both": (
        ArgumentValueError,
        "segments, submodules: ",
        lambda model: recompute(model, segments=2, submodules=["0"]),
    ),
    "unknown": (
        ArgumentValueError,
        r"submodules\[1\]: .*got 'head'",
        lambda model: recompute(model, submodules=["0", "head"]),
    ),
    "foreign": (
        ArgumentValueError,
        r"submodules\[0\]: expected a submodule",
        lambda model: recompute(model, submodules=[nn.Linear(1, 1)]),
    ),
    "no module": (
        ArgumentValueError,
        r"submodules\[1\]: ",
        lambda model: recompute(model, submodules=["0", 1]),
    ),
    "a name": (
        ArgumentValueError,
        r"submodules\[0\]: .*got 'layers'",
        lambda model: recompute(model, submodules="layers"),
    ),
    "empty": (
        ArgumentValueError,
        "submodules: ",
        lambda model: recompute(model, submodules=[]),
    ),
    "container": (
        ArgumentTypeError,
        "function: .*container",
        lambda model: recompute(nn.ModuleList(model)),
    ),
    "twice": (
        UsageError,
        "recomputed yet",
        lambda model: recompute(recompute(copy.deepcopy(model))),
    ),
    "function twice": (
        UsageError,
        "recomputed yet",
        lambda _: recompute(recompute(abs)),
    ),
    "parallel": (
        ArgumentTypeError,
        "DistributedDataParallel",
        lambda _: recompute(object.__new__(Parallel)),
    ),
}


class Parallel(nn.parallel.DistributedDataParallel):
    """Of no process group."""

    __init__ = nn.Module.__init__


@pytest.mark.parametrize("what", REFUSED)
def test_refused(what: str) -> None:
    """And nothing is replaced."""
    kind, words, call = REFUSED[what]
    model = make()
    with pytest.raises(kind, match=words):
        call(model)
    assert all("forward" not in each.__dict__ for each in model.modules())
    assert same(trained(model), trained(make()))


# A recomputed module keeps less, and is otherwise what it was: copied, hooked,
# compiled, nested, under a wrapped optimizer.


def test_nested_parts() -> None:
    inner = make()
    recompute(inner, submodules=["0", "1", "2", "4"])
    outer = recompute(nn.Sequential(inner), segments=1)
    assert same(trained(outer), trained(make()))


def test_micro_batches_of_a_wrapped_optimizer() -> None:
    """Float32 sums of bfloat16 gradients under a loss scale, in windows of three."""

    def parameters(model: nn.Module) -> list[Tensor]:
        opt = gradaccum.wrap(
            torch.optim.SGD(model.parameters(), lr=0.1),
            steps=3,
            loss_scale=1024.0,
            clip_norm=1.0,
        )
        torch.manual_seed(1)
        for index in range(6):
            opt.backward(
                model(data(torch.bfloat16) + index).float().square().mean(),
                weight=index + 1,
            )
            opt.step()
            opt.zero_grad()
        assert opt.result.optimizer_step == 2
        return [p.detach() for p in model.parameters()] + list(model.buffers())

    assert same(
        parameters(recompute(make(torch.bfloat16))), parameters(make(torch.bfloat16))
    )


def test_memory_falls() -> None:
    """Sixteen times (linear, GELU): the inputs of 6 parts in place of 32
    activations.
    """

    def deep() -> nn.Sequential:
        return nn.Sequential(
            *[layer for _ in range(16) for layer in (nn.Linear(8, 8), nn.GELU())]
        )

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


@pytest.mark.parametrize(
    "how", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))]
)
@pytest.mark.parametrize("way", ["default", "by name"])
def test_copies_recompute_themselves(
    how: Callable[[nn.Module], nn.Module], way: str
) -> None:
    model = recomputed(way, make())
    twin, before = how(model), state(model)
    assert same(trained(twin), trained(make()))
    assert same(state(model)[:-1], before[:-1])
    assert kept_bytes(twin) == kept_bytes(model) < kept_bytes(make())


def test_own_forward_of_an_instance_is_kept() -> None:
    model, other = make(), make()
    for each in (model[0], other[0]):
        each.forward = functools.partial(
            nn.Bilinear(8, 8, 8).requires_grad_(False).forward, torch.ones(5, 8)
        )
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
    assert inspect.signature(recompute(copy.deepcopy)) == inspect.signature(
        copy.deepcopy
    )


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
            loss = coupled_backward(
                model, lambda out: torch.logsumexp(out, 0).sum(), x, steps=3
            )
        else:
            loss = backward(lambda x: model(x).square().mean(), x, steps=3)
        return [loss, *state(model)]

    assert same(split(recompute(make())), split(make()))


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("fullgraph", [False, True])
def test_compiled(fullgraph: bool) -> None:
    """Buffers move once; where the compiler would move them twice, the parts run
    outside of the graph, or one graph is refused.
    """
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
    model, expected = (
        nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh()) for _ in range(2)
    )
    expected.load_state_dict(model.state_dict())
    compiled = torch.compile(
        recompute(lambda x: model(x)), backend="aot_eager", fullgraph=True
    )
    assert same(trained(model, compiled)[:-1], trained(expected)[:-1])
