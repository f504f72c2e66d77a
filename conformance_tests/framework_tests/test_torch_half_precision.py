"""Half precision in torch: memory at the peak, and what the host waits for and looks
at.
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
ONE, ALL = SIZE * SIZE, LAYERS * SIZE * SIZE


def make(dtype: torch.dtype = torch.float32, **options: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    layers = [nn.Linear(SIZE, SIZE, bias=False) for _ in range(LAYERS)]
    model = nn.Sequential(*layers).to(dtype)
    inner = torch.optim.SGD(model.parameters(), lr=0.25)
    return model, gradaccum.wrap(inner, **{"steps": 2, **options})


def loss_of(model: nn.Module) -> Tensor:
    x = torch.full((2, SIZE), 0.5, dtype=next(model.parameters()).dtype)
    return model(x).float().square().mean()


def live_bytes(tensors: Iterable[Tensor | None]) -> int:
    """The bytes of all storages, each counted once."""
    storages = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
        for t in tensors
        if t is not None
    }
    return sum(storages.values())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("master_weights", [False, True])
def test_peak_is_sum_and_one_gradient(
    dtype: torch.dtype, master_weights: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The update's gradients are freed with it; a master's is the sum itself."""
    model, opt = make(dtype, master_weights=master_weights)
    parameters = [*model.parameters(), *opt.master_weights.values()]
    peaks: list[int] = []

    def note(*made: object) -> None:
        gradients = (parameter.grad for parameter in parameters)
        sums = opt._window.gradient_sum.gradients().values()
        tensors = (each for each in made if isinstance(each, Tensor))
        peaks.append(live_bytes([*sums, *gradients, *tensors]))

    def noting(*arguments: Any) -> Tensor:
        result = narrowed(*arguments)
        note(result)
        return result

    narrowed = arithmetic.narrowed
    monkeypatch.setattr(update, "narrowed", noting)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: note())
    opt.register_step_pre_hook(lambda *_: note())
    for _ in range(4):
        loss_of(model).backward()
        opt.step()
    assert all(parameter.grad is None for parameter in parameters)
    assert max(peaks) <= 4 * ALL + 2 * ONE
    assert max(peaks) >= 4 * ALL, "nothing was measured"
    at_update = peaks[-1]
    assert at_update == (4 if master_weights else 2) * ALL


@pytest.mark.parametrize(
    "options", [{}, {"accumulate_dtype": "float64"}, {"loss_scale": 8.0}], ids=str
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_dtypes_skip_the_range_check(
    options: dict[str, Any], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The elements are not looked at."""
    monkeypatch.setattr(window, "fits", None)
    model, opt = make(dtype, **options)
    for _ in range(2):
        opt.scale(loss_of(model)).backward()
        opt.step()
    assert opt.result.applied


def test_resumed_window_has_the_same_norm() -> None:
    """To the last bit. Autograd delivers the last layer's gradient first, a saved
    window holds the first layer's first.
    """

    def made() -> tuple[list[nn.Parameter], Any]:
        torch.manual_seed(0)
        ps = [nn.Parameter(torch.randn(1 + index).bfloat16()) for index in range(40)]
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
    weight = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    opt = gradaccum.wrap(torch.optim.SGD([weight], lr=0.0), steps=lambda _: sizes[0])
    sizes[0] = then
    xs = torch.arange(4.0 * then).view(then, 4).bfloat16()
    for x in xs:
        (weight * x).sum().backward()
        opt.step()
        opt.zero_grad()
    assert opt.result.applied
    norm = float(xs.float().mean(0).norm())
    assert opt.result.grad_norm == pytest.approx(norm, rel=1e-4)


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

    cpu = [torch.profiler.ProfilerActivity.CPU]
    with (
        monkeypatch.context() as patched,
        torch.profiler.profile(activities=cpu, acc_events=True) as profiler,
    ):
        patched.setattr(Tensor, "tolist", counted)
        action()
    return lists + sum(
        event.count
        for event in profiler.key_averages()
        if event.key == "aten::_local_scalar_dense"
    )


@pytest.mark.parametrize(
    ("place", "scale"),
    [
        *((place, gradaccum.DynamicLossScale(init_scale=8.0)) for place in STRATEGIES),
        ("masters", None),
        ("masters", 8.0),
    ],
    ids=str,
)
def test_only_window_ends_wait(
    place: str, scale: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host waits for the device once at the end of a window and never inside it."""
    # As a loss on an accelerator is kept.
    monkeypatch.setattr(window, "as_number", lambda loss: loss.detach().clone())
    dtype, options = STRATEGIES[place]
    model, opt = make(dtype, steps=3, loss_scale=scale, **options)

    def micro_batch() -> None:
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


@pytest.mark.parametrize("way", WAYS)
def test_an_ignoring_window_is_as_always_and_looks_at_nothing(way: str) -> None:
    options = dict(WAYS[way])
    fused, dtype = options.pop("fused", False), options.pop("dtype", torch.float32)
    ends = []
    for on_overflow in ("ignore", "skip_window"):
        parameter = nn.Parameter(torch.arange(1.0, 9.0).to(dtype))
        inner = torch.optim.SGD([parameter], lr=0.5, fused=fused)
        opt = gradaccum.wrap(inner, steps=2, on_overflow=on_overflow, **options)
        for factor in (1.0, 3.0, 1.0, 1.0):
            opt.backward((parameter * factor).sum())
            with Operations() as ops:
                opt.step()
            opt.zero_grad()
        assert opt.result.optimizer_step == 2
        if on_overflow == "ignore":
            assert not LOOKS.intersection(ops.names), ops.names
            assert math.isnan(opt.result.grad_norm)
        ends.append(parameter)
    assert torch.equal(*ends)
