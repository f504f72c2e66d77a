"""A drop-in replacement for `optax.MultiSteps`, for existing code. New code should use
`gradaccum.wrap`, which has more options.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import optax

from gradaccum.kit import Scalar, make_options, steps_at
from gradaccum_jax import gradient_sum
from gradaccum_jax.arrays import (
    Array,
    DType,
    Extra,
    Gradients,
    Params,
    Tree,
    Updates,
    cast_like,
    gradient_types,
    strong,
    takes_part,
)
from gradaccum_jax.checks import align, require_dtype, require_plain
from gradaccum_jax.state import all_like
from gradaccum_jax.update import Update
from gradaccum_jax.window import check_known
from gradaccum_jax.xla import call_jitted

SkipFunction = Callable[[Updates, Scalar, Params], tuple[Scalar, Tree]]
"""The type of `should_skip_update_fn`:
``f(updates, gradient_step, params) -> (skip, skip_state)``.
"""


class MultiSteps:
    """Drop-in replacement for `optax.MultiSteps`, with the same state type. It differs
    from `optax.MultiSteps` as follows:

    - The inner optimizer runs once per window, not in every mini-step.
    - An inf or NaN does not remain in the sum after the end of its window, and the
      updates in the middle of a window are zeros, never ``0 * NaN``.
    - `accumulator_dtype` defaults to float32 for half precision and to the parameter's
      own dtype otherwise, not to float32 for all parameters.
    - A gradient that is None counts as zero.
    - `gradient_transformation` passes on extra arguments, whereas optax's method of
      this name drops them inside an `optax.chain`.
    - `every_k_schedule` may also be a NumPy int or a list of pairs
      ``(first gradient_step, steps)``. A number of steps below 1 is rejected.
    - In a loop outside `jax.jit`, the mini-step is compiled only once.

    The field `acc_grads` of the state contains the running mean of the gradients, or
    their sum if `use_grad_mean` is False. If `should_skip_update_fn` rejects a
    mini-step, only `skip_state` changes. Without a `should_skip_update_fn`, a gradient
    that is not finite reaches the inner optimizer. Extra arguments such as `value` come
    from the window's last mini-step.

    Args:
        opt: the optimizer to run once per window.
        every_k_schedule: the number of mini-steps per update: an int >= 1, or a
            function of `gradient_step` that returns such an int. Under `jax.jit` the
            returned int cannot be checked: if it is below 1, the window never ends, as
            in optax.
        use_grad_mean: True for the mean over the mini-steps, False for their sum.
        should_skip_update_fn: ``f(updates, gradient_step, params) -> (skip,
            skip_state)``, such as `optax.skip_not_finite`; `skip` is a bool scalar.
        accumulator_dtype: the dtype of `acc_grads`.

    Raises:
        ArgumentTypeError, ArgumentValueError: an argument is invalid.
    """

    def __init__(
        self,
        opt: optax.GradientTransformation,
        every_k_schedule: object,
        use_grad_mean: bool = True,
        should_skip_update_fn: SkipFunction | None = None,
        accumulator_dtype: DType = None,
    ) -> None:
        self._opt = optax.with_extra_args_support(opt)
        self._options = make_options(every_k_schedule, reduction="sum")
        check_known(self._options.steps)
        self._use_grad_mean = use_grad_mean
        self._should_skip = should_skip_update_fn or _never
        self._accumulator_dtype = require_dtype(accumulator_dtype)

    @property
    def inner_opt(self) -> optax.GradientTransformationExtraArgs:
        """The optimizer `opt`, extended to accept extra arguments."""
        return self._opt

    def init(self, params: Params) -> optax.MultiStepsState:
        """Return the state before the first mini-step."""
        gradient_step = jnp.zeros((), jnp.int32)
        _, skip_state = self._should_skip(
            jax.tree.map(jnp.zeros_like, params), gradient_step, params
        )
        inner_state = strong(self._opt.init(params))
        require_plain(inner_state)
        return optax.MultiStepsState(
            mini_step=jnp.zeros((), jnp.int32),
            gradient_step=gradient_step,
            inner_opt_state=inner_state,
            acc_grads=gradient_sum.zeros(params, self._accumulator_dtype),
            skip_state=strong(skip_state),
        )

    def update(
        self,
        updates: Tree,
        state: optax.MultiStepsState,
        params: Params = None,
        **extra_args: Any,
    ) -> tuple[Updates, optax.MultiStepsState]:
        """Process one mini-step. Return the updates and the new state. The updates are
        the inner optimizer's updates if the window ends, and zeros otherwise.

        Raises:
            GradientError: `updates` differs from `acc_grads` in structure or shape.
            ArgumentTypeError, ArgumentValueError: outside `jax.jit`, the function
                `every_k_schedule` returned something other than an int >= 1.
        """
        check_known(self._options.steps, state.gradient_step)
        gradients = align(updates, state.acc_grads)
        results: tuple[Updates, optax.MultiStepsState] = call_jitted(
            self._jitted_update, gradients, updates, state, params, extra_args
        )
        return results

    def has_updated(self, state: optax.MultiStepsState) -> Scalar:
        """Return a bool scalar: True if the last accepted mini-step applied an
        update.
        """
        return (state.mini_step == 0) & (state.gradient_step > 0)

    def gradient_transformation(self) -> optax.GradientTransformationExtraArgs:
        """Return `init` and `update` as an `optax.GradientTransformationExtraArgs`."""
        return optax.GradientTransformationExtraArgs(self.init, self.update)

    @cached_property
    def _jitted_update(self) -> Callable[..., Any]:
        return jax.jit(self._update)

    def _update(
        self,
        gradients: Gradients,
        updates: Tree,
        state: optax.MultiStepsState,
        params: Params,
        extra: Extra,
    ) -> tuple[Updates, optax.MultiStepsState]:
        types = gradient_types(state.acc_grads, None, gradients)
        update = Update(self._opt.update, types, params, extra)
        skip, skip_state = self._should_skip(updates, state.gradient_step, params)
        is_accepted = ~jnp.asarray(skip, bool)
        steps = steps_at(self._options.steps, state.gradient_step, jnp.where)
        count = state.mini_step + is_accepted
        at_end = is_accepted & (count >= steps) & (steps >= 1)
        mini_step, gradient_step = all_like(
            (jnp.where(at_end, 0, count), state.gradient_step + at_end),
            (state.mini_step, state.gradient_step),
        )
        total = self._add(state, gradients, is_accepted)
        new_updates, total, inner_state = update.run(
            total, state.inner_opt_state, None, at_end
        )
        return new_updates, optax.MultiStepsState(
            mini_step,
            gradient_step,
            inner_state,
            gradient_sum.emptied(total, at_end),
            cast_like(skip_state, state.skip_state),
        )

    def _add(
        self, state: optax.MultiStepsState, gradients: Gradients, is_accepted: Scalar
    ) -> Tree:
        """Add the gradients of a mini-step to the sum, or update the running mean: mean
        + (gradient - mean) / (number of mini-steps).
        """
        if not self._use_grad_mean:
            # `adds` must not be a constant of the compiled program: see the comment in
            # `window.add`.
            adds = is_accepted & (state.mini_step >= 0)
            return gradient_sum.add(state.acc_grads, gradients, None, adds)

        def share(mean: Array, gradient: Array) -> Array:
            if not takes_part(mean):
                return None
            offset = (0 if gradient is None else gradient) - mean
            return offset / (state.mini_step + 1).astype(offset.dtype)

        shares = map(share, jax.tree.leaves(state.acc_grads), gradients)
        return gradient_sum.add(state.acc_grads, list(shares), None, is_accepted)


def _never(*_: Tree) -> tuple[Scalar, Tree]:
    return jnp.asarray(False), ()
