"""Beside other parts of torch: a scaler, sharded optimizer state, a pipeline, a split
sequence, the buffers of a batch norm.
"""

from __future__ import annotations

import copy
import datetime
import inspect
import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel

import gradaccum
from conformance_tests.framework_tests.refusing import refused

from .common import (
    WORLD,
    all_windows,
    alone,
    build,
    ddp,
    learn,
    learn_all,
    make_shared,
    micro_batches,
    numbers,
    require_equal,
    require_same_everywhere,
    sgd,
)
from .jobs import check


@check
def grad_scaler_moves_once_per_window(rank: int) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
    model, parallel, opt = make_shared(build(torch.float32), steps=2, loss_scale=scaler)
    for index, (x, y, rare) in enumerate([*micro_batches(rank, torch.float32)[:2]] * 2):
        bad = math.inf if rank == 1 and index == 2 else 1
        scaler.scale((parallel(x * bad, rare) - y).square().mean()).backward()
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
    assert scaler.get_scale() == 8.0, (
        "doubled after the first window, halved after the second"
    )
    require_same_everywhere((numbers(model), scaler.state_dict(), opt.result))


@check
def zero_redundancy_optimizer_is_an_inner_optimizer(rank: int) -> None:
    """Each worker updates its part of the parameters and sends it to the others."""
    # Importing it warns, which is an error where the tests are collected.
    from torch.distributed.optim import (
        ZeroRedundancyOptimizer,
    )

    model = build()
    parallel = ddp(model)
    zero = ZeroRedundancyOptimizer(
        model.parameters(), optimizer_class=torch.optim.SGD, lr=0.1, momentum=0.9
    )
    opt = gradaccum.wrap(zero, steps=4, module=parallel, clip_norm=0.05)
    learn_all(parallel, opt, micro_batches(rank))
    require_equal(model, alone(all_windows(), clip_norm=0.05)[0])
    require_same_everywhere(opt.result)


@check
def pipeline_schedule_must_not_scale_gradients(rank: int) -> None:
    """One schedule step of two chunks is a micro-batch, if it leaves its gradients
    alone and the loss is divided by the chunks.
    """
    # Importing it takes a second, in each process of each job.
    from torch.distributed.pipelining import (
        PipelineStage,
        ScheduleGPipe,
    )

    # Older schedules never scale.
    scales = "scale_grads" in inspect.signature(ScheduleGPipe).parameters
    for scale_grads in (True, False) if scales else (False,):
        own = {"scale_grads": scale_grads} if scales else {}
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double()
        whole = copy.deepcopy(layers)
        stage = PipelineStage(layers[rank], rank, WORLD, torch.device("cpu"))
        schedule = ScheduleGPipe(
            stage, 2, loss_fn=lambda y, target: (y - target).square().mean() / 2, **own
        )
        opt = gradaccum.wrap(sgd(layers[rank]), steps=2)
        reference = gradaccum.wrap(sgd(whole), steps=2)
        for x in torch.arange(64.0).double().reshape(2, 8, 4).sin():
            schedule.step(
                *([x] if rank == 0 else []), **({"target": x} if rank == 1 else {})
            )
            if scale_grads:
                with refused(gradaccum.UsageError, "scale_grads=False"):
                    opt.step()
                break
            opt.step()
            opt.zero_grad()
            (whole(x) - x).square().mean().backward()
            reference.step()
            reference.zero_grad()
        else:
            require_equal(layers[rank], whole[rank])


def two_stages() -> tuple[nn.Module, nn.Module]:
    """Return an embedding and a head."""
    torch.manual_seed(0)
    first, last = (
        nn.Embedding(7, 4).double(),
        nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 7, bias=False)).double(),
    )
    return first, last


@check
def stages_have_one_norm(rank: int) -> None:
    """Over two stages: one norm, one clip, one overflow, one scale; a clip below and
    one above the norm.
    """
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    own = (
        {"scale_grads": False}
        if "scale_grads" in inspect.signature(ScheduleGPipe).parameters
        else {}
    )
    for options in ({"clip_norm": 0.05}, {"clip_norm": 50.0}, {"separate_sums": True}):
        first, last = two_stages()
        whole = nn.Sequential(*copy.deepcopy([first, last]))
        part = (first, last)[rank]
        opt = gradaccum.wrap(
            sgd(part),
            steps=2,
            norm_group=dist.group.WORLD,
            **options,
        )
        reference = gradaccum.wrap(sgd(whole), steps=2, **options)
        stage = PipelineStage(part, rank, WORLD, torch.device("cpu"))
        schedule = ScheduleGPipe(
            stage,
            2,
            loss_fn=lambda y, target: nn.functional.cross_entropy(y, target) / 2,
            **own,
        )
        for index, x in enumerate(torch.arange(48).reshape(6, 8) * 5 % 7):
            factor = math.inf if index == 2 else 1.0  # One stage alone overflows.
            hooks = [
                each[0].weight.register_hook(lambda grad, factor=factor: grad * factor)
                for each in (last, whole[1])
            ]
            schedule.step(
                *([x] if rank == 0 else []),
                **({"target": x.roll(1)} if rank == 1 else {}),
            )
            reference.backward(nn.functional.cross_entropy(whole(x), x.roll(1)))
            for each, hook in ((opt, hooks[0]), (reference, hooks[1])):
                each.step()
                each.zero_grad()
                hook.remove()
            torch.testing.assert_close(
                opt.result.grad_norm,
                reference.result.grad_norm,
                rtol=1e-12,
                atol=0,
                equal_nan=True,
            )
            assert opt.result[:3] == reference.result[:3]
        require_equal(part, whole[rank])
        assert opt.result.optimizer_step == 2


@check
def stages_count_the_same_micro_batches(rank: int) -> None:
    part = nn.Linear(2, 2).double()
    opt = gradaccum.wrap(sgd(part), steps=2, norm_group=dist.group.WORLD)
    for call in ("other weights", "the same"):
        x = torch.ones(3, 2).double()
        opt.backward(part(x).sum(), 1 + rank * (call == "other weights"))
        opt.step()
        opt.backward(part(x).sum(), 1)
        if call == "other weights":
            with refused(gradaccum.UsageError, "norm_group", "opt.discard()"):
                opt.step()
            opt.discard()
    opt.step()
    assert opt.result.applied
    with refused(gradaccum.UsageError, "copy, pickle"):
        copy.deepcopy(opt)
    del opt
    hasty = dist.new_group(timeout=datetime.timedelta(seconds=2))
    opt = gradaccum.wrap(sgd(part), steps=2, norm_group=hasty)
    opt.backward(part(x).sum())
    opt.step()
    if rank == 0:
        with refused(gradaccum.UsageError, "the end of a window on rank 0"):
            opt.flush()
        assert opt.state_dict()["gradaccum"]["micro_step"] == 1, "what it holds stays"
    dist.barrier()


@check
def buffers_are_sent_at_a_window_s_end(rank: int) -> None:
    """The first worker's, in the step that ends it: a forward pass that waited for the
    others would wait for ever if these flush.
    """
    for option, is_sent in (({}, True), ({"broadcast_buffers": False}, False)):
        model = nn.Sequential(
            nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)
        ).double()
        parallel = DistributedDataParallel(model, **option)
        # As a checkpoint that one worker alone has loaded.
        model[1].running_mean.fill_(rank)
        opt = gradaccum.wrap(sgd(model), steps=2, module=parallel)
        starts, ends = [model[1].running_mean.tolist()], []
        for index, (x, _, _) in enumerate(
            [*micro_batches(0), *micro_batches(1)][: 2 + 4 * rank]
        ):
            opt.backward(parallel(x + rank).square().mean(), len(x))
            opt.step()
            if index == 1:
                ends.append(model[1].running_mean.tolist())
        opt.flush()
        ends.append(model[1].running_mean.tolist())
        assert opt.result.optimizer_step == 3
        require_same_everywhere(numbers(model))
        for values in (starts, ends):
            everyone: list[list[list[float]]] = [[]] * WORLD
            dist.all_gather_object(everyone, values)
            assert (everyone[0] == everyone[1]) is is_sent, everyone
        with torch.no_grad():  # One worker alone evaluates.
            if rank == 0:
                parallel(micro_batches(0)[0][0])


@check
def averages_of_each_micro_batch_need_one_weight(rank: int) -> None:
    """Beside ``separate_sums`` the module reduces by itself, which is right as long as
    all workers have the same weights; it may be built after the optimizer was wrapped.
    """
    model = build()
    opt = gradaccum.wrap(sgd(model), steps=2, separate_sums=True, process_group="alone")
    parallel = ddp(model)
    pair = [(x, y, False) for x, y, _ in micro_batches(0)[:2]]
    for x, y, rare in pair:
        learn(parallel, opt, (x + rank, y, rare))
    large = [(x + each, y, rare) for each in range(WORLD) for x, y, rare in pair]
    require_equal(model, alone([large])[0])
    # With the group the weights are added up, and may differ.
    model = build()
    opt = gradaccum.wrap(
        sgd(model),
        steps=2,
        separate_sums=True,
        clip_norm=0.05,
        process_group=dist.group.WORLD,
    )
    parallel = ddp(model)
    batches = [
        [(x, y, False) for x, y, _ in micro_batches(each)[:2]] for each in range(WORLD)
    ]
    for batch in batches[rank]:
        learn(parallel, opt, batch)
    require_equal(model, alone([batches[0] + batches[1]], clip_norm=0.05)[0])


@check
def parameters_of_one_worker_are_parts_of_a_sharded_one(rank: int) -> None:
    """Experts, which the module was told to ignore: their sums stay on their worker,
    and the norm counts them all.
    """
    torch.manual_seed(0)
    shared, experts = nn.Linear(4, 3).double(), torch.randn(WORLD, 3).double()

    class Local(nn.Module):
        def __init__(self, expert: Any) -> None:
            super().__init__()
            self.shared, self.expert = copy.deepcopy(shared), nn.Parameter(expert)

        def forward(self, x: Tensor) -> Tensor:
            return self.shared(x) @ (
                self.expert.to_local()[0]
                if isinstance(self.expert, DTensor)
                else self.expert
            )

    mesh = init_device_mesh("cpu", (WORLD,))
    for sharded in (False, True):
        model = Local(
            DTensor.from_local(experts[rank : rank + 1].clone(), mesh, [Shard(0)])
            if sharded
            else experts[rank].clone()
        )
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
            model, ["expert"]
        )
        parallel = DistributedDataParallel(model)
        optimizer = torch.optim.SGD(
            [{"params": [each]} for each in model.parameters()], lr=0.1
        )
        if not sharded:
            with refused(
                gradaccum.ArgumentValueError, "module", "ignore 1 of them", "DTensor"
            ):
                gradaccum.wrap(optimizer, steps=2, module=parallel)
            continue
        opt = gradaccum.wrap(optimizer, steps=2, module=parallel, clip_norm=0.05)
        for x, _, _ in micro_batches(rank)[:2]:
            opt.backward(parallel(x).square().mean(), len(x))
            opt.step()
        whole, parts = copy.deepcopy(shared), nn.Parameter(experts.clone())
        losses = [
            (whole(x) @ parts[each]).square()
            for each in range(WORLD)
            for x, _, _ in micro_batches(each)[:2]
        ]
        torch.cat(losses).mean().backward()
        norm = nn.utils.clip_grad_norm_([*whole.parameters(), parts], 0.05)
        torch.optim.SGD([*whole.parameters(), parts], lr=0.1).step()
        assert math.isclose(opt.result.grad_norm, norm.item(), rel_tol=1e-12)
        for p, q in zip(model.shared.parameters(), whole.parameters(), strict=True):
            # torch clips to 1 / (norm + 1e-6).
            torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(
            model.expert.full_tensor(), parts, rtol=1e-6, atol=1e-6
        )


@check
def copies_of_an_expert_with_items_of_their_own_are_parts(rank: int) -> None:
    """Without ``grad_placements`` torch takes the copies' gradients for equal, as they
    are where the items are.
    """
    mesh = init_device_mesh("cpu", (WORLD,))
    items = torch.arange(12.0).double().reshape(3, 4).sin()
    for placements, own in (([Partial()], True), (None, False), (None, True)):
        expert = nn.Parameter(
            DTensor.from_local(torch.ones(4).double(), mesh, [Replicate()])
        )
        large = nn.Parameter(torch.ones(4).double())
        opt = gradaccum.wrap(
            torch.optim.SGD([expert], lr=0.1),
            steps=1,
            process_group=dist.group.WORLD,
            reduction="sum",
        )
        x = items * (1 + rank * own)
        (x @ expert.to_local(grad_placements=placements)).square().sum().backward()
        if placements is None and own:
            with refused(
                gradaccum.UsageError,
                "grad_placements",
                "copies of a shard",
                "Partial()",
                "discard()",
            ):
                opt.step()
            continue
        opt.step()
        sum(
            (items * (1 + each * own) @ large).square().sum()
            for each in range(WORLD if own else 1)
        ).backward()
        torch.optim.SGD([large], lr=0.1).step()
        torch.testing.assert_close(expert.full_tensor(), large, rtol=1e-12, atol=1e-12)


@check
def loop_under_join_is_refused(rank: int) -> None:
    """It answers the collectives of the module alone; ``flush`` is for workers that run
    out of data.
    """
    _, parallel, opt = make_shared(steps=1)
    with parallel.join(), refused(gradaccum.UsageError, "join()", "flush()"):
        learn(parallel, opt, micro_batches(rank)[0])
    opt.discard()


@check
def last_micro_batch_of_a_loop_is_no_other(rank: int) -> None:
    """The line of nanoGPT that has DDP reduce in the last backward pass may stay, also
    where the other worker flushes meanwhile.
    """
    for compiled in (False, True):
        model, parallel, opt = make_shared()
        called = torch.compile(parallel, backend="eager") if compiled else parallel
        for index, batch in enumerate(micro_batches(rank)):
            parallel.require_backward_grad_sync = index % 4 == 3 or index == 5
            learn(called, opt, batch)
        opt.flush()
        require_equal(model, alone(all_windows())[0])


class Block(nn.Module):
    """A language model of one block, without attention."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.up, self.down = (
            nn.Embedding(11, 8),
            nn.LayerNorm(8),
            nn.Linear(8, 16),
            nn.Linear(16, 8),
        )
        self.out = nn.Linear(8, 11)
        nn.init.normal_(self.norm.weight)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        return cross_entropy(
            self.out(h + self.down(self.up(self.norm(h)).tanh())).flatten(0, 1),
            x.roll(1, 1).flatten(),
        )


def require_no_parts(model: nn.Module) -> None:
    assert not any(
        each.is_partial()
        for parameter in model.parameters()
        for each in getattr(parameter.grad, "placements", ())
    )


@check
def sequence_parallel_norm_is_exact(rank: int) -> None:
    """The gradient of a norm whose items are split along the sequence is a part on each
    worker: it is added up before it is measured.
    """
    plan = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
        "out": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    every: list[dict[str, Any]] = [
        {"clip_norm": 0.05},
        {"separate_sums": True},
        {"on_overflow": "drop_micro_batch"},
    ]
    for options in every:
        torch.manual_seed(0)
        whole = Block().double()
        model = copy.deepcopy(whole)
        parallelize_module(model, init_device_mesh("cpu", (WORLD,)), plan)
        opt, alone = (
            gradaccum.wrap(torch.optim.Adam(each.parameters()), steps=3, **options)
            for each in (model, whole)
        )
        opt.register_step_pre_hook(lambda *_, model=model: require_no_parts(model))
        for index in range(6):
            x = torch.arange(8 * (1 + index % 3)).reshape(-1, 8) * (3 + index) % 11
            for each, own in ((model, opt), (whole, alone)):
                own.backward(each(x), weight=len(x))
                own.step()
                own.zero_grad()
            torch.testing.assert_close(
                opt.result.grad_norm, alone.result.grad_norm, rtol=1e-12, atol=0
            )
        assert opt.result.applied
        for mine, large in zip(model.parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(
                mine.full_tensor() if isinstance(mine, DTensor) else mine,
                large,
                rtol=1e-12,
                atol=1e-12,
            )


class Attention(nn.Module):
    """Over a sequence of which each worker has a part, if there is a mesh."""

    def __init__(self, mesh: DeviceMesh | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inputs, self.mesh = nn.Linear(4, 12).double(), mesh

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        query, key, value = self.inputs(x).chunk(3, -1)
        return (
            (
                scaled_dot_product_attention(query, self.whole(key), self.whole(value))
                * counts.unsqueeze(-1)
            )
            .square()
            .sum()
        )

    def whole(self, part: Tensor) -> Tensor:
        if self.mesh is None:
            return part
        return DTensor.from_local(part, self.mesh, [Shard(1)]).full_tensor(
            grad_placements=[Partial()]
        )


@check
def context_parallel_tokens_weigh(rank: int) -> None:
    """Each worker has a half of each sequence, and weighs its own tokens; padding
    stands at the end, in the second half.
    """
    model, large = Attention(init_device_mesh("cpu", (WORLD,))), Attention(None)
    module = DistributedDataParallel(model)
    options: dict[str, Any] = {
        "steps": 3,
        "clip_norm": 0.05,
        "reduction": "sum_per_item",
    }
    opt, alone = (
        gradaccum.wrap(sgd(model), module=module, **options),
        gradaccum.wrap(sgd(large), **options),
    )
    for index in range(6):
        x = torch.arange(64.0).double().reshape(2, 8, 4).add(index).sin()
        counts = (torch.arange(8) < 8 - index).expand(2, 8)
        own, mine = x.chunk(WORLD, 1)[rank], counts.chunk(WORLD, 1)[rank]
        loss = module(own, mine)
        if not mine.any():
            with refused(
                gradaccum.UsageError, "weight", "opt.weigh(0) and loss.backward()"
            ):
                opt.backward(loss, weight=0)
        opt.weigh(int(mine.sum()))
        loss.backward()
        alone.backward(large(x, counts), weight=int(counts.sum()))
        for each in (opt, alone):
            each.step()
            each.zero_grad()
        torch.testing.assert_close(
            opt.result.grad_norm, alone.result.grad_norm, rtol=1e-12, atol=0
        )
    require_equal(model, large)
