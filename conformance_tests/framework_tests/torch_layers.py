"""Layered windows of two processes: ``python -m
conformance_tests.framework_tests.torch_layers RANK FOLDER``.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import gradaccum
from conformance_tests.framework_tests.refusing import refused
from conformance_tests.framework_tests.torch_fsdp import RUNS_ON_CPU
from conformance_tests.framework_tests.torch_shards.common import counted
from conformance_tests.framework_tests.torch_workers.jobs import Check, run_checks
from gradaccum_torch import backward, layered_backward
from gradaccum_torch.torch_private.fsdp import GLOO_SUMS

ITEMS, STEPS, LAYERS = (5, 7), 3, 4
"""The items of each worker; the micro-batches of each; the layers of the model."""
CHECKS: dict[str, Check] = {}
PLACES: list[dict[str, Any]] = [{}, {"within": "keep"}, {"borders": "recompute"}]
OPTIONS: list[dict[str, Any]] = [
    {"on_overflow": "ignore"},
    {"clip_norm": 0.1},
    {"on_overflow": "ignore", "reduction": "sum"},
]


def check(function: Check) -> Check:
    CHECKS[function.__name__] = function
    return function


def build() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(LAYERS)]
    return nn.Sequential(*layers, nn.ReLU()).double()


def mean(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().mean()


def total(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().sum()


def loss_for(options: dict[str, Any]) -> Callable[[Tensor, Tensor], Tensor]:
    return total if options.get("reduction") == "sum" else mean


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(sum(ITEMS), 5, generator=generator).double(), torch.randn(
        sum(ITEMS), 5, generator=generator
    ).double()


def own(rank: int) -> tuple[Tensor, Tensor]:
    x, y = (each.split(ITEMS)[rank] for each in data())
    return x, y


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.1)


def require_same_as_alone(
    model: nn.Module, options: dict[str, Any], windows: int
) -> None:
    """Raise unless the model is that of one process with all items."""
    alone = build()
    opt = gradaccum.wrap(adamw(alone), None, **options)
    for _ in range(windows):
        backward(
            lambda x, y: loss_for(options)(alone(x), y), *data(), steps=2, optimizer=opt
        )
    for p, q in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(
            p.full_tensor() if hasattr(p, "full_tensor") else p.detach(),
            q.detach(),
            rtol=1e-10,
            atol=1e-12,
        )


@check
def data_parallel(rank: int) -> None:
    """Unequal items; a layer is reduced once, after the numbers of the window."""
    for options in OPTIONS:
        for grouped in (False, True):
            model = build()
            workers: dict[str, Any] = (
                {"process_group": dist.group.WORLD}
                if grouped
                else {"module": DistributedDataParallel(model)}
            )
            opt = gradaccum.wrap(adamw(model), None, **workers, **options)
            for _ in range(3):
                with counted() as calls:
                    layered_backward(
                        model, loss_for(options), *own(rank), steps=STEPS, optimizer=opt
                    )
            parts = LAYERS if options.get("on_overflow") else 1
            names = Counter(name for name, *_ in calls)
            assert names == {"all_reduce": 2 * parts}, calls
            require_same_as_alone(model, options, 3)
            assert opt.result.optimizer_step == 3


def shard(model: nn.Sequential, *, whole: bool) -> nn.Sequential:
    mesh = init_device_mesh("cpu", (2,))
    for layer in model[:LAYERS]:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh) if whole else model


@check
def sharded(rank: int) -> None:
    """Each layer is gathered once forwards and once backwards, and reduced once,
    whatever the number of micro-batches.
    """
    for options in OPTIONS:
        for place in PLACES:
            model = shard(build(), whole=True)
            opt = gradaccum.wrap(adamw(model), None, module=model, **options)
            for steps in (1, 2, STEPS):
                with counted() as calls:
                    layered_backward(
                        model,
                        loss_for(options),
                        *own(rank),
                        steps=steps,
                        optimizer=opt,
                        **place,
                    )
                names = Counter(name for name, *_ in calls)
                # Recomputed borders take another pass through all but the last layer of
                # a segment: 0 and 1, and 3.
                assert names["all_gather_single"] == 2 * LAYERS + (
                    3 if "borders" in place else 0
                ), names
                assert names["reduce_scatter_single"] == LAYERS, names
            require_same_as_alone(model, options, 3)
            assert all(p.grad is None for p in model.parameters())
            model(own(rank)[0])  # The outermost module is still FSDP2's root.


@check
def sharded_whole_model_in_two_layers(rank: int) -> None:
    """A unit whose parameters are in the first layer and in the last is reduced in the
    first; its gradient waits.
    """
    model = build()
    mesh = init_device_mesh("cpu", (2,))
    for layer in model[1:3]:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    opt = gradaccum.wrap(adamw(model), None, module=model, on_overflow="ignore")
    for _ in range(3):
        with counted() as calls:
            layered_backward(model, mean, *own(rank), steps=STEPS, optimizer=opt)
        names = Counter(name for name, *_ in calls)
        assert names["all_gather_single"] == 2 * LAYERS, names
        assert names["reduce_scatter_single"] == 3, names
    require_same_as_alone(model, {}, 3)


@check
def half_precision(rank: int) -> None:
    """FSDP2 adds up float32 gradients of bfloat16 passes: the same bits as in its own
    way to wait.
    """
    models = [build().float() for _ in range(2)]
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32
    )
    for model in models:
        for layer in (*model[:LAYERS], model):
            fully_shard(layer, mesh=init_device_mesh("cpu", (2,)), mp_policy=policy)
    usual, layered = models
    x, y = (each.float() for each in own(rank))
    waiting = gradaccum.wrap(
        adamw(usual), None, module=usual, on_overflow="ignore", gradient_sync="window"
    )
    opt = gradaccum.wrap(adamw(layered), None, module=layered, on_overflow="ignore")
    for _ in range(3):
        backward(
            lambda x, y: mean(usual(x).float(), y), x, y, steps=STEPS, optimizer=waiting
        )
        layered_backward(
            layered, lambda o, y: mean(o.float(), y), x, y, steps=STEPS, optimizer=opt
        )
    for p, q in zip(layered.parameters(), usual.parameters(), strict=True):
        assert torch.equal(p.full_tensor(), q.full_tensor())


@check
def weight_0_on_one_worker(rank: int) -> None:
    """A worker whose items all have weight 0 gathers and reduces as the other does, and
    adds nothing, not even NaN.
    """
    x, y = own(rank)
    (first, _), (targets, _) = (each.split(ITEMS) for each in data())
    for sharded_model in (False, True):
        model = build()
        module = (
            shard(model, whole=True)
            if sharded_model
            else DistributedDataParallel(model)
        )
        opt = gradaccum.wrap(adamw(model), None, module=module, on_overflow="ignore")
        items = x * float("nan") if rank else x
        layered_backward(
            model,
            mean,
            items,
            y,
            steps=STEPS,
            weight=[float(not rank)] * len(x),
            optimizer=opt,
        )
        alone = build()
        other = gradaccum.wrap(adamw(alone), None)
        backward(
            lambda x, y, alone=alone: mean(alone(x), y),
            first,
            targets,
            steps=2,
            optimizer=other,
        )
        for p, q in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(
                p.full_tensor() if sharded_model else p.detach(),
                q.detach(),
                rtol=1e-10,
                atol=1e-12,
            )


@check
def layers_without_gradients(rank: int) -> None:
    """A frozen layer between two trained ones."""
    model = shard(build(), whole=True)
    model[1].requires_grad_(False)
    reference = build()
    reference[1].requires_grad_(False)
    opt = gradaccum.wrap(adamw(model), None, module=model, on_overflow="ignore")
    other = gradaccum.wrap(adamw(reference), None)
    for _ in range(2):
        layered_backward(model, mean, *own(rank), steps=STEPS, optimizer=opt)
        backward(lambda x, y: mean(reference(x), y), *data(), steps=2, optimizer=other)
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p.full_tensor(), q.detach(), rtol=1e-10, atol=1e-12)


@check
def refused_options(rank: int) -> None:
    for name, options in {
        "gradient_sync": {"gradient_sync": "window"},
        "norm_group": {"norm_group": dist.group.WORLD},
    }.items():
        model = shard(build(), whole=True) if name == "gradient_sync" else build()
        module = {"module": model} if name == "gradient_sync" else {}
        opt = gradaccum.wrap(
            adamw(model), None, on_overflow="ignore", **module, **options
        )
        with refused(
            gradaccum.UsageError, f"one with {name}=", "gradaccum_torch.backward"
        ):
            layered_backward(model, mean, *own(rank), steps=STEPS, optimizer=opt)


@check
def error_on_both_workers(rank: int) -> None:
    """FSDP2 reduces by itself again, and the window is gone."""
    model = shard(build(), whole=True)
    opt = gradaccum.wrap(adamw(model), None, module=model, on_overflow="ignore")

    def failing(outputs: Tensor, targets: Tensor) -> Tensor:
        raise ValueError("no loss")

    try:
        layered_backward(model, failing, *own(rank), steps=STEPS, optimizer=opt)
    except ValueError:
        pass
    else:
        raise AssertionError("nothing raised")
    model.reset_iter_state() if hasattr(model, "reset_iter_state") else None
    for _ in range(3):
        backward(lambda x, y: mean(model(x), y), *own(rank), steps=STEPS, optimizer=opt)
    require_same_as_alone(model, {}, 3)


def runs(name: str) -> bool:
    """True if this torch can: on a CPU it has FSDP2 late, and averages of float32
    later.
    """
    return name == "data_parallel" or (
        RUNS_ON_CPU and not (GLOO_SUMS and name == "half_precision")
    )


if __name__ == "__main__":
    run_checks(
        {name: CHECKS[name] for name in CHECKS if runs(name)},
        int(sys.argv[1]),
        Path(sys.argv[2]),
    )
