"""The `repr` of a wrapped torch optimizer."""

from __future__ import annotations

import math

import gradaccum
from conformance_tests.framework_tests.torch_model import loss_of, make


def test_repr_is_one_line() -> None:
    model, opt = make(steps=2, clip_norm=1.0, loss_scale=gradaccum.DynamicLossScale())
    for factor in (math.inf, 1.0, 1.0):
        opt.backward(loss_of(model) * factor)
        opt.step()
    assert (
        str(opt)
        == "AccumulatingOptimizer(SGD, steps=2, clip_norm=1.0, loss_scale=dynamic |"
        " micro-batch 1 of 2, update 0, 1 skipped, scale 32768)"
    )
