"""A half-precision gradient is added to its sum block by block."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch", reason="needs PyTorch")

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from conformance_tests.framework_tests.test_torch_half_precision import by_dtype
from gradaccum_torch import sums as accumulator


class Sizes(TorchDispatchMode):
    """Records how many elements each addition inside the ``with`` block has."""

    def __init__(self) -> None:
        super().__init__()
        self.added: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.add_.Tensor:
            self.added.append(args[0].numel())
        return func(*args, **(kwargs or {}))


@by_dtype
@pytest.mark.parametrize("layout", ["whole", "last block short", "transposed"])
def test_large_gradient_is_added_in_blocks(dtype: torch.dtype, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the same last bit. A CPU first copies the gradient into the sum's dtype, and the copy of a block stays in the cache."""
    monkeypatch.setattr(accumulator, "BLOCK", 64)
    block = 64 * torch.get_num_threads()
    held, gradient = torch.randn(4 * block, 2), torch.randn(4 * block, 2).to(dtype)
    if layout == "last block short":
        held, gradient = held[:-3], gradient[:-3]
    elif layout == "transposed":
        gradient = torch.randn(2, 4 * block).to(dtype).t()
    expected = held + gradient
    with Sizes() as sizes:
        total = accumulator.add(held, gradient)
    assert total is held
    assert torch.equal(held, expected)
    assert max(sizes.added) == (8 * block if layout == "transposed" else block)


def test_gradient_of_sum_dtype_is_added_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accumulator, "BLOCK", 1)
    with Sizes() as sizes:
        accumulator.add(torch.zeros(1000), torch.ones(1000))
    assert sizes.added == [1000]
