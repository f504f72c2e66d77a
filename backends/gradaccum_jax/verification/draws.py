"""The random numbers of a traced loss: those that follow the keys of the batch,
replayed item by item.

To compare accumulation with the large batch, the equations that draw run for the large
batch, and each micro-batch gets the rows of its items.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence, Set
from functools import cache
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend import core

from gradaccum_jax.arrays import Array
from gradaccum_jax.programs import Equation, programs_in

DRAWING = ("random_bits", "random_split", "random_fold_in", "random_seed")


class Draw(NamedTuple):
    """One equation that makes random numbers or keys."""

    place: str
    shape: tuple[int, ...]
    bits: bool
    """Whether it makes numbers, not keys."""
    by_key: bool
    """Whether it follows a key."""
    by_items: bool
    """Whether it follows values of the items."""
    within: bool
    """Whether it stands in a loop, a branch or a custom derivative, where it cannot be
    replaced.
    """


def draws_of(program: Program, keys: Set[int], items: Set[int]) -> list[Draw]:
    jaxpr = program.closed.jaxpr
    marks = {
        variable: (place in keys, place in items)
        for place, variable in enumerate(jaxpr.invars)
    }
    return list(_walk(jaxpr, marks, Around(), within=False))


Mark = tuple[bool, bool]
"""Whether a value follows a key, and whether it follows an item."""
NEITHER: Mark = (False, False)


def _walk(
    jaxpr: Any, marks: dict[Any, Mark], around: Around, *, within: bool
) -> Iterator[Draw]:
    """Add a mark to `marks` for each value. Inside of loops every value counts as
    following the loop's arguments.
    """
    for eqn in jaxpr.eqns:
        given = [
            NEITHER if isinstance(v, core.Literal) else marks.get(v, NEITHER)
            for v in eqn.invars
        ]
        every = (any(key for key, _ in given), any(item for _, item in given))
        called = inner(eqn)
        if called is not None:
            below = dict(zip(called[0].invars, given, strict=True))
            yield from _walk(called[0], below, around.within(eqn), within=within)
            made = [
                NEITHER if isinstance(v, core.Literal) else below.get(v, NEITHER)
                for v in called[0].outvars
            ]
        else:
            yield from _draws_at(eqn, every, around.within(eqn), within)
            made = [every] * len(eqn.outvars)
        marks.update(zip(eqn.outvars, made, strict=True))


def _draws_at(
    eqn: Equation, mark: Mark, around: Around, within: bool
) -> Iterator[Draw]:
    if eqn.primitive.name in DRAWING:
        shape = tuple(eqn.outvars[0].aval.shape)
        yield Draw(
            Step(eqn, around).place,
            shape,
            eqn.primitive.name == "random_bits",
            *mark,
            within,
        )
    for jaxpr in programs_in(eqn):
        yield from _walk(jaxpr, dict.fromkeys(jaxpr.invars, mark), around, within=True)


def rows(value: Array, axis: int, items: int, part: Sequence[int]) -> Array:
    if value.shape[axis] == items:
        return value[(slice(None),) * axis + (np.asarray(part),)]
    each = value.shape[axis] // items
    places = [item * each + row for item in part for row in range(each)]
    return value[(slice(None),) * axis + (np.asarray(places),)]


class Replay:
    """A run of a program with given random numbers, or one that records the drawn
    ones.
    """

    def __init__(self, given: dict[int, Array] | None = None) -> None:
        self.drawn: list[Array] = []
        self._given = given or {}

    def __call__(self, step: Step, values: list[Array]) -> list[Array]:
        if step.eqn.primitive.name not in DRAWING:
            return bind(step.eqn, values)
        given = self._given.get(len(self.drawn))
        made = bind(step.eqn, values) if given is None else [given]
        self.drawn += made
        return made


# A loss as the program that JAX traced, run equation by equation.
#
# The check has to stand between the equations of a loss that it did not write: to give
# the items of a micro-batch the random numbers that they met in the large batch, and to
# see where an item's value begins to depend on the other items. Calls of jitted and
# rematerialised functions are run as part of the program. Loops, branches and functions
# with derivatives of their own are run as one equation each.


Hook = Callable[["Step", list[Array]], list[Array]]
"""Runs one equation on the values of its inputs."""

CALLS = ("jit", "pjit", "closed_call", "core_call", "checkpoint", "remat", "remat2")
LIBRARIES = (
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "haiku",
    "equinox",
    "gradaccum",
    "gradaccum_jax",
)
"""Packages whose frames are not the user's."""


class Around(NamedTuple):
    """The surroundings of an equation."""

    stack: str = ""
    """The modules, as the library names them: ``Net/BatchNorm_0``; empty without any.
    """
    frame: str = ""
    """The user's function and line that called the innermost call; newer JAX keeps no
    frame of the user's inside of its own functions.
    """

    def within(self, eqn: Equation) -> Around:
        """Return the surroundings of the equations inside of the call `eqn`; for
        another equation its own.
        """
        own = str(eqn.source_info.name_stack)
        return Around(
            "/".join(part for part in (self.stack, own) if part),
            _frame(eqn) or self.frame,
        )


class Step(NamedTuple):
    """One equation on the way through a program."""

    eqn: Equation
    around: Around

    @property
    def place(self) -> str:
        """The module, or the user's function and line."""
        return self.around.stack or self.around.frame or str(self.eqn.primitive.name)


class Program:
    """The equations of a function of flat arguments."""

    def __init__(self, closed: Any) -> None:
        self.closed = closed

    def run(self, arguments: Sequence[Array], hook: Hook | None = None) -> list[Array]:
        return _run(
            self.closed.jaxpr,
            self.closed.consts,
            arguments,
            hook or (lambda step, values: bind(step.eqn, values)),
            Around(),
        )


def bind(eqn: Equation, values: Sequence[Array]) -> list[Array]:
    """Return the results of one equation. Older JAX passes functions as arguments,
    newer JAX as parameters.
    """
    found = eqn.primitive.get_bind_params(eqn.params)
    functions, parameters = found if isinstance(found, tuple) else ((), found)
    results = eqn.primitive.bind(*functions, *values, **parameters)
    return list(results) if eqn.primitive.multiple_results else [results]


def inner(eqn: Equation) -> tuple[Any, Sequence[Array]] | None:
    """Return the jaxpr and the constants of a call; None for another equation."""
    if eqn.primitive.name not in CALLS:
        return None
    found = next(
        value
        for value in eqn.params.values()
        if isinstance(value, (core.Jaxpr, core.ClosedJaxpr))
    )
    if isinstance(found, core.ClosedJaxpr):
        return (found.jaxpr, found.consts)
    return (found, ())


def _run(
    jaxpr: Any,
    consts: Sequence[Array],
    arguments: Sequence[Array],
    hook: Hook,
    around: Around,
) -> list[Array]:
    values: dict[Any, Array] = dict(
        zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *arguments), strict=True)
    )

    def read(variable: Any) -> Array:
        return variable.val if isinstance(variable, core.Literal) else values[variable]

    for eqn in jaxpr.eqns:
        given = [read(variable) for variable in eqn.invars]
        within = around.within(eqn)
        called = inner(eqn)
        if called is None:
            made = hook(Step(eqn, within), given)
        else:
            made = _run(*called, given, hook, within)
        values.update(zip(eqn.outvars, made, strict=True))
    return [read(variable) for variable in jaxpr.outvars]


def _frame(eqn: Equation) -> str:
    """Return the user's innermost function when the equation was traced; "" if the
    traceback holds none.
    """
    trace = getattr(eqn.source_info, "traceback", None)
    for frame in trace.frames if trace is not None else ():
        if _is_users(frame.file_name):
            function = frame.function_name.rpartition("<locals>.")[2]
            return f"{function} at {os.path.basename(frame.file_name)}:{frame.line_num}"
    return ""


@cache
def _is_users(file: str) -> bool:
    """True if `file` belongs to neither one of `LIBRARIES` nor Python's own library."""
    modules = [sys.modules[name] for name in LIBRARIES if name in sys.modules]
    folders = [os.path.dirname(str(module.__file__)) for module in modules]
    python = sysconfig.get_path("stdlib")
    if file.startswith(python) and "site-packages" not in file:
        return False
    return not any(file.startswith(folder + os.sep) for folder in folders)


def trace(function: Callable[..., Array], *arguments: Any) -> Program:
    """Trace `function`, with products of float32 in full precision."""
    with jax.default_matmul_precision("highest"):
        return Program(jax.make_jaxpr(function)(*arguments))
