"""Every optimizer of torch, and of the packages of optimizers: as on the large batches,
or refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
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
    ROWS,
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


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


class Case(NamedTuple):
    make: Make
    loop: Loop = LOOP
    bound: float = 1e-11


Cases = dict[str, Case]
LIBRARIES: dict[str, Callable[[Any], Cases]] = {}
"""By package, what makes its cases of the imported package."""


def cases_of(package: str) -> Callable[[Any], Any]:
    def register(function: Callable[[Any], Cases]) -> Callable[[Any], Cases]:
        LIBRARIES[package] = function
        return function

    return register


@cases_of("torch.optim")
def of_torch(library: Any) -> Cases:
    """A fused kernel divides in float32 by a float32; the windows' divisors, 4 and 2,
    are such numbers. LBFGS evaluates the model again and again, and SparseAdam takes
    sparse gradients only: the framework's own tests have them.
    """
    kinds = {
        name: kind
        for name, kind in vars(library).items()
        if inspect.isclass(kind)
        and issubclass(kind, torch.optim.Optimizer)
        and name not in ("Optimizer", "LBFGS", "SparseAdam")
    }
    made = {}
    for name, kind in kinds.items():
        variants = {"foreach", "fused"} & inspect.signature(kind).parameters.keys()
        for options in ({}, *({variant: True} for variant in sorted(variants))):
            made[f"{name} {options}"] = Case(
                lambda model, kind=kind, options=options: kind(
                    model.parameters(), lr=0.01, **options
                ),
                Loop(bias=name != "Muon"),
            )
    assert len(made) > 25
    return made


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


@cases_of("pytorch_optimizer")
def of_pytorch_optimizer(library: Any) -> Cases:
    options: dict[str, dict[str, Any]] = {
        "adashift": {"keep_num": 2},
        "sara": {"lr": 0.01, "threshold": 1.0},
        "ranger21": {"num_iterations": 6},
    }
    given: dict[str, Callable[[nn.Module], Any]] = {
        **dict.fromkeys(
            ("adago", "adamuon", "muon", "muonclip", "normuon"), matrices_apart
        ),
        "adammini": lambda model: model,
    }
    loops = {
        **dict.fromkeys(("adahessian", "sophiah"), Loop(graph=True)),
        "spectralsphere": Loop(bias=False),
        "fadam": Loop(dtype=torch.float32),
    }

    def case(name: str) -> Case:
        kind = library.load_optimizer(name)
        of_model = given.get(name, nn.Module.parameters)
        loop = loops.get(name, LOOP)
        return Case(
            lambda model: kind(of_model(model), **options.get(name, {})),
            loop,
            1e-11 if loop.dtype == torch.float64 else 1e-5,
        )

    names = set(library.get_supported_optimizers()) - CANNOT.keys()
    lookahead = Case(lambda model: library.Lookahead(sgd(model), k=2))
    return {**{name: case(name) for name in sorted(names)}, "Lookahead": lookahead}


@cases_of("torch_optimizer")
def of_torch_optimizer(library: Any) -> Cases:
    names = set(library.__all__) - {"get", "Lookahead"}
    return {
        **{
            name: Case(
                lambda model, name=name: getattr(library, name)(model.parameters()),
                Loop(graph=name == "Adahessian"),
            )
            for name in sorted(names)
        },
        "Lookahead": Case(
            lambda model: library.Lookahead(library.Yogi(model.parameters()), k=2)
        ),
    }


@cases_of("lion_pytorch")
def of_lion(library: Any) -> Cases:
    return {
        "Lion": Case(
            lambda model: library.Lion(model.parameters(), lr=0.01, weight_decay=0.1)
        )
    }


@cases_of("prodigyopt")
def of_prodigy(library: Any) -> Cases:
    return {"Prodigy": Case(lambda model: library.Prodigy(model.parameters()))}


@cases_of("timm.optim")
def of_timm(library: Any) -> Cases:
    """Without bitsandbytes' and APEX's, which timm refuses to make without CUDA."""
    names = [
        name
        for name in library.list_optimizers()
        if not name.startswith(("bnb", "fused"))
    ]
    names += [
        f"lookahead_{name}"
        for name in ("adamw", "lamb", "lion", "muon", "radam", "sgd")
    ]
    return {
        name: Case(
            lambda model, name=name: library.create_optimizer_v2(
                model, opt=name, lr=0.01, weight_decay=0.05
            ),
            Loop(graph=name == "adahessian"),
        )
        for name in names
    }


def schedule_free_makers(library: Any) -> dict[str, Make]:
    class Wrapper(library.ScheduleFreeWrapper, torch.optim.Optimizer):  # type: ignore[misc,name-defined]
        """Its own is no `torch.optim.Optimizer`; two lines make it one."""

    rates = {
        "AdamWScheduleFree": {"lr": 0.01, "warmup_steps": 2},
        "AdamWScheduleFreeReference": {"lr": 0.01},
        "AdamWScheduleFreePaper": {"lr": 0.01},
        "RAdamScheduleFree": {"lr": 0.01},
        "SGDScheduleFree": {"lr": 0.1, "foreach": True},
        "SGDScheduleFreeReference": {"lr": 0.1},
    }
    return {
        **{
            name: lambda model, name=name, given=given: getattr(library, name)(
                model.parameters(), **given
            )
            for name, given in rates.items()
        },
        "Wrapper": lambda model: Wrapper(sgd(model), momentum=0.9),
    }


def in_training(optimizer: Any) -> Any:
    optimizer.train()
    return optimizer


@cases_of("schedulefree")
def of_schedulefree(library: Any) -> Cases:
    return {
        name: Case(lambda model, make=make: in_training(make(model)))
        for name, make in schedule_free_makers(library).items()
    }


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


def test_runs_differ_without_division() -> None:
    """The comparison is one that can fail: a window that is summed and not averaged is
    another run.
    """
    summed = LOOP.train(sgd, {"reduction": "sum"})
    assert furthest(summed, LOOP.train(sgd)) > 1e-3


@by_sum
def test_average_of_timm_once_per_update(options: dict[str, Any]) -> None:
    utils = pytest.importorskip("timm.utils")

    def average_of(options: dict[str, Any] | None) -> nn.Module:
        averages: list[Any] = []
        updates = iter(range(1, 10))

        def each(model: nn.Module) -> None:
            if not averages:
                averages.append(utils.ModelEmaV3(model, decay=0.5))
            averages[0].update(model, step=next(updates))

        LOOP.train(sgd, options, each)
        return averages[0].module

    assert furthest(average_of(options), average_of(None)) < 1e-12
    assert furthest(average_of(options), LOOP.model()) > 1e-3


@by_sum
def test_average_of_weights_once_per_update(options: dict[str, Any]) -> None:
    def average_of(options: dict[str, Any] | None) -> nn.Module:
        averages: list[Any] = []

        def each(model: nn.Module) -> None:
            if not averages:
                decay = torch.optim.swa_utils.get_ema_multi_avg_fn(0.5)
                averages.append(
                    torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=decay)
                )
            averages[0].update_parameters(model)

        LOOP.train(sgd, options, each)
        assert int(averages[0].n_averaged) == 6
        return averages[0].module

    assert furthest(average_of(options), average_of(None)) < 1e-12


def test_wrap_comes_last() -> None:
    """Lookahead around a wrapped optimizer counts micro-batches: it is another
    optimizer than the one that is wrapped around it, and a warning says so.
    """
    library = pytest.importorskip("pytorch_optimizer")

    def run(make: Make) -> nn.Module:
        model = LOOP.model()
        opt = make(model)
        for start in range(0, 16, 2):
            opt.zero_grad()
            LOOP.loss(model, start, 2).backward()
            opt.step()
        return model

    right = run(lambda model: gradaccum.wrap(library.Lookahead(sgd(model), k=2), 4))
    with pytest.warns(gradaccum.GradAccumWarning, match="changed inside a window"):
        wrong = run(lambda model: library.Lookahead(gradaccum.wrap(sgd(model), 4), k=2))
    assert furthest(wrong, right) > 1e-3


# Refusals.


REFUSED: list[tuple[str, str, str]] = [
    ("pytorch_optimizer", "LOMO", "LOMO, which makes it within each backward pass"),
    (
        "pytorch_optimizer",
        "AdaLOMO",
        "AdaLOMO, which makes it within each backward pass",
    ),
    *(
        ("schedulefree", f"{name}Closure", f"{name}Closure, whose step evaluates")
        for name in ("AdamWScheduleFree", "RAdamScheduleFree", "SGDScheduleFree")
    ),
]
"""The closure variants move the weights before the closure and back after it."""


@pytest.mark.parametrize(("package", "name", "words"), REFUSED)
@by_sum
def test_refused_by_wrap(
    package: str, name: str, words: str, options: dict[str, Any]
) -> None:
    library = pytest.importorskip(package)
    model = LOOP.model().float()
    given = model if "LOMO" in name else model.parameters()
    inner = getattr(library, name)(given, lr=0.01)
    with pytest.raises(gradaccum.ArgumentTypeError, match=f"optimizer: .*{words}"):
        gradaccum.wrap(inner, steps=4, **options)


def test_wrapper_of_schedulefree_is_refused_as_it_is() -> None:
    library = pytest.importorskip("schedulefree")
    with pytest.raises(
        gradaccum.ArgumentTypeError, match=r"optimizer: .*ScheduleFreeWrapper"
    ):
        gradaccum.wrap(library.ScheduleFreeWrapper(sgd(LOOP.model())), steps=4)


def closure_of(model: nn.Module) -> Callable[[], Tensor]:
    def closure() -> Tensor:
        loss = LOOP.loss(model, 0, WINDOW)
        loss.backward()
        return loss

    return closure


CLOSURE_WANTED: dict[str, Callable[[Any, nn.Module], Any]] = {
    "AliG": lambda library, model: library.AliG(model.parameters(), max_lr=0.1),
    "BSAM": lambda library, model: library.BSAM(model.parameters(), num_data=20),
    "SAM": lambda library, model: SAMS["SAM"](library, model),
}


@pytest.mark.parametrize("name", CLOSURE_WANTED)
def test_closure_wanted_at_the_windows_end(name: str) -> None:
    """Their own error, with a note; the window stays as it is."""
    library = pytest.importorskip("pytorch_optimizer")
    model = LOOP.model()
    opt = gradaccum.wrap(CLOSURE_WANTED[name](library, model), steps=2)
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
    "SAM": of_sam("SAM", torch.optim.SGD, momentum=0.9),
    "adaptive SAM": of_sam("SAM", torch.optim.AdamW, rho=0.5, adaptive=True),
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
    for opt in 3 * wrapped:
        for start in range(0, WINDOW, PART):
            opt.zero_grad()
            LOOP.loss(model, start, PART).backward()
            opt.step()
        assert opt.result.applied
    assert furthest(bare, LOOP.model()) > 1e-3
    assert furthest(model, bare) < 1e-11


# Weights that an optimizer of schedulefree switches in mid-window, and a checkpoint.


def micro_batches(model: nn.Module, opt: Any, starts: range) -> None:
    for start in starts:
        opt.zero_grad()
        LOOP.loss(model, start, starts.step).backward()
        opt.step()


SCHEDULE_FREE = (
    schedule_free_makers(import_module("schedulefree"))
    if find_spec("schedulefree")
    else {}
)


@by_sum
@pytest.mark.parametrize("name", SCHEDULE_FREE)
def test_schedulefree_validates_and_resumes_in_mid_window(
    name: str, options: dict[str, Any], tmp_path: Path
) -> None:
    """``opt.eval()`` puts the averaged weights into the model, ``opt.train()`` takes
    them out: the open window's sum stays.
    """

    def made(wrapped: bool) -> tuple[nn.Module, Any]:
        model = LOOP.model()
        opt = SCHEDULE_FREE[name](model)
        return model, in_training(
            gradaccum.wrap(opt, steps=WINDOW // PART, **options) if wrapped else opt
        )

    def validated(model: nn.Module, opt: Any) -> float:
        opt.eval()
        loss = float(LOOP.loss(model, 0, ROWS).detach())
        opt.train()
        return loss

    bare, reference = made(False)
    micro_batches(bare, reference, range(0, WINDOW, WINDOW))
    expected = validated(bare, reference)
    micro_batches(bare, reference, range(WINDOW, 16, WINDOW))
    model, opt = made(True)
    micro_batches(model, opt, range(0, 12, PART))
    assert validated(model, opt) == pytest.approx(expected, rel=1e-12)
    torch.save([model.state_dict(), opt.state_dict()], tmp_path / "state.pt")
    micro_batches(model, opt, range(12, 16, PART))
    resumed, other = made(True)
    weights, state = torch.load(tmp_path / "state.pt", weights_only=True)
    resumed.load_state_dict(weights)
    other.load_state_dict(state)
    micro_batches(resumed, other, range(12, 16, PART))
    assert all(map(torch.equal, resumed.parameters(), model.parameters()))
    opt.eval()
    reference.eval()
    assert furthest(model, bare) < 1e-11
    with pytest.raises(Exception, match="train mode"):
        micro_batches(model, opt, range(0, WINDOW, PART))


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
@pytest.mark.parametrize(
    "name",
    ["AdamW", "AdamW8bit", "AdEMAMix8bit", "Lion", "Lion8bit", "SGD", "SGD8bit"],
)
def test_bitsandbytes_has_the_same_bits(
    name: str, options: dict[str, Any], tmp_path: Path
) -> None:
    bare, reference = eight_bits(name)
    before = bare.detach().clone()
    train_rows(bare, reference, SIXTEENTHS, 8)
    assert not torch.equal(bare, before)
    parameter, inner = eight_bits(name)
    opt = gradaccum.wrap(inner, steps=4, **options)
    train_rows(parameter, opt, SIXTEENTHS[:12], 2)
    torch.save([parameter.detach(), opt.state_dict()], tmp_path / "state.pt")
    train_rows(parameter, opt, SIXTEENTHS[12:], 2)
    resumed, inner = eight_bits(name)
    opt = gradaccum.wrap(inner, steps=4, **options)
    weights, state = torch.load(tmp_path / "state.pt", weights_only=True)
    resumed.data.copy_(weights)
    opt.load_state_dict(state)
    train_rows(resumed, opt, SIXTEENTHS[12:], 2)
    assert torch.equal(parameter, bare)
    assert torch.equal(resumed, bare)
    dtypes = {getattr(value, "dtype", None) for value in opt.state[resumed].values()}
    assert (torch.uint8 in dtypes) == name.endswith("8bit")


# timm's schedulers and clipping.


SCHEDULERS: dict[str, dict[str, Any]] = {
    "CosineLRScheduler": {
        "t_initial": 10,
        "lr_min": 1e-3,
        "warmup_t": 2,
        "warmup_lr_init": 1e-3,
    },
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
    kind = getattr(pytest.importorskip("timm.scheduler"), name)

    def run(is_wrapped: bool) -> tuple[nn.Module, list[float]]:
        model = LOOP.model()
        opt: Any = sgd(model)
        if is_wrapped:
            opt = gradaccum.wrap(opt, steps=WINDOW // PART)
        schedule = kind(opt, t_in_epochs=False, **SCHEDULERS[name])
        if is_wrapped:
            schedule = gradaccum.wrap(schedule)
        size, calls, rates = PART if is_wrapped else WINDOW, 0, []
        for epoch in range(2):
            for start in range(0, ROWS, size):
                micro_batches(model, opt, range(start, start + 1, size))
                calls += 1
                if is_wrapped and start + size >= ROWS:
                    opt.flush()
                schedule.step_update(num_updates=calls)
                if not is_wrapped or opt.result.applied:
                    rates.append(opt.param_groups[0]["lr"])
            schedule.step(epoch + 1)
        return model, rates

    (mine, rates), (bare, expected) = run(True), run(False)
    assert rates == expected
    assert len(set(rates)) > 1
    assert furthest(mine, bare) < 1e-12


def test_adaptive_clipping_of_timm() -> None:
    """The loop of timm clips what is in ``.grad``, and that is a sum that still grows:
    it is refused, and the hook that the refusal names clips the window.
    """
    utils = pytest.importorskip("timm.utils")

    def clip(model: nn.Module) -> None:
        utils.dispatch_clip_grad(model.parameters(), 1e-3, mode="agc")

    mine, bare = LOOP.model(), LOOP.model()
    opt = gradaccum.wrap(sgd(mine), steps=4)
    LOOP.loss(mine, 0, PART).backward()
    clip(mine)
    with pytest.raises(gradaccum.UsageError, match="register_step_pre_hook"):
        opt.step()
    opt.discard()
    opt.register_step_pre_hook(lambda *_: clip(mine))
    micro_batches(mine, opt, range(0, WINDOW, PART))
    LOOP.loss(bare, 0, WINDOW).backward()
    clip(bare)
    sgd(bare).step()
    assert furthest(mine, bare) < 1e-12
