"""Half precision in torch: memory at the peak, and infs and NaNs out of float16
autograd.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradaccum
from conformance_tests.framework_tests.torch_operations import Operations
from gradaccum_torch import arithmetic, update, window

LAYERS, SIZE = 6, 32


HALF = [torch.float16, torch.bfloat16]


by_dtype = pytest.mark.parametrize("dtype", HALF, ids=str)


def make(dtype: torch.dtype = torch.float32, **options: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Linear(SIZE, SIZE, bias=False) for _ in range(LAYERS))
    ).to(dtype)
    return model, gradaccum.wrap(
        torch.optim.SGD(model.parameters(), lr=0.25), **{"steps": 2, **options}
    )


def loss_of(model: nn.Module, factor: float = 1.0) -> Tensor:
    dtype = next(model.parameters()).dtype
    return (
        (model(torch.full((2, SIZE), 0.5, dtype=dtype)) * factor)
        .float()
        .square()
        .mean()
    )


def live_bytes(tensors: Iterable[Tensor | None]) -> int:
    """The bytes of all storages, each counted once."""
    storages = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
        for t in tensors
        if t is not None
    }
    return sum(storages.values())


ONE, ALL = SIZE * SIZE, LAYERS * SIZE * SIZE


@by_dtype
@pytest.mark.parametrize("master_weights", [False, True])
def test_peak_is_sum_and_one_gradient(
    dtype: torch.dtype, master_weights: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, opt = make(dtype, master_weights=master_weights)
    inner = [*model.parameters(), *opt.master_weights.values()]
    peaks: list[int] = []

    def note(*_: object) -> None:
        gradients = (t.grad for t in (*model.parameters(), *inner))
        peaks.append(
            live_bytes([*opt._window.gradient_sum.gradients().values(), *gradients])
        )

    def noting(*arguments: Any) -> Tensor:
        result = narrowed(*arguments)
        peaks.append(
            live_bytes(
                [
                    *opt._window.gradient_sum.gradients().values(),
                    *(p.grad for p in model.parameters()),
                    result,
                ]
            )
        )
        return result

    narrowed = arithmetic.narrowed
    monkeypatch.setattr(update, "narrowed", noting)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(note)
    opt.register_step_pre_hook(note)
    for _ in range(4):
        loss_of(model).backward()
        opt.step()
    assert all(tensor.grad is None for tensor in (*model.parameters(), *inner)), (
        "the update's gradients are freed with it"
    )
    assert max(peaks) <= 4 * ALL + 2 * ONE
    assert max(peaks) >= 4 * ALL, "nothing was measured"
    at_update = peaks[-1]
    assert at_update == (4 if master_weights else 2) * ALL


@pytest.mark.parametrize(
    "options", [{}, {"accumulate_dtype": "float64"}, {"loss_scale": 8.0}]
)
def test_other_dtypes_skip_the_range_check(
    options: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object) -> bool:
        raise AssertionError("the elements were looked at")

    monkeypatch.setattr(window, "fits", never)
    for dtype in (torch.float32, torch.bfloat16):
        model, opt = make(dtype, **options)
        for _ in range(2):
            opt.scale(loss_of(model)).backward()
            opt.step()
        assert opt.result.applied


SCALES: dict[str, Callable[[], Any]] = {
    "no scale": lambda: None,
    "a number": lambda: 8.0,
    "dynamic": lambda: gradaccum.DynamicLossScale(init_scale=8.0),
    "a GradScaler": lambda: torch.amp.GradScaler("cpu", init_scale=8.0),
}


def test_resumed_window_has_the_same_norm() -> None:
    """To the last bit. Autograd delivers the last layer's gradient first, a saved
    window holds the first layer's first.
    """

    def made() -> tuple[list[torch.nn.Parameter], Any]:
        torch.manual_seed(0)
        ps = [
            torch.nn.Parameter(torch.randn(1 + index).to(torch.bfloat16))
            for index in range(40)
        ]
        return ps, gradaccum.wrap(torch.optim.SGD(ps, lr=0.0), steps=None)

    (ps, opt), (_, resumed) = made(), made()
    for index in range(3):
        total = torch.zeros(())
        for p in ps:
            total = (total + (p.float() * (index + 1)).exp().sum()).sin() + total
        opt.backward(total)
        opt.step()
    resumed.load_state_dict(opt.state_dict())
    for each in (opt, resumed):
        each.flush()
    assert opt.result.grad_norm == resumed.result.grad_norm


@pytest.mark.parametrize(("before", "then"), [(1, 4), (4, 1)])
def test_callable_that_changes_its_mind_between_two_windows(
    before: int, then: int
) -> None:
    """The window has the size of its first ``step``, and ``zero_grad`` keeps the
    sum.
    """
    sizes = [before]
    model = torch.nn.Linear(4, 2).bfloat16()
    opt = gradaccum.wrap(
        torch.optim.SGD(model.parameters(), lr=0.0), steps=lambda _: sizes[0]
    )
    sizes[0] = then
    norms = []
    for x in torch.randn(then, 3, 4).bfloat16():
        loss = model(x).float().square().mean()
        norms.append(
            torch.cat(
                [
                    g.float().flatten()
                    for g in torch.autograd.grad(
                        loss, list(model.parameters()), retain_graph=True
                    )
                ]
            )
        )
        loss.backward()
        opt.step()
        opt.zero_grad()
    assert opt.result.applied
    assert opt.result.grad_norm == pytest.approx(
        float(torch.stack(norms).mean(0).norm()), rel=1e-4
    )


STRATEGIES: dict[str, tuple[torch.dtype, dict]] = {
    "in .grad": (torch.float32, {}),
    "in buffers": (torch.bfloat16, {}),
    "in float64": (torch.float32, {"accumulate_dtype": "float64"}),
    "masters": (torch.float16, {"master_weights": True}),
    "masters, half sums": (
        torch.bfloat16,
        {"master_weights": True, "accumulate_dtype": "bfloat16"},
    ),
    "clipped": (torch.float32, {"clip_norm": 1e-3, "skip_norm": 1e6}),
}


CPU = [torch.profiler.ProfilerActivity.CPU]


def waits(action: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> int:
    """How often the host reads a tensor: by ``item``, called directly or not, and by
    ``tolist``, which the profiler does not show.
    """
    lists = 0
    tolist = Tensor.tolist

    def counted(tensor: Tensor) -> Any:
        nonlocal lists
        lists += 1
        return tolist(tensor)

    with (
        monkeypatch.context() as patched,
        torch.profiler.profile(activities=CPU, acc_events=True) as profiler,
    ):
        patched.setattr(Tensor, "tolist", counted)
        action()
    return lists + sum(
        event.count
        for event in profiler.key_averages()
        if event.key == "aten::_local_scalar_dense"
    )


SCALINGS = [(scale, False) for scale in SCALES if scale != "a GradScaler"]


USUAL = [
    *((place, *SCALINGS[2]) for place in STRATEGIES),
    *(("masters", *scaling) for scaling in SCALINGS),
]


@pytest.mark.parametrize(
    ("place", "scale", "through_scaler"),
    [
        pytest.param(
            place,
            *scaling,
            marks=() if (place, *scaling) in USUAL else pytest.mark.deep,
        )
        for place in STRATEGIES
        for scaling in SCALINGS
    ],
)
def test_only_window_ends_wait(
    place: str, scale: str, through_scaler: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host waits for the device once at the end of a window and never inside it."""
    # As a loss on an accelerator is kept.
    monkeypatch.setattr(window, "as_number", lambda loss: loss.detach().clone())
    dtype, options = STRATEGIES[place]
    scaling: Any = SCALES[scale]()
    model, opt = make(dtype, steps=3, loss_scale=scaling, **options)

    def micro_batch() -> None:
        if through_scaler:
            scaling.scale(loss_of(model)).backward()
            scaling.step(opt)
            scaling.update()
        else:
            opt.scale(loss_of(model)).backward()
            opt.step()
        opt.zero_grad()

    measured = [waits(micro_batch, monkeypatch) for _ in range(9)]
    assert measured[3:] == [0, 0, 1, 0, 0, 1]
    assert measured[:3] in ([2, 2, 3], [0, 0, 1]), (
        "the first window compares values, the windows after it do not"
    )
    assert opt.result.optimizer_step == 3


def test_dropping_waits_once_per_micro_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    model, opt = make(steps=2, on_overflow="drop_micro_batch")

    def micro_batch() -> None:
        loss_of(model).backward()
        opt.step()

    assert [waits(micro_batch, monkeypatch) for _ in range(6)][2:] == [1, 2, 1, 2]


WAYS: dict[str, dict[str, Any]] = {
    "in .grad": {},
    "fused": {"fused": True},
    "separate": {"separate_sums": True},
    "float32 sums of bfloat16": {"dtype": torch.bfloat16},
    "masters": {"dtype": torch.bfloat16, "master_weights": True},
    "loss scale": {"loss_scale": 8.0},
    "sum": {"reduction": "sum"},
}


LOOKS = {
    "linalg_vector_norm",
    "_foreach_norm",
    "isfinite",
    "isnan",
    "isinf",
    "_amp_foreach_non_finite_check_and_unscale_",
    "amax",
}


def setting(
    fused: bool = False, dtype: torch.dtype = torch.float32, **options: Any
) -> tuple[torch.nn.Parameter, Any]:
    parameter = torch.nn.Parameter(torch.arange(1.0, 9.0).to(dtype))
    inner = torch.optim.SGD([parameter], lr=0.5, fused=fused)
    return parameter, gradaccum.wrap(
        inner, **{"steps": 2, "on_overflow": "ignore", **options}
    )


def feed(
    parameter: torch.nn.Parameter, opt: Any, factors: tuple[float, ...] = (1.0, 3.0)
) -> None:
    for factor in factors:
        opt.backward((parameter * factor).sum())
        opt.step()
        opt.zero_grad()


@pytest.mark.parametrize("way", WAYS)
def test_a_window_is_as_always_and_looks_at_nothing(way: str) -> None:
    (ours, opt), (theirs, other) = (
        setting(**WAYS[way]),
        setting(**WAYS[way], on_overflow="skip_window"),
    )
    for each, optimizer in ((ours, opt), (theirs, other)):
        feed(each, optimizer)
        optimizer.backward(each.sum())
        optimizer.step()
        optimizer.backward(each.sum())
    with Operations() as ops:
        opt.step()
    other.step()
    assert not LOOKS.intersection(ops.names), ops.names
    assert torch.equal(ours, theirs)
    assert (
        opt.result.applied,
        opt.result.optimizer_step,
        math.isnan(opt.result.grad_norm),
    ) == (True, 2, True)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_bad_gradient_reaches_its_own_elements_only(way: str, bad: float) -> None:
    ours, opt = setting(**WAYS[way])
    clean, other = setting(**WAYS[way])
    factors = torch.ones(8)
    factors[3] = bad
    for each, optimizer, second in (
        (ours, opt, factors),
        (clean, other, torch.ones(8)),
    ):
        optimizer.backward(each.sum())
        optimizer.step()
        optimizer.backward((each * second).sum())
        optimizer.step()
    assert (opt.result.applied, opt.result.skipped, opt.result.overflow) == (
        True,
        False,
        False,
    )
    rest = torch.arange(8) != 3
    assert torch.equal(ours[rest], clean[rest])
    assert not ours[3].isfinite()


def test_masters_take_the_model_over() -> None:
    """Something wrote into the model between two windows: a checkpoint, or averaged
    weights.
    """
    parameter, opt = setting(dtype=torch.bfloat16, master_weights=True)
    feed(parameter, opt)
    with torch.no_grad():
        parameter[0] = 64.0
    before = opt.master_weights[0].clone()
    feed(parameter, opt)
    expected = torch.cat([torch.tensor([64.0]), before[1:]]) - 0.5 * 2
    assert torch.equal(opt.master_weights[0], expected)


def test_moving_scaler_is_refused() -> None:
    """Nothing would tell it of an overflow."""
    with pytest.raises(gradaccum.ArgumentValueError, match="loss_scale"):
        setting(loss_scale=torch.amp.GradScaler("cpu"))
