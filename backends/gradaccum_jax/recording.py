"""Record the gradients that an optax optimizer receives while a training loop runs, to
check whether the loop accumulates them correctly.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gradaccum import ArgumentValueError, kit
from gradaccum_jax.arrays import Leaves, is_masked, moving_of
from gradaccum_jax.verification import wide


class RecorderState(NamedTuple):
    """The state of a `LoopRecorder`: the number of updates so far. The gradients of
    each update are recorded under this number, because JAX's callbacks may run out of
    order.
    """

    updates: jax.Array


@jax.tree_util.register_static  # JAX would rebuild a NamedTuple from its leaves
class LoopRecorder(optax.GradientTransformation):  # type: ignore[misc]
    """An optax transformation to use instead of the inner optimizer. It records the
    gradients that the optimizer would receive, and returns all-zero updates, so the
    parameters do not change.

        recorder = gradaccum_jax.LoopRecorder()
        state = train(optax.MultiSteps(recorder, 4))
        print(recorder.report(state, loss_fn, params, micro_batches))

    Use it instead of a whole `optax.multi_transform` or `optax.masked`, not inside one.
    A report on the gradients of only some parameters is not valid if other parameters
    change or the loop clips all gradients together.
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
            recorder._mask = jax.tree.map(is_masked, gradients, is_leaf=is_masked)
            jax.debug.callback(note, state.updates, *moving_of(gradients)[0])
            zeros = jax.tree.map(jnp.zeros_like, gradients)
            return zeros, RecorderState(state.updates + 1)

        recorder = super().__new__(cls, init, update)
        recorder._vectors = vectors
        recorder._mask = False
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
        """Report which micro-batches each update contained, and with what weights.

        Args:
            state: the optimizer's state at the end of the loop, or a tree that contains
                this state. A wrapper may compute an update in every step but apply only
                some of them; the state shows which ones.
            loss_fn: ``loss_fn(params, *micro_batch)`` returns the loss as a scalar,
                before it is divided or weighted, or a tuple whose first element is the
                loss.
            params: all parameters of the loop, including those whose gradients the
                recorder does not receive. The recorder does not change parameters, so
                you may pass them after the loop.
            micro_batches: the micro-batches that the loop trained on, in the same
                order.
            weight: ``weight(*micro_batch)`` returns a micro-batch's weight. By default
                the weight is the number of items.
            options: ``reduction``, ``steps`` and ``clip_norm``, as in
                `gradaccum.check_loop`.
        """
        jax.effects_barrier()  # type: ignore[no-untyped-call]
        vectors: dict[int, np.ndarray[Any, Any]] = self._vectors
        nodes = jax.tree.leaves(state, is_leaf=_is_recorders)
        recorder_states = [node for node in nodes if _is_recorders(node)]
        if len(recorder_states) != 1:
            raise ArgumentValueError(
                "state: expected an optimizer state that contains one RecorderState;"
                f" got {len(recorder_states)} of them. Use one recorder as the entire"
                " inner optimizer, and pass the state that the optimizer returned."
            )
        updates = recorder_states[0].updates
        if np.shape(updates) != ():
            raise ArgumentValueError(
                "state: expected the state of one model on one device; got a state"
                f" whose update counter has shape {np.shape(updates)}. If jax.pmap"
                " replicated the state, pass flax.jax_utils.unreplicate(state). If"
                " jax.vmap trains an ensemble, record one member alone, without vmap."
            )
        batches = kit.recorded_batches(micro_batches)
        count = weight or kit.items_of
        is_partial = any(jax.tree.leaves(self._mask))

        moving, put = moving_of(params)

        def loss_of(moving: Leaves, number: int, factor: float = 1.0) -> Any:
            loss = loss_fn(put(moving), *batches[number])
            if isinstance(loss, tuple):  # It is (loss, aux).
                loss = loss[0]
            return loss * factor

        def gradient_of(number: int, factor: float = 1.0) -> Any:
            gradient = put(jax.grad(loss_of)(moving, number, factor), lambda _: None)
            if is_partial:
                gradient = jax.tree.map(
                    lambda is_masked, leaf: None if is_masked else leaf,
                    self._mask,
                    gradient,
                )
            return _vector(gradient)

        def rounding() -> float:
            program = jax.make_jaxpr(loss_of, static_argnums=1)(moving, 0)
            is_float16 = re.search(r"\bf16\b", str(program)) is not None
            return kit.rounding_of(gradients, gradient_of, is_float16=is_float16)

        gradients = [gradient_of(number) for number in range(len(batches))]
        report = kit.loop_report(
            gradients,
            [vectors[number] for number in range(int(updates))],
            [float(count(*batch)) for batch in batches],
            max(float(jnp.finfo(jnp.result_type(leaf)).eps) for leaf in moving),
            measure_rounding=rounding,
            **options,
        )
        if is_partial:
            report.notes.append(
                "The recorder receives the gradients of only some parameters. If the"
                " loop changes other parameters, or clips all gradients together, the"
                " report is not valid: use the recorder instead of the whole"
                " optax.multi_transform."
            )
        return report


def _is_recorders(node: Any) -> bool:
    return isinstance(node, RecorderState)


def _vector(gradients: Any) -> np.ndarray[Any, Any]:
    return np.concatenate([*map(wide, jax.tree.leaves(gradients))])
