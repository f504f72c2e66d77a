"""Softmax cross-entropy of logits that are sharded by class, inside `jax.shard_map`.

The method is Megatron-LM's (Shoeybi et al., 2019, "Megatron-LM: Training Multi-Billion
Parameter Language Models Using Model Parallelism", section 3), with two all-reduces in
place of three, and a backward that computes the softmax again.

The communication stands before the function with a derivative of its own, which
`verify_loss_scaling` can run outside of the mesh.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from gradaccum import ArgumentTypeError, ArgumentValueError, UsageError
from gradaccum.kit import explain, require_loss_options
from gradaccum_jax.sharding import axes_of, vary
from gradaccum_jax.workers.group import require_checked

Saved = tuple[Array, Array, Array, Array, Array | None]
"""The logits' shard, each target's index in it, the maxima, the sums, and the width
without padding.
"""


def sharded_cross_entropy(
    logits_shard: Array,
    labels: Array,
    *,
    axis_name: str,
    num_classes: int | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
) -> Array:
    """Return the loss of `optax.softmax_cross_entropy_with_integer_labels` over all
    classes, from this device's slice of them.

    For use inside `jax.shard_map` with its default ``check_vma=True``. The devices
    along the axis hold the classes in order. All get the same loss, and each the
    gradient of its own logits, whether `jax.grad` stands inside the `jax.shard_map` or
    around it. Half-precision logits are computed with in float32. The gradient has no
    derivative.

    Args:
        logits_shard: shape ``(*batch, classes of one device)``, any floating dtype.
        labels: shape ``(*batch)``, an integer dtype, numbered over all classes, the
            same on every device of the axis.
        axis_name: the mesh axis along which the classes are sharded.
        num_classes: by default those of all devices; classes beyond it are padding,
            whose logits may be anything and have no gradient.
        ignore_index: items with this label have no loss and no gradient.
        label_smoothing: in [0, 1]: this share of the target is spread evenly over all
            classes.
        reduction: "mean" (over the items that are not ignored), "sum" or "none".

    Returns:
        Shape ``()``, or ``(*batch)`` for "none". float64 for float64 logits, otherwise
        float32. The mean over no item is NaN; its gradient is zero. Traced labels
        cannot raise: the loss and the gradient of a label that is no class are NaN.

    Raises:
        ArgumentTypeError, ArgumentValueError: an argument has the wrong type, dtype,
            shape or range.
        UsageError: there is no axis of that name here, or `jax.shard_map` does not
            check what is replicated.
    """
    require_loss_options(ignore_index, label_smoothing, reduction)
    require_arrays(logits_shard, labels)
    devices = require_axis(axis_name, logits_shard)
    own = logits_shard.shape[-1]
    classes = require_classes(num_classes, own * devices)
    logits_shard = vary(logits_shard, axes_of(labels))
    labels = labels.astype(jnp.int64 if labels.dtype.itemsize == 8 else jnp.int32)
    first = lax.axis_index(axis_name).astype(labels.dtype) * own
    width = None if classes == own * devices else jnp.clip(classes - first, 0, own)
    ignored = labels == ignore_index
    index = jnp.where(ignored, -1, labels - first)
    shard = lax.stop_gradient(logits_shard)
    maximum = lax.pmax(
        _masked(shard, width, -jnp.inf).max(-1).astype(_wide(shard)), axis_name
    )  # type: ignore[no-untyped-call]
    sums, votes = _sums(
        shard, index, ignored, maximum, width, axis_name, smoothed=label_smoothing > 0
    )
    losses = class_sharded_losses(
        logits_shard,
        index,
        maximum,
        sums,
        width,
        label_smoothing,
        label_smoothing / classes,
    )
    return _reduced(losses, votes, 2 * devices, reduction)


def _masked(values: Array, width: Array | None, padding: float) -> Array:
    return (
        values
        if width is None
        else jnp.where(_columns(values, width) < width, values, padding)
    )


def _sums(
    shard: Array,
    index: Array,
    ignored: Array,
    maximum: Array,
    width: Array | None,
    axis_name: str,
    smoothed: bool,
) -> tuple[Array, Array]:
    """Return, less the maximum, the sum of exponentials, the target's logit, if
    `smoothed` the sum of logits; and votes.

    A device has one vote for a target that it holds, and two for an ignored item. Any
    other sum than one, or two for each device, is a label that is no class, or that
    differs between devices.
    """
    shifted = _masked(shard.astype(maximum.dtype) - maximum[..., None], width, -jnp.inf)
    here = (index >= 0) & (index < (shard.shape[-1] if width is None else width))
    # From the logits as they came: gathered from `shifted`, they would make XLA store
    # all of it.
    target = (
        jnp.take_along_axis(shard, jnp.where(here, index, 0)[..., None], axis=-1)[
            ..., 0
        ].astype(maximum.dtype)
        - maximum
    )
    rows = [
        jnp.exp(shifted).sum(-1),
        jnp.where(here, target, 0),
        jnp.where(ignored, 2, here.astype(maximum.dtype)),
    ]
    if smoothed:
        rows.append(_masked(shifted, width, 0.0).sum(-1))
    total = lax.psum(jnp.stack(rows), axis_name)  # type: ignore[no-untyped-call]
    return jnp.delete(total, 2, axis=0), total[2]


@partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def class_sharded_losses(
    shard: Array,
    index: Array,
    maximum: Array,
    sums: Array,
    width: Array | None,
    smoothing: float,
    uniform: float,
) -> Array:
    """Return the losses of all items without communication, forward or backward."""
    losses = jnp.log(sums[0]) - (1 - smoothing) * sums[1]
    return losses - uniform * sums[2] if smoothing else losses


def _forward(
    shard: Array,
    index: Array,
    maximum: Array,
    sums: Array,
    width: Array | None,
    smoothing: float,
    uniform: float,
) -> tuple[Array, Saved]:
    losses = class_sharded_losses(
        shard, index, maximum, sums, width, smoothing, uniform
    )
    return losses, (shard, index, maximum, sums, width)


def _backward(
    smoothing: float, uniform: float, saved: Saved, upstream: Array
) -> tuple[Array | None, ...]:
    """Loop once over the shard; the fused comparison that finds the target makes no
    one-hot array.
    """
    shard, index, maximum, sums, width = saved
    scale = upstream / sums[0]
    target = jnp.exp(sums[1]) * scale - upstream * (1 - smoothing + uniform)
    others = (
        jnp.exp(shard.astype(upstream.dtype) - maximum[..., None]) * scale[..., None]
        - (upstream * uniform)[..., None]
    )
    gradient = jnp.where(
        _columns(shard, index) == index[..., None], target[..., None], others
    )
    return _masked(gradient, width, 0.0).astype(shard.dtype), None, None, None, None


class_sharded_losses.defvjp(_forward, _backward)


def _reduced(losses: Array, votes: Array, ignoring: int, reduction: str) -> Array:
    """Return the reduced losses: zero for ignored items, NaN for items with any other
    votes than a target's.
    """
    ignored = votes == ignoring
    losses = jnp.where(
        ignored,
        0,
        losses * jnp.where(ignored | (votes == 1), 1, jnp.nan).astype(losses.dtype),
    )
    if reduction == "none":
        return losses
    return (
        losses.sum() / (~ignored).sum().astype(losses.dtype)
        if reduction == "mean"
        else losses.sum()
    )


def _columns(shard: Array, like: Array) -> Array:
    return lax.iota(like.dtype, shard.shape[-1])


def _wide(shard: Array) -> Any:
    return jnp.promote_types(shard.dtype, jnp.float32)


def require_arrays(logits_shard: Any, labels: Any) -> None:
    """Raise unless logits are floating ``(*batch, classes of one device)`` and labels
    integers ``(*batch)``.
    """
    for name, value in (("logits_shard", logits_shard), ("labels", labels)):
        if not hasattr(value, "dtype") or not hasattr(value, "astype"):
            raise explain(
                ArgumentTypeError,
                name,
                expected="an array",
                got=value,
                fix=f"Write jnp.asarray({name}).",
            )
    if not jnp.issubdtype(logits_shard.dtype, jnp.floating):
        fix = "Pass what the last layer gives, before any softmax."
        raise explain(
            ArgumentTypeError,
            "logits_shard",
            expected="a floating dtype",
            found=f"{logits_shard.dtype}",
            fix=fix,
        )
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        fix = (
            "Pass the number of each item's class. Probabilities of all classes are not"
            " supported."
        )
        raise explain(
            ArgumentTypeError,
            "labels",
            expected="an integer dtype",
            found=f"{labels.dtype}",
            fix=fix,
        )
    if logits_shard.ndim == 0 or labels.shape != logits_shard.shape[:-1]:
        expected = "shape (*batch) for logits of shape (*batch, classes of one device)"
        found = f"shape {labels.shape} for logits of shape {logits_shard.shape}"
        fix = (
            "Put the classes last: jnp.moveaxis(logits_shard, 1, -1). Every device"
            " passes the labels of all items."
        )
        raise explain(
            ArgumentValueError, "labels", expected=expected, found=found, fix=fix
        )
    if logits_shard.shape[-1] == 0:
        fix = (
            "Pad the class weights to a multiple of the devices, and say num_classes=."
        )
        raise explain(
            ArgumentValueError,
            "logits_shard",
            expected="one class at least",
            found=f"shape {logits_shard.shape}",
            fix=fix,
        )


def require_axis(axis_name: Any, logits_shard: Any) -> int:
    """Raise unless `logits_shard` is sharded over the axis `axis_name`; return its
    number of devices.

    Without ``check_vma`` gradients would be wrong by a factor of the number of devices.
    """
    if not isinstance(axis_name, str):
        fix = "Write axis_name='model', as in jax.make_mesh."
        raise explain(
            ArgumentTypeError,
            "axis_name",
            expected="the name of a mesh axis",
            got=axis_name,
            fix=fix,
        )
    require_checked(
        axis_name,
        "Call it in a function under jax.shard_map; outside there is"
        " optax.softmax_cross_entropy_with_integer_labels.",
    )
    if axis_name not in axes_of(logits_shard):
        fix = (
            f"Shard the class weights: in_specs=PartitionSpec({axis_name!r}, None) for"
            " shape (classes, features)."
        )
        raise explain(
            UsageError,
            "logits_shard",
            expected=f"logits sharded along {axis_name!r}",
            found="replicated ones",
            fix=fix,
        )
    return int(lax.axis_size(axis_name))


def require_classes(num_classes: Any, held: int) -> int:
    """Raise unless `num_classes` is an int in [1, held]; return the number of classes
    that are no padding.
    """
    if num_classes is None:
        return held
    expected, fix = (
        f"an int in [1, {held}]",
        "Pass the number of classes without padding, or None.",
    )
    if isinstance(num_classes, bool) or not isinstance(num_classes, int):
        raise explain(
            ArgumentTypeError,
            "num_classes",
            expected=expected,
            got=num_classes,
            fix=fix,
        )
    if not 1 <= num_classes <= held:
        raise explain(
            ArgumentValueError,
            "num_classes",
            expected=expected,
            got=num_classes,
            fix=fix,
        )
    return num_classes
