"""Whether half-precision tensors hold the rounded values of float32 ones, in one pass over both.

A CPU compares the bits: it has no vector instruction that compares half-precision numbers, so that would take twice the time. On an
accelerator the launch of a kernel takes the time: there one call subtracts many tensors, no more than keep the rounded copies small.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from gradaccum_torch.torch_private import foreach_copy_, foreach_norm, foreach_sub_

CHUNK = 2**25
"""Elements that are rounded at a time."""

Pair = tuple[Tensor, Tensor]
"""A half-precision tensor and the float32 tensor that it should be the rounded copy of."""


@torch.no_grad()
def apart(pairs: Sequence[Pair]) -> Tensor | None:
    """Whether any half-precision tensor differs from the other one rounded: a bool, shape ``()``; None without any element.

    True also where both are not finite. Of a sharded tensor the part that is here is compared.
    """
    local = [(half, wide) for half, wide in ((_local(half), _local(wide)) for half, wide in pairs) if half.numel()]
    if not local:
        return None
    if all(half.is_cpu for half, _ in local):
        found = [bits_apart(half, wide) for half, wide in local]
    else:
        found = [difference for chunk in _chunks(local) for difference in differences(chunk)]
    return torch.stack([each.to(found[0].device) for each in found]).any()


def bits_apart(half: Tensor, wide: Tensor) -> Tensor:
    """Not 0 where a bit differs, shape ``()``."""
    bits = wide.to(half.dtype, copy=True).view(torch.int16)
    lowest, highest = bits.bitwise_xor_(half.view(torch.int16)).aminmax()
    return lowest | highest


def differences(pairs: Sequence[Pair]) -> Sequence[Tensor]:
    """The largest difference within each pair, shape ``()``: not 0, or NaN, where a number differs."""
    rounded = [torch.empty_like(half) for half, _ in pairs]
    foreach_copy_(rounded, [wide for _, wide in pairs])
    foreach_sub_(rounded, [half for half, _ in pairs])
    return foreach_norm(rounded, math.inf)


def _chunks(pairs: Sequence[Pair]) -> Iterator[Sequence[Pair]]:
    first, elements = 0, 0
    for index, (half, _) in enumerate(pairs):
        elements += half.numel()
        if elements >= CHUNK or index == len(pairs) - 1:
            yield pairs[first : index + 1]
            first, elements = index + 1, 0


def _local(tensor: Tensor) -> Tensor:
    own: Any = tensor.detach()
    local: Tensor = own.to_local() if hasattr(own, "to_local") else own
    return local
