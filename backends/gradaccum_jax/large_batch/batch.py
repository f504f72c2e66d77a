"""A large batch, cut into micro-batches: axes, the user's own parts, weights, and
groups of one shape.

Arrays are data of the compiled program; axes, cuts and plain values such as flags are
constants: one program for each shape of batch. Users add classes to JAX's trees, so
`jax.tree` walks the nests and `jax.tree_util.keystr` spells the paths.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from gradaccum import (
    ArgumentTypeError,
    ArgumentValueError,
    GradAccumError,
    UsageError,
    kit,
)
from gradaccum.kit import Cut, Division, Scalar, explain
from gradaccum_jax.arrays import (
    BY_ITEM,
    KEY,
    Array,
    Axis,
    DType,
    Tree,
    axis_of,
    is_constant,
    spread_over,
    typeof,
)
from gradaccum_jax.checks import as_weight
from gradaccum_jax.sharding import (
    AxisShards,
    axis_shards,
    divide_axis,
    merge_axis,
)

PLAIN = (str, bytes, bool, int, float, complex)
"""A leaf of these types has no items, and is given whole to each micro-batch."""


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["leaves", "item_weights"],
    meta_fields=["axes", "constants", "structure", "cuts", "lists", "blocks"],
)
@dataclass(frozen=True)
class Batch:
    """The batch's arguments, and where they are cut."""

    leaves: list[Array]
    """The arrays, in JAX's order."""
    item_weights: Array
    """Real, shape (items,): each item's weight; or None."""
    axes: tuple[Axis, ...]
    """One for each of `leaves`."""
    constants: tuple[tuple[int, type, Any], ...]
    """Values that are no arrays, such as flags, each with its place among all leaves
    and its type: a compiled program is found again by them, and 1 equals True.
    """
    structure: Any
    """The tree that arrays and constants are the leaves of."""
    cuts: tuple[Cut, ...] = ()
    """The cuts of each block: a micro-batch takes the same items of all blocks."""
    lists: tuple[tuple[str, int, str], ...] = ()
    """Path, length and brackets of each list that may be one of items; see
    `gradaccum.kit.mark_lists`.
    """
    blocks: int = 1
    """How many blocks of consecutive items the batch has: 1 unless devices share it."""

    def arguments(self, leaves: Sequence[Array]) -> tuple[Tree, ...]:
        held = list(leaves)
        for place, _, value in self.constants:
            held.insert(place, value)
        arguments: tuple[Tree, ...] = jax.tree.unflatten(self.structure, held)
        return arguments

    def taken(self, start: Scalar, size: int, index: Scalar) -> list[Array]:
        return [
            take(leaf, axis, start, size, index, self.blocks)
            for leaf, axis in zip(self.leaves, self.axes, strict=True)
        ]

    def sizes(self) -> list[tuple[str, int]]:
        held = zip(self._paths(), self.leaves, self.axes, strict=True)
        return [
            (path, np.shape(leaf)[axis])
            for path, leaf, axis in held
            if isinstance(axis, int)
        ]

    @property
    def items(self) -> int:
        return kit.require_one_size(self.sizes(), self.lists, BY_ITEM)

    def shards(self, given: Tree) -> AxisShards:
        """Return the shards of the axis of items, as far as the leaves say; `given` are
        the other arguments of the call.
        """
        held = zip(self.leaves, self.axes, strict=True)
        known = [
            axis_shards(leaf, axis, given)
            for leaf, axis in held
            if isinstance(axis, int)
        ]
        return AxisShards(
            math.lcm(*(shards.known for shards in known)),
            math.lcm(*(shards.possible for shards in known)),
        )

    def _paths(self) -> list[str]:
        held = jax.tree_util.tree_flatten_with_path(self.arguments(self.leaves))[0]
        constant = {place for place, *_ in self.constants}
        return [
            f"batch{jax.tree_util.keystr(path)}"
            for place, (path, _) in enumerate(held)
            if place not in constant
        ]


def make_batch(arguments: tuple[Tree, ...], axes: Tree) -> Batch:
    held, structure = jax.tree_util.tree_flatten_with_path(arguments)
    _require_dense(arguments, spread_over(axes, arguments, "axes"))
    spread = _whole_where_plain(arguments, spread_over(axes, arguments, "axes"))
    checked = [
        axis_of(f"batch{jax.tree_util.keystr(path)}", leaf, axis)
        for (path, leaf), axis in zip(held, spread, strict=True)
    ]
    constants = tuple(
        (place, type(leaf), leaf)
        for place, (_, leaf) in enumerate(held)
        if is_constant(leaf)
    )
    arrays = [
        (leaf, axis)
        for (_, leaf), axis in zip(held, checked, strict=True)
        if not is_constant(leaf)
    ]
    lists = tuple(kit.mark_lists(arguments, axes)[1])
    return Batch(
        [leaf for leaf, _ in arrays],
        None,
        tuple(axis for _, axis in arrays),
        constants,
        structure,
        lists=lists,
    )


def is_cut(axis: Axis) -> bool:
    return isinstance(axis, int)


def take(
    leaf: Array, axis: Axis, start: Scalar, size: int, index: Scalar, blocks: int = 1
) -> Array:
    """Return the part of `leaf` for micro-batch number `index`: `size` items of each
    block, from `start` on. A key is folded by each number of a tuple.
    """
    if axis == KEY:
        return functools.reduce(
            jax.random.fold_in, index if isinstance(index, tuple) else (index,), leaf
        )
    if axis is None:
        return leaf
    return take_items(jnp.asarray(leaf), int(axis), start, size, blocks)


def take_items(array: Array, axis: int, start: Scalar, size: int, blocks: int) -> Array:
    """Return `size` items of each block, from `start` on, block after block."""
    if blocks == 1:
        return lax.dynamic_slice_in_dim(array, start, size, axis)
    by_block = divide_axis(array, axis, blocks)
    return merge_axis(lax.dynamic_slice_in_dim(by_block, start, size, axis + 1), axis)


def _whole_where_plain(arguments: tuple[Tree, ...], axes: list[Any]) -> list[Any]:
    """Return `axes` with None for plain values, except in a list, where a whole value
    would broadcast against a micro-batch of one.
    """
    nodes = jax.tree.leaves(
        arguments, is_leaf=lambda node: node is not arguments and kit.is_column(node)
    )
    alone = [not kit.is_column(node) for node in nodes for _ in jax.tree.leaves(node)]
    held = zip(jax.tree.leaves(arguments), axes, alone, strict=True)
    return [
        None if by_itself and _is_plain(leaf) and axis != KEY else axis
        for leaf, axis, by_itself in held
    ]


def _require_dense(arguments: tuple[Tree, ...], axes: list[Any]) -> None:
    """Raise unless no array is sparse: JAX would cut the list of its entries."""
    module = sys.modules.get("jax.experimental.sparse")
    if module is None:
        return
    given = iter(axes)
    for path, node in jax.tree_util.tree_flatten_with_path(
        arguments, is_leaf=lambda node: isinstance(node, module.JAXSparse)
    )[0]:
        split = [isinstance(next(given), int) for _ in jax.tree.leaves(node)]
        if any(split) and isinstance(node, module.JAXSparse):
            fix = (
                "Write split= a function that cuts it, or .todense(); axes=None where"
                " every micro-batch is given it whole."
            )
            found = f"a {type(node).__name__}"
            raise explain(
                ArgumentValueError,
                f"batch{jax.tree_util.keystr(path)}",
                expected="a dense array to split",
                found=found,
                fix=fix,
            )


def _is_plain(leaf: object) -> bool:
    return isinstance(leaf, PLAIN) and not isinstance(leaf, np.generic)


# Micro-batches of one shape are one loop of the compiled program.
#
# XLA compiles a loop's body once, however often it runs. So micro-batches are grouped
# by size, wherever in the batch they stand: equal cuts make one loop, and a smaller
# last one is a second body. Sums do not ask for the order; `in_order` puts rows back
# into that of the batch.
#
# A tail is such a second body, and is not padded with masked items: a loss is a scalar,
# so nobody can take padded items out of its mean, nor out of what it computes across
# items. Padding also costs the time of a whole micro-batch in every call. The second
# body costs compilation only: 9.0 s of CPU in place of 5.4 s for an encoder of four
# layers, 0.8 s in place of 0.5 s for an MLP. Scratch rose by at most 3 %. Users who
# want one body pad the batch, and give the padding no weight inside of the loss.


C = TypeVar("C")


class MicroBatch(NamedTuple):
    """The arguments of one run of the loss function."""

    arguments: tuple[Tree, ...]
    items: int | None
    """How many items it has; None where nobody knows."""
    item_weights: Array
    """Real, shape (items,): their weights; or None."""
    index: Scalar
    """int32: its number among all micro-batches; or a tuple of it and another."""


class Group(NamedTuple):
    """Micro-batches of one shape."""

    numbers: tuple[int, ...]
    """Their numbers among all micro-batches of the batch."""
    places: Tree
    """Arrays with one entry of the leading axis for each: what `take` wants to know."""
    take: Callable[[Tree, Scalar], MicroBatch]
    """``take(place, index)``."""
    items: int | None
    """How many items each has; None where nobody knows."""
    blocks: int = 1
    """How many blocks of the batch these items come from."""


Body = Callable[[C, MicroBatch], tuple[C, list[Array]]]
"""``body(carry, micro_batch)`` returns the carry and arrays of rows."""


def groups_of(batch: Batch) -> list[Group]:
    sizes: dict[int, list[int]] = {}
    for number, cut in enumerate(batch.cuts):
        sizes.setdefault(cut.items, []).append(number)
    return [_group(batch, size, tuple(numbers)) for size, numbers in sizes.items()]


def over(
    groups: list[Group], body: Body[C], carry: C, first: Scalar = 0
) -> tuple[C, list[list[Array]]]:
    """Run `body` over all micro-batches; return the last carry, and each group's rows,
    stacked along a new leading axis.
    """
    rows = []
    for group in groups:
        carry, made = _over_group(group, body, carry, first)
        rows.append(made)
    return carry, rows


def beside(groups: list[Group], number: Scalar, *rows: list[Any]) -> list[Group]:
    """Return `groups` whose micro-batches get their own of `rows` before their
    arguments; a random key is folded by `number` too.
    """

    def first(
        take: Callable[[Tree, Scalar], MicroBatch], place: Tree, index: Scalar
    ) -> MicroBatch:
        each = take(place[0], index if number is None else (index, number))
        return each._replace(arguments=(*place[1:], *each.arguments))

    held = zip(groups, *rows, strict=True)
    return [
        each._replace(
            places=(each.places, *own), take=functools.partial(first, each.take)
        )
        for each, *own in held
    ]


def in_order(groups: list[Group], rows: list[list[Array]]) -> list[Array]:
    return [_joined(groups, list(stacked)) for stacked in zip(*rows, strict=True)]


def _group(batch: Batch, size: int, numbers: tuple[int, ...]) -> Group:
    starts = jnp.asarray([batch.cuts[number].start for number in numbers], jnp.int32)
    weights = batch.item_weights
    items = size * batch.blocks

    def take(start: Scalar, index: Scalar) -> MicroBatch:
        if weights is None:
            own = None
        else:
            own = take_items(jnp.asarray(weights), 0, start, size, batch.blocks)
        return MicroBatch(
            batch.arguments(batch.taken(start, size, index)), items, own, index
        )

    return Group(numbers, starts, take, items, batch.blocks)


def _over_group(
    group: Group, body: Body[C], carry: C, first: Scalar
) -> tuple[C, list[Array]]:
    indices = first + jnp.asarray(group.numbers, jnp.int32)

    def step(carry: C, given: tuple[Scalar, Tree]) -> tuple[C, list[Array]]:
        return body(carry, group.take(given[1], given[0]))

    if len(group.numbers) > 1:
        return lax.scan(step, carry, (indices, group.places))
    carry, rows = step(
        carry, jax.tree.map(lambda leaf: leaf[0], (indices, group.places))
    )
    return carry, jax.tree.map(lambda row: row[None], rows)


def blocks_of_rows(groups: list[Group], stacked: list[Array]) -> int:
    """Return how many blocks of the batch each micro-batch's rows come from: 1 unless
    there are as many rows for each item.
    """
    blocks = groups[0].blocks
    if blocks == 1:
        return 1
    rows_per_item = {
        divmod(rows.shape[1], group.items or 1)
        for group, rows in zip(groups, stacked, strict=True)
    }
    return blocks if len(rows_per_item) == 1 and rows_per_item.pop()[1] == 0 else 1


def _joined(groups: list[Group], stacked: list[Array]) -> Array:
    blocks = blocks_of_rows(groups, stacked)
    parts = [_by_block(rows, blocks) for rows in stacked]
    rows = jnp.concatenate(parts, axis=1) if len(parts) > 1 else parts[0]
    numbers = np.concatenate(
        [
            np.repeat(group.numbers, part.shape[1] // len(group.numbers))
            for group, part in zip(groups, parts, strict=True)
        ]
    )
    order = np.argsort(numbers, kind="stable")
    if not bool(np.all(order == np.arange(len(order)))):
        rows = rows[:, order]
    return merge_axis(rows, 0)


def _by_block(rows: Array, blocks: int) -> Array:
    """Return rows of shape (micro-batches, rows of one, ...) with the axes (blocks,
    rows of one block, ...).
    """
    if blocks > 1:
        by_block = jnp.swapaxes(divide_axis(rows, 1, blocks), 0, 1)
        return merge_axis(by_block, 1)
    if typeof(rows).sharding.spec[1:2] not in ((), (None,)):
        fix = (
            "Call it in a jax.shard_map with axis_name=, or make the mesh with"
            " AxisType.Auto, whose rows XLA puts together."
        )
        raise explain(
            UsageError,
            "batch",
            expected="rows that are whole on each device",
            found=f"rows of type {typeof(rows)}",
            fix=fix,
        )
    return rows.reshape(1, -1, *rows.shape[2:])


# The weight of a micro-batch: its number of items, the sum of per-item weights, or what
# the user's function says of it.
#
# Nobody can look at a traced weight. If such a one is negative or not finite, it
# becomes NaN, and so do loss and gradient: a mistake shows.


Weight = Callable[..., Any] | Array | None
"""A function of the micro-batch's arguments, an array of one number per item, or None:
one for each item.
"""


def weight_of(
    micro_batch: MicroBatch, weight: Weight, unit: int | None, dtype: DType
) -> Scalar:
    """Return the weight of a micro-batch: a Python number if the program knows it, else
    a scalar of `dtype`.
    """
    if callable(weight):
        return _loud(as_weight(weight(*micro_batch.arguments), dtype))
    if micro_batch.item_weights is not None:
        return _loud(jnp.sum(micro_batch.item_weights.astype(dtype)))
    return 1 if unit is None else known_items(micro_batch.items) / unit


def known_items(items: int | None) -> int:
    if items is None:
        expected = (
            "weight= a function of the micro-batch, as its number of items is not known"
        )
        fix = (
            "Write weight=lambda *micro_batch: ..., the number of items that its mean"
            " is taken over; or reduction='sum'."
        )
        raise explain(
            ArgumentValueError,
            "weight",
            expected=expected,
            found="none beside split=",
            fix=fix,
        )
    return items


def as_item_weights(weight: Array, items: int) -> Array:
    """Return per-item weights as an array of shape (items,), checked as far as their
    values are known.
    """
    array = weight if isinstance(weight, jax.Array) else np.asarray(weight)
    if array.shape != (items,):
        raise kit.item_weights_error(items, f"shape {array.shape}")
    if (
        array.dtype != bool
        and not jnp.issubdtype(array.dtype, jnp.integer)
        and not jnp.issubdtype(array.dtype, jnp.floating)
    ):
        fix = "Give one real number per item, or a callable of the micro-batch."
        raise explain(
            ArgumentTypeError,
            "weight",
            expected="real numbers",
            found=f"dtype {array.dtype}",
            fix=fix,
        )
    if not isinstance(array, jax.core.Tracer):
        kit.require_item_weights(np.asarray(array).tolist(), items)
    return array


def concrete(item_weights: Array) -> list[float] | None:
    """Return per-item weights as Python numbers; None if there are none."""
    if item_weights is None:
        return None
    if isinstance(item_weights, jax.core.Tracer):
        raise traced_weights_error()
    return [float(value) for value in np.asarray(item_weights)]


def traced_weights_error() -> GradAccumError:
    fix = (
        "Call it outside of jax.jit (it compiles by itself), or give weight= a NumPy"
        " array that the program has as a constant."
    )
    expected = "per-item weights known while tracing"
    return explain(
        ArgumentTypeError,
        "micro_batch_weight",
        expected=expected,
        found="traced ones",
        fix=fix,
    )


def _loud(weight: Scalar) -> Scalar:
    return jnp.where((weight >= 0) & jnp.isfinite(weight), weight, jnp.nan)


# Blocks: the cuts of a batch that several devices share.
#
# A device holds consecutive items of a batch that is sharded over a mesh. Consecutive
# micro-batches would lie on some of the devices each: XLA would gather the batch, and
# every device would compute all of it. So such a batch is taken for as many blocks of
# consecutive items as there are shards, and a micro-batch takes the same items of each
# block, as a device of `jax.shard_map` takes them of its own part.
#
# The array, or its type on an explicit mesh, says how many shards there are. Under
# `jax.jit` a type on an ordinary mesh says which mesh it is, and no more. Then the mesh's
# devices are taken for the shards: if there are fewer, several blocks lie in one. But the
# micro-batches must not grow by that, since the batch may be whole on each device.
#
# A batch on one device is cut as in other frameworks, and so is a batch that is known to
# be whole on each. Single items in strides would need no knowledge of shards, but would
# part neighbours that the loss function may compare.


def cut_in_blocks(
    items: int, size: int, shards: AxisShards
) -> tuple[int, tuple[Cut, ...]]:
    """Return the number of blocks, and the cuts of each of them.

    Args:
        items: all items of the batch, a multiple of ``shards.known``.
        size: the items of a micro-batch, to be rounded up to a multiple of
            ``shards.known``.
        shards: of the axis of items.
    """
    size = _rounded_up(size, shards.known)
    possible = math.gcd(shards.possible, items)
    if size >= 8 * possible:  # adds an eighth at most
        size = _rounded_up(size, possible)
    blocks = math.gcd(possible, size)
    if blocks < possible and items % size:
        # XLA of JAX 0.7 joins rows of unequal parts wrongly.
        blocks = shards.known
    block_division = Division(None, size // blocks, None)
    return blocks, kit.divided(block_division, items // blocks, None)


def _rounded_up(size: int, factor: int) -> int:
    return math.ceil(size / factor) * factor


# The user's options on a batch, and the micro-batches that come of them: by axes and
# cuts, or by a function of the user's own.


Parts = list[Batch]
"""The micro-batches of the user's own function, each a `Batch` without cuts."""
Source = Batch | Parts
"""A tree of arrays: what the compiled program is given of the batch."""


@dataclass(frozen=True, eq=False)
class Splitting:
    """The options that divide and weigh a batch."""

    division: Division
    axes: Tree
    weight: Weight
    split: Callable[..., Iterable[Any]] | None

    def source(
        self,
        arguments: tuple[Tree, ...],
        given: Tree = (),
        division: Division | None = None,
    ) -> Source:
        """Divide the batch; `given` are the other arguments of the call."""
        division = self.division if division is None else division
        if self.split is not None:
            return self._own_parts(arguments, division)
        batch = make_batch(arguments, self.axes)
        items = batch.items
        if self.weight is None or callable(self.weight):
            weights = None
        else:
            weights = as_item_weights(self.weight, items)
        if division.micro_batch_weight is not None:
            known = concrete(self._item_weights(batch, items, weights))
        else:
            known = None
        blocks = 1
        cuts = kit.divided(division, items, known)
        if division.micro_batch_weight is None:
            blocks, cuts = cut_in_blocks(items, cuts[0].items, batch.shards(given))
        return replace(batch, item_weights=weights, cuts=cuts, lists=(), blocks=blocks)

    def _item_weights(self, batch: Batch, items: int, weights: Any) -> Any:
        """Return per-item weights to pack by: the user's array, or the user's function
        called on every item.
        """
        if not callable(self.weight):
            return weights
        if any(isinstance(leaf, jax.core.Tracer) for leaf in batch.leaves):
            raise traced_weights_error()
        return as_item_weights(self._weigh_items(batch), items)

    @cached_property
    def _weigh_items(self) -> Callable[[Batch], Array]:
        weigh: Any = self.weight

        def each(batch: Batch) -> Array:
            return jax.vmap(
                lambda item: jnp.asarray(
                    weigh(*batch.arguments(batch.taken(item, 1, item)))
                )
            )(jnp.arange(batch.items))

        return jax.jit(each)

    def _own_parts(self, arguments: tuple[Tree, ...], division: Division) -> Parts:
        assert self.split is not None
        if self.weight is not None and not callable(self.weight):
            fix = "Write weight= a function of the micro-batch."
            raise explain(
                ArgumentTypeError,
                "weight",
                expected="a function beside split=",
                found="an array",
                fix=fix,
            )
        if division.steps is None:
            made = self.split(*arguments)
        else:
            made = self.split(*arguments, steps=division.steps)
        parts = [part if type(part) is tuple else (part,) for part in made]
        kit.require_items(len(parts))
        if division.steps is not None and len(parts) > division.steps:
            fix = "Let split return no more of them, or leave steps out."
            raise explain(
                ArgumentValueError,
                "split",
                expected=f"at most steps={division.steps} micro-batches",
                got=len(parts),
                fix=fix,
            )
        return [_part(part, self.axes) for part in parts]


def make_splitting(
    steps: Any,
    micro_batch_size: Any,
    micro_batch_weight: Any,
    axes: Tree,
    weight: Weight,
    split: Any,
) -> Splitting:
    if split is not None and not callable(split):
        fix = "Write split=lambda *batch: [micro_batch, ...]."
        raise explain(
            ArgumentTypeError,
            "split",
            expected="a function of the batch",
            got=split,
            fix=fix,
        )
    return Splitting(
        kit.make_division(
            steps, micro_batch_size, micro_batch_weight, own_split=split is not None
        ),
        axes,
        weight,
        split,
    )


def groups_in(source: Source) -> list[Group]:
    return groups_of(source) if isinstance(source, Batch) else _groups_of_parts(source)


def items_in(source: Source) -> int | None:
    if isinstance(source, Batch):
        return sum(cut.items for cut in source.cuts) * source.blocks
    known = [_items(part) for part in source]
    return None if None in known else sum(items for items in known if items is not None)


def largest_in(source: Source) -> int | None:
    if isinstance(source, Batch):
        return max(cut.items for cut in source.cuts) * source.blocks
    known = [_items(part) for part in source]
    return None if None in known else max(items for items in known if items is not None)


def _part(arguments: tuple[Tree, ...], axes: Tree) -> Batch:
    """Return a user's micro-batch; leaves without items need no ``axes=None``, since
    nothing is cut any more.
    """
    if axes == 0:
        axes = jax.tree.map(lambda leaf: 0 if np.ndim(leaf) else None, arguments)
    return make_batch(arguments, axes)


def _items(part: Batch) -> int | None:
    sizes = {
        np.shape(leaf)[axis]
        for leaf, axis in zip(part.leaves, part.axes, strict=True)
        if isinstance(axis, int)
    }
    return sizes.pop() if len(sizes) == 1 else None


def _groups_of_parts(parts: Parts) -> list[Group]:
    kinds: dict[Any, list[int]] = {}
    for number, part in enumerate(parts):
        shapes = tuple((np.shape(leaf), jnp.result_type(leaf)) for leaf in part.leaves)
        kinds.setdefault(
            (part.structure, part.constants, part.axes, shapes), []
        ).append(number)
    return [_stacked(parts, tuple(numbers)) for numbers in kinds.values()]


def _stacked(parts: Parts, numbers: tuple[int, ...]) -> Group:
    first = parts[numbers[0]]
    places = jax.tree.map(
        lambda *leaves: jnp.stack(leaves), *[parts[number].leaves for number in numbers]
    )

    def take(leaves: Tree, index: Scalar) -> MicroBatch:
        held = Batch(
            leaves,
            None,
            tuple(None if is_cut(axis) else axis for axis in first.axes),
            first.constants,
            first.structure,
        )
        return MicroBatch(
            held.arguments(held.taken(0, 0, index)), _items(first), None, index
        )

    return Group(numbers, places, take, _items(first))
