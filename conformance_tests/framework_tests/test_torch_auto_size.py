"""Automatic sizes of micro-batches: a window that ran out of memory starts over with
half, as if it had never begun.
"""

from __future__ import annotations

import copy
import gc
import random
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import gradaccum
from gradaccum import ArgumentValueError, AutoMicroBatchSize, UsageError
from gradaccum_torch.large_batch import auto, backward, coupled_backward
from gradaccum_torch.large_batch.auto import is_out_of_memory, key_of

X = torch.linspace(-1, 2, 64, dtype=torch.float64).reshape(8, 8).sin()


@pytest.fixture(autouse=True, scope="module")
def _small_heap() -> Iterator[None]:
    """A retry collects garbage. The objects of torch itself, a million, need not be
    looked at each time.
    """
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _on_a_cpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss says when memory runs out, as a device's allocator does."""
    if "refused" not in request.node.name:
        monkeypatch.setattr(auto, "require_device", lambda sizes, tensors: None)


class Failure(Exception):
    """Raised by the user's code."""


class Failing(torch.autograd.Function):
    """Raises in its forward or backward pass where `Trouble` says so."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, trouble: Trouble) -> Tensor:
        ctx.trouble, ctx.at = trouble, trouble.point
        trouble.strike("forward", ctx.at)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.trouble.strike("backward", ctx.at)
        return gradient, None


class Trouble:
    """What goes wrong in which call of the loss function.

    Args:
        points: the calls, counted from 0, and the pass.
        error: makes what is raised.
    """

    def __init__(
        self,
        *points: tuple[int, str],
        error: Callable[[], BaseException] = torch.OutOfMemoryError,
    ) -> None:
        self.points, self.error, self.calls = set(points), error, 0
        self.point = 0

    def strike(self, which: str, point: int) -> None:
        if (point, which) in self.points:
            raise self.error()

    def into(self, x: Tensor) -> Tensor:
        self.point, self.calls = self.calls, self.calls + 1
        failed: Tensor = Failing.apply(x, self)
        return failed


def make(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Tanh(), nn.Linear(8, 2)
    ).to(dtype)


def loss_of(model: nn.Module, trouble: Trouble) -> Callable[[Tensor], Tensor]:
    def loss_fn(x: Tensor) -> Tensor:
        noise = random.random() + np.random.random()
        return (
            noise
            * trouble.into(model(x.to(model[0].weight.dtype))).float().square().mean()
        )

    return loss_fn


PLACES: dict[str, tuple[torch.dtype, dict[str, Any] | None]] = {
    "no optimizer": (torch.float32, None),
    "half precision": (torch.bfloat16, None),
    "in .grad": (torch.float32, {}),
    "moving sums": (torch.bfloat16, {"loss_scale": 256.0}),
    "kept apart": (
        torch.float32,
        {"on_overflow": "drop_micro_batch", "clip_norm": 0.1},
    ),
}


class Run:
    """A model, in the place where its gradients are summed, and one call of
    `backward`.
    """

    def __init__(
        self, place: str, *points: tuple[int, str], held: bool = False, **trouble: Any
    ) -> None:
        dtype, options = PLACES[place]
        self.model, self.trouble = make(dtype), Trouble(*points, **trouble)
        self.opt: Any = None
        if options is not None:
            self.opt = gradaccum.wrap(
                torch.optim.SGD(self.model.parameters(), lr=0.5), steps=None, **options
            )
        for parameter in self.model.parameters() if held else ():
            parameter.grad = torch.full_like(parameter, 0.3)
        torch.manual_seed(1)
        random.seed(1)
        np.random.seed(1)

    def call(self, size: Any) -> Tensor:
        loss: Tensor = backward(
            loss_of(self.model, self.trouble),
            X,
            micro_batch_size=size,
            optimizer=self.opt,
        )
        return loss

    def state(self) -> list[Any]:
        tensors = [
            *self.model.parameters(),
            *self.model.buffers(),
            *(p.grad for p in self.model.parameters()),
        ]
        counted = (
            None
            if self.opt is None
            else (
                self.opt.result.optimizer_step,
                self.opt.result.micro_step,
                self.opt.result.loss_scale,
            )
        )
        copies = [None if each is None else each.detach().clone() for each in tensors]
        return [
            *copies,
            torch.get_rng_state(),
            torch.tensor(np.random.get_state()[1].astype(int)),
            random.getstate(),
            counted,
        ]


def same(got: list[Any], expected: list[Any]) -> bool:
    pairs = zip(got, expected, strict=True)
    return all(
        torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else a == b
        for a, b in pairs
    )


def assert_as_with(size: int, run: Run, place: str, held: bool, got: Tensor) -> None:
    other = Run(place, held=held)
    assert torch.equal(got, other.call(size))
    assert same(run.state(), other.state())


POINTS = [(call, which) for call in (1, 2) for which in ("forward", "backward")]


@pytest.mark.parametrize(
    ("place", "held"),
    [
        *((place, False) for place in PLACES),
        ("no optimizer", True),
        ("half precision", True),
    ],
)
@pytest.mark.parametrize("point", POINTS, ids=str)
def test_as_without_failure(place: str, point: tuple[int, str], held: bool) -> None:
    """The whole batch fails, then a half of it at every point, and then quarters fit:
    all bits are theirs. With gradients `held` before.
    """
    run, sizes, x = (
        Run(place, (0, "backward"), point, held=held),
        AutoMicroBatchSize(),
        X.clone(),
    )
    got = run.call(sizes)
    assert sizes.size == 2
    assert run.trouble.calls == point[0] + 1 + 4
    assert torch.equal(x, X)
    assert_as_with(2, run, place, held, got)


def test_choice_is_remembered() -> None:
    run, sizes = Run("no optimizer", (0, "forward")), AutoMicroBatchSize()
    run.call(sizes)
    assert (sizes.size, run.trouble.calls, list(sizes.choices.values())) == (4, 3, [4])
    run.call(sizes)
    assert run.trouble.calls == 5


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    "error", [Failure, KeyboardInterrupt, lambda: RuntimeError("of another kind")]
)
@pytest.mark.parametrize("which", ["forward", "backward"])
def test_other_errors_pass(place: str, error: Any, which: str) -> None:
    """Unchanged, with everything as it was; no size is remembered, and the next call is
    as the first.
    """
    run, sizes = (
        Run(place, (0, "forward"), (2, which), error=error),
        AutoMicroBatchSize(),
    )
    run.trouble.calls = 1
    sizes.remember(key_of(loss_of(run.model, run.trouble), [X]), 4)
    before = run.state()
    with pytest.raises(type(error())) as raised:
        run.call(sizes)
    assert type(raised.value) is type(error())
    assert raised.value.__cause__ is None
    assert same(run.state(), before)
    run.trouble.points.clear()
    assert_as_with(4, run, place, False, run.call(sizes))


@pytest.mark.parametrize("place", PLACES)
def test_one_item_does_not_fit(place: str) -> None:
    run, sizes = (
        Run(place, *((call, "backward") for call in range(99))),
        AutoMicroBatchSize(),
    )
    run.model.eval()  # Batch norm wants more than one item.
    before = run.state()
    with pytest.raises(
        UsageError, match="micro_batch_size: expected a micro-batch of one item to fit"
    ) as raised:
        run.call(sizes)
    assert isinstance(raised.value.__cause__, torch.OutOfMemoryError)
    assert same(run.state(), before)
    assert sizes.size is None


@pytest.mark.parametrize("kept", [False, True], ids=["in frames", "in a kept error"])
def test_freed_before_retry(kept: bool) -> None:
    """A tensor of the failed frames, and of an error that somebody else still holds."""
    model, alive, errors = make(), [], []

    def first(x: Tensor) -> None:
        large = model(x)
        alive.append(weakref.ref(large))
        raise Failure

    def loss_fn(x: Tensor) -> Tensor:
        if len(x) < len(X):
            assert [each() for each in alive] == [None, None]
            return model(x).square().mean()
        large = model(x)
        alive.append(weakref.ref(large))
        try:
            first(x)
        except Failure as error:
            errors.extend([error] if kept else [])
            raise torch.OutOfMemoryError from error

    backward(loss_fn, X.float(), micro_batch_size=AutoMicroBatchSize())
    assert len(alive) == 2


def test_allocator_of_the_cpu() -> None:
    """Its own error, of 128 TiB."""
    model, sizes = make(), AutoMicroBatchSize()

    def loss_fn(x: Tensor) -> Tensor:
        return model(x.float()).square().mean() + (
            torch.empty(2**45).sum() if len(x) > 2 else 0
        )

    backward(loss_fn, X, micro_batch_size=sizes)
    assert sizes.size == 2


def test_coupled_loss() -> None:
    """Both passes may run out of memory."""

    def gradients(size: Any, *points: tuple[int, str]) -> list[Any]:
        model, trouble = make(), Trouble(*points)
        torch.manual_seed(1)
        coupled_backward(
            lambda x: trouble.into(model(x.float())),
            lambda out: torch.logsumexp(out, 0).sum(),
            X,
            micro_batch_size=size,
        )
        return [
            *(p.grad for p in model.parameters()),
            *model.buffers(),
            torch.get_rng_state(),
        ]

    expected = gradients(4)
    for point in ((0, "forward"), (1, "backward")):
        sizes = AutoMicroBatchSize()
        assert same(gradients(sizes, point), expected)
        assert sizes.size == 4


@pytest.mark.parametrize("coupled", [False, True])
def test_a_batch_that_was_written_into_is_not_written_into_twice(coupled: bool) -> None:
    """A second attempt would write once more, so it is refused; where the first one
    fits, the write is the user's.
    """
    x, model = X.clone(), make()
    before = [value.clone() for value in model.state_dict().values()]

    def fn(x: Tensor) -> Tensor:
        out = model(x.clamp_(-0.5, 0.5).float())
        if len(x) > 2:
            raise torch.OutOfMemoryError
        return out if coupled else out.square().mean()

    def call(sizes: AutoMicroBatchSize) -> Any:
        if coupled:
            return coupled_backward(
                fn, lambda out: torch.logsumexp(out, 0).sum(), x, micro_batch_size=sizes
            )
        return backward(fn, x, micro_batch_size=sizes)

    with pytest.raises(
        UsageError,
        match=(
            r"micro_batch_size: expected a function that leaves its batch as it"
            r" is.*give a number of items"
        ),
    ):
        call(sizes := AutoMicroBatchSize())
    assert all(p.grad is None for p in model.parameters())
    assert same(list(model.state_dict().values()), before)
    sizes.remember(key_of(fn, [x]), 2)
    call(sizes)
    assert model[0].weight.grad is not None


@pytest.mark.parametrize(
    ("error", "memory"),
    [
        (torch.OutOfMemoryError("CUDA out of memory."), True),
        (
            RuntimeError(
                "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"
                " to allocate 8 bytes"
            ),
            True,
        ),
        (
            RuntimeError(
                "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"
                " `cublasCreate(handle)`"
            ),
            True,
        ),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (MemoryError(), False),
        (ValueError("DefaultCPUAllocator: can't allocate memory"), False),
    ],
)
def test_errors_of_memory(error: Exception, memory: bool) -> None:
    assert is_out_of_memory(copy.copy(error)) == memory


@pytest.mark.parametrize(
    "size",
    ["auto", AutoMicroBatchSize(), AutoMicroBatchSize(memory_limit=2**40)],
    ids=str,
)
def test_unknown_limit_is_refused(size: Any) -> None:
    """A CPU has none to ask for, and a device its own."""
    with pytest.raises(
        ArgumentValueError,
        match=r"micro_batch_size: .*On a CPU write a number of items",
    ):
        backward(lambda x: make()(x).sum(), X.float(), micro_batch_size=size)


def test_keys_tell_functions_and_shapes() -> None:
    trouble = Trouble()
    first, second = loss_of(make(), trouble), (lambda x: x.sum())
    assert (
        key_of(first, [X])
        == key_of(loss_of(make(), trouble), [X[:3]])
        != key_of(second, [X])
    )
    assert key_of(first, [X]) == key_of(first, [X[:, :5]]) != key_of(first, [X[:, :4]])
    assert key_of(first, [X]) != key_of(first, [X.float()])
