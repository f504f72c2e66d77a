"""`recompute`: less memory for more time, with the same numbers.

This module adds what `jax.checkpoint` does not get right by itself:

- It caches its trace by the function's identity: a function that reads something else
  the next time would return the old values. So each call traces the function anew.
- A `Ref` from outside differs between both runs, and is refused.
- The state of a flax module would change twice, or not at all. Such modules are
  refused: flax has a `remat` of its own.
- A maker of policies answers with a function, which is true: JAX would keep everything.
  Such an answer is refused.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar, cast

import jax
import numpy as np
from jax.extend import core

from gradaccum import ArgumentTypeError, ArgumentValueError, UsageError
from gradaccum.kit import explain, segment_cuts
from gradaccum_jax.arrays import Tree

F = TypeVar("F", bound=Callable[..., Any])
Layer = Callable[..., Any]
Policy = Callable[..., Any]
"""Called with an operation, the types of its inputs and its parameters: whether its
result is kept, or where it is moved.
"""
_TRACED = (jax.Array, np.ndarray, np.generic)


def recompute(
    function: F | Iterable[Layer],
    *,
    segments: int | None = None,
    policy: Policy | None = None,
    prevent_cse: bool = True,
) -> F:
    """Return `function` with its activations computed again for the gradient in place
    of being kept.

    Value, gradients of any order and randomness are those of `function`, compiled with
    `jax.jit` to the bit. Op by op, XLA may round a `jax.jit` inside of `function`
    otherwise in its last bits. A `jax.debug.print` prints in both runs. On a CPU memory
    falls inside of `jax.lax.scan` alone: elsewhere XLA:CPU starts all second runs
    early.

    Args:
        function: a function of arrays, also an equinox module. Or an iterable of such
            layers: the first one gets all arguments, each further one the last result
            in place of the first argument.
        segments: into how many segments an iterable is cut, about the square root of
            its length by default. Each segment keeps its input only.
        policy: what else is kept, or moved to the host's memory: a policy of
            `jax.checkpoint_policies`.
        prevent_cse: False lets XLA merge both runs. In the body of `jax.lax.scan` it
            cannot, and False makes a faster program.

    Returns:
        A function of the same arguments, which traces `function` in every call. Leaves
        other than arrays stay as they are.

    Raises:
        ArgumentTypeError, ArgumentValueError: an option has no meaning, or `segments`
            is above the number of layers. Later, in a call: `policy` answers with no
            bool and no case of JAX's.
        UsageError: `function` is a flax module or a method of one. Later, in a call: it
            reads or writes a `Ref` from outside, or is given a flax nnx module.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> layer = recompute(lambda weight, x: jnp.tanh(x @ weight))
        >>> jax.grad(lambda weight: layer(weight, jnp.ones((2, 3))).sum())(jnp.zeros((3, 3))).shape
        (3, 3)
    """
    layers = _layers(function, segments)
    if policy is not None and not callable(policy):
        fix = "Write policy=jax.checkpoint_policies.dots_saveable."
        raise explain(
            ArgumentTypeError,
            "policy",
            expected="a policy of jax.checkpoint_policies",
            got=policy,
            fix=fix,
        )
    options = {
        "policy": policy and functools.partial(_answer, policy),
        "prevent_cse": prevent_cse,
    }
    parts = [
        _recomputed(layers[cut.start : cut.stop], options)
        for cut in segment_cuts(len(layers), segments)
    ]
    return cast(
        F,
        (
            parts[0]
            if callable(function)
            else lambda *arguments, **named: _applied(parts, arguments, named)
        ),
    )


def _layers(function: object, segments: object) -> tuple[Layer, ...]:
    fix = "Write recompute(function) or recompute([first, second], segments=2)."
    if callable(function) and segments is not None:
        found = "segments for one function"
        raise explain(
            ArgumentValueError,
            "segments",
            expected="a sequence of layers to cut",
            found=found,
            fix=fix,
        )
    if not callable(function) and not isinstance(function, Iterable):
        raise explain(
            ArgumentTypeError,
            "function",
            expected="a function or a sequence of layers",
            got=function,
            fix=fix,
        )
    layers = (
        (function,) if callable(function) else tuple(cast(Iterable[Layer], function))
    )
    for index, layer in enumerate(layers):
        if not callable(layer):
            raise explain(
                ArgumentTypeError,
                f"function[{index}]",
                expected="a function or a module",
                got=layer,
                fix=fix,
            )
        _require_functional(layer)
    return layers


def _recomputed(layers: Sequence[Layer], options: dict[str, Any]) -> Layer:
    @functools.wraps(layers[0])
    def call(*arguments: Any, **named: Any) -> Any:
        return _replay(
            options,
            lambda inputs, named: _applied(layers, inputs, named),
            (arguments, named),
        )

    return call


def _applied(
    layers: Sequence[Layer], arguments: tuple[Any, ...], named: dict[str, Any]
) -> Any:
    for layer in layers:
        arguments = (layer(*arguments, **named), *arguments[1:])
    return arguments[0]


def _replay(
    options: dict[str, Any], function: Callable[..., Tree], arguments: Tree
) -> Tree:
    for node in jax.tree.leaves(arguments, is_leaf=_is_nnx):
        _require_functional(node)
    leaves, structure = jax.tree.flatten(arguments)
    places = [
        index
        for index, leaf in enumerate(leaves)
        if isinstance(leaf, _TRACED) or hasattr(leaf, "__jax_array__")
    ]

    def of_inputs(*inputs: Any) -> Tree:
        given = dict(zip(places, inputs, strict=True))
        return function(
            *jax.tree.unflatten(
                structure, [given.get(index, leaf) for index, leaf in enumerate(leaves)]
            )
        )

    inputs = [leaves[index] for index in places]
    traced, shape = jax.make_jaxpr(of_inputs, return_shape=True)(*inputs)
    if any(
        type(effect).__module__.startswith("jax._src.state")
        for effect in traced.effects
    ):
        # JAX 0.10 would write it twice, and read at the second run what others wrote
        # meanwhile.
        fix = "Pass the value in and return the new one."
        raise explain(
            UsageError,
            "recompute",
            expected="a pure function",
            found="one that reads or writes a Ref from outside",
            fix=fix,
        )
    library: Any = jax
    made = library.checkpoint(core.jaxpr_as_fun(traced), **options)(*inputs)
    return jax.tree.unflatten(jax.tree.structure(shape), made)


def _answer(policy: Policy, primitive: Any, *kinds: Any, **params: Any) -> Any:
    """Return the policy's answer: a bool, or one of JAX's own cases."""
    said = policy(primitive, *kinds, **params)
    if isinstance(said, bool) or type(said).__module__.startswith("jax"):
        return said
    expected, found = (
        "a policy that returns True or False",
        f"one that returned {said!r}",
    )
    fix = (
        "A maker of policies is called first:"
        " jax.checkpoint_policies.save_only_these_names('name')."
    )
    raise explain(ArgumentTypeError, "policy", expected=expected, found=found, fix=fix)


def _is_nnx(node: object) -> bool:
    nnx: Any = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(node, nnx.Module)


def _require_functional(layer: object) -> None:
    """Raise unless the layer is free of flax modules: JAX would leak or drop what they
    write.
    """
    linen: Any = sys.modules.get("flax.linen")
    cells = getattr(layer, "__closure__", None) or ()
    # An empty cell is not assigned yet.
    enclosed = [cell.cell_contents for cell in cells if cell != type(cell)()]
    for one in (layer, getattr(layer, "__self__", None), *enclosed):
        name, expected = type(one).__name__, "a pure function"
        if _is_nnx(one):
            fix = (
                "Write flax.nnx.remat(lambda module, x: module(x))(module, x), which"
                " carries its state."
            )
            raise explain(
                UsageError,
                "recompute",
                expected=expected,
                found=f"{name}, a flax nnx module",
                fix=fix,
            )
        if (
            linen
            and isinstance(one, linen.Module)
            and (one is layer or one.scope is not None)
        ):
            fix = (
                f"Write recompute({name}(...).apply), or flax.linen.remat({name})"
                " inside a module."
            )
            raise explain(
                UsageError,
                "recompute",
                expected=expected,
                found=f"{name}, a flax linen module",
                fix=fix,
            )
