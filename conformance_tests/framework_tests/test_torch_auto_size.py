"""Calls that fail, and automatic sizes of micro-batches: a window that ran out of memory
starts over with half, as if it had never begun.
"""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import gradaccum
from gradaccum import AutoMicroBatchSize, UsageError
from gradaccum.kit import SmallerSizeError
from gradaccum_torch import backward, coupled_backward
from gradaccum_torch.large_batch.auto import is_out_of_memory, key_of

X = torch.linspace(-1, 2, 64, dtype=torch.float64).reshape(8, 8).sin()


def make(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Tanh(), nn.Linear(8, 2)
    ).to(dtype)


PLACES = {
    "no optimizer": (torch.float32, None),
    "half precision": (torch.bfloat16, None),
    "in .grad": (torch.float32, {}),
    "moving sums": (torch.bfloat16, {"loss_scale": 256.0}),
    "kept apart": (
        torch.float32,
        {"on_overflow": "drop_micro_batch", "clip_norm": 0.1},
    ),
}
by_pass = pytest.mark.parametrize("which", ["forward", "backward"])
by_place = pytest.mark.parametrize("place", PLACES)


def numbers(model: nn.Module) -> list[Any]:
    """Of parameters, buffers and gradients, in all digits."""
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return [each.tolist() for each in (*model.state_dict().values(), *grads)]


class Run:
    """A model, in the place where its gradients are summed, and one call. Without an
    optimizer it has gradients from before.

    Args:
        place: one of `PLACES`.
        points: where it raises: runs of the model, counted from 0, and the pass.
        coupled: call `coupled_backward`.
        error: makes what is raised.
    """

    def __init__(
        self,
        place: str,
        *points: tuple[int, str],
        coupled: bool = False,
        error: Callable[[], BaseException] = torch.OutOfMemoryError,
    ) -> None:
        self.points = set(points)
        self.error = error
        self.calls = 0
        dtype, options = PLACES[place]
        self.model = make(dtype)
        self.coupled = coupled
        self.opt = None
        if options is not None:
            inner = torch.optim.SGD(self.model.parameters(), lr=0.5)
            self.opt = gradaccum.wrap(inner, steps=None, **options)
        for parameter in self.model.parameters() if options is None else ():
            parameter.grad = torch.full_like(parameter, 0.3)
        torch.manual_seed(1)
        self.seed_host()

    def seed_host(self) -> None:
        random.seed(1)
        np.random.seed(1)

    def strike(self, *point: Any) -> None:
        if point in self.points:
            raise self.error()

    def outputs_of(self, x: Tensor) -> Tensor:
        noise = random.random() + np.random.random()
        call = self.calls
        self.calls += 1
        out = self.model(x.to(self.model[0].weight.dtype))
        self.strike(call, "forward")
        if out.requires_grad:
            out.register_hook(lambda _: self.strike(call, "backward"))
        return noise * out.float()

    def loss_of(self, x: Tensor) -> Tensor:
        return self.outputs_of(x).std()

    def call(self, size: Any) -> Tensor:
        options = {"micro_batch_size": size, "optimizer": self.opt}
        if isinstance(size, int) and not self.coupled:
            options["modules"] = (self.model,)
        if self.coupled:
            return coupled_backward(self.outputs_of, Tensor.std, X, **options)
        return backward(self.loss_of, X, **options)

    def state(self) -> str:
        """All that a call may move."""
        result = self.opt and self.opt.result[-4:]
        draws = random.getstate(), np.random.get_state()[1].tolist()
        return repr(
            (numbers(self.model), torch.get_rng_state().tolist(), draws, result)
        )


def require_same_as(size: int, run: Run, place: str, got: Tensor) -> None:
    other = Run(place, coupled=run.coupled)
    assert torch.equal(got, other.call(size))
    assert run.state() == other.state()


@by_place
@by_pass
@pytest.mark.parametrize("call", [1, 2])
def test_as_without_failure(place: str, call: int, which: str) -> None:
    """The whole batch fails, then a half of it at every point, and then quarters fit:
    all bits are theirs.
    """
    run = Run(place, (0, "backward"), (call, which))
    sizes = AutoMicroBatchSize()
    got = run.call(sizes)
    assert sizes.size == 2
    assert run.calls == call + 1 + 4
    require_same_as(2, run, place, got)
    run.call(sizes)
    assert run.calls == call + 1 + 4 + 4, "the choice is remembered"


@pytest.mark.parametrize(
    ("place", "coupled"),
    [
        *((place, False) for place in PLACES),
        *((place, True) for place in PLACES if place != "kept apart"),
    ],
)
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@by_pass
@pytest.mark.parametrize("automatic", [False, True])
def test_error_leaves_everything(
    place: str, coupled: bool, error: Any, which: str, automatic: bool
) -> None:
    """It passes unchanged: gradients, random states and statistics are what they were,
    and the next call is as the first.
    """
    point = 3 if coupled and which == "backward" else 1
    run = Run(place, (point, which), coupled=coupled, error=error)
    size = AutoMicroBatchSize() if automatic else 4
    if automatic:
        key = key_of(run.outputs_of if coupled else run.loss_of, [X])
        size.search(key, 8, only_half_fits)
    before = run.state()
    with pytest.raises(error) as raised:
        run.call(size)
    assert raised.value.__cause__ is None
    if not automatic and not coupled:
        run.seed_host()  # A call that runs nothing twice restores torch's state only.
    assert run.state() == before
    run.points.clear()
    require_same_as(4, run, place, run.call(size))


def only_half_fits(size: int, smaller_size: int) -> None:
    if size == 8:
        raise SmallerSizeError(smaller_size)


@by_place
def test_one_item_does_not_fit(place: str) -> None:
    run = Run(place, *((call, "backward") for call in range(99)))
    run.model.eval()  # Batch norm wants more than one item.
    before = run.state()
    sizes = AutoMicroBatchSize()
    with pytest.raises(UsageError, match="a micro-batch of one item to fit") as raised:
        run.call(sizes)
    assert isinstance(raised.value.__cause__, torch.OutOfMemoryError)
    assert run.state() == before
    assert sizes.size is None


@pytest.mark.parametrize("kept", [False, True], ids=["in frames", "in a kept error"])
def test_freed_before_retry(kept: bool) -> None:
    """A tensor of the failed frames, and of an error that somebody else still holds."""
    model = make()
    alive = []
    errors = []

    def loss_fn(x):
        large = model(x)
        if len(x) < len(X):
            assert alive[0]() is None
            return large.square().mean()
        alive.append(weakref.ref(large))
        error = torch.OutOfMemoryError()
        errors.extend([error] if kept else [])
        raise error

    backward(loss_fn, X.float(), micro_batch_size=AutoMicroBatchSize())
    assert len(alive) == 1


def test_coupled_loss() -> None:
    """Both passes may run out of memory."""
    for point in ((0, "forward"), (1, "backward")):
        run = Run("no optimizer", point, coupled=True)
        sizes = AutoMicroBatchSize()
        require_same_as(4, run, "no optimizer", run.call(sizes))
        assert sizes.size == 4


def test_batch_is_not_written_into_twice() -> None:
    """A second attempt would write once more."""
    x = X.clone()
    model = make()
    before = numbers(model)

    def loss_of(x):
        outputs = model(x.clamp_(-0.5, 0.5).float())
        if len(x) > 2:
            raise torch.OutOfMemoryError
        return outputs.std()

    with pytest.raises(UsageError, match=r"in place.*set micro_batch_size to a number"):
        backward(loss_of, x, micro_batch_size=AutoMicroBatchSize())
    assert numbers(model) == before


CUBLAS = "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"


def test_errors_of_memory() -> None:
    with pytest.raises(RuntimeError) as raised:
        torch.empty(2**45)  # 128 TiB.
    for error in (raised.value, torch.OutOfMemoryError("CUDA"), RuntimeError(CUBLAS)):
        assert is_out_of_memory(error)
    for other in (
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        MemoryError(),
        ValueError(str(raised.value)),
    ):
        assert not is_out_of_memory(other)
