"""The norm of a window's sum is right over the whole range of finite gradients, and of an ordinary one it costs one measurement."""

from __future__ import annotations

import math

import pytest

pytest.importorskip("torch", reason="needs PyTorch")

import torch

from gradaccum_torch import sums as module
from gradaccum_torch.sums import measure

EXTREMES = [2.0**-149, 2.0**-140, 2.0**-100, 2.0**-72, 2.0**-40, 1.0, 2.0**64, 2.0**127]


def near(norm: float, relative: float = 1e-6) -> object:
    return pytest.approx(norm, rel=relative, abs=0)


def pattern(size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Numbers that each of these dtypes holds, at the ends of its range too."""
    return (torch.arange(size, dtype=torch.float64) % 2).to(dtype)


@pytest.mark.parametrize("scale", EXTREMES)
@pytest.mark.parametrize("sizes", [(3,), (5, 7, 1, 2, 9, 4), (5000, 3)], ids=str)
def test_every_magnitude(scale: float, sizes: tuple[int, ...]) -> None:
    tensors = [(pattern(size).double() * scale).float() for size in sizes]
    assert measure(tensors).norm == near(scale * math.sqrt(sum(size // 2 for size in sizes)), 1e-6)


@pytest.mark.parametrize("scale", [2.0**-24, 2.0**-20, 2.0**-14, 1.0, 2.0**15])
def test_float16(scale: float) -> None:
    """A norm of its own dtype, which is how torch gives it, has few bits where it is small."""
    tensors = [(pattern(7).double() * scale).half(), (pattern(5).double() * scale).half()]
    assert measure(tensors).norm == near(scale * math.sqrt(5), 2e-3)


def test_sparse_and_complex() -> None:
    sparse = torch.sparse_coo_tensor(torch.tensor([[0, 2]]), torch.tensor([3.0, 4.0]) * 2.0**-100, (5,), check_invariants=True)
    assert measure([sparse]).norm == near(5 * 2.0**-100)
    assert measure([torch.tensor([3 + 4j], dtype=torch.complex64) * 2.0**-100]).norm == near(5 * 2.0**-100)


def test_ordinary_sums_are_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> float:
        raise AssertionError("measured again")

    monkeypatch.setattr(module, "_scaled_norm", refuse)
    monkeypatch.setattr(module, "largest", refuse)
    assert measure([torch.ones(4), torch.full((3,), 1e-20)]).norm == 2.0
    assert measure([torch.full((4,), 1e-9)]).norm == near(2e-9)
