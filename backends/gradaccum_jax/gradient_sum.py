"""The sum of a window, in the structure of the parameters, and its arithmetic.

Additions are plain elementwise expressions, which XLA fuses into one pass in place.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import custom_vmap
from jax.extend import core
from jax.interpreters import ad, batching, mlir

from gradaccum import ArgumentTypeError, ArgumentValueError
from gradaccum.kit import Scalar, Where, explain
from gradaccum_jax.arrays import (
    Array,
    DType,
    Gradients,
    Leaves,
    Params,
    Tree,
    is_key,
    takes_part,
    typeof,
    wider,
)
from gradaccum_jax.sharding import ShardAxes, axes_of, manual_axes, shards_of, vary, x64
from gradaccum_jax.xla import once


def sum_dtype(leaf: Array, accumulate_dtype: DType) -> DType:
    """Return the dtype in which gradients of `leaf` are summed: float32 for half
    precision, else the leaf's own.

    `accumulate_dtype` replaces both for every leaf that takes part. Complex leaves stay
    complex.
    """
    own = jnp.result_type(leaf)
    if not takes_part(leaf):
        return own
    if own.itemsize < 2:
        fix = (
            "Keep parameters in bfloat16 or wider, and cast them to float8 inside the"
            " loss."
        )
        raise explain(
            ArgumentTypeError,
            "params",
            expected="parameters of 16 bits or more",
            found=f"dtype {own}",
            fix=fix,
        )
    if accumulate_dtype is None:
        return jnp.dtype("float32") if own.itemsize < 4 else own
    wanted = jnp.dtype(accumulate_dtype)
    if jax.dtypes.canonicalize_dtype(wanted) != wanted:
        fix = "Set jax.config.update('jax_enable_x64', True) first."
        raise explain(
            ArgumentValueError,
            "accumulate_dtype",
            expected="a dtype that JAX has switched on",
            found=str(wanted),
            fix=fix,
        )
    return (
        jnp.promote_types(wanted, jnp.complex64)
        if jnp.issubdtype(own, jnp.complexfloating)
        else wanted
    )


def zeros(params: Params, accumulate_dtype: DType) -> Tree:
    """Return an empty accumulator for `params`: one array per leaf; None for random
    keys, and where `params` has None.
    """

    def empty(leaf: Array) -> Array:
        return (
            None
            if is_key(leaf)
            else vary(
                jnp.zeros_like(leaf, dtype=sum_dtype(leaf, accumulate_dtype)),
                axes_of(leaf),
            )
        )

    return jax.tree.map(empty, params)


def weight_dtype(accumulator: Tree) -> DType:
    """Return float64 if any leaf is float64 or complex128, else float32."""
    wide = any(
        leaf.dtype in ("float64", "complex128") for leaf in jax.tree.leaves(accumulator)
    )
    return jnp.dtype("float64" if wide else "float32")


def add(
    accumulator: Tree,
    gradients: Gradients,
    factor: Scalar,
    adds: Scalar,
    harmless: Scalar = None,
) -> Tree:
    """Add ``factor * gradients`` to the accumulator if `adds` holds."""

    def add_leaf(held: Array, gradient: Array) -> Array:
        if gradient is None:
            return held
        if factor is not None:
            return add_weighted(held, gradient, factor, adds, harmless)
        return pick(adds, plus(held, gradient), held)

    leaves, structure = jax.tree.flatten(accumulator)
    return jax.tree.unflatten(
        structure,
        [
            add_leaf(held, gradient)
            for held, gradient in zip(leaves, gradients, strict=True)
        ],
    )


@jax.custom_jvp
def add_weighted(
    held: Array, gradient: Array, weight: Scalar, adds: Scalar, harmless: Scalar
) -> Array:
    """Return ``held + weight * gradient`` in the dtype of `held` if `adds` holds, else
    `held`.

    A weight of 0 must add exactly nothing, even of a NaN, so a select leaves the
    product out. Yet the derivative by the weight is the gradient at weight 0 too, from
    where learning to reweight starts (Ren et al., "Learning to Reweight Examples for
    Robust Deep Learning", 2018, section 3.2).
    """
    return pick(adds, plus(held, weight * gradient), held)


@add_weighted.defjvp
def _(primals: tuple[Array, ...], tangents: tuple[Array, ...]) -> tuple[Array, Array]:
    held, gradient, weight, adds, harmless = primals
    moved, turned, heavier, *_ = tangents
    # JAX differentiates after `call_jitted` has returned.
    with jax.numpy_dtype_promotion("standard"):
        by_gradient = jnp.where(adds, weight * turned, 0)
        by_weight = heavier * jnp.where(harmless, gradient, 0)
        return add_weighted(*primals), (moved + by_gradient + by_weight).astype(
            held.dtype
        )


def passing(harmless: Scalar) -> Where:
    """Return `jax.numpy.where` with the derivative of `add_weighted`: of the first
    choice where `harmless` holds, else of the second.
    """
    return lambda adds, a, b: _chosen(adds, a, b, harmless)


@jax.custom_jvp
def _chosen(adds: Scalar, a: Scalar, b: Scalar, harmless: Scalar) -> Scalar:
    return jnp.where(adds, a, b)


@_chosen.defjvp
def _(
    primals: tuple[Scalar, ...], tangents: tuple[Scalar, ...]
) -> tuple[Scalar, Scalar]:
    return _chosen(*primals), jnp.where(primals[3], tangents[1], tangents[2])


def all_finite(gradients: Gradients) -> Scalar:
    return all_of(
        [
            jnp.all(jnp.isfinite(gradient))
            for gradient in gradients
            if gradient is not None
        ]
    )


def divide(accumulator: Tree, divisor: Scalar, dtypes: list[DType]) -> Tree:
    leaves, structure = jax.tree.flatten(accumulator)
    return jax.tree.unflatten(
        structure,
        [to(leaf / divisor, dtype) for leaf, dtype in zip(leaves, dtypes, strict=True)],
    )


def emptied(accumulator: Tree, where: Scalar) -> Tree:
    zeros = fills(lambda _: 0)
    return jax.tree.map(lambda leaf: pick(where, zeros(leaf), leaf), accumulator)


def clear(tree: Tree) -> Tree:
    return jax.tree.map(jnp.zeros_like, tree)


def fits(accumulator: Tree, divisor: Scalar, dtypes: list[DType]) -> Scalar:
    """True if every finite element of the accumulator stays finite in
    ``(accumulator / divisor).astype(dtype)``: a bool scalar.

    The largest magnitude decides, because dividing and rounding are monotonic.
    """
    held = zip(jax.tree.leaves(accumulator), dtypes, strict=True)
    return all_of(
        [
            _largest(leaf) / divisor < _limit(dtype)
            for leaf, dtype in held
            if leaf.size and _is_narrower(dtype, leaf.dtype)
        ]
    )


def _is_narrower(dtype: DType, held: DType) -> bool:
    """True if `dtype` is narrower than the quotient: a division by a float32 makes
    float32 even of a half-precision sum.
    """
    if not jnp.issubdtype(held, jnp.inexact):
        return False
    quotient = wider(held, jnp.float32)
    return bool(jnp.finfo(dtype).maxexp < jnp.finfo(quotient).maxexp)


def _limit(dtype: DType) -> float:
    """Return the smallest magnitude that rounds to infinity, half a step beyond the
    largest number: 65520 for float16.
    """
    largest = float(jnp.finfo(dtype).max)
    return largest + 2.0 ** (math.frexp(largest)[1] - int(jnp.finfo(dtype).nmant) - 2)


def _largest(leaf: Array) -> Scalar:
    """Reduce row by row: XLA:CPU takes minutes to compile several reductions of whole
    matrices to scalars side by side.
    """
    parts = (leaf.real, leaf.imag) if jnp.iscomplexobj(leaf) else (leaf,)
    rows = [
        jnp.atleast_1d(part.astype(jnp.promote_types(part.dtype, jnp.float32)))
        for part in parts
    ]
    return jnp.stack(
        [
            jnp.max(jnp.maximum(jnp.max(part, axis=-1), -jnp.min(part, axis=-1)))
            for part in rows
        ]
    ).max()


# Elementwise operations on every array of a model, in as few equations of the traced
# program as there are.
#
# `jax.numpy` promotes, broadcasts and jits: `jnp.where` alone is a function of its own
# in the program, called once for each array. For arrays of one shape and dtype
# `jax.lax` says the same in one equation each. Elsewhere `jax.numpy` does it.


def plus(a: Array, b: Array) -> Array:
    """Return ``(a + b)`` in the dtype of `a`, of its shape."""
    return lax.add(a, b) if _like(a, b) else to(a + b, a.dtype)


def fills(value: Callable[[Array], Scalar]) -> Callable[[Array], Array]:
    """Return a function that fills an array with ``value(array)``, made once for each
    type.
    """
    made: dict[Any, Array] = {}

    def fill(leaf: Array) -> Array:
        kind = typeof(leaf)
        if kind not in made:
            made[kind] = lax.full_like(leaf, value(leaf))
        return made[kind]

    return fill


def pick(where: Scalar, a: Array, b: Array) -> Array:
    return lax.select(jnp.asarray(where), a, b)


def to(leaf: Array, dtype: DType) -> Array:
    return leaf if leaf.dtype == dtype else leaf.astype(dtype)


def _like(a: Array, b: Array) -> bool:
    return bool(a.dtype == b.dtype and a.shape == b.shape)


# Many scalars out of one kernel.
#
# XLA compiles a kernel for each scalar. And it copies a chain of scalar additions or
# conjunctions into the fusion of every tensor that uses its end: n tensors, n chains of
# n links, and a program whose size is the square of the model's. A barrier does not
# stop it, and XLA turns a reduction of the stacked scalars into a chain again. It
# leaves alone a reduction with two results that need each other.


T = TypeVar("T")
_config: Any = jax.config


def together(numbers: T) -> T:
    """Return a tree of scalars as it is, out of one kernel that XLA copies into no
    other.
    """
    leaves, structure = jax.tree.flatten(numbers)
    return cast(
        T, jax.tree.unflatten(structure, _together.bind(*map(jnp.asarray, leaves)))
    )


def _last_of_two(*numbers: Array) -> Leaves:
    if any(number.dtype == jnp.float64 for number in numbers):
        # XLA on the CPU allows no two precisions in one reduction.
        return list(numbers)
    twice, first = (
        [jnp.stack([number, number]) for number in numbers],
        [jnp.zeros_like(number) for number in numbers],
    )
    return list(
        lax.reduce((jnp.arange(2), *twice), (jnp.asarray(-1), *first), _later, (0,))
    )[1:]


def _later(a: Leaves, b: Leaves) -> Leaves:
    return [
        lax.select(a[0] >= b[0], one, other) for one, other in zip(a, b, strict=True)
    ]


_together: Any = core.Primitive("together")
_together.multiple_results = True
_together.def_impl(lambda *numbers: list(numbers))
_together.def_abstract_eval(lambda *kinds: list(kinds))
mlir.register_lowering(_together, mlir.lower_fun(_last_of_two, multiple_results=True))
_rules: Any = batching.primitive_batchers
_rules[_together] = lambda numbers, places: (list(numbers), list(places))
ad.primitive_jvps[_together] = lambda numbers, tangents: (
    _together.bind(*numbers),
    list(tangents),
)


def all_of(flags: list[Scalar]) -> Scalar:
    """True if all of these bool scalars hold."""
    return together(functools.reduce(jnp.logical_and, flags, jnp.asarray(True)))


Pair = tuple[Array, Array]
"""A sum, and the rounding error that it has lost."""


def sum_of(values: Array) -> Array:
    """Return the compensated sum along the first axis (Neumaier, 1974), as good as
    rounded once; inf or NaN where an element is.
    """
    nothing = jnp.zeros((), values.dtype)
    total, lost = lax.reduce(
        (values, jnp.zeros_like(values)), (nothing, nothing), _add, (0,)
    )
    return jnp.where(jnp.isfinite(total), total + lost, total)


def _add(a: Pair, b: Pair) -> Pair:
    """Add two pairs; the rounding error of an addition is exact in floating point
    (Knuth, TAOCP 2, 4.2.2).
    """
    total = a[0] + b[0]
    other = total - a[0]
    return total, a[1] + b[1] + ((a[0] - (total - other)) + (b[0] - other))


# The global norm of an accumulator, robust and with no temporary of the parameters'
# size.
#
# Squares of large finite elements overflow, and squares of tiny ones vanish. Then the
# norm is that of the elements times a power of two that brings them into range. So a
# norm that is not finite means a gradient that is not finite. The arrays are measured
# again for it, only then. Small arrays, which are many, are measured in float64
# instead, and once: it has room for all squares of float32. Large ones are not, as XLA
# before JAX 0.10 would write out their squares; nor sharded ones; and a TPU has no
# float64.
#
# XLA compiles a kernel for each sum of squares, unless it has compiled the same before.
# So the squares of small arrays of one type are added up element by element before, and
# all these sums have one form: their factor is a number that XLA does not know.


SMALL = 2**14
"""Elements of an array at most that is measured together with others."""
MOST_TOGETHER = 10
"""Beyond it XLA takes longer to compile a kernel than it takes for two."""
Shards = tuple[tuple[str, ...], ...]
"""The mesh axes along which each group of arrays is sharded inside `jax.shard_map`."""


def are_small(accumulator: Tree) -> bool:
    return all(leaf.size <= SMALL for leaf in jax.tree.leaves(accumulator))


def measure(
    accumulator: Tree, one: Scalar, weight: Scalar, shard_axes: ShardAxes = None
) -> tuple[Scalar, Scalar]:
    """Return the global 2-norm and whether every element is finite: scalars of the
    dtype of `one` and bool.

    `one` is 1 and `weight` never below 0: numbers from outside of the conditional
    around this call, which XLA does not know there.
    """
    groups = _grouped(_real_leaves(accumulator, one.dtype))
    norm = _norm(
        tuple(shards_of(group[0], shard_axes) for group in groups), groups, one, weight
    )
    return norm, norm < jnp.inf


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _norm(axes: Shards, groups: list[Leaves], one: Scalar, weight: Scalar) -> Scalar:
    """Return the norm of arrays that are measured in groups."""
    wide = (
        one.dtype == jnp.float32
        and not manual_axes()
        and jax.default_backend() in ("cpu", "gpu")
        and not _config.jax_disable_jit
    )
    small = [leaf for group in groups for leaf in group if wide and leaf.size <= SMALL]
    if not small:
        return _by_looks(axes, groups, one, weight)
    large = [group for group in groups if group[0].size > SMALL]
    others = [_by_looks(axes[: len(large)], large, one, weight)] if large else []
    root, finite = _traced_whole(_in_float64)(*small, *others)
    return jnp.where(
        finite, jnp.minimum(root, float(np.finfo(np.float32).max)), jnp.inf
    )


def _in_float64(*leaves: Array) -> tuple[Scalar, Scalar]:
    """Return the norm of float32 arrays, and whether it is finite: scalars of float32
    and bool.
    """
    with x64(True):
        groups = [
            functools.reduce(
                operator.add, [jnp.square(leaf.astype(np.float64)) for leaf in group]
            )
            for group in _grouped([*leaves])
        ]
        total = functools.reduce(operator.add, map(jnp.sum, groups))
        return jnp.sqrt(total).astype(np.float32), lax.is_finite(total)


def _traced_whole(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that JAX evaluates by no rule of its own: its rules know no
    float64 where it is not switched on.
    """

    @custom_vmap
    def whole(*leaves: Array) -> Any:
        return jax.jit(function)(*leaves)

    @whole.def_vmap
    def _(_: int, batched: list[bool], *leaves: Array) -> tuple[Any, Any]:
        return _traced_whole(
            jax.vmap(function, tuple(0 if own else None for own in batched))
        )(*leaves), (True, True)

    return whole


def _by_looks(
    axes: Shards, groups: list[Leaves], one: Scalar, weight: Scalar
) -> Scalar:
    kind = np.finfo(one.dtype)
    large = 2.0 ** (0.75 * int(kind.maxexp))

    def again(power: Scalar) -> Scalar:
        squares = _squares(axes, groups, power, weight)
        return jnp.where(
            squares < jnp.inf,
            jnp.minimum(jnp.sqrt(squares) / power, float(kind.max)),
            jnp.inf,
        )

    squares = _squares(axes, groups, one, weight)
    in_range = (squares > _smallest_sum(one.dtype)) & (squares < jnp.inf)
    return once(
        ~in_range,
        again,
        jnp.where(
            in_range, jnp.sqrt(squares), jnp.where(squares < 1, large, 1 / large)
        ),
    )


@_norm.defjvp
def _(
    axes: Shards, primals: tuple[Any, ...], tangents: tuple[Any, ...]
) -> tuple[Scalar, Scalar]:
    # The derivative is 0 at 0, and where the norm is not finite: a window of zero
    # gradients has no 0 x inf.
    norm = _norm(axes, *primals)
    tells = (norm > 0) & (norm < jnp.inf)
    unit = jax.tree.map(
        lambda leaf: jnp.where(tells, leaf / jnp.where(tells, norm, 1), 0), primals[0]
    )
    moved = [
        sum(jnp.sum(a * b) for a, b in zip(*pair, strict=True))
        for pair in zip(unit, tangents[0], strict=True)
    ]
    return norm, _over_shards(
        axes, moved, jnp.zeros_like(norm), functools.partial(jnp.sum, axis=0)
    )


def _grouped(leaves: Leaves) -> list[Leaves]:
    alike: dict[Any, Leaves] = {}
    for place, leaf in enumerate(leaves):
        alike.setdefault(typeof(leaf) if leaf.size <= SMALL else place, []).append(leaf)
    return [
        group[start : start + MOST_TOGETHER]
        for group in alike.values()
        for start in range(0, len(group), MOST_TOGETHER)
    ]


def _squares(
    axes: Shards, groups: list[Leaves], power: Scalar, weight: Scalar
) -> Scalar:
    """Return the sum of the squares of all elements, each times `power`."""
    done: list[Array] = []
    last: dict[tuple[str, ...], Array] = {}
    for own, leaves in zip(axes, groups, strict=True):
        # The dependence makes XLA, which writes out squares on a CPU before JAX 0.10,
        # measure one group after the other.
        previous: Scalar = last.get(own, weight)
        factor = jnp.where(previous < 0, previous, power)
        last[own] = jnp.sum(
            functools.reduce(
                operator.add, [jnp.square(leaf * factor) for leaf in leaves]
            )
        )
        done.append(last[own])
    return _over_shards(axes, done, 0 * power, sum_of)


def _over_shards(
    axes: Shards, values: list[Array], nothing: Scalar, add_up: Callable[[Array], Array]
) -> Scalar:
    """Return the sum of one value per group over all shards; a copy counts once."""
    alike: dict[tuple[str, ...], list[Array]] = {}
    for own, value in zip(axes, values, strict=True):
        alike.setdefault(own, []).append(value)
    for own, held in alike.items():
        total = add_up(jnp.stack(held))
        nothing = nothing + (lax.psum(total, own) if own else total)  # type: ignore[no-untyped-call]
    return nothing


def _smallest_sum(dtype: DType) -> float:
    """Return the sum below which vanished squares may count; 1e-24 in float32."""
    kind = np.finfo(dtype)
    return float(kind.tiny) / float(kind.eps) ** 2


def _real_leaves(accumulator: Tree, dtype: DType) -> Leaves:
    parts: Leaves = []
    for leaf in jax.tree.leaves(accumulator):
        if leaf.size:
            parts += (leaf.real, leaf.imag) if jnp.iscomplexobj(leaf) else (leaf,)
    return [part.astype(dtype) for part in parts]
