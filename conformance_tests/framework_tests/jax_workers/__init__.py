"""Windows that four devices share, in one process: `test_jax_workers` starts it.

A process of its own, because JAX fixes the number of devices when it starts, and a
deadlock must not hang pytest.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

NAMES = {
    "windows": (
        """
        mixed_dtypes chain scan ensemble
        one_reduction_per_window one_for_each_dtype nothing_is_copied benchmark
        other_number_of_devices checked_state empty_flush
    """
    ),
    "meshes": "two_axes axis_for_the_compiler explicit_axes",
    "layered": "layered_window layered_shards",
    "refusals": (
        """
        reduced_gradients unchecked_replication outside bad_names bad_arguments bad_batches other_results window_of_one_device state_of_all_devices
        differing_parameters parameters_of_each_device optimizer_of_each_device losses windows_by_weight optimizer_that_reduces
        parameters_by_hand beside_the_state own_derivative differing_state reducing_optimizer
    """
    ),
}
"""The checks, by file."""


def checks() -> dict[str, Callable[[], None]]:
    """Each check by its name."""
    return {
        name: getattr(import_module(f"{__name__}.{file}"), name)
        for file, names in NAMES.items()
        for name in names.split()
    }
