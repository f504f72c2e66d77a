"""Layered windows of two workers, whose layers are copies or shards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import gradaccum
from conformance_tests.framework_tests.refusing import refused
from gradaccum_torch import backward, layered_backward

from ..torch_fsdp import GLOO_SUMS
from .common import check, counted, mesh_of, require_equal

ITEMS, STEPS, LAYERS = (5, 7), 3, 4
"""The items of each worker; the micro-batches of each; the layers of the model."""
PLACES = [{}, {"within": "keep"}, {"borders": "recompute"}]
OPTIONS = [
    {"on_overflow": "ignore"},
    {"clip_norm": 0.1},
    {"on_overflow": "ignore", "reduction": "sum"},
]


def build(frozen: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(LAYERS)]
    layers[1].requires_grad_(not frozen)
    return nn.Sequential(*layers, nn.ReLU()).double()


def shard(model: nn.Sequential, **options: Any) -> nn.Sequential:
    for module in (*model[:LAYERS], model):
        fully_shard(module, mesh=mesh_of((2,)), **options)
    return model


def mean(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().mean()


def total(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().sum()


def loss_for(options: dict[str, Any]) -> Callable[[Tensor, Tensor], Tensor]:
    return total if options.get("reduction") == "sum" else mean


def data() -> tuple[Tensor, Tensor]:
    x, y = torch.arange(2.0 * 5 * sum(ITEMS)).double().sin().reshape(2, -1, 5)
    return x, y


def own(rank: int) -> tuple[Tensor, Tensor]:
    x, y = (each.split(ITEMS)[rank] for each in data())
    return x, y


def wrap(model: nn.Module, **options: Any) -> Any:
    inner = torch.optim.AdamW(model.parameters(), lr=0.1)
    return gradaccum.wrap(inner, None, **{"on_overflow": "ignore", **options})


def require_same_as_alone(
    model: nn.Module, options: dict[str, Any], frozen: bool = False
) -> None:
    """Raise unless the model is that of one process with three windows of all items."""
    alone, loss_fn = build(frozen), loss_for(options)
    opt = wrap(alone, **options)
    for _ in range(3):
        backward(lambda x, y: loss_fn(alone(x), y), *data(), steps=2, optimizer=opt)
    require_equal(model, alone, off=1e-10)


@check
def layers_of_copies(rank: int) -> None:
    """Unequal items; a layer is reduced once, after the numbers of the window."""
    for options in OPTIONS:
        for grouped in (False, True):
            model = build()
            workers = (
                {"process_group": dist.group.WORLD}
                if grouped
                else {"module": DistributedDataParallel(model)}
            )
            opt = wrap(model, **workers, **options)
            loss_fn = loss_for(options)
            for _ in range(3):
                with counted() as calls:
                    layered_backward(
                        model, loss_fn, *own(rank), steps=STEPS, optimizer=opt
                    )
            assert calls["all_reduce"] == (2 if "clip_norm" in options else 2 * LAYERS)
            require_same_as_alone(model, options)


@check
def sharded_layers(rank: int) -> None:
    """Each layer is gathered once forwards and once backwards, and reduced once,
    whatever the number of micro-batches; one of them may be frozen.
    """
    for options in OPTIONS:
        for place in PLACES:
            frozen = "within" in place
            model = shard(build(frozen))
            opt, loss_fn = wrap(model, module=model, **options), loss_for(options)
            for steps in (1, 2, STEPS):
                with counted() as calls:
                    layered_backward(
                        model, loss_fn, *own(rank), steps=steps, optimizer=opt, **place
                    )
                # Recomputed borders take another pass through all but the last layer of
                # a segment: 0 and 1, and 3.
                gathered = 2 * LAYERS + (3 if "borders" in place else 0)
                assert calls["all_gather_single"] == gathered, calls
                assert calls["reduce_scatter_single"] == LAYERS - frozen, calls
            require_same_as_alone(model, options, frozen)
            assert all(p.grad is None for p in model.parameters())
            model(own(rank)[0])  # The outermost module is still FSDP2's root.


@check
def sharded_whole_model_in_two_layers(rank: int) -> None:
    """A unit whose parameters are in the first layer and in the last is reduced in the
    first; its gradient waits.
    """
    model = build()
    for module in (*model[1:3], model):
        fully_shard(module, mesh=mesh_of((2,)))
    opt = wrap(model, module=model)
    for _ in range(3):
        with counted() as calls:
            layered_backward(model, mean, *own(rank), steps=STEPS, optimizer=opt)
        assert calls["all_gather_single"] == 2 * LAYERS, calls
        assert calls["reduce_scatter_single"] == 3, calls
    require_same_as_alone(model, {})


@check
def half_precision_layers(rank: int) -> None:
    """FSDP2 adds up float32 gradients of bfloat16 passes: the same bits as in its own
    way to wait.
    """
    if GLOO_SUMS:
        return
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32
    )
    usual, layered = (shard(build().float(), mp_policy=policy) for _ in range(2))
    x, y = (each.float() for each in own(rank))
    waiting = wrap(usual, module=usual, gradient_sync="window")
    opt = wrap(layered, module=layered)
    for _ in range(3):
        backward(lambda x, y: mean(usual(x), y), x, y, steps=STEPS, optimizer=waiting)
        layered_backward(layered, mean, x, y, steps=STEPS, optimizer=opt)
    require_equal(layered, usual, off=0)


@check
def layers_of_a_worker_without_weight(rank: int) -> None:
    """A worker whose items all have weight 0 gathers and reduces as the other does, and
    adds nothing, not even NaN.
    """
    (x, _), (y, _) = (each.split(ITEMS) for each in data())
    alone = build()
    other = wrap(alone)
    backward(lambda x, y: mean(alone(x), y), x, y, steps=2, optimizer=other)
    x, y = own(rank)
    if rank == 1:
        x = x * float("nan")
    for is_sharded in (False, True):
        model = build()
        module = shard(model) if is_sharded else DistributedDataParallel(model)
        layered_backward(
            model,
            mean,
            x,
            y,
            steps=STEPS,
            weight=[1.0 - rank] * len(x),
            optimizer=wrap(model, module=module),
        )
        require_equal(model, alone, off=1e-10)


@check
def layers_that_raise_or_are_refused(rank: int) -> None:
    """On both workers: FSDP2 reduces by itself again, and the window is gone."""
    model = shard(build())
    opt = wrap(model, module=model)
    with refused(ZeroDivisionError):
        layered_backward(
            model, lambda *_: 1 / 0, *own(rank), steps=STEPS, optimizer=opt
        )
    if hasattr(model, "reset_iter_state"):
        model.reset_iter_state()
    for _ in range(3):
        backward(lambda x, y: mean(model(x), y), *own(rank), steps=STEPS, optimizer=opt)
    require_same_as_alone(model, {})
    model, whole = shard(build()), build()
    for wrong, layers, name in (
        (wrap(model, module=model, gradient_sync="window"), model, "gradient_sync"),
        (wrap(whole, norm_group=dist.group.WORLD), whole, "norm_group"),
    ):
        with refused(gradaccum.UsageError, f"one with {name}=", "backward"):
            layered_backward(layers, mean, *own(rank), steps=STEPS, optimizer=wrong)
