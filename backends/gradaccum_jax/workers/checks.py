"""Checks of the arguments of a call that several devices make together: while JAX traces, at no cost when the program runs."""

from __future__ import annotations

from typing import Any

import jax
from jax import lax

from gradaccum import ArgumentTypeError, ArgumentValueError, UsageError
from gradaccum.kit import explain
from gradaccum_jax.varying import KNOWS_AXES, axes_of


def require_checked(axis_name: str, fix: str) -> None:
    """Refuse an axis of which JAX does not know what differs along it.

    Args:
        axis_name: the name of a mesh axis.
        fix: what to write where there is none.

    Raises:
        UsageError: no such axis is in scope, its `jax.shard_map` does not check what is replicated, or this JAX is too old for it.
    """
    _require_types()
    try:
        index = lax.axis_index(axis_name)
    except NameError as error:
        raise explain(UsageError, "axis_name", expected="an axis of the jax.shard_map around it", got=axis_name, fix=fix) from error
    if axis_name not in axes_of(index) and lax.axis_size(axis_name) > 1:  # JAX may leave an axis of one device out of types
        found, fix = "an axis of pmap, of vmap, or with check_vma=False", "Leave check_vma=True, the default of jax.shard_map."
        raise explain(UsageError, "axis_name", expected="an axis of a jax.shard_map with check_vma=True", found=found, fix=fix)


def require_names(axis_name: Any) -> tuple[str, ...]:
    """`axis_name`, the name of a mesh axis or several names, as a tuple; None is no name.

    Raises:
        ArgumentTypeError: it is something else.
        ArgumentValueError: there is no name in it, or one twice.
        UsageError: this JAX is too old for an axis.
    """
    names = () if axis_name is None else (axis_name,) if isinstance(axis_name, str) else axis_name
    expected, fix = "the name of a mesh axis, or a tuple of names", "Write axis_name='data', as in jax.make_mesh."
    if not isinstance(names, tuple) or not all(isinstance(name, str) for name in names):
        raise explain(ArgumentTypeError, "axis_name", expected=expected, got=axis_name, fix=fix)
    if axis_name is not None and (not names or not all(names) or len(set(names)) < len(names)):
        raise explain(ArgumentValueError, "axis_name", expected=expected, got=axis_name, fix=fix)
    if names:
        _require_types()
    return names


def _require_types() -> None:
    """Refuse a mesh axis on a JAX whose types do not say along which axes devices differ."""
    if not KNOWS_AXES:
        fix = "Install a newer one: pip install -U jax. Or leave axis_name, shard_axes and mesh out: XLA partitions the step under jax.jit."
        found = f"JAX {jax.__version__}, whose types do not say what differs from device to device"
        raise explain(UsageError, "axis_name", expected="a JAX that has jax.shard_map", found=found, fix=fix)
