"""The sum over the workers, whatever FSDP2 divides it by; and the collectives of a window."""

from __future__ import annotations

import gradaccum
from conformance_tests.framework_tests.refusing import refused
from conformance_tests.framework_tests.torch_shards.common import (
    WAYS,
    Way,
    alone,
    batches,
    check,
    counted,
    learn,
    require_equal,
    sgd,
    sharded,
    train,
    windows_of,
    wrap,
)

SMALL = 80
"""Bytes: the first layer has more."""


@check
def every_divide_factor(rank: int) -> None:
    for reduction in ("mean", "sum"):
        reference, _ = alone(windows_of(), reduction=reduction)
        for way in (way for way in WAYS if way.shape != (2, 1)):
            for factors in ((1.0, 1.0), (3.0, 3.0), (5.0, None)):
                model = sharded(way)
                for module, factor in zip((model.first, model), factors, strict=True):
                    if factor is not None:
                        module.set_gradient_divide_factor(factor)
                opt = wrap(model, way, reduction=reduction)
                train(model, opt, rank)
                require_equal(model, reference)


@check
def sum_without_the_module(rank: int) -> None:
    """FSDP2's units are found by the parameters."""
    model = sharded(WAYS[0])
    model.set_gradient_divide_factor(1.0)
    model.first.set_gradient_divide_factor(1.0)
    opt = gradaccum.wrap(sgd(model), steps=3, reduction="sum")
    train(model, opt, rank)
    require_equal(model, alone(windows_of(), reduction="sum")[0])


@check
def factors_that_cannot_be_told(rank: int) -> None:
    model = sharded(WAYS[0])
    opt = wrap(model, WAYS[0])
    train(model, opt, rank, 2)
    model.set_gradient_divide_factor(3.0)
    with refused(gradaccum.UsageError, "set_gradient_divide_factor", "opt.discard()"):
        opt.flush()
    opt.discard()
    train(model, opt, rank, 3)
    require_equal(model, alone(windows_of((3,)))[0])
    for way in (Way("micro_batch", (2, 1)), Way("window", (2, 1))):
        model = sharded(way)
        model.set_gradient_divide_factor(3.0)
        opt = wrap(model, way)
        learn(model, opt, batches(rank)[0])
        with refused(gradaccum.UsageError, "set_gradient_divide_factor", "twice"):
            opt.flush()
    model = sharded(WAYS[0])
    model.set_all_reduce_hook(lambda _: None)
    opt = wrap(model, WAYS[0])
    learn(model, opt, batches(rank)[0])
    with refused(gradaccum.UsageError, "set_all_reduce_hook"):
        opt.flush()


@check
def collectives_of_a_window(rank: int) -> None:
    """Gradients travel in each micro-batch, or once per window, whatever its length; beside them one or two vectors of a few numbers."""
    for steps in (2, 5):
        for way in WAYS:
            model = sharded(way)
            opt = wrap(model, way, steps=steps)
            train(model, opt, rank, steps)
            with counted() as called:
                train(model, opt, rank, steps)
            kind = "reduce_scatter_single" if way.shape[-1] == 2 else "all_reduce"
            units, per_window = 2, steps if way.sync == "micro_batch" else 1
            assert sum(name == kind and size > SMALL for name, size in called) == units * per_window, (way, called)
            small = sum(name == "all_reduce" and size <= SMALL for name, size in called)
            assert small == len(way.shape) * (1 if way.sync == "micro_batch" else 2), (way, called)
