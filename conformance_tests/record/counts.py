"""The cost of a window, counted: operators, waits for a device, collectives, equations,
bytes, and Python calls of gradaccum's own.

Each framework counts in its own way, with an optimizer that clips. Other versions count
differently, so counts are held for an environment.
"""

from __future__ import annotations

import functools
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import gradaccum
from gradaccum_conformance.bits import versions

from .facts import Facts

ROOT = Path(__file__).parents[2]
OWN = tuple(str(ROOT / folder) for folder in ("gradaccum", "backends"))
STEPS, SIDE = 4, 8
Counted = Iterator[tuple[str, int]]


def environment(backend: str) -> str:
    return (
        f"{versions(backend)}; Python {sys.version_info.major}.{sys.version_info.minor}"
    )


def found(backends: Iterable[str]) -> Facts:
    return {
        environment(name): [f"{what}: {count}" for what, count in COUNTS[name]()]
        for name in backends
        if name in COUNTS
    }


def calls(what: str, run: Callable[[], object]) -> Counted:
    """The calls of gradaccum's functions in `run`."""
    called: list[tuple[Any, str]] = []

    def note(frame: Any, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(OWN):
            caller = frame.f_back
            while caller is not None and not caller.f_code.co_filename.startswith(OWN):
                caller = caller.f_back
            called.append((frame.f_code, caller.f_code.co_filename if caller else ""))

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    yield f"{what}, Python calls", len(called)
    yield (
        f"{what}, Python calls from another file",
        sum(code.co_filename != caller for code, caller in called),
    )
    yield f"{what}, Python files", len({code.co_filename for code, _ in called})
    yield f"{what}, Python functions", len({code for code, _ in called})


def torch_counts() -> Counted:
    import torch

    kinds: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
        "sums in .grad": (torch.float32, {}),
        "sums in buffers": (torch.bfloat16, {}),
        "masters": (torch.bfloat16, {"master_weights": True}),
        "dropping": (torch.float32, {"on_overflow": "drop_micro_batch"}),
        "dynamic scale": (
            torch.float32,
            {"loss_scale": gradaccum.DynamicLossScale(8.0)},
        ),
        "fused": (torch.float32, {}),
    }
    for kind, (dtype, options) in kinds.items():
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Linear(SIDE, SIDE), torch.nn.Linear(SIDE, SIDE)
        ).to(dtype)
        inner = (
            torch.optim.AdamW(model.parameters(), fused=True)
            if kind == "fused"
            else torch.optim.SGD(model.parameters(), 0.1, foreach=True)
        )
        opt = gradaccum.wrap(inner, steps=STEPS, clip_norm=1.0, **options)
        for index in range(3 * STEPS):
            loss = model(torch.ones(2, SIDE, dtype=dtype)).square().mean()
            yield from _torch_micro_batch(kind, index, opt, loss)
    yield "workers, a window, collectives", _torch_collectives()


def _torch_micro_batch(kind: str, index: int, opt: Any, loss: Any) -> Counted:
    from conformance_tests.framework_tests.torch_operations import Operations

    def run() -> None:
        opt.backward(loss, weight=3)
        opt.step()
        opt.zero_grad()

    where = "window end" if index % STEPS == STEPS - 1 else "micro-batch"
    if index in (STEPS + 1, 2 * STEPS - 1):
        with Operations() as operations:
            run()
        yield f"{kind}, {where}, operators", sum(operations.counts.values())
        yield f"{kind}, {where}, waits", operations.counts["_local_scalar_dense"]
    elif index in (2 * STEPS + 1, 3 * STEPS - 1):
        yield from calls(f"{kind}, {where}", run)
    else:
        run()


def _torch_collectives() -> int:
    import torch
    import torch.distributed as dist

    from conformance_tests.framework_tests.torch_mirror import mirror

    with mirror(2) as collectives:
        model = torch.nn.Linear(SIDE, SIDE)
        opt = gradaccum.wrap(
            torch.optim.SGD(model.parameters(), 0.1),
            steps=STEPS,
            process_group=dist.group.WORLD,
        )
        collectives.clear()
        for _ in range(STEPS):
            opt.backward(model(torch.ones(2, SIDE)).square().mean())
            opt.step()
        return len(collectives)


def jax_counts() -> Counted:
    kinds: dict[str, dict[str, Any]] = {
        "plain": {},
        "clipping": {"clip_norm": 1.0},
        "dropping": {"on_overflow": "drop_micro_batch"},
        "dynamic scale": {"loss_scale": gradaccum.DynamicLossScale(8.0)},
        "masters": {"master_weights": True},
    }
    for kind, options in kinds.items():
        yield from _jax_update(kind, options)
    yield "workers, an update, collectives", _jax_collectives()


def _jax_update(kind: str, options: dict[str, Any]) -> Counted:
    import jax
    import jax.numpy as jnp
    import optax

    dtype = jnp.bfloat16 if "master_weights" in options else jnp.float32
    params = {"w": jnp.ones((SIDE, SIDE), dtype), "b": jnp.ones(SIDE, dtype)}
    tx = gradaccum.wrap(optax.adamw(1e-3), steps=STEPS, **options)
    program, state = (
        jax.jit(functools.partial(tx.update, weight=3.0), donate_argnums=1),
        tx.init(params),
    )
    jax.clear_caches()
    traced: list[Any] = []
    yield from calls(
        f"{kind}, traced", lambda: traced.append(program.trace(params, state, params))
    )
    yield f"{kind}, equations", _equations(traced[0].jaxpr.jaxpr)
    yield (
        f"{kind}, bytes of scratch",
        traced[0].lower().compile().memory_analysis().temp_size_in_bytes,
    )


def _equations(jaxpr: Any, named: str = "") -> int:
    """The equations of a program and of the programs in it; with `named`, those of
    primitives whose name matches.
    """
    inner = [
        getattr(each, "jaxpr", each)
        for eqn in jaxpr.eqns
        for value in eqn.params.values()
        for each in _listed(value)
    ]
    own = sum(re.match(named, eqn.primitive.name) is not None for eqn in jaxpr.eqns)
    return own + sum(_equations(each, named) for each in inner if hasattr(each, "eqns"))


def _listed(value: Any) -> Iterable[Any]:
    return value if isinstance(value, (list, tuple)) else [value]


def _jax_collectives() -> int:
    import jax
    import jax.numpy as jnp
    import optax

    import gradaccum_jax

    mesh = jax.make_mesh((1,), ("data",))
    tx = gradaccum.wrap(optax.sgd(0.1), steps=STEPS, axis_name="data")
    params = {"w": jnp.ones((SIDE, SIDE)), "b": jnp.ones(SIDE)}
    state = gradaccum_jax.data_parallel(tx.init, mesh, "data")(params)

    def step(params: Any, state: Any, x: Any) -> Any:
        gradient = jax.grad(
            lambda params: jnp.mean((x @ params["w"] + params["b"]) ** 2)
        )(params)
        updates, state = tx.update(gradient, state, params)
        return optax.apply_updates(params, updates), state

    step = gradaccum_jax.data_parallel(step, mesh, "data")
    return _equations(
        jax.make_jaxpr(step)(params, state, jnp.ones((2, SIDE))).jaxpr,
        "psum|all_gather|reduce_scatter|pmin|pmax",
    )


def mindspore_counts() -> Counted:
    import mindspore as ms
    from mindspore import Parameter, nn, ops

    from conformance_tests.framework_tests.mindspore_graphs import saved_graphs

    kinds: dict[str, dict[str, Any]] = {
        "plain": {},
        "clipping": {"clip_norm": 1.0},
        "dropping": {"on_overflow": "drop_micro_batch"},
    }
    for kind, options in kinds.items():
        parameters = [
            Parameter(ops.ones(shape, ms.float32), name=f"p{index}")
            for index, shape in enumerate([(SIDE, SIDE), (SIDE,)])
        ]
        gradients = tuple(ops.ones_like(parameter) for parameter in parameters)
        opt = gradaccum.wrap(nn.Adam(parameters, 1e-3), steps=STEPS, **options)
        for index in range(2 * STEPS):
            where = {STEPS + 1: "micro-batch", 2 * STEPS - 1: "window end"}.get(index)
            if where:
                yield from calls(
                    f"{kind}, PyNative, {where}",
                    lambda opt=opt, gradients=gradients: opt(gradients, 3.0),
                )
            else:
                opt(gradients, 3.0)
    opt = gradaccum.wrap(nn.Adam(parameters, 1e-3), steps=STEPS)

    @ms.jit
    def step(*gradients: Any) -> Any:
        return opt(gradients)

    with saved_graphs("graph_build") as texts:
        step(*gradients)
    operators = Counter(
        name
        for text in texts
        for name in re.findall(r"= (?:PrimFunc_)?([A-Z]\w*)\(", text)
    )
    yield "jit, graphs", len(texts)
    for name in ("Assign", "AssignAdd", "TensorMove", "Select", "Div", "Mul", "Square"):
        yield f"jit, {name}", operators[name]


COUNTS: dict[str, Callable[[], Counted]] = {
    "torch": torch_counts,
    "jax": jax_counts,
    "mindspore": mindspore_counts,
}
