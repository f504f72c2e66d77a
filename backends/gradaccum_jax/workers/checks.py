"""Checks of the arguments of a call that several devices make together: while JAX traces, at no cost when the program runs."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from gradaccum import ArgumentTypeError, ArgumentValueError, UsageError
from gradaccum.kit import explain
from gradaccum_jax.varying import axes_of

KNOWS_AXES = hasattr(jax, "shard_map")
"""JAX 0.5 and 0.6.0 have `jax.experimental.shard_map` only, where a value's type does not say along which axes devices differ."""


def require_arrays(logits_shard: Any, labels: Any) -> None:
    """Refuse anything but floating logits ``(*batch, classes of one device)`` and integer labels ``(*batch)``.

    Raises:
        ArgumentTypeError: one is no array, or of another kind of dtype.
        ArgumentValueError: their shapes do not belong together, or there is no class at all.
    """
    for name, value in (("logits_shard", logits_shard), ("labels", labels)):
        if not hasattr(value, "dtype") or not hasattr(value, "astype"):
            raise explain(ArgumentTypeError, name, expected="an array", got=value, fix=f"Write jnp.asarray({name}).")
    if not jnp.issubdtype(logits_shard.dtype, jnp.floating):
        fix = "Pass what the last layer gives, before any softmax."
        raise explain(ArgumentTypeError, "logits_shard", expected="a floating dtype", found=f"{logits_shard.dtype}", fix=fix)
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        fix = "Pass the number of each item's class. Probabilities of all classes are not supported."
        raise explain(ArgumentTypeError, "labels", expected="an integer dtype", found=f"{labels.dtype}", fix=fix)
    if logits_shard.ndim == 0 or labels.shape != logits_shard.shape[:-1]:
        expected = "shape (*batch) for logits of shape (*batch, classes of one device)"
        found = f"shape {labels.shape} for logits of shape {logits_shard.shape}"
        fix = "Put the classes last: jnp.moveaxis(logits_shard, 1, -1). Every device passes the labels of all items."
        raise explain(ArgumentValueError, "labels", expected=expected, found=found, fix=fix)
    if logits_shard.shape[-1] == 0:
        fix = "Pad the class weights to a multiple of the devices, and say num_classes=."
        raise explain(ArgumentValueError, "logits_shard", expected="one class at least", found=f"shape {logits_shard.shape}", fix=fix)


def require_axis(axis_name: Any, logits_shard: Any) -> int:
    """The number of devices along the axis `axis_name`, over which `logits_shard` is sharded.

    Without ``check_vma`` JAX hands the backward of a replicated loss one gradient inside `jax.shard_map` and a fraction of it outside, and
    nothing tells which: gradients would be right by a factor of the number of devices only.

    Raises:
        ArgumentTypeError: `axis_name` is no name.
        UsageError: no such axis is in scope, its `jax.shard_map` does not check what is replicated, or the logits are replicated.
    """
    if not isinstance(axis_name, str):
        fix = "Write axis_name='model', as in jax.make_mesh."
        raise explain(ArgumentTypeError, "axis_name", expected="the name of a mesh axis", got=axis_name, fix=fix)
    require_checked(
        axis_name, "Call it in a function under jax.shard_map; outside there is optax.softmax_cross_entropy_with_integer_labels."
    )
    if axis_name not in axes_of(logits_shard):
        fix = f"Shard the class weights: in_specs=PartitionSpec({axis_name!r}, None) for shape (classes, features)."
        raise explain(UsageError, "logits_shard", expected=f"logits sharded along {axis_name!r}", found="replicated ones", fix=fix)
    return int(lax.axis_size(axis_name))


def require_classes(num_classes: Any, held: int) -> int:
    """The number of classes that are no padding, of those that the devices hold.

    Raises:
        ArgumentTypeError: `num_classes` is no int.
        ArgumentValueError: it is not in [1, held].
    """
    if num_classes is None:
        return held
    expected, fix = f"an int in [1, {held}]", "Pass the number of classes without padding, or None."
    if isinstance(num_classes, bool) or not isinstance(num_classes, int):
        raise explain(ArgumentTypeError, "num_classes", expected=expected, got=num_classes, fix=fix)
    if not 1 <= num_classes <= held:
        raise explain(ArgumentValueError, "num_classes", expected=expected, got=num_classes, fix=fix)
    return num_classes


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
