"""`recompute`: trade time for memory without a change of any number.

The function's activations are not kept between the forward and the backward pass: they are computed again. In JAX randomness is a value, so
dropout draws the same mask in both runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core

from gradaccum import ArgumentTypeError, ArgumentValueError, UsageError
from gradaccum.kit import explain, segment_cuts
from gradaccum_jax.arrays import Array, Leaves, Tree
from gradaccum_jax.recomputation.module import Layer, applied, owner_of, require_functional, stateful, threaded
from gradaccum_jax.sharding import axes_of, explicitly_sharded, vary

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


# The run of a function whose activations are computed again for the gradient: `jax.checkpoint`, traced anew in every call.
#
# `jax.checkpoint` remembers what it traced by the identity of the function. A function that reads something else the next time, a parameter
# of an object say, would give the old values. So each call hands JAX a function of its own, as a call without recomputation would trace
# the original again.
#
# Two runs must do the same. JAX's randomness and functional state do; a `Ref` that the function reads or writes from outside does not, and
# is refused.


_TRACED = (jax.Array, np.ndarray, np.generic)


class Rules(NamedTuple):
    """How a function is recomputed."""

    policy: Policy | None
    """What is kept; None keeps the inputs only."""
    prevent_cse: bool
    """Whether XLA is kept from merging the second run with the first one."""
    hold: bool
    """Whether XLA:CPU is kept from starting the second run early: see `held`."""


def replay(function: Callable[..., Tree], arguments: Tree, rules: Rules) -> Tree:
    """``function(*arguments)``, recomputed for the gradient by `rules`.

    Args:
        function: pure, of the arguments; it may read traced values from outside.
        arguments: a tuple of nests. Arrays are inputs; the function sees any other leaf as it is.
        rules: how it is recomputed.

    Raises:
        UsageError: the function reads or writes a `Ref` that it did not make.
    """
    leaves, structure = jax.tree.flatten(arguments)
    places = [index for index, leaf in enumerate(leaves) if isinstance(leaf, _TRACED) or hasattr(leaf, "__jax_array__")]
    inputs = [leaves[index] for index in places]

    def of_inputs(*given: Any) -> Tree:
        filled = list(leaves)
        for index, leaf in zip(places, given, strict=True):
            filled[index] = leaf
        return function(*jax.tree.unflatten(structure, filled))

    traced, shape = jax.make_jaxpr(of_inputs, return_shape=True)(*inputs)
    _require_no_refs(traced)
    return jax.tree.unflatten(jax.tree.structure(shape), _run(traced, inputs, rules))


def _run(traced: core.ClosedJaxpr, inputs: Leaves, rules: Rules) -> Leaves:
    """The results of a traced function. Values from outside are inputs of the second run too, so that gradients flow to them."""
    given = [*traced.consts, *inputs]
    kinds, made_kinds = [kind_of(leaf) for leaf in given], list[Any]()

    def again(*numbers: Array) -> Leaves:
        leaves = [typed(leaf, kind) for leaf, kind in zip(numbers, kinds, strict=True)]
        consts, inputs = leaves[: len(traced.consts)], leaves[len(traced.consts) :]
        made = core.jaxpr_as_fun(core.ClosedJaxpr(traced.jaxpr, consts))(*inputs)
        made_kinds[:] = map(kind_of, made)
        return [raw(leaf) for leaf in made]

    library: Any = jax
    once_more = library.checkpoint(again, policy=rules.policy, prevent_cse=rules.prevent_cse)
    numbers = [raw(leaf) for leaf in given]
    made = held(once_more, numbers) if rules.hold else once_more(*numbers)
    return [typed(leaf, kind) for leaf, kind in zip(made, made_kinds, strict=True)]


def _require_no_refs(traced: core.ClosedJaxpr) -> None:
    """Refuse effects on a `Ref` from outside: JAX 0.10 would write it twice, and read at the second run what others wrote meanwhile."""
    if any(type(effect).__module__.startswith("jax._src.state") for effect in traced.effects):
        fix = "Pass the value in and return the new one."
        raise explain(UsageError, "recompute", expected="a pure function", found="one that reads or writes a Ref from outside", fix=fix)


# On the CPU, keep the second run of a function behind the gradient that needs it.
#
# JAX puts an optimization barrier between the gradient and the second run. XLA's GPU and TPU compilers schedule by it. XLA:CPU drops it
# before it schedules, runs all second runs early and keeps what they compute: in a chain of 16 layers the temporary memory fell by 9 % in
# place of 83 %. XLA:CPU does not look into a conditional, so there the function runs as the branch of one that is always taken. Inside of
# `jax.lax.scan` nothing of it is needed. Compiled apart, a function may be rounded otherwise in its last bits; so the user asks for it.


def held(function: Callable[..., Leaves], inputs: Leaves) -> Leaves:
    """``function(*inputs)``, as the branch of a conditional where the program is compiled for a CPU.

    Op by op, nothing can be reordered; a conditional would be compiled anew in every call.
    """
    # The barrier hides the constant until XLA has removed the conditionals whose predicate it knows.
    barrier: Any = lax.optimization_barrier
    always = barrier(jnp.asarray(True)) if jax.default_backend() == "cpu" else None
    if not isinstance(always, jax.core.Tracer) or any(map(explicitly_sharded, inputs)):
        return function(*inputs)
    traced = jax.make_jaxpr(function)(*inputs)
    made = lax.cond(always, core.jaxpr_as_fun(traced), lambda *_: [_never(kind) for kind in traced.out_avals], *inputs)
    return list(made)


def _never(kind: Any) -> Array:
    """What the branch that is never taken returns."""
    return vary(jnp.zeros(kind.shape, kind.dtype), axes_of(kind))


# Random keys as the integers that they are made of: JAX 0.7.1 cannot compile a conditional whose gradient keeps a typed key.


def kind_of(leaf: Array) -> Any:
    """The generator of a typed random key; None for anything else."""
    is_key = jnp.issubdtype(jnp.result_type(leaf), jax.dtypes.prng_key)
    return jax.random.key_impl(leaf) if is_key else None


def raw(leaf: Array) -> Array:
    """A typed key as uint32 integers, anything else as it is."""
    return leaf if kind_of(leaf) is None else jax.random.key_data(leaf)


def typed(leaf: Array, kind: Any) -> Array:
    """What `raw` was given, by its `kind_of`."""
    return leaf if kind is None else jax.random.wrap_key_data(leaf, impl=kind)


# The policies: what a recomputed function may keep, and what it keeps in the host's memory, by name or by function.
#
# JAX calls a policy once for each operation and keeps the operation's result if the answer is true. A function is true, so JAX would keep
# everything if the user passed a maker of policies in place of the policy that it makes. That is refused here.


Policy = Callable[..., Any]
"""Called with an operation, the types of its inputs and its parameters: whether its result is kept, or where it is moved."""

MAKERS = frozenset(
    {
        "offload_dot_with_no_batch_dims",
        "save_and_offload_only_these_names",
        "save_any_names_but_these",
        "save_anything_except_these_names",
        "save_from_both_policies",
        "save_only_these_names",
    }
)
"""The attributes of `jax.checkpoint_policies` that return a policy and are none themselves."""

HOST = "pinned_host"
"""JAX's name of the host's memory that a device reaches."""


def make_policy(policy: object, offload: object) -> Policy | None:
    """One policy of the two options; None keeps nothing.

    Raises:
        ArgumentTypeError, ArgumentValueError: one of the options is not what `recompute` takes, or the device has no such memory.
    """
    kept, moved = _policy_of(policy), _offload_of(offload)
    if moved is None:
        return kept
    _require_host_memory()
    return moved if kept is None else _either(moved, kept)


def _policy_of(policy: object) -> Policy | None:
    """`policy` as a function whose answers are checked."""
    if policy is None:
        return None
    made = _by_name(policy) if isinstance(policy, str) else policy
    if any(made is getattr(jax.checkpoint_policies, name, None) for name in MAKERS):
        raise _maker_error(getattr(made, "__name__", str(made)))
    if not callable(made):
        raise explain(ArgumentTypeError, "policy", expected=_expected(), got=policy, fix='Write policy="dots_saveable".')
    return _checked(made)


def _by_name(name: str) -> Policy:
    if name in MAKERS:
        raise _maker_error(name)
    if name not in _names():
        raise explain(ArgumentValueError, "policy", expected=_expected(), got=name, fix='Write policy="dots_saveable".')
    policy: Policy = getattr(jax.checkpoint_policies, name)
    return policy


def _checked(policy: Policy) -> Policy:
    """`policy`, which may answer with a bool or with one of JAX's own cases. A random key is made again: it costs less than its place."""

    def answer(primitive: Any, *kinds: Any, **params: Any) -> Any:
        if primitive.name.startswith("random_"):
            return False
        said = policy(primitive, *kinds, **params)
        if isinstance(said, bool) or type(said).__module__.startswith("jax"):
            return said
        fix = "A maker of policies is called first: jax.checkpoint_policies.save_only_these_names('name')."
        raise explain(
            ArgumentTypeError, "policy", expected="a policy that returns True or False", found=f"one that returned {said!r}", fix=fix
        )

    return answer


def _offload_of(offload: object) -> Policy | None:
    """The policy that moves what `offload` names to the host."""
    if offload is None:
        return None
    policies: Any = jax.checkpoint_policies
    if offload == "dots":
        return _checked(policies.offload_dot_with_no_batch_dims("device", HOST))
    if isinstance(offload, Sequence) and not isinstance(offload, str) and offload and all(isinstance(name, str) for name in offload):
        names = {"names_which_can_be_saved": [], "names_which_can_be_offloaded": list(offload)}
        return _checked(policies.save_and_offload_only_these_names(**names, offload_src="device", offload_dst=HOST))
    kind = ArgumentValueError if isinstance(offload, (str, Sequence)) else ArgumentTypeError
    fix = 'Write offload=["name"] of a value that the function marks with jax.ad_checkpoint.checkpoint_name(value, "name").'
    raise explain(kind, "offload", expected='"dots" or a sequence of names', got=offload, fix=fix)


def _either(moved: Policy, kept: Policy) -> Policy:
    """Move what `moved` moves; of the rest, keep what `kept` keeps."""

    def answer(primitive: Any, *kinds: Any, **params: Any) -> Any:
        said = moved(primitive, *kinds, **params)
        return said if hasattr(said, "dst") else kept(primitive, *kinds, **params)

    return answer


def _require_host_memory() -> None:
    device = jax.devices()[0]
    kinds = [memory.kind for memory in device.addressable_memories()]
    if HOST not in kinds:
        expected, fix = f"a device that reaches the host's memory ({HOST})", "Leave offload out, and keep less by policy= instead."
        raise explain(ArgumentValueError, "offload", expected=expected, found=f"{device.device_kind} with {kinds}", fix=fix)


def _names() -> list[str]:
    return [name for name in dir(jax.checkpoint_policies) if not name.startswith("_") and name not in MAKERS]


def _expected() -> str:
    return f"a policy or one of {', '.join(map(repr, _names()))}"


def _maker_error(name: str) -> ArgumentValueError:
    fix = f"Call it first and pass what it returns: policy=jax.checkpoint_policies.{name}(...)."
    return explain(ArgumentValueError, "policy", expected="a policy", found=f"{name}, which makes one", fix=fix)
