"""Which results of a step differ from device to device, where types cannot tell.

Parameters enter a step as copies, which are the same on all devices but of a type that may differ. So is all that is made of them. Here the
step's program is read from its arguments to its results: what is made of a device's own batch, sums or place differs, unless it is reduced.
Types still help, because a value whose type cannot differ does not.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.extend import core

from gradaccum import UsageError
from gradaccum.kit import explain
from gradaccum_jax.types import Axes, Tree
from gradaccum_jax.varying import axes_of

COPIES = ("pvary", "pcast", "pbroadcast")
"""The primitives that make a copy for each device of what is the same on all."""
Flags = list[bool]


def require_replicated(program: Any, made: Tree, axes: tuple[str, ...]) -> None:
    """What leaves a step as replicated is the same on all devices.

    Args:
        program: the traced `jax.shard_map` of the step.
        made: its results.
        axes: the names of the axes.

    Raises:
        UsageError: a result may differ, or parameters that an optimizer was given; names it.
    """
    (lifted,) = (equation for equation in program.eqns if equation.primitive.name == "shard_map")
    over, params = frozenset(axes), lifted.params
    flags = differing(params["jaxpr"], [bool(spec) for spec in map(tuple, params["in_specs"])], over)
    for (path, _), flag, spec in zip(jax.tree_util.tree_flatten_with_path(made)[0], flags, params["out_specs"], strict=True):
        if flag and not tuple(spec):
            name, found = f"what step returned, {jax.tree_util.keystr(path)}", "one that is made of a device's own batch"
            fix = "Change parameters by what tx.update returns; average all else over the devices: jax.lax.pmean(value, axis_name)."
            raise explain(UsageError, name, expected="a value that is the same on all devices", found=found, fix=fix)


def differing(jaxpr: Any, given: Flags, axes: Axes) -> Flags:
    """For each result of a program whether it may differ along `axes`.

    Args:
        jaxpr: a `jax.extend.core.Jaxpr`, or a closed one.
        given: for each argument whether it does.
        axes: names of mesh axes.
    """
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    known = dict(zip(jaxpr.invars, given, strict=True))

    def flag(atom: Any) -> bool:
        return not isinstance(atom, core.Literal) and known.get(atom, False)

    for equation in jaxpr.eqns:
        made = _made(equation, [flag(atom) for atom in equation.invars], axes)
        told = equation.primitive.name != "replicated"  # whose type is a claim
        known |= {out: own and bool(not told or axes_of(out.aval) & axes) for out, own in zip(equation.outvars, made, strict=True)}
    return [flag(atom) for atom in jaxpr.outvars]


def _made(equation: Any, given: Flags, axes: Axes) -> Flags:
    name, params, results = equation.primitive.name, equation.params, len(equation.outvars)
    if name == "replicated":
        if any(given) and params["asked"]:
            raise _own_error(params["asked"])
        return [any(given) and not params["known"]] * results
    if name == "scan":
        return _scanned(params, given, axes)
    if name == "while":
        return _looped(params, given, axes)
    if name == "cond":
        branches = [differing(branch, given[1:], axes) for branch in params["branches"]]
        return [given[0] or any(flags) for flags in zip(*branches, strict=True)]
    called: list[Any] = [value for value in params.values() if isinstance(value, (core.Jaxpr, core.ClosedJaxpr))]
    if len(called) == 1 and len(getattr(called[0], "jaxpr", called[0]).invars) == len(given):
        made = differing(called[0], given, axes)
        return made if len(made) == results else [any(given)] * results
    # A value that differs and is made of none that may, and that is no copy, tells the device's place.
    placed = name not in COPIES and not any(axes_of(atom.aval) & axes for atom in equation.invars)
    return [any(given) or placed] * results


def _own_error(name: str) -> UsageError:
    """The error for something made of a device's own batch, where all devices need the same."""
    found = "one that is made of a device's own batch"
    fix = "Give tx the parameters that the step was given, and average all else over the devices: jax.lax.pmean(value, axis_name)."
    return explain(UsageError, name, expected="a value that is the same on all devices", found=found, fix=fix)


def _scanned(params: Any, given: Flags, axes: Axes) -> Flags:
    first, last = params["num_consts"], params["num_consts"] + params["num_carry"]
    while True:
        made = differing(params["jaxpr"], given, axes)
        carried = [old or new for old, new in zip(given[first:last], made, strict=False)]
        if carried == given[first:last]:
            return made
        given = [*given[:first], *carried, *given[last:]]


def _looped(params: Any, given: Flags, axes: Axes) -> Flags:
    asked, used = params["cond_nconsts"], params["body_nconsts"]
    carried = given[asked + used :]
    while True:
        made = differing(params["body_jaxpr"], [*given[asked : asked + used], *carried], axes)
        made = [old or new for old, new in zip(carried, made, strict=True)]
        if made == carried:
            break
        carried = made
    ends = differing(params["cond_jaxpr"], [*given[:asked], *carried], axes)
    return [flag or any(ends) for flag in carried]
