"""Mixed precision on a GPU: is a window the large batch, does nothing wait for the
device inside it, and what does it cost?

``python -m benchmarks.questions.gpu_mixed_precision`` needs torch and gradaccum, and
looks at JAX too where it is installed. Without CUDA it says so and ends well;
``--device cpu`` runs the same checks there, small. Each line of the table is a check
with what was measured, and the program fails if one of them does.
"""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Iterator
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import nn

import gradaccum
from benchmarks.contestants.gpu_problem import (
    STEPS,
    Problem,
    distance,
    inner,
    median_times,
    micro_batch,
    window,
)


class Check(NamedTuple):
    """One line of the table."""

    name: str
    passed: bool
    measured: str


def large_batch(
    problem: Problem, dtype: torch.dtype | None, autocast: torch.dtype | None
) -> nn.Module:
    """One step of the bare optimizer with the whole batch."""
    model = problem.model(dtype or torch.float32)
    optimizer = inner(model)
    problem.loss(model, None, autocast).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return model


def check_large_batch(problem: Problem) -> Iterator[Check]:
    """One window against the large batch: within rounding of what the forward pass
    computes in.
    """
    half = torch.float16 if problem.device == "cuda" else torch.bfloat16
    cases: list[tuple[str, torch.dtype | None, bool, float]] = [
        ("float32", None, False, 2.0**-12),
        ("float32, GradScaler loop", None, True, 2.0**-12),
        (f"{half} autocast, GradScaler loop", half, True, 2.0**-4),
        (f"{half} autocast, opt.backward", half, False, 2.0**-4),
    ]
    for name, autocast, looped, bound in cases:
        scaler = torch.amp.GradScaler(problem.device, init_scale=2.0**10)
        model = problem.model()
        opt = gradaccum.wrap(inner(model), steps=STEPS, loss_scale=scaler)
        window(problem, model, opt, scaler if looped else None, autocast)
        off = distance(model, large_batch(problem, None, autocast), problem.model())
        state = scaler.state_dict()
        passed = (
            off <= bound
            and opt.result.applied
            and (state["scale"], state["_growth_tracker"]) == (2.0**10, 1)
        )
        yield Check(f"large batch: {name}", passed, f"{off:.1e} <= {bound:.1e}")


def check_scale(problem: Problem) -> Iterator[Check]:
    """A power of two as the loss scale changes no bit in float32; an overflow skips the
    window and halves the scale.
    """
    models = []
    for scale in (None, 2.0**10):
        model = problem.model()
        window(
            problem, model, gradaccum.wrap(inner(model), steps=STEPS, loss_scale=scale)
        )
        models.append(model)
    equal = all(
        torch.equal(a, b)
        for a, b in zip(*(model.parameters() for model in models), strict=True)
    )
    yield Check(
        "a scale of 1024 changes no bit",
        equal,
        (
            "bitwise"
            if equal
            else f"{distance(models[0], models[1], problem.model()):.1e}"
        ),
    )
    model, scaler = (
        problem.model(),
        torch.amp.GradScaler(problem.device, init_scale=2.0**10),
    )
    opt = gradaccum.wrap(inner(model), steps=STEPS, loss_scale=scaler)
    for part in range(STEPS):
        micro_batch(
            problem.loss(model, part) * (float("inf") if part == 1 else 1.0),
            opt,
            scaler,
        )
    untouched = all(
        torch.equal(a, b)
        for a, b in zip(model.parameters(), problem.model().parameters(), strict=True)
    )
    yield Check(
        "an overflow skips and backs off",
        untouched and scaler.get_scale() == 2.0**9,
        f"scale {scaler.get_scale():g}",
    )


def check_masters(problem: Problem) -> Iterator[Check]:
    """The half-precision model is the rounded masters, and those are near the float32
    model's step.
    """
    for dtype in (torch.float16, torch.bfloat16):
        model = problem.model(dtype)
        opt: Any = gradaccum.wrap(
            inner(model), steps=STEPS, loss_scale=2.0**8, master_weights=True
        )
        window(problem, model, opt)
        masters = opt.master_weights.values()
        rounded = all(
            torch.equal(p, m.to(dtype))
            for p, m in zip(model.parameters(), masters, strict=True)
        )
        full = all(m.dtype == torch.float32 for m in masters)
        yield Check(
            f"masters of {dtype}",
            rounded and full and opt.result.applied,
            "model = rounded masters",
        )


def check_cost(problem: Problem) -> Iterator[Check]:
    """Time of a window beside the loop written by hand; no bar, so that a busy machine
    fails nothing.
    """
    half = torch.float16 if problem.device == "cuda" else torch.bfloat16
    mine, theirs = problem.model(), problem.model()
    scaler, other = (
        torch.amp.GradScaler(problem.device, init_scale=2.0**10) for _ in range(2)
    )
    opt, bare = (
        gradaccum.wrap(inner(mine), steps=STEPS, loss_scale=scaler),
        inner(theirs),
    )

    def by_hand() -> None:
        for part in range(STEPS):
            other.scale(problem.loss(theirs, part, half) / STEPS).backward()  # type: ignore[no-untyped-call]
        other.step(bare)
        other.update()
        bare.zero_grad()

    ours, hand = median_times(
        problem, [lambda: window(problem, mine, opt, scaler, half), by_hand]
    )
    yield Check(
        "time of a window, beside by hand",
        True,
        f"{ours * 1e3:.2f} ms, {hand * 1e3:.2f} ms",
    )


def check_jax() -> Iterator[Check]:
    """One float16 window with masters in a jitted step, where JAX and optax are
    installed.
    """
    if not (find_spec("jax") and find_spec("optax")):
        return
    import jax
    import jax.numpy as jnp
    import optax

    params = {"w": jnp.ones((8,), jnp.float16)}
    tx = gradaccum.wrap(optax.sgd(2.0**-13), steps=STEPS, master_weights=True)
    state, step = tx.init(params), jax.jit(tx.update)
    for _ in range(4 * STEPS):
        updates, state = step({"w": jnp.ones((8,), jnp.float16)}, state, params)
        params = optax.apply_updates(params, updates)
    kept = bool((params["w"] == 1 - 4 * 2.0**-13).all())
    yield Check(
        f"masters of float16, JAX on {jax.default_backend()}",
        kept,
        f"{float(params['w'][0]):.7g}",
    )


def describe(device: str) -> str:
    name = (
        torch.cuda.get_device_name()
        if device == "cuda"
        else platform.processor() or platform.machine()
    )
    versions = [
        f"{package} {version(package)}"
        for package in ("torch", "jax")
        if find_spec(package)
    ]
    return ", ".join([name, *versions, f"Python {platform.python_version()}"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    device = parser.parse_args().device
    if device == "cuda" and not torch.cuda.is_available():
        print("No CUDA device here; --device cpu runs the same checks, small.")
        return 0
    if device == "cpu":
        torch.set_num_threads(1)
    problem = Problem(device, *((1024, 4096) if device == "cuda" else (16, 32)))
    print(describe(device))
    failed = 0
    for checks in (
        check_large_batch(problem),
        check_scale(problem),
        check_masters(problem),
        check_cost(problem),
        check_jax(),
    ):
        for check in checks:
            failed += not check.passed
            print(
                f"{'ok  ' if check.passed else 'FAIL'}  {check.name:48} "
                f" {check.measured}"
            )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
