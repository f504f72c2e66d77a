"""`recompute`: trade time for memory without a change of any number.

The function's activations are not kept between the forward and the backward pass: they are computed again. In JAX randomness is a value, so
dropout draws the same mask in both runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar, cast

from gradaccum import ArgumentTypeError, ArgumentValueError
from gradaccum.kit import explain, segment_cuts
from gradaccum_jax.recomputation.module import Layer, applied, owner_of, require_functional, stateful, threaded
from gradaccum_jax.recomputation.policy import Policy, make_policy
from gradaccum_jax.recomputation.replay import Rules, replay

F = TypeVar("F", bound=Callable[..., Any])


def recompute(
    function: F | Iterable[Layer],
    *,
    segments: int | None = None,
    policy: str | Policy | None = None,
    offload: str | Sequence[str] | None = None,
    prevent_cse: bool = True,
    hold: bool = False,
    static_argnums: int | Sequence[int] = (),
) -> F:
    """`function`, its activations computed again for the gradient in place of being kept.

    Value, gradients of any order and randomness are those of `function`. Compiled with `jax.jit`, they have the same bits in all that
    the tests measure. Op by op, `jax.grad` compiles a `jax.jit` inside of `function` (`jax.numpy.var` is one) for both runs apart,
    and XLA may round their last bits otherwise. A `jax.debug.print` prints in both runs.

    Args:
        function: a function of arrays, also an equinox module, a flax nnx module or a method of one, whose state changes once as without
            recomputation. Or an iterable of such layers: the first one gets all arguments, each further one the last result in place
            of the first argument.
        segments: into how many segments an iterable is cut, about the square root of its length by default. Each segment keeps its
            input only.
        policy: what else is kept: a policy of `jax.checkpoint_policies` or its name.
        offload: what is moved to the host's memory and back in place of being computed again: names that `function` gives by
            `jax.ad_checkpoint.checkpoint_name`, or "dots", the results of matrix products without batch dimensions.
        prevent_cse: False lets XLA merge both runs. In the body of `jax.lax.scan` it cannot, and False makes a faster program.
        hold: True is for long chains of calls on a CPU, where memory falls only inside of `jax.lax.scan` otherwise: XLA:CPU starts all
            second runs early. Each call then is a computation of its own, whose last bits XLA may round otherwise. No other device is
            changed by it.
        static_argnums: positions of arguments that stay as they are, as `function` needs them to trace. Leaves other than arrays stay
            as they are without it.

    Returns:
        A function of the same arguments. It traces `function` in every call, so it never uses old values of what `function` reads.

    Raises:
        ArgumentTypeError, ArgumentValueError: an option has no meaning, `segments` is above the number of layers, or the device has no
            host memory for `offload`.
        UsageError: `function` is a flax linen module, which is recomputed by its ``apply`` or by `flax.linen.remat`. Later, in a call:
            it reads or writes a `Ref` from outside, or changes the structure of an nnx module.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> layer = recompute(lambda weight, x: jnp.tanh(x @ weight))
        >>> jax.grad(lambda weight: layer(weight, jnp.ones((2, 3))).sum())(jnp.zeros((3, 3))).shape
        (3, 3)
    """
    layers = _layers(function, segments)
    rules = Rules(make_policy(policy, offload), _flag("prevent_cse", prevent_cse), _flag("hold", hold))
    static = _positions(static_argnums, several=not callable(function))
    parts = [_recomputed(layers[cut.start : cut.stop], rules, static) for cut in segment_cuts(len(layers), segments)]
    return cast(F, parts[0] if callable(function) else functools.partial(applied_in_order, parts))


def applied_in_order(parts: Sequence[Layer], /, *arguments: Any, **named: Any) -> Any:
    """The segments one after the other, as `applied` runs the layers of one."""
    return applied(parts, [None] * len(parts), arguments, named)


def _recomputed(layers: tuple[Layer, ...], rules: Rules, static: tuple[int, ...]) -> Layer:
    """The layers as one function that is recomputed as a whole."""

    @functools.wraps(layers[0])
    def call(*arguments: Any, **named: Any) -> Any:
        kept = {index % len(arguments): arguments[index] for index in static if -len(arguments) <= index < len(arguments)}
        inputs = tuple(None if index in kept else value for index, value in enumerate(arguments))

        def run(owners: Any, inputs: Any, named: Any) -> Any:
            filled = tuple(kept.get(index, value) for index, value in enumerate(inputs))
            return applied(layers, owners, filled, named)

        nest = ([owner_of(layer) for layer in layers], inputs, named)
        if stateful(nest):
            return threaded(lambda nest: run(*nest), nest, lambda function, values: replay(function, values, rules))
        return replay(run, nest, rules)

    return call


def _layers(function: object, segments: object) -> tuple[Layer, ...]:
    """The layers that are given, each of them callable and functional."""
    fix = "Write recompute(function) or recompute([first, second], segments=2)."
    if callable(function) and segments is not None:
        found = "segments for one function"
        raise explain(ArgumentValueError, "segments", expected="a sequence of layers to cut", found=found, fix=fix)
    if not callable(function) and not isinstance(function, Iterable):
        raise explain(ArgumentTypeError, "function", expected="a function or a sequence of layers", got=function, fix=fix)
    layers = (function,) if callable(function) else tuple(cast(Iterable[Layer], function))
    for index, layer in enumerate(layers):
        if not callable(layer):
            raise explain(ArgumentTypeError, f"function[{index}]", expected="a function or a module", got=layer, fix=fix)
        require_functional(layer)
    return layers


def _flag(name: str, value: object) -> bool:
    if isinstance(value, bool):
        return value
    raise explain(ArgumentTypeError, name, expected="True or False", got=value, fix=f"Write {name}=True.")


def _positions(static_argnums: object, several: bool) -> tuple[int, ...]:
    """`static_argnums` as positions; those of a chain begin with 1, since the first argument is what its layers hand on."""
    positions = (static_argnums,) if isinstance(static_argnums, int) else static_argnums
    plain = isinstance(positions, Sequence) and all(isinstance(one, int) and not isinstance(one, bool) for one in positions)
    if not plain:
        fix = "Write static_argnums=1 or static_argnums=(1, 2)."
        raise explain(ArgumentTypeError, "static_argnums", expected="an int or a sequence of them", got=static_argnums, fix=fix)
    if several and 0 in cast(Sequence[int], positions):
        fix = "Leave 0 out: each layer gets the last one's result there."
        raise explain(ArgumentValueError, "static_argnums", expected="positions from 1 on, for a chain", got=static_argnums, fix=fix)
    return tuple(cast(Sequence[int], positions))
