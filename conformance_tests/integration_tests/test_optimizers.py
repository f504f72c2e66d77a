"""Every optimizer of torch, and of the packages of optimizers: as on the large batches,
or refused.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytest.importorskip("torch", reason="needs PyTorch")

import torch
from torch import Tensor, nn

import gradaccum
from conformance_tests.integration_tests.optimizer_runs import (
    PART,
    SUMS,
    WINDOW,
    Loop,
    Make,
    assert_equals_large_batches,
    furthest,
)

pytestmark = [
    pytest.mark.filterwarnings(line)
    for line in (
        (
            "ignore:Using backward.. with create_graph=True will create a reference"
            " cycle:UserWarning"
        ),
        "ignore:This overload of add.* is deprecated:UserWarning",
        "ignore:Converting a tensor with requires_grad=True to a scalar:UserWarning",
        "ignore:`torch.jit.script` is deprecated:DeprecationWarning",
    )
]
LOOP = Loop()
by_sum = pytest.mark.parametrize("options", SUMS, ids=str)


def plain(kind: Any, **options: Any) -> Make:
    return lambda model: kind(model.parameters(), **options)


sgd = plain(torch.optim.SGD, lr=0.1)


class Case(NamedTuple):
    make: Make
    loop: Loop = LOOP
    bound: float = 1e-11


Cases = dict[str, Case]


CANNOT = {
    "lbfgs": "evaluates the model again and again",
    "alig": "reads the loss of the closure",
    "bsam": "calls the closure a second time",
    "lomo": "updates within the backward pass",
    "adalomo": "updates within the backward pass",
    "distributedmuon": "needs a process group to be made",
    "demo": "needs einops and a process group",
}
"""Tests below say what each of them does; the last two cannot be made in one process.
"""


def matrices_apart(model: nn.Module) -> list[dict[str, Any]]:
    """Matrices for the optimizer itself, the rest for its AdamW."""
    return [
        {
            "params": [p for p in model.parameters() if (p.ndim == 2) == own],
            "use_muon": own,
        }
        for own in (True, False)
    ]


def of_torch(library: Any) -> Cases:
    """A fused kernel divides in float32 by a float32; the windows' divisors, 4 and 2,
    are such numbers. LBFGS evaluates the model again and again, and SparseAdam takes
    sparse gradients only: the framework's own tests have them.
    """
    made = {}
    for name, kind in vars(library).items():
        if not (inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer)):
            continue
        if name in ("Optimizer", "LBFGS", "SparseAdam"):
            continue
        variants = {"foreach", "fused"} & inspect.signature(kind).parameters.keys()
        for options in ({}, *({variant: True} for variant in sorted(variants))):
            make = plain(kind, lr=0.01, **options)
            made[f"{name} {options}"] = Case(make, Loop(bias=name != "Muon"))
    return made


def of_pytorch_optimizer(library: Any) -> Cases:
    options: dict[str, dict[str, Any]] = {
        "adashift": {"keep_num": 2},
        "sara": {"lr": 0.01, "threshold": 1.0},
        "ranger21": {"num_iterations": 6},
    }
    apart = ("adago", "adamuon", "muon", "muonclip", "normuon")
    given: dict[str, Callable[[nn.Module], Any]] = {
        **dict.fromkeys(apart, matrices_apart),
        "adammini": lambda model: model,
    }
    loops = {
        **dict.fromkeys(("adahessian", "sophiah"), Loop(graph=True)),
        "spectralsphere": Loop(bias=False),
        "fadam": Loop(dtype=torch.float32),
    }

    def case(name: str) -> Case:
        make = partial(library.load_optimizer(name), **options.get(name, {}))
        of_model = given.get(name, nn.Module.parameters)
        loop = loops.get(name, LOOP)
        bound = 1e-11 if loop.dtype == torch.float64 else 1e-5
        return Case(lambda model: make(of_model(model)), loop, bound)

    names = set(library.get_supported_optimizers()) - CANNOT.keys()
    lookahead = Case(lambda model: library.Lookahead(sgd(model), k=2))
    return {**{name: case(name) for name in sorted(names)}, "Lookahead": lookahead}


def of_torch_optimizer(library: Any) -> Cases:
    kinds = {name: getattr(library, name) for name in library.__all__ if name != "get"}
    kinds["Lookahead"] = lambda parameters: library.Lookahead(
        torch.optim.SGD(parameters, lr=0.1), k=2
    )
    return {
        name: Case(plain(kinds[name]), Loop(graph=name == "Adahessian"))
        for name in sorted(kinds)
    }


def of_lion(library: Any) -> Cases:
    return {"Lion": Case(plain(library.Lion, lr=0.01, weight_decay=0.1))}


def of_prodigy(library: Any) -> Cases:
    return {"Prodigy": Case(plain(library.Prodigy))}


def of_timm(library: Any) -> Cases:
    """Without bitsandbytes' and APEX's, which timm refuses to make without CUDA."""

    def case(name: str) -> Case:
        options = {"opt": name, "lr": 0.01, "weight_decay": 0.05}
        return Case(
            lambda model: library.create_optimizer_v2(model, **options),
            Loop(graph=name == "adahessian"),
        )

    ahead = [f"lookahead_{name}" for name in ("adamw", "lamb", "muon", "sgd")]
    return {
        name: case(name)
        for name in (*library.list_optimizers(), *ahead)
        if not name.startswith(("bnb", "fused"))
    }


def in_training(optimizer: Any) -> Any:
    optimizer.train()
    return optimizer


def of_schedulefree(library: Any) -> Cases:
    class Wrapper(library.ScheduleFreeWrapper, torch.optim.Optimizer):  # type: ignore[misc,name-defined]
        """Its own is no `torch.optim.Optimizer`; two lines make it one."""

    makers: dict[str, Make] = {
        "AdamWScheduleFree": plain(library.AdamWScheduleFree, warmup_steps=2),
        "SGDScheduleFree": plain(library.SGDScheduleFree, lr=0.1, foreach=True),
        "Wrapper": lambda model: Wrapper(sgd(model), momentum=0.9),
        **{
            name: plain(getattr(library, name), lr=0.01)
            for name in (
                "AdamWScheduleFreeReference",
                "AdamWScheduleFreePaper",
                "RAdamScheduleFree",
                "SGDScheduleFreeReference",
            )
        },
    }
    return {
        name: Case(lambda model, make=make: in_training(make(model)))
        for name, make in makers.items()
    }


LIBRARIES: dict[str, Callable[[Any], Cases]] = {
    "torch.optim": of_torch,
    "pytorch_optimizer": of_pytorch_optimizer,
    "torch_optimizer": of_torch_optimizer,
    "lion_pytorch": of_lion,
    "prodigyopt": of_prodigy,
    "timm.optim": of_timm,
    "schedulefree": of_schedulefree,
}
"""By package, what makes its cases of the imported package."""


def parameters() -> list[Any]:
    """Each case, by its package; one that is skipped for a package that is missing."""
    found = []
    for package, function in LIBRARIES.items():
        top = package.partition(".")[0]
        if find_spec(top) is None:
            skip = pytest.mark.skip(reason=f"needs {top}")
            found.append(pytest.param(None, id=package, marks=skip))
            continue
        made = function(import_module(package))
        found += [pytest.param(made[name], id=f"{package} {name}") for name in made]
    return found


@pytest.mark.parametrize("case", parameters())
def test_equals_large_batches(case: Case) -> None:
    # Kron compiles its small products, which takes a minute.
    with torch.compiler.set_stance("force_eager"):
        assert_equals_large_batches(*case)


def test_wrap_comes_last() -> None:
    """Lookahead around a wrapped optimizer counts micro-batches: it is another
    optimizer than the one that is wrapped around it, and a warning says so.
    """
    lookahead = partial(pytest.importorskip("pytorch_optimizer").Lookahead, k=2)
    right, wrong = LOOP.model(), LOOP.model()
    micro_batches(right, gradaccum.wrap(lookahead(sgd(right)), 4), range(0, 16, 2))
    with pytest.warns(gradaccum.GradAccumWarning, match="changed inside a window"):
        micro_batches(wrong, lookahead(gradaccum.wrap(sgd(wrong), 4)), range(0, 16, 2))
    assert furthest(wrong, right) > 1e-3


def closure_of(model: nn.Module) -> Callable[[], Tensor]:
    def closure() -> Tensor:
        loss = LOOP.loss(model, 0, WINDOW)
        loss.backward()
        return loss

    return closure


CLOSURE_WANTED: dict[str, Callable[[Any], Make]] = {
    "AliG": lambda library: plain(library.AliG, max_lr=0.1),
    "BSAM": lambda library: plain(library.BSAM, num_data=20),
    "SAM": lambda library: partial(SAMS["SAM"], library),
}


@pytest.mark.parametrize("name", CLOSURE_WANTED)
def test_closure_wanted_at_the_windows_end(name: str) -> None:
    """Their own error; the window stays as it is."""
    library, model = pytest.importorskip("pytorch_optimizer"), LOOP.model()
    opt = gradaccum.wrap(CLOSURE_WANTED[name](library)(model), steps=2)
    opt.step(closure_of(model))
    with pytest.raises(Exception, match="requires closure") as raised:
        opt.step(closure_of(model))
    assert any("An optimizer with two updates" in n for n in raised.value.__notes__)
    assert opt.result.micro_step == 2
    assert furthest(model, LOOP.model()) == 0


# Sharpness-aware minimization: two updates a batch, each of them a window of its own.


def of_sam(name: str, base: Any, **options: Any) -> Callable[[Any, nn.Module], Any]:
    return lambda library, model: getattr(library, name)(
        *([model] if name == "WSAM" else []),
        model.parameters(),
        base,
        **{"lr": 0.1, "rho": 0.1, **options},
    )


SAMS: dict[str, Callable[[Any, nn.Module], Any]] = {
    "SAM": of_sam("SAM", torch.optim.AdamW, rho=0.5, adaptive=True),
    "WSAM": of_sam("WSAM", torch.optim.SGD),
    "FriendlySAM": of_sam("FriendlySAM", torch.optim.SGD),
    "LookSAM": of_sam("LookSAM", torch.optim.SGD, k=2),
}


class Update(torch.optim.Optimizer):
    """One of the two updates, as the ``step`` of an optimizer that can be wrapped."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, method: Callable[[], object]
    ) -> None:
        super().__init__(
            [{"params": group["params"]} for group in optimizer.param_groups], {}
        )
        self.method = method

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.method()


@by_sum
@pytest.mark.parametrize("name", SAMS)
def test_window_for_each_update_equals_large_batches(
    name: str, options: dict[str, Any]
) -> None:
    """As RECIPES.md has it, An optimizer with two updates."""
    library = pytest.importorskip("pytorch_optimizer")
    bare, model = LOOP.model(), LOOP.model()
    opt = SAMS[name](library, bare)
    for _ in range(3):
        opt.zero_grad()
        if name != "WSAM":  # It calls the closure twice.
            closure_of(bare)()
        opt.step(closure_of(bare))
    sam = SAMS[name](library, model)
    wrapped = [
        gradaccum.wrap(Update(sam, method), steps=4, **options)
        for method in (sam.first_step, sam.second_step)
    ]
    for each in 3 * wrapped:
        micro_batches(model, each, range(0, WINDOW, PART))
        assert each.result.applied
    assert furthest(bare, LOOP.model()) > 1e-3
    assert furthest(model, bare) < 1e-11


def micro_batches(model: nn.Module, opt: Any, starts: range) -> None:
    for start in starts:
        opt.zero_grad()
        LOOP.loss(model, start, starts.step).backward()
        opt.step()


# bitsandbytes, whose optimizers have a state of 8 bits: the same bits as on the large
# batches, where float32 adds up exactly.


SIXTEENTHS = (
    torch.randint(-16, 17, (24, 64, 64), generator=torch.Generator().manual_seed(1))
    / 16
)
"""Sums and means of two, four and eight rows are exact, so that no rounding moves a
state into another of its 256 steps.
"""


def eight_bits(name: str) -> tuple[nn.Parameter, Any]:
    library = pytest.importorskip("bitsandbytes")
    parameter = nn.Parameter(torch.linspace(-1, 1, 4096).view(64, 64))
    momentum = {"momentum": 0.9} if name.startswith("SGD") else {}
    return parameter, getattr(library.optim, name)([parameter], lr=0.01, **momentum)


def train_rows(parameter: nn.Parameter, opt: Any, rows: Tensor, size: int) -> None:
    for part in rows.split(size):
        opt.zero_grad()
        (parameter * part.mean(dim=0)).sum().backward()
        opt.step()


@by_sum
@pytest.mark.parametrize("name", ["AdamW8bit", "AdEMAMix8bit", "Lion8bit", "SGD"])
def test_bitsandbytes_has_the_same_bits(
    name: str, options: dict[str, Any], tmp_path: Path
) -> None:
    bare, reference = eight_bits(name)
    train_rows(bare, reference, SIXTEENTHS, 8)
    assert not torch.equal(bare, eight_bits(name)[0])
    (parameter, inner), (resumed, other) = eight_bits(name), eight_bits(name)
    opt = gradaccum.wrap(inner, steps=4, **options)
    train_rows(parameter, opt, SIXTEENTHS[:12], 2)
    torch.save([parameter.detach(), opt.state_dict()], tmp_path / "state.pt")
    train_rows(parameter, opt, SIXTEENTHS[12:], 2)
    opt = gradaccum.wrap(other, steps=4, **options)
    weights, state = torch.load(tmp_path / "state.pt", weights_only=True)
    resumed.data.copy_(weights)
    opt.load_state_dict(state)
    train_rows(resumed, opt, SIXTEENTHS[12:], 2)
    assert torch.equal(parameter, bare)
    assert torch.equal(resumed, bare)
    kept = opt.state[resumed].values()
    dtypes = {getattr(value, "dtype", None) for value in kept}
    assert (torch.uint8 in dtypes) == name.endswith("8bit")


def of_timm_utils(model: nn.Module) -> tuple[nn.Module, Callable[[], object]]:
    average = pytest.importorskip("timm.utils").ModelEmaV3(model, decay=0.5)
    updates = iter(range(1, 10))
    return average.module, lambda: average.update(model, step=next(updates))


def of_torch_swa(model: nn.Module) -> tuple[nn.Module, Callable[[], object]]:
    average = torch.optim.swa_utils.AveragedModel(model)
    return average.module, lambda: average.update_parameters(model)


@pytest.mark.parametrize("kind", [of_timm_utils, of_torch_swa])
def test_average_once_per_update(kind: Any) -> None:
    averages = []
    for options in ({}, None):
        made: list[Any] = []

        def each(model: nn.Module, made: list[Any] = made) -> None:
            made.extend(kind(model) if not made else ())
            made[1]()

        LOOP.train(sgd, options, each)
        averages.append(made[0])
    assert furthest(*averages) < 1e-12


@by_sum
def test_schedulefree_resumes_in_mid_window(options: dict[str, Any]) -> None:
    """The averaged weights were put into the model before, and taken out."""
    library, runs = pytest.importorskip("schedulefree"), []
    for _ in range(2):
        model = LOOP.model()
        inner = library.AdamWScheduleFree(model.parameters(), lr=0.01, warmup_steps=2)
        runs.append((model, in_training(gradaccum.wrap(inner, steps=4, **options))))
    (model, opt), (resumed, other) = runs
    micro_batches(model, opt, range(0, 12, PART))
    opt.eval()
    opt.train()
    resumed.load_state_dict(model.state_dict())
    other.load_state_dict(copy.deepcopy(opt.state_dict()))
    for each in runs:
        micro_batches(*each, range(12, 16, PART))
    assert opt.result.optimizer_step == 2
    assert all(map(torch.equal, resumed.parameters(), model.parameters()))


SCHEDULERS: dict[str, dict[str, Any]] = {
    "CosineLRScheduler": {"t_initial": 10, "warmup_t": 2, "warmup_lr_init": 1e-3},
    "StepLRScheduler": {"decay_t": 2, "decay_rate": 0.5},
    "MultiStepLRScheduler": {"decay_t": [2, 4], "decay_rate": 0.5},
    "PolyLRScheduler": {"t_initial": 10, "lr_min": 1e-3},
    "TanhLRScheduler": {"t_initial": 10, "lr_min": 1e-3},
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedule_of_timm_moves_per_update(name: str) -> None:
    """The training script of timm counts the calls of ``step``; the gate hands on the
    number of updates, whatever the loop has counted.
    """
    make = getattr(pytest.importorskip("timm.scheduler"), name)
    model, rates = LOOP.model(), []
    inner = sgd(LOOP.model())
    opt: Any = gradaccum.wrap(sgd(model), steps=2)
    bare = make(inner, t_in_epochs=False, **SCHEDULERS[name])
    gated = gradaccum.wrap(make(opt, t_in_epochs=False, **SCHEDULERS[name]))
    for calls in range(1, 11):
        micro_batches(model, opt, range(0, 1, PART))
        gated.step_update(num_updates=calls)
        if opt.result.applied:
            bare.step_update(num_updates=opt.result.optimizer_step)
            rates.append(opt.param_groups[0]["lr"])
            assert rates[-1] == inner.param_groups[0]["lr"]
    assert len(set(rates)) > 1


def test_adaptive_clipping_of_timm() -> None:
    """Of the window's gradient, in the hook that the page names."""
    clip = partial(
        pytest.importorskip("timm.utils").dispatch_clip_grad, value=1e-3, mode="agc"
    )
    mine, bare = LOOP.model(), LOOP.model()
    opt = gradaccum.wrap(sgd(mine), steps=4)
    opt.register_step_pre_hook(lambda *_: clip(mine.parameters()))
    micro_batches(mine, opt, range(0, WINDOW, PART))
    LOOP.loss(bare, 0, WINDOW).backward()
    clip(bare.parameters())
    sgd(bare).step()
    assert furthest(mine, bare) < 1e-12
