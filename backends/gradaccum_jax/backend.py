"""Define `wrap` and `backend`. The gradaccum core uses JAX only through the object
`backend`, which it finds through an entry point. `gradaccum.wrap` uses this object to
wrap optax optimizers.
"""

from __future__ import annotations

from typing import Any, Unpack, cast

import jax
import optax

from gradaccum import LossScale
from gradaccum.kit import (
    Options,
    Steps,
    UntilWeight,
    WrapOptions,
    shared_until_weight_error,
    wrap_with,
    wrapped_twice_error,
)
from gradaccum_jax.checks import require_dtype
from gradaccum_jax.optimizer import Accumulation, accumulation_of
from gradaccum_jax.optimizer import Wrapped as Wrapped
from gradaccum_jax.verification import JaxSubject
from gradaccum_jax.window import check_known
from gradaccum_jax.workers.data_parallel import start_on
from gradaccum_jax.workers.group import names_of

Axes = str | tuple[str, ...] | None


class JaxBackend:
    """The backend for optax gradient transformations."""

    name = "jax"
    subject_type = JaxSubject

    def verifies(self, model: object) -> bool:
        return any(map(JaxSubject.is_array, jax.tree.leaves(model)))

    def wrap(
        self,
        optimizer: Any,
        options: Options,
        *,
        axis_name: object = None,
        shard_axes: Any = None,
        mesh: Any = None,
    ) -> Wrapped:
        """Wrap an `optax.GradientTransformation`; see `gradaccum.wrap`.

        Args:
            optimizer: an `optax.GradientTransformation`.
            options: the checked options.
            axis_name: the mesh axis, or a tuple of several axes, along which the large
                batch is sharded. The option works inside `jax.shard_map`; the easiest
                way to use it is `gradaccum_jax.data_parallel`. All devices must make
                the same calls. The gradient sums of the devices are reduced once, at
                the end of the window. A device without items must pass weight 0.
            shard_axes: the mesh axis, or a tuple of several axes, along which
                parameters are sharded inside `jax.shard_map`. The gradient norm is then
                computed over all shards, and all devices make the same decision about
                whether to apply the update. Pass ``()`` if each device has its own
                model. If you use only `jax.jit`, omit this option.
            mesh: the `jax.sharding.Mesh` that contains `axis_name`. Outside
                `gradaccum_jax.data_parallel`, ``tx.init(params)`` uses this mesh. The
                default is the mesh of the surrounding context.

        Raises:
            ArgumentTypeError: `optimizer` is already wrapped. `init` also raises this
                error if the inner optimizer itself accumulates gradients.
            ArgumentValueError: ``steps`` is a callable that does not return an int >= 1
                for the first window, or a window's size does not fit into an int32.
            UsageError: ``steps=until_weight(...)`` is combined with `axis_name`. This
                is not supported, because each device would end the window according to
                its own weight.
        """
        if accumulation_of(optimizer) is not None:
            raise wrapped_twice_error(optimizer)
        check_known(options.steps)
        names = names_of(axis_name)
        if names and isinstance(options.steps, UntilWeight):
            raise shared_until_weight_error(options.steps)
        checked_options = options._replace(
            accumulate_dtype=require_dtype(options.accumulate_dtype)
        )
        if shard_axes is not None:
            shard_axes = names_of(shard_axes)
        accumulation = Accumulation(optimizer, checked_options, names, shard_axes)
        init = accumulation.init
        if names:
            init = start_on(init, mesh, names)
        return Wrapped(init, accumulation.update)


backend = JaxBackend()


class JaxOptions(WrapOptions, total=False):
    """The options that `gradaccum.wrap` accepts for an optax optimizer."""

    loss_scale: float | LossScale | None
    axis_name: Axes
    shard_axes: Axes
    mesh: jax.sharding.Mesh | None


def wrap(
    optimizer: optax.GradientTransformation, steps: Steps, **options: Unpack[JaxOptions]
) -> Wrapped:
    """Wrap an optax transformation, like `gradaccum.wrap` but with precise type
    annotations.
    """
    return cast(Wrapped, wrap_with(backend, optimizer, steps, **options))
