"""Losses that compare items across the whole batch, such as contrastive losses.

The micro-batches run twice: for their outputs, and, after the loss of all outputs was
differentiated, to carry each output's gradient to the parameters (Gao et al., "Scaling
Deep Contrastive Learning Batch Size under Memory Limited Setup", 2021, section 3.2).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from gradaccum import ArgumentValueError
from gradaccum.kit import Scalar, concatenate_error, explain, make_options
from gradaccum_jax import gradient_sum
from gradaccum_jax.arrays import Array, DType, Params, Tree, moving_of, takes_part
from gradaccum_jax.checks import require_dtype
from gradaccum_jax.large_batch import gradients
from gradaccum_jax.large_batch.auto import Call
from gradaccum_jax.large_batch.batch import (
    Group,
    MicroBatch,
    Source,
    Splitting,
    Weight,
    beside,
    blocks_of_rows,
    groups_in,
    in_order,
    make_splitting,
    over,
    take_items,
)
from gradaccum_jax.large_batch.gradients import (
    Differentiation,
    axes_in,
    copies,
    first_number,
)
from gradaccum_jax.workers.group import require_axes, require_names, require_same_params


def coupled_value_and_grad(
    outputs_fn: Callable[..., Tree],
    loss_fn: Callable[..., Any],
    has_aux: bool = False,
    *,
    steps: int | None = None,
    micro_batch_size: Any = None,
    micro_batch_weight: float | None = None,
    weight: Weight = None,
    axes: Tree = 0,
    split: Callable[..., Iterable[Any]] | None = None,
    accumulate_dtype: DType = None,
    axis_name: str | tuple[str, ...] | None = None,
) -> Callable[..., Any]:
    """Return a function that computes loss and gradient of a large batch whose items
    the loss compares with each other.

        step = gradaccum_jax.coupled_value_and_grad(embed, info_nce, steps=8)
        loss, grads = step(params, images, texts)

    It costs one forward pass more than `value_and_grad`, and the memory of all outputs.

    Args:
        outputs_fn: ``outputs_fn(params, *micro_batch)`` returns a tree of arrays with
            one or more rows per item along the leading axis. It runs twice: randomness
            comes from a key in the batch.
        loss_fn: ``loss_fn(params, outputs)`` returns a floating scalar from the rows of
            the whole batch, in the order of the items; or ``(loss, aux)`` with
            `has_aux`. It runs once; scale the loss in it, if at all. Outputs of
            integers get no gradient.
        has_aux: as in `jax.value_and_grad`.
        steps: as for `value_and_grad`.
        micro_batch_size: likewise.
        micro_batch_weight: likewise.
        weight: per-item weights to pack by, beside `micro_batch_weight` only; the loss
            alone decides what an item counts.
        axes: likewise.
        split: likewise.
        accumulate_dtype: likewise.
        axis_name: inside `jax.shard_map`: the mesh axes whose devices share the batch.
            The outputs of all are gathered, device after device; the gradients are
            reduced once.

    Returns:
        A function of ``(params, *batch)`` that returns ``(loss, gradients)``, or
        ``((loss, aux), gradients)``. Keywords go to `outputs_fn`, as for
        `value_and_grad`.

    Raises:
        ArgumentTypeError, ArgumentValueError: an option makes no sense; or, at a call,
            the batch cannot be divided so, an output has no leading axis, or `loss_fn`
            returns no scalar.
    """
    loss = Differentiation(loss_fn, (0, 1), has_aux, allow_int=True, single=False)
    fix = (
        "Let outputs_fn close over it, or hand it over with the batch, with axes=None."
    )
    outputs = Differentiation(
        outputs_fn, (0,), has_aux=False, allow_int=False, single=True, fix_for_int=fix
    )
    splitting = make_splitting(
        steps, micro_batch_size, micro_batch_weight, axes, weight, split
    )
    _require_use(weight, micro_batch_weight)
    return Coupled(
        outputs,
        loss,
        splitting,
        require_dtype(accumulate_dtype),
        require_names(axis_name),
    )


@dataclass(frozen=True, eq=False)
class Coupled(Call):
    """The function that `coupled_value_and_grad` returns."""

    outputs: Differentiation
    loss: Differentiation
    splitting: Splitting
    accumulate_dtype: DType
    axis_names: tuple[str, ...]

    def __call__(self, params: Params, *batch: Tree, **keywords: Any) -> Any:
        if keywords:
            return self._bound(keywords, self._with_keywords)(params, *batch)
        require_axes(self.axis_names)
        require_same_params(params, self.axis_names)
        by, batch = self.outputs.parted((params, *batch))
        return self._of_batch(by, batch)

    def _with_keywords(self, keywords: dict[str, Any]) -> Coupled:
        return replace(self, outputs=self.outputs.with_keywords(keywords))

    def _run(self, by: tuple[Tree, ...], source: Source) -> Any:
        groups = groups_in(source)
        axes = axes_in(by, source, self.axis_names)
        first = first_number(groups, self.axis_names)
        own = copies(by, axes)
        rows, structure = self._forward(groups, own, first)
        held = in_order(groups, rows)
        value, aux, by_params, by_rows = self._of_all(own, held, structure)
        total = self._backward(
            groups,
            own,
            first,
            rows,
            by_rows,
            copies(gradients.start(by, self.accumulate_dtype), axes),
        )
        total = gradient_sum.add(total, by_params, None, True)
        options = make_options(None, reduction="sum")
        one = jnp.ones((), jnp.float32)
        found = gradients.finish(total, one, by, options, self.axis_names)[0]
        return ((value, aux), found) if self.loss.has_aux else (value, found)

    def _forward(
        self, groups: list[Group], by: tuple[Tree, ...], first: Scalar
    ) -> tuple[list[list[Array]], Any]:
        found: list[Any] = []

        def body(
            carry: tuple[()], micro_batch: MicroBatch
        ) -> tuple[tuple[()], list[Array]]:
            made = self.outputs.loss_fn(*by, *micro_batch.arguments)
            found.append(jax.tree.structure(made))
            return carry, _rows(made)

        _, rows = over(groups, body, (), first)
        return rows, found[0]

    def _of_all(
        self, by: tuple[Tree, ...], rows: list[Array], structure: Any
    ) -> tuple[Scalar, Tree, list[Array], list[Array]]:
        """Return loss and aux of the whole batch, and the gradients by the parameters
        and by this device's outputs.
        """
        library: Any = lax
        if self.axis_names:
            gathered = [
                library.all_gather(leaf, self.axis_names, tiled=True) for leaf in rows
            ]
        else:
            gathered = rows
        loss, aux, found = self.loss.value_and_gradients(
            (*by, jax.tree.unflatten(structure, gathered)), ()
        )
        count = len(found) - sum(takes_part(leaf) for leaf in rows)
        by_params = found[:count]
        by_rows = found[count:]
        if not self.axis_names:
            return loss, aux, by_params, by_rows
        index = lax.axis_index(self.axis_names)
        own = [
            lax.dynamic_slice_in_dim(g, index * len(leaf), len(leaf))
            for g, leaf in zip(by_rows, moving_of(rows)[0], strict=True)
        ]
        loss, aux = _same((loss, aux), self.axis_names)
        return (
            loss,
            aux,
            [jnp.where(index == 0, leaf, jnp.zeros_like(leaf)) for leaf in by_params],
            own,
        )

    def _backward(
        self,
        groups: list[Group],
        by: tuple[Tree, ...],
        first: Scalar,
        rows: list[list[Array]],
        by_rows: list[Array],
        start: list[Array],
    ) -> list[Array]:
        moving, put = moving_of(by)
        all_blocks = [
            blocks_of_rows(groups, list(stacked))
            for stacked in zip(*rows, strict=True)
            if takes_part(stacked[0])
        ]

        def body(
            held: list[Array], micro_batch: MicroBatch
        ) -> tuple[list[Array], list[Array]]:
            starts, *arguments = micro_batch.arguments

            def outputs(moving: list[Array]) -> list[Array]:
                return moving_of(_rows(self.outputs.loss_fn(*put(moving), *arguments)))[
                    0
                ]

            made, pull_back = jax.vjp(outputs, moving)
            given = [
                take_items(g, 0, at, len(leaf) // blocks, blocks)
                for g, at, leaf, blocks in zip(
                    by_rows, starts, made, all_blocks, strict=True
                )
            ]
            return gradient_sum.add(held, pull_back(given)[0], None, True), []

        starts = _starts(groups, rows, all_blocks)
        return over(beside(groups, None, starts), body, start, first)[0]


def _require_use(weight: Weight, micro_batch_weight: float | None) -> None:
    if weight is not None and micro_batch_weight is None:
        fix = (
            "Weight the items inside of loss_fn: it is given the rows of the whole"
            " batch."
        )
        raise explain(
            ArgumentValueError,
            "weight",
            expected="none, or micro_batch_weight= beside it",
            found="weights alone",
            fix=fix,
        )


def _rows(outputs: Tree) -> list[Array]:
    held = jax.tree_util.tree_flatten_with_path(outputs)[0]
    for path, leaf in held:
        if np.ndim(leaf) == 0:
            raise concatenate_error(f"outputs{jax.tree_util.keystr(path)}", "a scalar")
    return [jnp.asarray(leaf) for _, leaf in held]


def _starts(
    groups: list[Group], rows: list[list[Array]], all_blocks: list[int]
) -> list[list[Array]]:
    """Return for each group where its micro-batches' rows begin in a block: int32, one
    for each array of rows that takes part.
    """
    count = sum(len(group.numbers) for group in groups)
    starts = []
    places = [place for place, leaf in enumerate(rows[0]) if takes_part(leaf)]
    for place, blocks in zip(places, all_blocks, strict=True):
        lengths = np.zeros(count, np.int32)
        for group, made in zip(groups, rows, strict=True):
            lengths[list(group.numbers)] = made[place].shape[1] // blocks
        starts.append(np.cumsum(lengths) - lengths)
    return [
        [jnp.asarray(first[list(group.numbers)], jnp.int32) for first in starts]
        for group in groups
    ]


def _same(tree: Tree, axis_names: tuple[str, ...]) -> Tree:
    library: Any = lax
    first = lax.axis_index(axis_names) == 0
    return jax.tree.map(
        lambda leaf: library.psum(
            jnp.where(first, leaf, jnp.zeros_like(leaf)), axis_names
        ),
        tree,
    )
