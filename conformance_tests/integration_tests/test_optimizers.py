"""Every optimizer of torch, and of the packages of optimizers: as on the large batches,
or refused.
"""

from __future__ import annotations

import copy
import inspect
import random
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from torch import nn

import gradaccum

from .regression import X, Y, distance, make_net, mean_square

pytestmark = [
    pytest.mark.filterwarnings(line)
    for line in (
        "ignore:Using backward.. with create_graph=True:UserWarning",
        "ignore:This overload of add.* is deprecated:UserWarning",
        "ignore:Converting a tensor with requires_grad=True to a scalar:UserWarning",
        "ignore:`torch.jit.script` is deprecated:DeprecationWarning",
    )
]
SUMS = [{}, {"separate_sums": True}]
by_sum = pytest.mark.parametrize("options", SUMS, ids=str)
WINDOW = 8
"""Rows of a window, in four micro-batches of two. An epoch has 20 rows: two windows,
and one of two micro-batches.
"""
Make = Callable[[nn.Module], Any]


class Case(NamedTuple):
    """An optimizer, and what it asks of the loop."""

    make: Make
    graph: bool = False
    """It differentiates ``.grad``, by ``backward(create_graph=True)``."""
    bias: bool = True
    """False: it takes matrices only."""
    dtype: torch.dtype = torch.float64
    rows: int = WINDOW
    """The rows of a backward pass of the bare optimizer. With 2 rows the sums have the
    same bits as the wrapper's.
    """


def of(kind: Any, **options: Any) -> Make:
    return lambda net: kind(net.parameters(), **options)


sgd = of(torch.optim.SGD, lr=0.1)


def train(case: Case, options: dict[str, Any] | None = None) -> nn.Module:
    """Two epochs of the bare optimizer on the large batches; with `options`, the
    options of the wrapper, on their micro-batches.
    """
    net = make_net(case.bias).to(case.dtype)
    opt = case.make(net)
    rows = WINDOW
    if options is not None:
        opt = gradaccum.wrap(opt, steps=4, **options)
        rows = 2
    # Some optimizers draw random directions, some draw the updates at which they renew
    # what they keep.
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    for _ in range(2):
        for x, y in zip(X[:20].split(rows), Y[:20].split(rows), strict=True):
            opt.zero_grad()
            passes = list(zip(x.split(case.rows), y.split(case.rows), strict=True))
            for some_x, some_y in passes:
                loss = mean_square(net, some_x.to(case.dtype), some_y.to(case.dtype))
                loss.backward(create_graph=case.graph)
            for parameter in net.parameters() if len(passes) > 1 else ():
                parameter.grad /= len(passes)
            opt.step()
        if options is not None:
            opt.flush()
    if options is not None:
        assert opt.result.optimizer_step == 6
    return net


def of_torch(library: Any) -> Iterator[tuple[str, Case]]:
    """LBFGS evaluates the model again and again, and SparseAdam takes sparse gradients
    only: the framework's own tests have them.
    """
    for name, kind in vars(library).items():
        if name in ("Optimizer", "LBFGS", "SparseAdam") or not inspect.isclass(kind):
            continue
        if issubclass(kind, torch.optim.Optimizer):
            variants = {"foreach", "fused"} & inspect.signature(kind).parameters.keys()
            for options in ({}, *({variant: True} for variant in sorted(variants))):
                make = of(kind, lr=0.01, **options)
                yield f"{name} {options}", Case(make, bias=name != "Muon")


UNFIT = {
    "lbfgs": "evaluates the model again and again",
    "alig": "reads the loss of the closure, and raises without one",
    "bsam": "calls the closure a second time, and raises without one",
    "lomo": "updates within the backward pass",
    "adalomo": "updates within the backward pass",
    "distributedmuon": "needs a process group to be made",
    "demo": "needs einops and a process group",
}
OPTIONS: dict[str, dict[str, Any]] = {
    "adashift": {"keep_num": 2},
    "sara": {"lr": 0.01, "threshold": 1.0},
    "ranger21": {"num_iterations": 6},
}
OF_MATRICES = ("adago", "adamuon", "muon", "muonclip", "normuon")


def matrices_apart(net: nn.Module) -> list[dict[str, Any]]:
    """Matrices for the optimizer itself, the rest for its AdamW."""
    matrices = [p for p in net.parameters() if p.ndim == 2]
    vectors = [p for p in net.parameters() if p.ndim < 2]
    return [
        {"params": matrices, "use_muon": True},
        {"params": vectors, "use_muon": False},
    ]


def lookahead(library: Any) -> tuple[str, Case]:
    return "Lookahead", Case(lambda net: library.Lookahead(sgd(net), k=2))


def of_pytorch_optimizer(library: Any) -> Iterator[tuple[str, Case]]:
    for name in sorted(set(library.get_supported_optimizers()) - UNFIT.keys()):
        kind = partial(library.load_optimizer(name), **OPTIONS.get(name, {}))
        make = of(kind)
        if name in OF_MATRICES:
            make = lambda net, kind=kind: kind(matrices_apart(net))  # noqa: E731
        if name == "adammini":
            make = kind
        yield (
            name,
            Case(
                make,
                graph=name in ("adahessian", "sophiah"),
                bias=name != "spectralsphere",
                dtype=torch.float32 if name == "fadam" else torch.float64,
                # SOAP's eigenvectors of a singular matrix depend on the last bit.
                rows=2 if name == "soap" else WINDOW,
            ),
        )
    yield lookahead(library)


def of_torch_optimizer(library: Any) -> Iterator[tuple[str, Case]]:
    yield lookahead(library)
    for name in sorted(set(library.__all__) - {"get", "Lookahead"}):
        yield name, Case(of(getattr(library, name)), graph=name == "Adahessian")


def of_timm(library: Any) -> Iterator[tuple[str, Case]]:
    """Without bitsandbytes' and APEX's, which timm refuses to make without CUDA."""
    ahead = [f"lookahead_{name}" for name in ("adamw", "lamb", "muon", "sgd")]
    for name in (*library.list_optimizers(), *ahead):
        if not name.startswith(("bnb", "fused")):
            options = {"opt": name, "lr": 0.01, "weight_decay": 0.05}
            make = partial(library.create_optimizer_v2, **options)
            yield name, Case(make, graph=name == "adahessian")


def in_training(optimizer: Any) -> Any:
    optimizer.train()
    return optimizer


def of_schedulefree(library: Any) -> Iterator[tuple[str, Case]]:
    """The page's own program has the wrapper."""
    for name in (
        "AdamWScheduleFree",
        "AdamWScheduleFreePaper",
        "AdamWScheduleFreeReference",
        "RAdamScheduleFree",
        "SGDScheduleFree",
        "SGDScheduleFreeReference",
    ):
        make = of(getattr(library, name), lr=0.01)
        yield name, Case(lambda net, make=make: in_training(make(net)))


LIBRARIES = {
    "torch.optim": of_torch,
    "pytorch_optimizer": of_pytorch_optimizer,
    "torch_optimizer": of_torch_optimizer,
    "lion_pytorch": lambda library: [("Lion", Case(of(library.Lion, lr=0.01)))],
    "prodigyopt": lambda library: [("Prodigy", Case(of(library.Prodigy)))],
    "timm.optim": of_timm,
    "schedulefree": of_schedulefree,
}


def cases() -> Iterator[Any]:
    """Each case, by its package; a skipped one for a package that is missing."""
    for package, cases_of in LIBRARIES.items():
        if find_spec(package.partition(".")[0]) is None:
            skip = pytest.mark.skip(reason=f"needs {package}")
            yield pytest.param(None, id=package, marks=skip)
        else:
            for name, case in cases_of(import_module(package)):
                yield pytest.param(case, id=f"{package} {name}")


@pytest.mark.parametrize("case", list(cases()))
def test_equals_large_batches(case: Case) -> None:
    """With the sum in ``.grad`` and apart from it. A gradient with a graph raises: the
    window's has none.
    """
    # Kron compiles its small products, which takes a minute.
    with torch.compiler.set_stance("force_eager"):
        wanted = train(case)
        start = make_net(case.bias).to(case.dtype)
        assert distance(wanted, start) > 1e-6, "the bare optimizer trains nothing"
        for options in SUMS:
            if case.graph:
                words = "separate_sums: .*gradients without a graph|grad_fn"
                errors = (gradaccum.UsageError, RuntimeError)
                with pytest.raises(errors, match=words):
                    train(case, options)
            else:
                bound = 1e-11 if case.dtype == torch.float64 else 1e-5
                assert distance(train(case, options), wanted) < bound, options


def step_on(net: nn.Module, opt: Any, rows: range) -> None:
    for start in rows:
        opt.zero_grad()
        end = start + rows.step
        mean_square(net, X[start:end], Y[start:end]).backward()
        opt.step()


# bitsandbytes, whose optimizers have a state of 8 bits. The rows are sixteenths, whose
# sums and means are exact in float32, so that no rounding moves a state into another of
# its 256 steps.


@by_sum
@pytest.mark.parametrize("name", ["AdamW8bit", "AdEMAMix8bit", "Lion8bit", "SGD"])
def test_bitsandbytes_has_the_same_bits(name: str, options: dict[str, Any]) -> None:
    """As on the large batches, also after a checkpoint in mid-window."""
    kind = getattr(pytest.importorskip("bitsandbytes").optim, name)
    settings = {"momentum": 0.9} if name == "SGD" else {}
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(-16, 17, (24, 64, 64), generator=generator) / 16
    start = torch.linspace(-1, 1, 4096).view(64, 64)

    def run(parameter, opt, rows):
        for part in rows:
            opt.zero_grad()
            (parameter * part).sum().backward()
            opt.step()

    bare = nn.Parameter(start.clone())
    parameter = nn.Parameter(start.clone())
    large_batches = rows.unflatten(0, (3, 8)).mean(dim=1)
    run(bare, kind([bare], lr=0.01, **settings), large_batches)
    assert not torch.equal(bare, start)
    opt = gradaccum.wrap(kind([parameter], lr=0.01, **settings), steps=4, **options)
    micro_batches = rows.unflatten(0, (12, 2)).mean(dim=1)
    run(parameter, opt, micro_batches[:6])
    opt.load_state_dict(copy.deepcopy(opt.state_dict()))
    run(parameter, opt, micro_batches[6:])
    assert torch.equal(parameter, bare)
    dtypes = [getattr(value, "dtype", None) for value in opt.state[parameter].values()]
    assert (torch.uint8 in dtypes) == name.endswith("8bit")


@by_sum
def test_schedulefree_resumes_in_mid_window(options: dict[str, Any]) -> None:
    """The averaged weights were put into the model before, and taken out."""
    kind = pytest.importorskip("schedulefree").AdamWScheduleFree

    def make():
        net = make_net()
        inner = kind(net.parameters(), lr=0.01, warmup_steps=2)
        return net, in_training(gradaccum.wrap(inner, steps=4, **options))

    net, opt = make()
    step_on(net, opt, range(0, 16, 2))
    resumed, resumed_opt = make()
    step_on(resumed, resumed_opt, range(0, 12, 2))
    resumed_opt.eval()
    resumed_opt.train()
    resumed_opt.load_state_dict(copy.deepcopy(resumed_opt.state_dict()))
    step_on(resumed, resumed_opt, range(12, 16, 2))
    assert opt.result.optimizer_step == 2
    assert distance(resumed, net) == 0


def test_adaptive_clipping_of_timm() -> None:
    """Of the window's gradient, in the hook that the page names."""
    dispatch = pytest.importorskip("timm.utils").dispatch_clip_grad
    clip = partial(dispatch, value=1e-3, mode="agc")
    net = make_net()
    bare = make_net()
    opt = gradaccum.wrap(sgd(net), steps=4)
    opt.register_step_pre_hook(lambda *_: clip(net.parameters()))
    step_on(net, opt, range(0, WINDOW, 2))
    mean_square(bare, X[:WINDOW], Y[:WINDOW]).backward()
    clip(bare.parameters())
    sgd(bare).step()
    assert distance(net, bare) < 1e-12
