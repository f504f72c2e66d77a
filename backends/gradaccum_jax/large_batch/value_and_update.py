"""A whole window of a wrapped optimizer in one call: the large batch is divided, and its update is made or skipped."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from gradaccum import ArgumentValueError
from gradaccum.kit import Scalar, explain
from gradaccum_jax.arrays import Array, Extra, Params, Tree, plain, takes_part
from gradaccum_jax.large_batch.auto import Call
from gradaccum_jax.large_batch.batch import Source, Splitting, Weight, make_splitting
from gradaccum_jax.large_batch.gradients import Differentiation, Gathering, Question, run
from gradaccum_jax.large_batch.value_and_grad import as_declared
from gradaccum_jax.optimizer import Accumulation, require_accumulation
from gradaccum_jax.state import AccumulationState


def value_and_update(
    loss_fn: Callable[..., Any],
    tx: optax.GradientTransformation,
    has_aux: bool = False,
    *,
    steps: int | None = None,
    micro_batch_size: Any = None,
    micro_batch_weight: float | None = None,
    weight: Weight = None,
    axes: Tree = 0,
    split: Callable[..., Iterable[Any]] | None = None,
    aux: Tree = None,
) -> Callable[..., Any]:
    """Return a function that computes a large batch's loss and its window's update, for an optimizer wrapped with ``steps=None``.

        tx = gradaccum.wrap(optax.adamw(1e-3), steps=None, clip_norm=1.0)
        step = gradaccum_jax.value_and_update(loss_fn, tx, steps=8)
        loss, updates, state = step(params, state, x, y)
        params = gradaccum_jax.apply_updates(params, updates, state)

    Every micro-batch goes into the window with its weight, and the call closes it: `clip_norm`, `skip_norm`, the loss scale, the overflow
    policy, masters and `gradaccum_jax.result` are those of a window that was streamed. An update also includes what an open window held
    before the call. The reduction and the dtype of the sums are those of `tx`.

    Args:
        loss_fn: as for `value_and_grad`; the call scales the loss by itself. Parameters of integers, bools or random keys take no part.
        tx: from `gradaccum.wrap` with ``steps=None``. With ``axis_name``, for use where its devices share the window, each with a part of
            the batch: the loss and merged aux are those of all devices.
        has_aux: as for `value_and_grad`.
        steps: as for `value_and_grad`.
        micro_batch_size: as for `value_and_grad`.
        micro_batch_weight: as for `value_and_grad`.
        weight: as for `value_and_grad`.
        axes: as for `value_and_grad`.
        split: as for `value_and_grad`.
        aux: as for `value_and_grad`.

    Returns:
        A function of ``(params, state, *batch, **extra)`` that returns ``(loss, updates, state)``, or ``((loss, aux), updates, state)``.
        The loss is the unscaled loss of the whole batch, including dropped micro-batches; ``gradaccum_jax.result(...).loss`` excludes
        them. The updates are zeros if none was made, in the parameters' dtypes. `extra` is passed on to the inner optimizer, and the
        window's loss as `value` unless `extra` has one: momo and `optax.contrib.reduce_on_plateau` read it, others must ignore unknown
        arguments, as optax asks.

    Raises:
        ArgumentTypeError: `tx` is not wrapped.
        ArgumentValueError: `tx` closes windows by itself, or an option makes no sense. At a call: as for `value_and_grad`.
    """
    accumulation = require_accumulation(tx)
    if accumulation.options.steps is not None:
        expected, fix = "one wrapped with steps=None, as this call closes the window", "Write gradaccum.wrap(optimizer, steps=None)."
        raise explain(ArgumentValueError, "tx", expected=expected, found=f"steps={accumulation.options.steps!r}", fix=fix)
    differentiation = Differentiation(loss_fn, (0,), has_aux, allow_int=True, single=True)
    splitting = make_splitting(steps, micro_batch_size, micro_batch_weight, axes, weight, split)
    declared = as_declared(aux, has_aux=has_aux)
    question = Question(differentiation, weight, declared, accumulation.options, accumulation.axes)
    return ValueAndUpdate(question, splitting, accumulation)


@dataclass(frozen=True, eq=False)
class ValueAndUpdate(Call):
    """The function that `value_and_update` returns."""

    question: Question
    splitting: Splitting
    accumulation: Accumulation

    def __call__(self, params: Params, state: AccumulationState, *batch: Tree, **extra: Any) -> tuple[Any, Tree, AccumulationState]:
        """Return the loss, the updates and the state; see `value_and_update`."""
        self.question.differentiation.check((params,))
        params, state = plain(params), plain(state)
        self.accumulation.check(state, params, extra)
        made: tuple[Any, Tree, AccumulationState] = self._of_batch((params, state, extra), batch)
        return made

    def _run(self, given: tuple[Params, AccumulationState, Extra], source: Source) -> tuple[Any, Tree, AccumulationState]:
        params, state, extra = given

        def add(held: AccumulationState, gradients: list[Array], weight: Scalar, loss: Scalar) -> AccumulationState:
            known, told = (jnp.asarray(number, jnp.result_type(held.weight)) for number in (weight, loss))
            return self.accumulation.add(held, _like(params, gradients), known, told)

        axes = frozenset(self.question.axis_names)
        made = run(self.question, (params,), source, Gathering(state, add, relative=False, axes=axes, scale=state.loss_scale))
        updates, state = self.accumulation.flush(made.held, params, **extra)
        return (made.loss, made.aux) if self.question.differentiation.has_aux else made.loss, updates, state


def _like(params: Params, gradients: list[Array]) -> Tree:
    """Return a tree like `params` with the gradients of the leaves that take part, and None for the others."""
    leaves, structure = jax.tree.flatten(params)
    given = iter(gradients)
    return jax.tree.unflatten(structure, [next(given) if takes_part(leaf) else None for leaf in leaves])
