"""The list of checks. Each runs in both processes at once, in the order in which it was added."""

from __future__ import annotations

from collections.abc import Callable

Check = Callable[[int], None]
"""A function of the rank; it raises if the check fails."""
CHECKS: dict[str, Check] = {}


def check(function: Check) -> Check:
    CHECKS[function.__name__] = function
    return function
