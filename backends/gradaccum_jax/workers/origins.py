"""The results of a step that differ from device to device, where JAX's types cannot tell.

Parameters enter a step as copies, which are the same on all devices but of a type that may differ. The other way round, JAX types as the
same on all devices what a device's own predicate chose, and what a callback returned. So the step's program is read from its arguments to
its results, and types are not believed: what is made of a device's own batch, sums or place differs until a collective makes it the same.

JAX renames the parameters of its primitives from version to version. So programs, axes and groups are found by what they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.extend import core

from gradaccum import UsageError
from gradaccum.kit import explain
from gradaccum_jax.types import Axes, Tree
from gradaccum_jax.varying import axes_of

COPIES = ("pvary", "pcast", "reduced_vary_cast", "name")
"""The primitives that make a copy for each device of what is the same on all, and one whose parameter may be an axis's name by chance."""
REDUCING = ("psum", "psum_invariant", "pmax", "pmin", "all_gather", "all_gather_invariant", "all_gather_reduced", "pbroadcast")
"""The collectives that hand all devices along their axes the same; every other collective hands each device its own."""
UNREAD = ("pure_callback", "io_callback", "new_ref", "array_ref", "empty_ref", "get", "swap", "freeze", "infeed")
"""The primitives whose results this file does not follow, and takes for each device's own."""
NONE: Axes = frozenset()
Origins = list[Axes]
"""For each value the mesh axes along which it may differ."""
Specs = Sequence[Any]
"""A `jax.sharding.PartitionSpec` for each value."""


def require_replicated(program: Any, made: Tree, given: Specs, left: Specs, axes: tuple[str, ...]) -> None:
    """Raise unless what leaves a step as replicated is the same on all devices.

    Args:
        program: the traced `jax.shard_map` of the step.
        made: its results.
        given: how each argument is split.
        left: the same for each result.
        axes: the names of the axes.

    Raises:
        UsageError: a result may differ, or parameters or an extra argument that an optimizer was given; names it. Or a collective runs on
            some devices only.
    """
    over = frozenset(axes)
    found = differing(program, [over if tuple(spec) else NONE for spec in given], over)
    for (path, _), differs, spec in zip(jax.tree_util.tree_flatten_with_path(made)[0], found, left, strict=True):
        if differs and not tuple(spec):
            fix = "Change parameters by what tx.update returns; average all else over the devices: jax.lax.pmean(value, axis_name)."
            raise _own_error(f"what step returned, {jax.tree_util.keystr(path)}", fix)


def differing(jaxpr: Any, given: Origins, axes: Axes) -> Origins:
    """Return for each result of a program along which of `axes` it may differ.

    Args:
        jaxpr: a `jax.extend.core.Jaxpr`, or a closed one.
        given: the same for each argument.
        axes: names of mesh axes.
    """
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    known = dict(zip(jaxpr.invars, given, strict=True))

    def origin(atom: Any) -> Axes:
        return NONE if isinstance(atom, core.Literal) else known.get(atom, NONE)

    for equation in jaxpr.eqns:
        known |= zip(equation.outvars, _made(equation, [origin(atom) for atom in equation.invars], axes), strict=True)
    return [origin(atom) for atom in jaxpr.outvars]


def _made(equation: Any, given: Origins, axes: Axes) -> Origins:
    name, params, results = equation.primitive.name, equation.params, len(equation.outvars)
    either = NONE.union(*given)
    if name == "replicated":
        if either and params["asked"]:
            fix = "Give tx the parameters that the step was given, and average all else over the devices: jax.lax.pmean(value, axis_name)."
            raise _own_error(params["asked"], fix)
        return [either - axes if params["known"] else either]
    if within := _programs(equation):
        return _programmed(name, within, equation, given, axes)
    if name in UNREAD:
        return [axes] * results
    if name in COPIES:
        return [either] * results
    if along := _names(params) & axes:
        same = name in REDUCING and not any(_is_grouped(value) for value in params.values())
        return [either - along if same else either | along] * results
    # A value of a type that differs, made of none of such a type, tells the device's place.
    placed = not any(axes_of(atom.aval) & axes for atom in equation.invars)
    return [either | (axes_of(out.aval) & axes if placed else NONE) for out in equation.outvars]


def _programs(equation: Any) -> list[Any]:
    """Return the jaxprs that are parameters of an equation, in order."""
    held = jax.tree.leaves(list(equation.params.values()), is_leaf=_is_program)
    return [getattr(value, "jaxpr", value) for value in held if _is_program(value)]


def _is_program(value: object) -> bool:
    return isinstance(value, (core.Jaxpr, core.ClosedJaxpr))


def _names(params: Any) -> Axes:
    """Return the mesh axes of a collective: all words among its parameters, of which the caller takes those that are axes."""
    held = [tuple(value) if isinstance(value, (set, frozenset)) else value for value in params.values()]
    return frozenset(leaf for leaf in jax.tree.leaves(held) if isinstance(leaf, str))


def _is_grouped(value: object) -> bool:
    """True if a collective's parameter holds groups of devices: it reduces within each of them."""
    return isinstance(value, (list, tuple)) and bool(value) and all(isinstance(group, (list, tuple)) for group in value)


def _programmed(name: str, within: list[Any], equation: Any, given: Origins, axes: Axes) -> Origins:
    """Return the same as `_made` of an equation that runs programs: a call, a scan, a loop, a conditional, or one that is not known."""
    results, asks = len(equation.outvars), [program for program in within if _returns_bool(program)]
    takes, returns = {len(program.invars) for program in within}, {len(program.outvars) for program in within}
    if name == "cond" and takes == {len(given) - 1} and returns == {results}:
        branches = [differing(branch, given[1:], axes) for branch in within]
        return _chosen(given[0], within, [NONE.union(*one) for one in zip(*branches, strict=True)], axes)
    if name == "while" and len(within) == 2 and len(asks) == 1:
        return _looped(asks[0], within[within[0] is asks[0]], given, results, axes)
    if len(within) == 1 and takes == {len(given)} and returns == {results}:
        return _scanned(equation, within[0], given, axes) if name == "scan" else differing(within[0], given, axes)
    # Such as a loop that carries one bool. Whatever it does, a result is made of its operands and of what its programs make.
    either, before = NONE.union(*given), None
    while either != before:
        before = either
        either = either.union(*(made for program in within for made in differing(program, [before] * len(program.invars), axes)))
    return _chosen(either, within, [either] * results, axes)


def _returns_bool(program: Any) -> bool:
    return [(out.aval.shape, str(out.aval.dtype)) for out in program.outvars] == [((), "bool")]


def _scanned(equation: Any, body: Any, given: Origins, axes: Axes) -> Origins:
    """Return the same for the results of a scan. A scanned array has one axis more outside than in the body."""
    carries = sum(_rank(out) == _rank(inner) for out, inner in zip(equation.outvars, body.outvars, strict=True))
    last = sum(_rank(atom) == _rank(inner) for atom, inner in zip(equation.invars, body.invars, strict=True))
    first = last - carries
    while True:
        made = differing(body, given, axes)
        carried = [old | new for old, new in zip(given[first:last], made, strict=False)]
        if carried == given[first:last]:
            return made
        given = [*given[:first], *carried, *given[last:]]


def _looped(asks: Any, body: Any, given: Origins, results: int, axes: Axes) -> Origins:
    """Return the same for the results of a while loop, whose operands are what `asks` reads, what the body reads, and what it carries."""
    asked, carried = len(given) - results, given[len(given) - results :]
    used = len(body.invars) - results
    while True:
        made = differing(body, [*given[asked - used : asked], *carried], axes)
        made = [old | new for old, new in zip(carried, made, strict=True)]
        if made == carried:
            break
        carried = made
    (ends,) = differing(asks, [*given[: asked - used], *carried], axes)
    return _chosen(ends, [body, asks], carried, axes)


def _chosen(predicate: Axes, programs: Any, made: Origins, axes: Axes) -> Origins:
    """Return `made` as differing along the axes along which devices choose differently which of `programs` runs, or how often.

    Raises:
        UsageError: one of the programs reduces over these axes: some devices would wait for ever for the others.
    """
    waits = predicate & {getattr(effect, "name", "") for program in programs for effect in program.effects}
    if waits:
        fix = "Take the collective out of the branch or loop, or decide by jax.lax.pmean or pmax, so that all devices decide alike."
        expected = "the same collectives on all devices"
        found = f"one over {sorted(waits)} in a branch or loop that each device decides on by itself"
        raise explain(UsageError, "what step does", expected=expected, found=found, fix=fix)
    return [differs | predicate for differs in made]


def _rank(atom: Any) -> int:
    return len(getattr(atom.aval, "shape", ()))


def _own_error(name: str, fix: str) -> UsageError:
    """Return the error for something made of a device's own batch, where all devices need the same."""
    expected, found = "a value that is the same on all devices", "one that is made of a device's own batch or place, or by a callback"
    return explain(UsageError, name, expected=expected, found=found, fix=fix)
