"""The list of faults, and the ways of planting that several faults share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gradaccum.kit import State

Module = Any
"""The example backend's module, `plain_backend`. A mutant replaces names in it."""
MUTANTS: dict[str, Callable[[Module], None]] = {}
SELECTED: dict[str, tuple[str, str]] = {}
"""The part of the suite for a mutant that only the last of its files would catch."""


def mutant(plant: Callable[[Module], None]) -> Callable[[Module], None]:
    MUTANTS[plant.__name__] = plant
    return plant


def change_state(m: Module, transition: str, **changes: Callable[[State, State], Any]) -> None:
    """After `transition`, replace fields by functions of the state before and the state after."""
    original = getattr(m, transition)

    def changed(before: Any, *arguments: Any) -> Any:
        before, after = State(*before), State(*original(before, *arguments))
        return after._replace(**{name: change(before, after) for name, change in changes.items()})

    setattr(m, transition, changed)


def change_decision(m: Module, change: Callable[..., dict[str, Any]]) -> None:
    """Replace fields of every decision; `change(decision, state, norm, finite, options)` names them."""
    original = m.decide

    def changed(state: Any, norm: Any, finite: Any, options: Any, *rest: Any) -> Any:
        decision = m.Decision(*original(state, norm, finite, options, *rest))
        return decision._replace(**change(decision, State(*state), norm, finite, options))

    m.decide = changed


def change_options(m: Module, function: str, position: int, **changes: Any) -> None:
    """Let `function` see other options."""
    original = getattr(m, function)

    def changed(*arguments: Any) -> Any:
        values = list(arguments)
        values[position] = values[position]._replace(**changes)
        return original(*values)

    setattr(m, function, changed)
