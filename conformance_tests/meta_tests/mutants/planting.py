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


def mutants(**plants: Callable[[Module], None]) -> None:
    """Register faults of one expression each, by their names."""
    assert not MUTANTS.keys() & plants.keys(), "two faults of one name"
    MUTANTS.update(plants)


def mutant(plant: Callable[[Module], None]) -> Callable[[Module], None]:
    mutants(**{plant.__name__: plant})
    return plant


def put(owner: Any, **functions: Any) -> None:
    """Replace functions of a module or a class."""
    for name, function in functions.items():
        setattr(owner, name, function)


def around(owner: Any, name: str, changed: Callable[..., Any]) -> None:
    """Replace a function by `changed`, which gets the original one first, and then the
    arguments.
    """
    original = getattr(owner, name)
    setattr(
        owner,
        name,
        lambda *arguments, **options: changed(original, *arguments, **options),
    )


def change_state(
    m: Module, transition: str, **changes: Callable[[State, State], Any]
) -> None:
    """After `transition`, replace fields by functions of the state before and the state
    after.
    """

    def changed(original: Any, before: Any, *arguments: Any) -> Any:
        before, after = State(*before), State(*original(before, *arguments))
        return after._replace(
            **{name: change(before, after) for name, change in changes.items()}
        )

    around(m, transition, changed)


def change_decision(m: Module, change: Callable[..., dict[str, Any]]) -> None:
    """Replace fields of every decision;
    `change(decision, state, norm, finite, options)` names them.
    """

    def changed(
        original: Any, state: Any, norm: Any, finite: Any, options: Any, *rest: Any
    ) -> Any:
        decision = m.Decision(*original(state, norm, finite, options, *rest))
        return decision._replace(
            **change(decision, State(*state), norm, finite, options)
        )

    around(m, "decide", changed)


def change_options(m: Module, function: str, position: int, **changes: Any) -> None:
    """Let `function` see other options."""

    def changed(original: Any, *arguments: Any) -> Any:
        values = list(arguments)
        values[position] = values[position]._replace(**changes)
        return original(*values)

    around(m, function, changed)
