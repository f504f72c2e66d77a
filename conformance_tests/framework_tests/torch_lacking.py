"""Scenarios under a torch that lacks a private name: `SCENARIOS` has a function for
each name of `LOST`, which raises if it fails.

The module is imported after the names are taken away.
"""

from __future__ import annotations

import socket
import sys
import warnings
from collections.abc import Callable
from contextlib import nullcontext, redirect_stdout, suppress
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gradaccum
from conformance_tests.framework_tests.refusing import refused
from gradaccum.errors import ArgumentValueError, UsageError
from gradaccum_torch.private.names import exists


def model_of(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()


def batches_of() -> Any:
    return torch.arange(80.0, dtype=torch.float64).sin().reshape(5, 4, 4)


def learn(model: Any, opt: Any, x: Any) -> None:
    opt.backward(model(x).square().mean())
    opt.step()
    opt.zero_grad()


def reference(
    make: Callable[[Any], Any], windows: int = 2, clip: float | None = None
) -> Any:
    """A model that a bare optimizer has trained for windows of two micro-batches."""
    plain = model_of()
    bare = make(plain.parameters())
    for pair in batches_of()[: 2 * windows].reshape(windows, 2, 4, 4):
        (sum(plain(x).square().mean() for x in pair) / 2).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(plain.parameters(), clip, foreach=False)
        bare.step()
        bare.zero_grad()
    return plain


def require_equal(model: Any, other: Any) -> None:
    assert all(map(torch.allclose, model.parameters(), other.parameters()))


def adam(parameters: Any) -> Any:
    return torch.optim.AdamW(parameters, lr=0.1, fused=True)


def sgd(parameters: Any) -> Any:
    return torch.optim.SGD(parameters, lr=0.1, foreach=False)


def trains(windows: int = 2, **options: Any) -> Any:
    """A model that a wrapped optimizer has trained as a bare one would; its
    optimizer.
    """
    model = model_of()
    opt: Any = gradaccum.wrap(sgd(model.parameters()), steps=2, **options)
    for x in batches_of()[: 2 * windows]:
        learn(model, opt, x)
    require_equal(model, reference(sgd, windows))
    return model, opt


def sums_beside_grad() -> None:
    trains(separate_sums=True)
    trains(on_overflow="drop_micro_batch")


def arithmetic() -> None:
    """A few windows: clipped or not, scaled past an overflow, saved in the middle,
    against torch's own arithmetic.
    """
    batches = batches_of()
    for options in (
        {},
        {"loss_scale": gradaccum.DynamicLossScale(2.0**4)},
        {"separate_sums": True},
    ):
        for inner, clip in ((adam, 0.5), (adam, None), (sgd, 0.01), (sgd, None)):
            model, twin = model_of(), model_of(1)
            opt, other = (
                gradaccum.wrap(
                    inner(each.parameters()), steps=2, clip_norm=clip, **options
                )
                for each in (model, twin)
            )
            for x in batches[:3]:
                learn(model, opt, x)
            twin.load_state_dict(model.state_dict())
            other.load_state_dict(opt.state_dict())
            learn(twin, other, batches[3])
            require_equal(twin, reference(inner, clip=clip))
            before = [parameter.detach().clone() for parameter in twin.parameters()]
            if "loss_scale" in options:
                learn(twin, other, batches[0] * float("inf"))
                learn(twin, other, batches[0])
                assert other.result.overflow
                assert all(map(torch.equal, twin.parameters(), before))


TESTS = Path(__file__).parent
SUITE = TESTS.parent / "gradaccum_conformance" / "suite"


def passes(file: Path, *chosen: str) -> Callable[[], None]:
    """Return a scenario: the tests of a file, as in any torch, or those that `chosen`
    selects.
    """

    def run() -> None:
        with redirect_stdout(sys.stderr):
            assert (
                pytest.main(
                    [
                        "-q",
                        "-x",
                        "-p",
                        "no:cacheprovider",
                        "--backend",
                        "torch",
                        str(file),
                        *chosen,
                    ]
                )
                == 0
            )

    return run


masters = passes(
    TESTS / "test_torch_masters.py",
    "-k",
    "smallest_change or equals_float32_optimizer and sgd",
)
memory_that_stays = passes(SUITE / "test_gradient_memory.py")
buffers_are_put_back = passes(
    TESTS / "test_torch_large_batch_misuse.py", "-k", "replaced_buffer"
)
compiled_module = passes(
    TESTS / "test_torch_coupled.py", "-k", "compiled_functions", "-W", "ignore"
)
compiled_step = passes(
    TESTS / "test_torch_compile.py", "-k", "compiled_training and step"
)


def pass_that_raised() -> None:
    """Nobody notices it, and what follows is right."""
    model, opt = trains(1)
    loss = model(batches_of()[2])
    loss.register_hook(lambda gradient: gradient)

    def fail(gradient: Any) -> Any:
        raise ValueError

    handle = model[0].weight.register_hook(fail)
    with suppress(ValueError):
        loss.square().mean().backward()
    handle.remove()
    opt.step()
    opt.discard()
    opt.zero_grad()
    other, again = trains(1)
    for x in batches_of()[2:4]:
        learn(model, opt, x)
        learn(other, again, x)
    assert all(map(torch.equal, model.parameters(), other.parameters()))


def scaler_step_is_refused() -> None:
    scaler = torch.amp.GradScaler("cpu")
    model = model_of()
    opt: Any = gradaccum.wrap(sgd(model.parameters()), steps=2, loss_scale=scaler)
    scaler.scale(model(batches_of()[0]).square().mean()).backward()
    with refused(UsageError, "scaler.step"):
        scaler.step(opt)
    arithmetic()


def scaler_unscales() -> None:
    """The loop with a scaler is right; a method of a subclass that reads the groups is
    refused.
    """
    from conformance_tests.framework_tests.test_torch_loss_scale import Loop, state_of

    class Looking(torch.amp.GradScaler):
        def look(self, optimizer: Any) -> Any:
            return optimizer.param_groups

    rule = {"init_scale": 4.0, "growth_interval": 2}
    loops = [Loop(kind, steps=2, **rule) for kind in ("scaler.step", "opt.backward")]
    for gradient in (1.0, 2.0, float("inf"), 1.0, 3.0, 4.0, 1.0, 1.0):
        for loop in loops:
            loop.micro_batch(gradient)
    assert torch.equal(*(loop.parameter for loop in loops))
    assert bool(loops[0].parameter.any())
    assert state_of(loops[0].scaler) == state_of(loops[1].scaler)
    scaler = Looking("cpu")
    scaler.scale(torch.zeros(()))
    with refused(UsageError, "scaler.unscale_"):
        scaler.unscale_(loops[0].opt)
    with refused(UsageError, "scaler.unscale_"):
        scaler.look(gradaccum.wrap(sgd(model_of().parameters()), steps=2))


def scaler_is_refused() -> None:
    with refused(
        UsageError,
        "loss_scale",
        "which lacks it",
        "loss_scale=gradaccum.DynamicLossScale()",
    ):
        gradaccum.wrap(
            sgd(model_of().parameters()),
            steps=2,
            loss_scale=torch.amp.GradScaler("cpu"),
        )
    trains(loss_scale=gradaccum.DynamicLossScale())


def scheduler_moves() -> None:
    model = model_of()
    opt: Any = gradaccum.wrap(sgd(model.parameters()), steps=2)
    scheduler = gradaccum.wrap(torch.optim.lr_scheduler.StepLR(opt, 1, 0.5))
    rates = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for x in batches_of()[:4]:
            learn(model, opt, x)
            scheduler.step()
            rates.append(opt.param_groups[0]["lr"])
    assert rates == [0.1, 0.05, 0.05, 0.025]


def sparse_is_refused() -> None:
    for sparse in (True, False):
        table = torch.nn.Embedding(4, 2, sparse=sparse)
        before = table.weight.detach().clone()
        opt: Any = gradaccum.wrap(sgd(table.parameters()), steps=2)
        with (
            refused(UsageError, "torch.Tensor._values", "sparse=False")
            if sparse
            else nullcontext()
        ):
            for index in range(2):
                opt.backward(table(torch.tensor([index])).sum())
                opt.step()
        before[:2] -= 0 if sparse else 0.05
        assert torch.allclose(table.weight, before)


def verify_is_refused() -> None:
    with refused(UsageError, "verify", "which lacks it"):
        gradaccum.verify(
            model_of(), lambda model, x: model(x).square().mean(), batches_of()[0]
        )


def verifies_coarsely() -> None:
    assert gradaccum.verify(
        model_of(), lambda model, x: model(x).square().mean(), batches_of()[0]
    ).equivalent
    assert not gradaccum.verify(
        model_of(), lambda model, x: model(x).square().sum(), batches_of()[0]
    ).equivalent
    report = gradaccum.verify(
        model_of(),
        lambda model, x: model(x).square().mean() * (1 + 1e-5 * x[0, 0]),
        batches_of()[0],
    )
    assert report.equivalent, "finer than a bfloat16"


def model_states_are_refused() -> None:
    from torch.distributed.checkpoint.state_dict import (
        get_optimizer_state_dict,
        set_optimizer_state_dict,
    )

    model, opt = trains()
    with refused(
        UsageError, "torch.distributed.checkpoint.state_dict", "opt.state_dict()"
    ):
        get_optimizer_state_dict(model, opt)
    if exists("torch.distributed.checkpoint.state_dict:_init_optim_state"):
        return  # Then nothing of the other name is needed to load.
    with refused(
        UsageError, "torch.distributed.checkpoint.state_dict", "opt.state_dict()"
    ):
        set_optimizer_state_dict(model, opt, {"state": {}, "param_groups": []})


def compiled_autograd() -> None:
    import torch._dynamo.compiled_autograd

    model = model_of()
    opt: Any = gradaccum.wrap(sgd(model.parameters()), steps=2)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        for x in batches_of()[:4]:
            learn(model, opt, x)
    require_equal(model, reference(sgd))
    pass_that_raised()


@cache
def _join_group() -> None:
    """Make this process a process group. It is never destroyed: gloo may wait for ever
    for modules that live.
    """
    import torch.distributed as dist

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1
    )


def _parallel(**options: Any) -> tuple[Any, Any]:
    """A model with a buffer under DistributedDataParallel, trained for two windows; its
    optimizer.
    """
    from torch.nn.parallel import DistributedDataParallel

    _join_group()
    model = model_of()
    model.register_buffer("noted", model[0].bias.detach().clone())
    parallel = DistributedDataParallel(model, **options)
    opt: Any = gradaccum.wrap(sgd(model.parameters()), steps=2, module=parallel)
    for x in batches_of()[:4]:
        learn(parallel, opt, x)
    require_equal(model, reference(sgd))
    return parallel, opt


def static_graph_is_refused() -> None:
    _parallel()
    with refused(UsageError, "module", "static_graph=True"):
        _parallel(static_graph=True)


def module_is_refused() -> None:
    with refused(UsageError, "module", "process_group="):
        _parallel()


def buffers_are_sent() -> None:
    import torch.distributed as dist

    broadcast, sent = dist.broadcast, []

    def noting(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        sent.append(tensor)
        return broadcast(tensor, *args, **kwargs)

    _join_group()
    dist.broadcast = noting
    try:
        parallel, _ = _parallel()
    finally:
        dist.broadcast = broadcast
    assert len(sent) == 1, (
        "as the module is wrapped; a group of one worker ends its windows alone"
    )
    assert all(each is parallel.module.noted for each in sent)


def join_is_refused() -> None:
    parallel, opt = _parallel()
    with parallel.join(), refused(UsageError, "join()", "flush()"):
        for x in batches_of()[:2]:
            learn(parallel, opt, x)


def parts_are_refused() -> None:
    if "torch.distributed.tensor.parallel.ddp" not in sys.modules:
        _parallel()
    import torch.distributed.tensor.parallel.ddp  # noqa: F401

    with refused(ArgumentValueError, "module", "tensor-parallel"):
        _parallel()


def flattened_is_refused() -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    _join_group()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = FullyShardedDataParallel(model_of(), device_id=torch.device("cpu"))
        with refused(ArgumentValueError, "optimizer", "FSDP1"):
            gradaccum.wrap(sgd(model.parameters()), steps=2)
    trains()


SCENARIOS: dict[str, Callable[[], object]] = {
    "torch:_foreach_norm": arithmetic,
    "torch:_foreach_div_": arithmetic,
    "torch:_foreach_mul_": arithmetic,
    "torch:_foreach_sub_": masters,
    "torch:_foreach_copy_": masters,
    "torch.optim:Adam._step_supports_amp_scaling": arithmetic,
    "torch.amp:GradScaler._step_supports_amp_scaling": scaler_step_is_refused,
    "torch:_C._storage_Use_Count": memory_that_stays,
    "torch:UntypedStorage._cdata": memory_that_stays,
    "torch._utils:_flatten_dense_tensors": arithmetic,
    "torch._utils:_unflatten_dense_tensors": arithmetic,
    "torch.autograd:Variable._execution_engine.queue_callback": pass_that_raised,
    "torch.optim.lr_scheduler:LRScheduler._opt_called": scheduler_moves,
    "torch:_C._functions.AccumulateGrad._input_metadata": verifies_coarsely,
    "torch:Tensor._values": sparse_is_refused,
    "torch.distributed.checkpoint.state_dict:_get_optim_state_dict": (
        model_states_are_refused
    ),
    "torch.distributed.checkpoint.state_dict:_init_optim_state": (
        model_states_are_refused
    ),
    "torch.nn.parallel:DistributedDataParallel._comm_hooks": module_is_refused,
    "torch.amp:GradScaler._unscale_grads_": scaler_unscales,
    "torch.utils._python_dispatch:TorchDispatchMode": verify_is_refused,
    "torch._dynamo.compiled_autograd:in_compiled_autograd_region": compiled_autograd,
    "torch._C._dynamo:eval_frame": compiled_step,
    "torch._dynamo:OptimizedModule._orig_mod": compiled_module,
    "torch.amp:GradScaler._growth_tracker": scaler_is_refused,
    "torch.amp:GradScaler._get_scale_async": scaler_is_refused,
    "torch.amp:GradScaler._per_optimizer_states": scaler_is_refused,
    "torch.amp:GradScaler._found_inf_per_device": scaler_is_refused,
    "torch.nn:Module._buffers": buffers_are_put_back,
    "torch.nn.parallel:DistributedDataParallel._static_graph_delay_allreduce_enqueued": (
        static_graph_is_refused
    ),
    "torch.nn.parallel:DistributedDataParallel._sync_buffers": buffers_are_sent,
    "torch.distributed.algorithms.join:Joinable._join_config": join_is_refused,
    "torch.distributed.fsdp._common_utils:FSDP_FLATTENED": flattened_is_refused,
    "torch.distributed.tensor.parallel.ddp:_reconstruct_dtensor._st_info": (
        parts_are_refused
    ),
    # Last: a fused optimizer needs it itself, and the last group has none.
    "torch:_foreach_add_": sums_beside_grad,
}
"""By private name, in the order in which they run."""

_NAMES = list(SCENARIOS)
TOGETHER = (_NAMES[:18], _NAMES[18:23], _NAMES[23:])
"""Names that one process can lack: none is refused where another one's scenario goes
on.
"""
