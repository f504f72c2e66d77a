"""Refusals that every worker raises, and saved windows that resume."""

from __future__ import annotations

import datetime
import gc
import pickle
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import gradaccum
from conformance_tests.framework_tests.refusing import refused

from .common import (
    WORLD,
    all_windows,
    alone,
    build,
    learn,
    micro_batches,
    numbers,
    require_equal,
    require_same_everywhere,
    sgd,
)
from .jobs import check


@check
def plain_loop_without_the_module_names_it(rank: int) -> None:
    model = build(torch.float32)
    parallel = DistributedDataParallel(model, find_unused_parameters=True)
    opt = gradaccum.wrap(sgd(model), steps=4)
    parallel(micro_batches(rank, torch.float32)[0][0]).square().mean().backward()
    with refused(gradaccum.UsageError, "module="):
        opt.step()


@check
def denominator_of_one_worker_is_refused(rank: int) -> None:
    """Each worker would divide the sum of all by its own, and the copies of the model
    would part.
    """
    model = build()
    opt = gradaccum.wrap(sgd(model), steps=None, process_group=dist.group.WORLD)
    opt.backward(sum(p.sum() for p in model.parameters()))
    opt.step()
    with refused(gradaccum.UsageError, "denominator", "several workers"):
        opt.flush(denominator=3.0 + rank)
    opt.flush()
    assert opt.result.applied


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
def tensor_parallel_model_under_ddp_is_refused(rank: int) -> None:
    """Each worker's norm, and its overflow, would be those of its own shards."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
    from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform

    mesh = init_device_mesh("cpu", (1, WORLD), mesh_dim_names=("data", "tensor"))
    model = parallelize_module(
        nn.Sequential(nn.Linear(4, 8)), mesh["tensor"], {"0": ColwiseParallel()}
    )
    _pre_dp_module_transform(model)  # type: ignore[no-untyped-call]
    parallel = DistributedDataParallel(model, process_group=mesh.get_group("data"))
    with refused(gradaccum.ArgumentValueError, "module", "tensor-parallel"):
        gradaccum.wrap(sgd(model), steps=4, module=parallel)


@check
def comm_hook_after_wrap_is_refused(rank: int) -> None:
    """At its registration, which leaves the open window as it is."""
    model = build()
    parallel = DistributedDataParallel(model, find_unused_parameters=True)
    opt = gradaccum.wrap(sgd(model), steps=4, module=parallel)
    for index, batch in enumerate(micro_batches(rank)):
        learn(parallel, opt, batch)
        if index == 0:
            with refused(gradaccum.UsageError, "hook"):
                parallel.register_comm_hook(state=None, hook=lambda state, bucket: None)
    opt.flush()
    require_equal(model, alone(all_windows())[0])


@check
def foreign_parameters_are_not_added(rank: int) -> None:
    """They would be added up over workers that may not have the same ones; those of the
    module may come later, under any name.
    """
    model, foreign = build(), nn.Linear(2, 2).double()
    parallel = DistributedDataParallel(model, find_unused_parameters=True)
    opt = gradaccum.wrap(
        torch.optim.SGD(model.first.parameters(), lr=0.1, momentum=0.9),
        steps=4,
        module=parallel,
    )
    for given in (
        foreign.weight,
        iter(foreign.parameters()),
        list(foreign.named_parameters()),
    ):
        with refused(gradaccum.ArgumentValueError, "module", "of them"):
            opt.add_param_group({"params": given})
    assert len(opt.param_groups) == 1
    opt.add_param_group({"params": (each for each in model.usual.parameters())})
    opt.add_param_group({"params": list(model.rare.parameters())})
    for batch in micro_batches(rank):
        learn(parallel, opt, batch)
    opt.flush()
    require_equal(model, alone(all_windows())[0])


@check
def copies_are_refused(rank: int) -> None:
    model = build()
    opt = gradaccum.wrap(sgd(model), steps=1, module=DistributedDataParallel(model))
    with refused(gradaccum.UsageError, "module"):
        pickle.dumps(opt)


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
    """On the worker that has none too, which would wait; the dense sums stay whole."""
    model = nn.ModuleDict(
        {"sparse": nn.Embedding(4, 2, sparse=True), "dense": nn.Linear(2, 2)}
    )
    opt = gradaccum.wrap(
        torch.optim.SGD(model.parameters(), lr=0.1),
        steps=1,
        module=DistributedDataParallel(model),
    )
    x = model["sparse"](torch.tensor([rank])) if rank else torch.ones(1, 2)
    opt.backward(model["dense"](x).sum())
    before = model["dense"].bias.grad.tolist()
    with refused(gradaccum.UsageError, "dense"):
        opt.step()
    assert model["dense"].bias.grad.tolist() == before


@check
def missing_worker_ends_in_an_error(rank: int) -> None:
    """The last check: it leaves the process group unusable."""
    model = build()
    group = dist.new_group(timeout=datetime.timedelta(seconds=2))
    parallel = DistributedDataParallel(
        model, find_unused_parameters=True, process_group=group
    )
    opt = gradaccum.wrap(sgd(model), steps=2, module=parallel)
    batches = micro_batches(rank)
    learn(parallel, opt, batches[0])
    if rank == 0:
        with refused(gradaccum.UsageError, "rank 0", "2 micro-batches", "flush()"):
            learn(parallel, opt, batches[1])


# A saved window resumes.


@check
def window_of_another_worker_is_refused(rank: int) -> None:
    """A job that saves on its first worker only would double that one's sum."""
    model = build()
    parallel = DistributedDataParallel(model, find_unused_parameters=True)
    opt = gradaccum.wrap(sgd(model), steps=4, module=parallel)
    learn(parallel, opt, micro_batches(rank)[0])
    saved: list[Any] = [None] * WORLD
    dist.all_gather_object(saved, opt.state_dict())
    with refused(
        gradaccum.CheckpointError,
        f"rank {rank} of 2",
        f"rank {1 - rank} of 2",
        "redistributed",
    ):
        opt.load_state_dict(saved[1 - rank])
    opt.load_state_dict(saved[rank])
    opt.flush()
    require_equal(model, alone([[micro_batches(0)[0], micro_batches(1)[0]]])[0])


def averages(parallel: DistributedDataParallel, rank: int) -> bool:
    """True if a plain backward pass of the module averages over the workers."""
    weight = next(parallel.parameters())
    weight.grad = None
    x = micro_batches(0)[0][0]
    parallel(x).sum().mul(1.0 + rank).backward()
    mine = weight.grad.clone()
    parallel.zero_grad()
    (once,) = torch.autograd.grad(parallel.module(x).sum(), weight)
    return torch.allclose(mine, once * 1.5, rtol=1e-12)


@check
def module_reduces_again_without_its_wrapper(rank: int) -> None:
    """After the wrapper is gone, and after a wrap that was refused."""
    model = build()
    parallel = DistributedDataParallel(model, find_unused_parameters=True)
    assert averages(parallel, rank)
    for wrong, error in (
        ({"accumulate_dtype": "int32"}, gradaccum.GradAccumError),
        ({"module": model}, gradaccum.ArgumentTypeError),
    ):
        with refused(error):
            gradaccum.wrap(sgd(model), **{"steps": 4, "module": parallel, **wrong})
        assert averages(parallel, rank)
    inner = sgd(model)
    first = gradaccum.wrap(inner, steps=4, module=parallel)
    with refused(gradaccum.ArgumentTypeError, "wrapped"):
        gradaccum.wrap(inner, steps=4, module=parallel)
    assert not averages(parallel, rank)
    second = gradaccum.wrap(sgd(model), steps=4, module=parallel)
    del first, inner
    gc.collect()
    assert not averages(parallel, rank), "the second one still waits"
    del second
    gc.collect()
    assert averages(parallel, rank)
    parallel.register_comm_hook(None, default_hooks.allreduce_hook)


@check
def each_optimizer_of_a_module_names_it(rank: int) -> None:
    """A module that waits reduces nothing for an optimizer that does not know it."""
    model = build()
    parallel = DistributedDataParallel(model, find_unused_parameters=True)
    heads = [*model.usual.parameters(), *model.rare.parameters()]
    bare = torch.optim.SGD(heads, lr=0.1)
    early = gradaccum.wrap(
        torch.optim.SGD(heads, lr=0.1), steps=1, process_group="alone"
    )
    body = gradaccum.wrap(
        torch.optim.SGD(model.first.parameters(), lr=0.1), steps=1, module=parallel
    )
    with refused(gradaccum.UsageError, "module=parallel", "4 of the parameters"):
        gradaccum.wrap(torch.optim.SGD(heads, lr=0.1), steps=1, process_group="alone")
    before = parallel.state_dict()["module.usual.weight"].clone()
    for opt in (bare, early):
        parallel(micro_batches(rank)[0][0]).square().mean().backward()
        with refused(gradaccum.UsageError, "module=parallel"):
            opt.step()
        model.zero_grad()
    assert torch.equal(before, model.usual.weight)
    other = torch.optim.SGD([torch.ones(2, requires_grad=True)], lr=0.1)
    other.step()
    early.discard()
    body.discard()
    del early, bare
    gc.collect()
    head = gradaccum.wrap(torch.optim.SGD(heads, lr=0.1), steps=1, module=parallel)
    x, y, _ = micro_batches(rank)[0]
    (parallel(x) - y).square().mean().backward()
    body.step()
    head.step()
    assert body.result.applied
    assert head.result.applied
    require_same_everywhere(numbers(model))
