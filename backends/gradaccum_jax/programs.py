"""Reading a traced program: the programs in it, the axes that it reduces over, and which
arguments each of its results is made of.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any

import jax
from jax.extend import core

from gradaccum_jax.arrays import Axes

Equation = Any
"""A `jax.extend.core.JaxprEqn`."""
Program = Any
"""A `jax.extend.core.Jaxpr`; a `jax.extend.core.ClosedJaxpr` has one."""


def named_axes(closed: Any) -> Axes:
    """Return the axes over which a closed program has collectives."""
    return frozenset(
        effect.name
        for effect in closed.effects
        if type(effect).__name__ == "NamedAxisEffect"
    )


def programs_in(equation: Equation) -> list[Program]:
    parameters = jax.tree.leaves(list(equation.params.values()), is_leaf=_is_program)
    return [
        getattr(value, "jaxpr", value) for value in parameters if _is_program(value)
    ]


def _is_program(value: object) -> bool:
    return isinstance(value, (core.Jaxpr, core.ClosedJaxpr))


def origins(program: Program, count: int) -> list[int]:
    """Return for each result of a program a set of bits: the first `count` arguments
    that it is made of, and bit number `count` if it is made of anything else.
    """
    bits = [1 << min(place, count) for place in range(len(program.invars))]
    return _origins(program, bits, 1 << count)


def _origins(program: Program, argument_bits: Sequence[int], other: int) -> list[int]:
    bits_of = dict(zip(program.invars, argument_bits, strict=True))

    def origin(atom: Any) -> int:
        return 0 if isinstance(atom, core.Literal) else bits_of.get(atom, other)

    for equation in program.eqns:
        bits = [origin(atom) for atom in equation.invars]
        called_program = _called_program(equation)
        if called_program is not None:
            result_bits = _origins(called_program, bits, other)
        elif equation.effects or equation.primitive.name == "freeze":
            # What comes out of a memory reference may be made of all.
            result_bits = [2 * other - 1] * len(equation.outvars)
        else:
            union = functools.reduce(operator.or_, bits, 0)
            result_bits = [union] * len(equation.outvars)
        bits_of.update(zip(equation.outvars, result_bits, strict=True))
    return [origin(atom) for atom in program.outvars]


def _called_program(equation: Equation) -> Program | None:
    """Return the program that an equation runs once on its arguments; None if it does
    something else.
    """
    programs = programs_in(equation)
    if len(programs) != 1 or equation.primitive.name == "scan":
        return None
    program = programs[0]
    takes_all = len(program.invars) == len(equation.invars)
    returns_all = len(program.outvars) == len(equation.outvars)
    return program if takes_all and returns_all else None
