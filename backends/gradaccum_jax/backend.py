"""The backend object, which the core finds by name and `gradaccum.wrap` by the
optimizer's type.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Unpack, cast

import jax
import optax

from gradaccum import LossScale, VerificationReport
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
from gradaccum_jax.verification import check
from gradaccum_jax.window import check_known
from gradaccum_jax.workers.data_parallel import start_on
from gradaccum_jax.workers.group import names_of

Axes = str | tuple[str, ...] | None


class JaxBackend:
    """The backend for optax gradient transformations."""

    name = "jax"

    def verifies(self, model: object) -> bool:
        return check.verifies(model)

    def verify(
        self,
        model: object,
        loss_fn: Callable[..., Any],
        batch: object,
        steps: int | None,
        **options: Any,
    ) -> VerificationReport:
        return check.verify(model, loss_fn, batch, steps, **options)

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
            axis_name: the mesh axis, or several in a tuple, whose devices share the
                window as one large batch. For use in `jax.shard_map`, most simply by
                `gradaccum_jax.data_parallel`. The devices make the same calls, and
                reduce once, at the window's end; a device without an item passes weight
                0.
            shard_axes: the mesh axis, or several in a tuple, along which parameters are
                sharded inside `jax.shard_map`: the norm is that of all shards, and all
                devices decide alike. ``()`` if each device has a model of its own.
                Leave it out under `jax.jit` alone.
            mesh: the `jax.sharding.Mesh` of `axis_name`, for ``tx.init(params)``
                outside of `gradaccum_jax.data_parallel`. Without it `init` takes the
                mesh that is set around it.

        Raises:
            ArgumentTypeError: `optimizer` is wrapped already; `init` raises it for an
                inner optimizer that accumulates.
            ArgumentValueError: a callable in ``steps`` returns no int >= 1 for step 0,
                or a size is more than int32 can hold.
            UsageError: ``steps=until_weight(...)`` with an `axis_name`: each device
                would end its window by its own weight.
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
    """The options of `wrap`: those of `gradaccum.wrap`, and those of
    `JaxBackend.wrap`.
    """

    loss_scale: float | LossScale | None
    axis_name: Axes
    shard_axes: Axes
    mesh: jax.sharding.Mesh | None


def wrap(
    optimizer: optax.GradientTransformation, steps: Steps, **options: Unpack[JaxOptions]
) -> Wrapped:
    """Wrap an optax transformation: `gradaccum.wrap`, typed."""
    return cast(Wrapped, wrap_with(backend, optimizer, steps, **options))
