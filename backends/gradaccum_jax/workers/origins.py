"""The results of a step that differ from device to device, where JAX's types cannot tell.

Parameters enter a step as copies, which are the same on all devices but of a type that may differ. The other way round, JAX types as the
same on all devices what a device's own predicate chose, and what a callback returned. So the step's program is read from its arguments to
its results, and types are not believed: what is made of a device's own batch, sums or place differs until a collective makes it the same.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.extend import core

from gradaccum import UsageError
from gradaccum.kit import explain
from gradaccum_jax.types import Axes, Tree
from gradaccum_jax.varying import axes_of

COPIES = ("pvary", "pcast", "reduced_vary_cast")
"""The primitives that make a copy for each device of what is the same on all."""
REDUCING = ("psum", "psum_invariant", "pmax", "pmin", "all_gather", "all_gather_invariant", "all_gather_reduced", "pbroadcast")
"""The collectives that hand all devices along their axes the same; every other collective hands each device its own."""
UNREAD = ("pure_callback", "io_callback", "new_ref", "array_ref", "empty_ref", "get", "swap", "freeze", "infeed")
"""The primitives whose results this file does not follow, and takes for each device's own."""
NONE: Axes = frozenset()
Origins = list[Axes]
"""For each value the mesh axes along which it may differ."""


def require_replicated(program: Any, made: Tree, axes: tuple[str, ...]) -> None:
    """Raise unless what leaves a step as replicated is the same on all devices.

    Args:
        program: the traced `jax.shard_map` of the step.
        made: its results.
        axes: the names of the axes.

    Raises:
        UsageError: a result may differ, or parameters or an extra argument that an optimizer was given; names it. Or a collective runs on
            some devices only.
    """
    (lifted,) = (equation for equation in program.eqns if equation.primitive.name == "shard_map")
    over, params = frozenset(axes), lifted.params
    found = differing(params["jaxpr"], [over if tuple(spec) else NONE for spec in params["in_specs"]], over)
    for (path, _), differs, spec in zip(jax.tree_util.tree_flatten_with_path(made)[0], found, params["out_specs"], strict=True):
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
    if name == "scan":
        return _scanned(equation, given, axes)
    if name == "while":
        return _looped(params, given, results, axes)
    if name == "cond":
        branches = [differing(branch, given[1:], axes) for branch in params["branches"]]
        return _chosen(given[0], params["branches"], [NONE.union(*one) for one in zip(*branches, strict=True)], axes)
    called: list[Any] = [value for value in params.values() if isinstance(value, (core.Jaxpr, core.ClosedJaxpr))]
    if len(called) == 1 and len(getattr(called[0], "jaxpr", called[0]).invars) == len(given):
        made = differing(called[0], given, axes)
        return made if len(made) == results else [either] * results
    if name in UNREAD:
        return [axes] * results
    if name in COPIES:
        return [either] * results
    if along := _names(params) & axes:
        same = name in REDUCING and params.get("axis_index_groups") is None
        return [either - along if same else either | along] * results
    # A value of a type that differs, made of none of such a type, tells the device's place.
    placed = not any(axes_of(atom.aval) & axes for atom in equation.invars)
    return [either | (axes_of(out.aval) & axes if placed else NONE) for out in equation.outvars]


def _names(params: Any) -> Axes:
    """The mesh axes of a collective."""
    held = [params.get("axes", ()), params.get("axis_name", ())]
    return frozenset(name for names in held for name in (names if isinstance(names, tuple) else (names,)) if isinstance(name, str))


def _scanned(equation: Any, given: Origins, axes: Axes) -> Origins:
    """The results of a scan. JAX 0.7 and 0.12 name its parts differently; in both, what is scanned over alone has an axis more outside."""
    body = equation.params["jaxpr"]
    within = getattr(body, "jaxpr", body)
    carries = sum(_rank(out) == _rank(inner) for out, inner in zip(equation.outvars, within.outvars, strict=True))
    last = sum(_rank(atom) == _rank(inner) for atom, inner in zip(equation.invars, within.invars, strict=True))
    first = last - carries
    while True:
        made = differing(body, given, axes)
        carried = [old | new for old, new in zip(given[first:last], made, strict=False)]
        if carried == given[first:last]:
            return made
        given = [*given[:first], *carried, *given[last:]]


def _looped(params: Any, given: Origins, results: int, axes: Axes) -> Origins:
    asked, carried = len(given) - results, given[len(given) - results :]
    used = len(getattr(params["body_jaxpr"], "jaxpr", params["body_jaxpr"]).invars) - results
    while True:
        made = differing(params["body_jaxpr"], [*given[asked - used : asked], *carried], axes)
        made = [old | new for old, new in zip(carried, made, strict=True)]
        if made == carried:
            break
        carried = made
    (ends,) = differing(params["cond_jaxpr"], [*given[: asked - used], *carried], axes)
    return _chosen(ends, [params["body_jaxpr"], params["cond_jaxpr"]], carried, axes)


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
