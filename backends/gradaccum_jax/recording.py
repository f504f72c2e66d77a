"""Record what an optax optimizer is handed while a loop runs, for the loop check."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gradaccum import kit


class RecorderState(NamedTuple):
    """The number of updates so far, because callbacks may come out of order."""

    updates: jax.Array


class LoopRecorder(optax.GradientTransformation):  # type: ignore[misc]
    """An optax transformation for the inner optimizer's place, which records what the
    optimizer would be handed and makes updates of zeros: the parameters stay.

        recorder = gradaccum_jax.LoopRecorder()
        state = train(optax.MultiSteps(recorder, 4))
        print(recorder.report(state, loss_fn, params, micro_batches))
    """

    def __new__(cls) -> LoopRecorder:
        vectors: dict[int, np.ndarray[Any, Any]] = {}

        def note(number: Any, *leaves: Any) -> None:
            vectors[int(number)] = _vector(leaves)

        def init(params: Any) -> RecorderState:
            vectors.clear()
            return RecorderState(jnp.zeros((), jnp.int32))

        def update(
            gradients: Any, state: RecorderState, params: Any = None
        ) -> tuple[Any, RecorderState]:
            jax.debug.callback(note, state.updates, *jax.tree.leaves(gradients))
            zeros = jax.tree.map(jnp.zeros_like, gradients)
            return zeros, RecorderState(state.updates + 1)

        recorder = super().__new__(cls, init, update)
        recorder._vectors = vectors
        return cast(LoopRecorder, recorder)

    def report(
        self,
        state: Any,
        loss_fn: Callable[..., Any],
        params: Any,
        micro_batches: Sequence[Any],
        *,
        weight: Callable[..., float] | None = None,
        **options: Any,
    ) -> kit.LoopReport:
        """Say which micro-batches each update held, and with what weight.

        Args:
            state: the optimizer's state at the loop's end, or what holds it. It tells
                which updates were made, where a wrapper computes each and takes some.
            loss_fn: ``loss_fn(params, *micro_batch)``, a scalar, before anything
                divides or weighs it.
            params: the parameters of the loop, which did not move.
            micro_batches: what the loop trained on, in its order.
            weight: ``weight(*micro_batch)``. Default: the number of items.
            options: ``reduction``, ``steps`` and ``clip_norm``, as in
                `gradaccum.check_loop`.
        """
        jax.effects_barrier()  # type: ignore[no-untyped-call]
        vectors: dict[int, np.ndarray[Any, Any]] = self._vectors
        (recorder_state,) = filter(
            _is_recorders, jax.tree.leaves(state, is_leaf=_is_recorders)
        )
        batches = [kit.as_arguments(each) for each in micro_batches]
        count = weight or kit.items_of
        gradients = np.stack(
            [_vector(jax.grad(loss_fn)(params, *batch)) for batch in batches]
        )
        solutions = [
            kit.solve_update(gradients, vectors[number])
            for number in range(int(recorder_state.updates))
        ]
        dtypes = [jnp.asarray(leaf).dtype for leaf in jax.tree.leaves(params)]
        epsilon = max(float(jnp.finfo(dtype).eps) for dtype in dtypes)
        return kit.read_coefficients(
            solutions,
            [float(count(*batch)) for batch in batches],
            limit=kit.rounding_limit(epsilon),
            **options,
        )


def _is_recorders(node: Any) -> bool:
    return isinstance(node, RecorderState)


def _vector(gradients: Any) -> np.ndarray[Any, Any]:
    leaves = jax.tree.leaves(gradients)
    return np.concatenate([np.asarray(leaf, np.float64).reshape(-1) for leaf in leaves])
