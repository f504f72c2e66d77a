"""Checks on several devices, in one process: `test_jax_workers` starts it.

A process of its own, because JAX fixes the number of devices when it starts, and a
deadlock must not hang pytest.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

NAMES = {
    "windows": ("scan one_reduction_per_window other_number_of_devices checked_state"),
    "meshes": ("start_outside two_axes axis_for_the_compiler explicit_axes varying"),
    "shards": "like_one_device with_workers models_of_their_own",
    "large_batch": (
        "one_reduction_per_call gathered_parameters weights_and_aux keys coupled"
    ),
    "layered": "layered_window",
    "batch_shards": (
        "fair_share outside_of_jit uneven_under_jit in_shardings whole_batches"
        " nested_batches coupled_batch"
    ),
    "refusals": "refused_calls accepted_calls own_derivative",
}
"""The checks, by file."""


def check_of(name: str) -> Callable[[], None]:
    (file,) = (file for file, names in NAMES.items() if name in names.split())
    check: Callable[[], None] = getattr(import_module(f"{__name__}.{file}"), name)
    return check
