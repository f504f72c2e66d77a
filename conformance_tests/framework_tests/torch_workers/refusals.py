"""What raises, on every worker."""

from __future__ import annotations

import datetime
import pickle
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradaccum
from conformance_tests.framework_tests.refusing import refused
from conformance_tests.framework_tests.torch_workers.checks import check
from conformance_tests.framework_tests.torch_workers.common import (
    build,
    learn,
    micro_batches,
    sgd,
)


@check
def plain_loop_without_the_module_names_it(rank: int) -> None:
    model = build(torch.float32)
    parallel = DistributedDataParallel(model, find_unused_parameters=True)
    opt = gradaccum.wrap(sgd(model), steps=4)
    parallel(micro_batches(rank, torch.float32)[0][0]).square().mean().backward()
    with refused(gradaccum.UsageError, "module="):
        opt.step()


@check
def wrong_modules_are_refused(rank: int) -> None:
    model, other = build(), build()
    parallel = DistributedDataParallel(model)
    with refused(gradaccum.ArgumentTypeError, "module", "Branches"):
        gradaccum.wrap(sgd(model), steps=4, module=model)
    with refused(gradaccum.ArgumentValueError, "module", "6 of them"):
        gradaccum.wrap(sgd(other), steps=4, module=parallel)
    with refused(gradaccum.ArgumentValueError, "options", "on rank 1"):
        gradaccum.wrap(sgd(model), steps=4 + rank, module=parallel)
    parallel.register_comm_hook(None, lambda state, bucket: None)
    with refused(gradaccum.UsageError, "hook"):
        gradaccum.wrap(sgd(model), steps=4, module=parallel)


@check
def copies_and_closures_are_refused(rank: int) -> None:
    model = build()
    opt = gradaccum.wrap(sgd(model), steps=1, module=DistributedDataParallel(model))
    with refused(gradaccum.UsageError, "module"):
        pickle.dumps(opt)
    with refused(gradaccum.UsageError, "module="):
        opt.step(lambda: torch.zeros(()))


@check
def second_derivatives_are_refused(rank: int) -> None:
    """The sum of all workers has no graph."""
    model = build()
    parallel = DistributedDataParallel(model, find_unused_parameters=True)
    opt = gradaccum.wrap(sgd(model), steps=1, module=parallel)
    loss = parallel(micro_batches(rank)[0][0]).square().mean()
    with refused(gradaccum.UsageError, "create_graph"):
        opt.backward(loss, create_graph=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loss.backward(create_graph=True)
    with refused(gradaccum.UsageError, "create_graph"):
        opt.step()
    opt.discard()


@check
def sparse_gradients_are_refused(rank: int) -> None:
    model = nn.Embedding(4, 2, sparse=True)
    opt = gradaccum.wrap(torch.optim.SGD(model.parameters(), lr=0.1), steps=1, module=DistributedDataParallel(model))
    opt.backward(model(torch.tensor([rank])).sum())
    with refused(gradaccum.UsageError, "dense"):
        opt.step()


@check
def missing_worker_ends_in_an_error(rank: int) -> None:
    """The last check: it leaves the process group unusable."""
    model = build()
    group = dist.new_group(timeout=datetime.timedelta(seconds=2))
    parallel = DistributedDataParallel(model, find_unused_parameters=True, process_group=group)
    opt = gradaccum.wrap(sgd(model), steps=2, module=parallel)
    batches = micro_batches(rank)
    learn(parallel, opt, batches[0])
    if rank == 0:
        with refused(gradaccum.UsageError, "rank 0", "2 micro-batches", "flush()"):
            learn(parallel, opt, batches[1])
