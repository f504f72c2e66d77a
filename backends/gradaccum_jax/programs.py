"""The programs in a traced program."""

from __future__ import annotations

from typing import Any

import jax
from jax.extend import core

Equation = Any
"""A `jax.extend.core.JaxprEqn`."""
Program = Any
"""A `jax.extend.core.Jaxpr`; a `jax.extend.core.ClosedJaxpr` has one."""


def programs_in(equation: Equation) -> list[Program]:
    parameters = jax.tree.leaves(list(equation.params.values()), is_leaf=_is_program)
    return [
        getattr(value, "jaxpr", value) for value in parameters if _is_program(value)
    ]


def _is_program(value: object) -> bool:
    return isinstance(value, (core.Jaxpr, core.ClosedJaxpr))
