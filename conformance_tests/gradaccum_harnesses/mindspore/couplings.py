"""The suite's losses that couple the items of a batch;
`gradaccum_conformance.couplings` has their definitions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mindspore import Tensor, ops

from gradaccum_conformance import Coupling

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def contrast(left: Tensor, right: Tensor, temperature: Tensor) -> Tensor:
    scores = ops.exp(temperature) * ops.matmul(left, right.T)
    largest = ops.stop_gradient(ops.ReduceMax(keep_dims=True)(scores, 1))
    shifted = scores - largest
    own = _sum(shifted * ops.eye(left.shape[0], left.shape[0], left.dtype), 1)
    return _mean(ops.log(_sum(ops.exp(shifted), 1)) - own)


def covariance(left: Tensor, right: Tensor, temperature: Tensor) -> Tensor:
    items, columns = left.shape
    centred = left - left.mean(0, keep_dims=True)
    c = ops.matmul(centred.T, centred) / _number(items - 1, left)
    off = c * (_number(1, left) - ops.eye(columns, columns, left.dtype))
    return _sum(ops.exp(temperature) * ops.square(off)) / _number(columns, left)


def balance(left: Tensor, right: Tensor, temperature: Tensor) -> Tensor:
    experts = left.shape[1]
    shifted = ops.exp(left - ops.stop_gradient(ops.ReduceMax(keep_dims=True)(left, 1)))
    p = shifted / ops.ReduceSum(keep_dims=True)(shifted, 1)
    hot = (left == ops.ReduceMax(keep_dims=True)(left, 1)).astype(left.dtype)
    fraction = ops.stop_gradient(hot.mean(0))
    return _sum(ops.exp(temperature) * _number(experts, left) * fraction * p.mean(0))


def _sum(value: Any, axis: Any = ()) -> Any:
    return ops.ReduceSum()(value, axis)


def _mean(value: Any) -> Any:
    return _sum(value) / _number(value.size, value)


def _number(value: int, like: Any) -> Any:
    return ops.full((), value, dtype=like.dtype)


COUPLINGS: dict[Coupling, Loss] = {
    "contrast": contrast,
    "covariance": covariance,
    "balance": balance,
}
