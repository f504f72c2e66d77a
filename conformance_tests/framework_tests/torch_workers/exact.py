"""The window of two workers is the large batch of both, whatever each of them holds."""

from __future__ import annotations

from functools import partial

from torch.nn.parallel import DistributedDataParallel

import gradaccum
from conformance_tests.framework_tests.torch_workers.checks import check
from conformance_tests.framework_tests.torch_workers.common import (
    all_windows,
    alone,
    build,
    learn,
    micro_batches,
    require_equal,
    sgd,
    together,
)


@check
def every_kind_of_module(rank: int) -> None:
    reference, _ = alone(all_windows())
    for kind in ({"static_graph": True}, {"gradient_as_bucket_view": True}, {"bucket_cap_mb": 1e-6}):
        require_equal(together(rank, module=kind)[0], reference)
    require_equal(together(rank, model=build(recomputed=True))[0], reference)
    compiled = build()
    compiled.compile(backend="eager")
    require_equal(together(rank, model=compiled)[0], reference)


@check
def discarded_window_is_one_worker_s_own(rank: int) -> None:
    model = build()
    parallel = DistributedDataParallel(model, find_unused_parameters=True)
    opt = gradaccum.wrap(sgd(model), steps=None, module=parallel)
    for batch in micro_batches(rank)[:3]:
        learn(parallel, opt, batch)
    if rank == 1:
        opt.discard()
    opt.flush()
    require_equal(model, alone([micro_batches(0)[:3]])[0])


@check
def listeners_hear_the_window_of_all(rank: int) -> None:
    """One worker's listener raises while the other still flushes: every window ends on both."""
    model, heard = build(), []
    parallel = DistributedDataParallel(model, find_unused_parameters=True)
    opt = gradaccum.wrap(sgd(model), steps=4, module=parallel)
    opt.add_listener(heard.append)
    if rank == 0:
        opt.add_listener(lambda window: window.no_such_field)
    calls = [*(partial(learn, parallel, opt, batch) for batch in micro_batches(rank)), opt.flush]
    raised = 0
    for call in calls:
        try:
            call()
        except AttributeError:
            raised += 1
    assert raised == (2 if rank == 0 else 0)
    assert [window.weight for window in heard] == [sum(len(x) for x, _, _ in window) for window in all_windows()]
    assert [window.micro_batches for window in heard] == ([4, 2] if rank == 0 else [3, 0])
    require_equal(model, alone(all_windows())[0])
