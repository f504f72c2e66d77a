"""The gradient of one micro-batch, and the sum over a large batch, with the reductions
of `gradaccum.wrap`.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import dataclass, replace
from functools import partial
from inspect import Parameter, signature
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from gradaccum import ArgumentTypeError, ArgumentValueError, kit
from gradaccum.kit import Options, Scalar, explain
from gradaccum_jax import gradient_sum
from gradaccum_jax.arrays import (
    Array,
    Axes,
    DType,
    Tree,
    moving_of,
    spread_over,
    takes_part,
    variables_in,
)
from gradaccum_jax.checks import require_arrays, require_params_alone
from gradaccum_jax.large_batch import batch as batches
from gradaccum_jax.large_batch.batch import (
    Group,
    MicroBatch,
    Source,
    Weight,
    in_order,
    over,
    weight_of,
)
from gradaccum_jax.sharding import axes_of, require_ordinary, vary


@dataclass(frozen=True)
class Differentiation:
    """A loss function, and the arguments by which it is differentiated."""

    loss_fn: Callable[..., Any]
    places: tuple[int, ...]
    """The places of these arguments, in the order in which the user named them."""
    has_aux: bool
    allow_int: bool
    """Whether integers among them are let through; they have no gradient."""
    single: bool
    """Whether the user named one place, and no tuple of them."""
    fix_for_int: str = (
        "Write allow_int=True, and it has a float0 as its gradient; or hand it over"
        " with the batch, with axes=None."
    )
    """What the error for an integer advises."""

    def parted(
        self, arguments: tuple[Tree, ...]
    ) -> tuple[tuple[Tree, ...], tuple[Tree, ...]]:
        """Return the arguments to differentiate by, and all others, in their order."""
        if max(self.places) >= len(arguments):
            found = f"{len(arguments)} arguments"
            fix = (
                "Call it as the loss function, with the batch in place of a"
                " micro-batch."
            )
            raise explain(
                ArgumentValueError,
                "argnums",
                expected=f"an argument number {max(self.places)}",
                found=found,
                fix=fix,
            )
        by = tuple(arguments[place] for place in self.places)
        self.check(by)
        require_ordinary(by, self._name)
        return by, tuple(a for i, a in enumerate(arguments) if i not in self.places)

    def with_keywords(self, keywords: dict[str, Any]) -> Differentiation:
        return replace(self, loss_fn=partial(self.loss_fn, **keywords))

    def keywords_in(
        self, given: dict[str, Any], positional: int, others: Set[str]
    ) -> dict[str, Any]:
        """Return those of `given` that the loss function takes beside `positional`
        arguments; by ``**kwargs`` none of `others`.
        """
        if not given:
            return {}
        try:
            parameters = list(signature(self.loss_fn).parameters.values())
        except (TypeError, ValueError):
            return {}
        names = {
            parameter.name
            for place, parameter in enumerate(parameters)
            if parameter.kind is Parameter.KEYWORD_ONLY
            or (
                parameter.kind is Parameter.POSITIONAL_OR_KEYWORD
                and place >= positional
            )
        }
        if any(each.kind is Parameter.VAR_KEYWORD for each in parameters):
            names |= given.keys() - others
        return {name: value for name, value in given.items() if name in names}

    def joined(self, by: tuple[Tree, ...], batch: tuple[Tree, ...]) -> list[Tree]:
        held = dict(zip(self.places, by, strict=True))
        rest = iter(batch)
        return [
            held[place] if place in held else next(rest)
            for place in range(len(by) + len(batch))
        ]

    def value(
        self, by: tuple[Tree, ...], batch: tuple[Tree, ...]
    ) -> tuple[Scalar, Tree]:
        """Return a micro-batch's loss, a floating scalar, and its aux, None without
        one.
        """
        made = self.loss_fn(*self.joined(by, batch))
        loss, aux = _parted(made) if self.has_aux else (made, None)
        return _scalar(loss), aux

    def value_and_gradients(
        self, by: tuple[Tree, ...], batch: tuple[Tree, ...], scale: Scalar = None
    ) -> tuple[Scalar, Tree, list[Array]]:
        """Return loss, aux, and the gradient of loss times `scale` by each leaf that
        takes part, in the order of `by`.
        """
        moving, put = moving_of(by)

        def value(moving: list[Array]) -> tuple[Scalar, tuple[Scalar, Tree]]:
            loss, aux = self.value(put(moving), batch)
            return loss if scale is None else loss * scale, (loss, aux)

        (_, (loss, aux)), gradients = jax.value_and_grad(value, has_aux=True)(moving)
        return loss, aux, gradients

    def check(self, by: tuple[Tree, ...]) -> None:
        """Raise unless the arguments to differentiate by are arrays that have
        gradients; integers as the user allows.
        """
        for place, tree in zip(self.places, by, strict=True):
            require_arrays(tree, f"argument {place}")
        require_params_alone(variables_in(by), self._name)
        for path, leaf in jax.tree_util.tree_flatten_with_path(by)[0]:
            if not takes_part(leaf) and not self.allow_int:
                found = str(jnp.result_type(leaf))
                raise explain(
                    ArgumentTypeError,
                    self._name(path),
                    expected="a float to differentiate by",
                    found=found,
                    fix=self.fix_for_int,
                )

    def _name(self, path: Any) -> str:
        return f"argument {self.places[path[0].idx]}{jax.tree_util.keystr(path[1:])}"


def start(by: tuple[Tree, ...], accumulate_dtype: DType) -> list[Array]:
    made: list[Array] = gradient_sum.zeros(moving_of(by)[0], accumulate_dtype)
    return made


def add(
    held: list[Array], gradients: list[Array], weight: Scalar, options: Options
) -> list[Array]:
    """Add one micro-batch's gradients to `held`. With weight 0 it adds exactly nothing,
    even of a NaN.
    """
    known = isinstance(weight, int | float)
    if options.reduction == "mean" and not (known and weight == 1):
        factor = kit.contribution(weight, options)
    else:
        factor = None
    if factor is not None and known:
        given = jnp.asarray(factor, gradient_sum.weight_dtype(held))
    else:
        given = factor
    made: list[Array] = gradient_sum.add(
        held, gradients, given, True if known else weight != 0, jnp.asarray(True)
    )
    return made


def finish(
    held: list[Array],
    weight: Scalar,
    by: tuple[Tree, ...],
    options: Options,
    axis_names: tuple[str, ...] = (),
) -> tuple[Tree, ...]:
    """Return the gradient of the large batch in the dtypes of `by`: float0 for
    integers, as in `jax.grad`.

    Each sum is reduced over `axis_names`, and over the axes along which the sum differs
    and its parameter does not.
    """
    divides = denominator(weight, options)
    moving, put = moving_of(by)
    made = [
        _quotient(_reduced(total, axis_names), divides, leaf)
        for total, leaf in zip(held, moving, strict=True)
    ]
    found: tuple[Tree, ...] = put(
        made, lambda leaf: np.zeros(np.shape(leaf), jax.dtypes.float0)
    )
    return found


def denominator(weight: Scalar, options: Options) -> Scalar:
    """Return the divisor of the sums: 1 for "sum", else the weight, or 1 for weight
    0.
    """
    nothing = 0 * weight
    return kit.divisor(
        (nothing, nothing, nothing, weight, nothing != 0, nothing + 1, nothing),
        options,
        jnp.where,
    )


def _reduced(total: Array, axes: tuple[str, ...]) -> Array:
    library: Any = lax
    return library.psum(total, axes) if axes else total


def _quotient(total: Array, divides: Scalar, leaf: Array) -> Array:
    quotient = total / divides
    return _reduced(quotient, tuple(sorted(axes_of(quotient) - axes_of(leaf)))).astype(
        jnp.result_type(leaf)
    )


def _parted(made: Any) -> tuple[Scalar, Tree]:
    if not isinstance(made, tuple) or len(made) != 2:
        raise kit.aux_shape_error(
            f"one that returns a {type(made).__name__}", declared=True
        )
    return made


def _scalar(loss: Any) -> Scalar:
    if isinstance(loss, tuple | list | dict):
        raise kit.aux_shape_error(
            f"one that returns a {type(loss).__name__}", declared=False
        )
    if (
        loss is None
        or np.shape(loss) != ()
        or not (hasattr(loss, "dtype") or isinstance(loss, float))
    ):
        raise kit.scalar_loss_error(
            "nothing" if loss is None else f"one of shape {np.shape(loss)}"
        )
    if not jnp.issubdtype(jnp.result_type(loss), jnp.floating):
        raise kit.scalar_loss_error(f"one of dtype {jnp.result_type(loss)}")
    return jnp.asarray(loss)


# The other outputs of a loss function (aux) over all micro-batches: merged in the
# loop's carry, or stacked as rows.
#
# The arithmetic is `gradaccum.nests`'s. What JAX adds: a loop's carry has one type from
# the start, so a maximum starts from the neutral element, and a micro-batch of weight 0
# is left out of a weighted mean by select, because 0 x NaN is NaN.


ROWS = "concatenate"
EXTREMES = ("max", "min")


class JaxOps:
    """`gradaccum.kit.MergingOps` for JAX."""

    maximum: Any = staticmethod(jnp.maximum)
    minimum: Any = staticmethod(jnp.minimum)

    def widened(self, value: Array) -> Array:
        """Cast half precision to float32, bools to JAX's default integer."""
        return value.astype(_sum_dtype(value.dtype))


OPS = JaxOps()


class Merging(NamedTuple):
    """The merging of one aux, known from its shape before anything runs."""

    kinds: tuple[str, ...]
    """One of `gradaccum.kit.KINDS` for each leaf."""
    like: tuple[Any, ...]
    """Shape and dtype of each leaf in a micro-batch."""
    structure: Any

    def start(self) -> list[Array]:
        """Return the merged leaves before the first micro-batch, without those that are
        rows.
        """
        return [
            _neutral(kind, leaf)
            for kind, leaf in zip(self.kinds, self.like, strict=True)
            if kind != ROWS
        ]

    def add(
        self, held: list[Array], aux: Tree, weight: Scalar
    ) -> tuple[list[Array], list[Array]]:
        """Merge one micro-batch; return the merged leaves, and its rows."""
        leaves = [jnp.asarray(leaf) for leaf in jax.tree.leaves(aux)]
        given = [
            (kind, leaf)
            for kind, leaf in zip(self.kinds, leaves, strict=True)
            if kind != ROWS
        ]
        added = [
            kit.merged(kind, old, _share(kind, leaf, weight), OPS)
            for old, (kind, leaf) in zip(held, given, strict=True)
        ]
        return added, [
            leaf for kind, leaf in zip(self.kinds, leaves, strict=True) if kind == ROWS
        ]

    def over_devices(self, held: list[Array], axes: tuple[str, ...]) -> list[Array]:
        """Reduce maxima and minima over all devices; sums are reduced with the
        gradients.
        """
        reduce: dict[str, Any] = {"max": lax.pmax, "min": lax.pmin}
        kinds = [kind for kind in self.kinds if kind != ROWS]
        return [
            reduce[kind](leaf, axes) if kind in reduce else leaf
            for kind, leaf in zip(kinds, held, strict=True)
        ]

    def is_sum(self) -> list[bool]:
        return [kind not in EXTREMES for kind in self.kinds if kind != ROWS]

    def finish(self, held: list[Array], rows: list[Array], weight: Scalar) -> Tree:
        """Return the aux of the large batch, floats in the dtypes of the loss
        function's.
        """
        merged_leaves = iter(held)
        row_leaves = iter(rows)
        made = [
            (
                next(row_leaves)
                if kind == ROWS
                else _as_given(
                    kit.finished(kind, next(merged_leaves), weight),
                    kind,
                    leaf.dtype,
                )
            )
            for kind, leaf in zip(self.kinds, self.like, strict=True)
        ]
        return jax.tree.unflatten(self.structure, made)

    @property
    def weighs(self) -> bool:
        return not {*self.kinds}.isdisjoint(kit.MEANS)


def make_merging(declared: Tree, aux: Tree) -> Merging:
    kinds = spread_over(declared, aux, "aux")
    held = jax.tree_util.tree_flatten_with_path(aux)
    for kind, (path, leaf) in zip(kinds, held[0], strict=True):
        kit.require_kind(kind)
        _require_mergeable(kind, f"aux{jax.tree_util.keystr(path)}", leaf)
    return Merging(tuple(kinds), tuple(leaf for _, leaf in held[0]), held[1])


def as_declared(aux: Tree, *, has_aux: bool) -> Tree:
    """Check how aux merges, as far as possible without one; "sum" without a
    declaration.
    """
    if has_aux and aux is None:
        fix = (
            "Write aux='mean', or a kind for each leaf: aux={'correct': 'sum',"
            " 'logits': 'concatenate'}."
        )
        raise explain(
            ArgumentValueError,
            "aux",
            expected="how aux merges, as has_aux=True",
            got=aux,
            fix=fix,
        )
    if aux is not None and not has_aux:
        fix = "Write has_aux=True beside it."
        raise explain(
            ArgumentValueError,
            "has_aux",
            expected="True, as aux says how it merges",
            got=has_aux,
            fix=fix,
        )
    check_declared(aux)
    return "sum" if aux is None else aux


def check_declared(declared: Tree) -> None:
    for kind in jax.tree.leaves(declared):
        kit.require_kind(kind)


def _require_mergeable(kind: str, path: str, leaf: Array) -> None:
    if kind == ROWS and leaf.shape == ():
        raise kit.concatenate_error(path, "a scalar")
    if kind != ROWS and jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
        fix = "Declare 'concatenate' for this leaf, or leave it out of aux."
        raise explain(
            ArgumentValueError,
            path,
            expected=f"numbers to merge by {kind!r}",
            found=f"dtype {leaf.dtype}",
            fix=fix,
        )


def _share(kind: str, leaf: Array, weight: Scalar) -> Array:
    if kind not in kit.MEANS:
        return kit.share(kind, leaf, weight, OPS)
    given = kit.share(
        kind, leaf if takes_part(leaf) else leaf.astype(_float()), weight, OPS
    )
    return jnp.where(weight == 0, jnp.zeros_like(given), given).astype(
        _mean_dtype(leaf.dtype)
    )


def _neutral(kind: str, like: Any) -> Array:
    """Return the start of a merge: 0, or the number that every other is above or
    below.
    """
    if kind in kit.MEANS:
        return jnp.zeros(like.shape, _mean_dtype(like.dtype))
    if kind == "sum":
        return jnp.zeros(like.shape, _sum_dtype(like.dtype))
    return jnp.full(like.shape, _extreme(kind, like.dtype), like.dtype)


def _extreme(kind: str, dtype: DType) -> Any:
    if jnp.issubdtype(dtype, jnp.bool_):
        return kind == "min"
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.iinfo(dtype).min if kind == "max" else jnp.iinfo(dtype).max
    return -np.inf if kind == "max" else np.inf


def _sum_dtype(dtype: DType) -> DType:
    if jnp.issubdtype(dtype, jnp.bool_):
        return jax.dtypes.canonicalize_dtype(jnp.int64)
    if jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4:
        return jnp.dtype("float32")
    return dtype


def _mean_dtype(dtype: DType) -> DType:
    return _sum_dtype(dtype) if jnp.issubdtype(dtype, jnp.inexact) else _float()


def _float() -> DType:
    return jax.dtypes.canonicalize_dtype(jnp.float64)


def _as_given(leaf: Array, kind: str, dtype: DType) -> Array:
    if jnp.issubdtype(dtype, jnp.inexact) and kind not in EXTREMES:
        return leaf.astype(dtype)
    return leaf


# One program over all micro-batches of a large batch: the loss, the weight and the aux
# are added up here, the gradients by the caller.


G = TypeVar("G")


class Question(NamedTuple):
    """The functions that are evaluated on every micro-batch."""

    differentiation: Differentiation
    weight: Weight
    aux: Tree
    """How aux merges; "sum" where there is none."""
    options: Options
    axis_names: tuple[str, ...] = ()
    inputs: int = 0
    """How many of a micro-batch's arguments, from the first on, are differentiated by
    too.
    """

    def with_keywords(self, keywords: dict[str, Any]) -> Question:
        return self._replace(
            differentiation=self.differentiation.with_keywords(keywords)
        )

    def parted(
        self, by: tuple[Tree, ...], micro_batch: MicroBatch
    ) -> tuple[tuple[Tree, ...], tuple[Tree, ...]]:
        given = micro_batch.arguments
        return (*by, *given[: self.inputs]), given[self.inputs :]


class Gathering(NamedTuple, Generic[G]):
    """The use of the micro-batches' gradients."""

    start: G
    add: Callable[[G, list[Array], Scalar, Scalar], Any]
    """``add(held, gradients, weight, loss)``; a Python number as the weight where the
    program knows it.
    """
    relative: bool
    """Whether weights may be counted in units of the largest micro-batch, so that most
    of them are 1 and cost nothing.
    """
    axes: Axes = frozenset()
    """The manual mesh axes along which each device has gradients of its own, to be
    reduced later.
    """
    scale: Scalar = None
    """What the loss is multiplied by before differentiation."""
    rows: bool = False
    """Whether `add` returns arrays beside the sum, which are kept of each micro-batch.
    """


class Made(NamedTuple, Generic[G]):
    """The result over all micro-batches."""

    held: G
    weight: Scalar
    """The weight of the large batch, as `denominator` wants it."""
    loss: Scalar
    aux: Tree
    rows: list[list[Array]]
    """For each group of micro-batches the arrays that are kept of them, stacked."""


class Own(NamedTuple):
    """The sums of this device."""

    weight: Scalar
    loss: Scalar
    aux: list[Array]


class Carry(NamedTuple, Generic[G]):
    """The carry from one micro-batch to the next."""

    held: G
    own: Own


def run(
    question: Question,
    by: tuple[Tree, ...],
    source: Source,
    gathering: Gathering[G],
    groups: list[Group] | None = None,
) -> Made[G]:
    groups = groups or batches.groups_in(source)
    axes = axes_in(by, source, question.axis_names)
    first = first_number(groups, question.axis_names)
    by = copies(by, gathering.axes)
    sample = groups[0].take(
        jax.tree.map(lambda leaf: leaf[0], groups[0].places), jnp.int32(0)
    )
    like, aux = jax.eval_shape(
        lambda by: question.differentiation.value(*question.parted(by, sample)), by
    )
    merging = make_merging(question.aux, aux)
    counting = _Counting(
        question,
        merging,
        _unit(question, merging, source, relative=gathering.relative),
        weight_dtype(by, like),
    )

    def body(carry: Carry[G], micro_batch: MicroBatch) -> tuple[Carry[G], list[Array]]:
        loss, aux, gradients = question.differentiation.value_and_gradients(
            *question.parted(by, micro_batch), gathering.scale
        )
        weight = counting.weight(micro_batch)
        own, rows = counting.add(carry.own, loss, aux, weight)
        made = gathering.add(carry.held, gradients, weight, loss)
        held, further = made if gathering.rows else (made, [])
        return Carry(held, copies(own, axes)), [*rows, *further]

    nothing = jnp.zeros((), counting.dtype)
    start = Carry(
        gathering.start,
        copies(
            Own(
                nothing,
                jnp.zeros((), gradient_sum.sum_dtype(like, None)),
                merging.start(),
            ),
            axes,
        ),
    )
    (held, own), rows = over(groups, body, start, first)
    own = counting.known(_over_devices(own, merging, question.axis_names), source)
    loss = (own.loss / denominator(own.weight, question.options)).astype(like.dtype)
    by_weight = jnp.where(own.weight == 0, 1, own.weight)
    merged = merging.kinds.count(ROWS)
    aux = merging.finish(
        own.aux, in_order(groups, [row[:merged] for row in rows]), by_weight
    )
    return Made(held, own.weight, loss, aux, [row[merged:] for row in rows])


class _Counting(NamedTuple):
    question: Question
    merging: Merging
    unit: int | None
    dtype: DType

    def weight(self, micro_batch: MicroBatch) -> Scalar:
        return weight_of(micro_batch, self.question.weight, self.unit, self.dtype)

    def known(self, own: Own, source: Source) -> Own:
        """Sum `own` over all devices; without the user's weights the weight is a
        constant, and XLA counts nothing in the loop.
        """
        if self.question.weight is not None or self.unit is None:
            return own
        return own._replace(
            weight=jnp.asarray(
                _all_items(source, self.question.axis_names) / self.unit, self.dtype
            )
        )

    def add(
        self, held: Own, loss: Scalar, aux: Tree, weight: Scalar
    ) -> tuple[Own, list[Array]]:
        """Add loss, weight and aux; with weight 0 nothing is added, even of a NaN."""
        merged, rows = self.merging.add(held.aux, aux, weight)
        dtype = held.loss.dtype
        own = jnp.asarray(weight, dtype)
        always = jnp.asarray(True)
        total = kit.add_loss(
            held.loss,
            loss.astype(dtype),
            own,
            own != 0,
            self.question.options,
            gradient_sum.where_with_derivative_at_zero(always),
        )
        return Own((held.weight + weight).astype(self.dtype), total, merged), rows


def weight_dtype(by: tuple[Tree, ...], loss: Array) -> DType:
    """Return float64 if a parameter or the loss is float64, else float32."""
    wide = any(
        jnp.result_type(leaf) in ("float64", "complex128")
        for leaf in (*jax.tree.leaves(by), loss)
    )
    return jnp.dtype("float64" if wide else "float32")


def axes_in(by: Tree, source: Source, axis_names: tuple[str, ...]) -> Axes:
    """Return the manual mesh axes along which anything here may differ from device to
    device.
    """
    return frozenset(axis_names).union(
        *(axes_of(leaf) for leaf in jax.tree.leaves((by, source)))
    )


def copies(tree: G, axes: Axes) -> G:
    """Mark `tree` as varying along `axes`, or `jax.grad` would reduce over the devices
    in every micro-batch.
    """
    made: G = jax.tree.map(lambda leaf: vary(leaf, axes), tree) if axes else tree
    return made


def _unit(
    question: Question, merging: Merging, source: Source, *, relative: bool
) -> int | None:
    if question.options.reduction == "sum" and not merging.weighs:
        return None
    if relative and question.weight is None and question.options.reduction == "mean":
        return batches.known_items(batches.largest_in(source))
    return 1


def first_number(groups: list[Group], axis_names: tuple[str, ...]) -> Scalar:
    count = sum(len(group.numbers) for group in groups)
    return lax.axis_index(axis_names) * count if axis_names else 0


def _all_items(source: Source, axis_names: tuple[str, ...]) -> int:
    return batches.known_items(batches.items_in(source)) * (
        lax.axis_size(axis_names) if axis_names else 1
    )


def _over_devices(own: Own, merging: Merging, axis_names: tuple[str, ...]) -> Own:
    """Reduce weight, loss and merged aux over all devices; the caller reduces the
    gradients.
    """
    if not axis_names:
        return own
    summed = [
        leaf for leaf, is_sum in zip(own.aux, merging.is_sum(), strict=True) if is_sum
    ]
    library: Any = lax
    # One by one: JAX 0.7 does not transpose a psum of several arrays where only some
    # have a derivative.
    weight, loss, *made = (
        library.psum(leaf, axis_names) for leaf in (own.weight, own.loss, *summed)
    )
    given = iter(made)
    extremes = merging.over_devices(own.aux, axis_names)
    aux = [
        next(given) if is_sum else leaf
        for leaf, is_sum in zip(extremes, merging.is_sum(), strict=True)
    ]
    return own._replace(weight=weight, loss=loss, aux=aux)
