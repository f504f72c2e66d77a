"""A runner of the vectors, on the standard library alone: this file and the JSON files
beside it are all that another project needs.

Write a class with the methods of `Implementation`, and call ``run(YourClass, "windows")``.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

FOLDER = Path(__file__).parent
KINDS = ("transitions", "windows", "resuming")
NUMBER = re.compile(r"-?(0x[01](\.[0-9a-f]+)?p[+-]\d+|inf|nan)")


class NotOffered(Exception):
    """An implementation has no such option, or no such event."""


class Implementation(Protocol):
    """An optimizer over two parameters of one element each, made with the options and
    the dtype of a vector.

    Whatever it does not offer raises `NotOffered`. Any other exception refuses the event.
    """

    def micro_batch(
        self, gradient: list[float | None], weight: float | None, loss: float
    ) -> object:
        """Take the gradient and the loss of a micro-batch, neither of them scaled: the
        implementation multiplies the gradient by its loss scale.

        A gradient of None belongs to a parameter that took no part. A weight of None
        was left out, and a loss of NaN is not known.
        """
        ...

    def flush(self) -> object: ...

    def discard(self) -> object: ...

    def resume(self, options: Mapping[str, Any]) -> Implementation:
        """Save, and return a new implementation with `options` that has loaded it."""
        ...

    def observe(self) -> Mapping[str, Any]:
        """Return the ``update`` of the last event, a list or None, and as much as the
        implementation can tell of what else the vectors have in ``after``.
        """
        ...


Start = Callable[[Mapping[str, Any], str], Implementation]
"""The class itself, or a function that makes one of options and a dtype."""


def run(start: Start, kind: str) -> dict[str, str]:
    """Return "" for each vector that passes, by name, else the first difference.

    Raises:
        OSError: `kind` is none of the `KINDS`.
    """
    return {vector["name"]: play(start, vector) for vector in read(kind)}


def read(kind: str) -> list[dict[str, Any]]:
    page = decode(json.loads((FOLDER / f"{kind}.json").read_text("utf-8")))
    vectors: list[dict[str, Any]] = page["vectors"]
    for vector in vectors:
        vector["options"] = page["options"][vector["options"]]
        for step in vector["steps"]:
            event = step["event"]
            if isinstance(event, str):
                step["event"] = page["events"][event]
            elif "options" in event:
                event["options"] = page["options"][event["options"]]
    return vectors


def decode(value: Any) -> Any:
    """Return JSON's `value` with its hexadecimal numbers as floats."""
    if isinstance(value, list):
        return [decode(each) for each in value]
    if isinstance(value, dict):
        return {name: decode(each) for name, each in value.items()}
    is_number = isinstance(value, str) and NUMBER.fullmatch(value)
    return float.fromhex(value) if is_number else value


def play(start: Start, vector: Mapping[str, Any]) -> str:
    try:
        implementation = start(vector["options"], vector["dtype"])
        for number, step in enumerate(vector["steps"]):
            arguments = dict(step["event"])
            kind = arguments.pop("kind")
            refused = False
            try:
                successor = getattr(implementation, kind)(**arguments)
                implementation = successor if kind == "resume" else implementation
            except NotOffered:
                raise
            except Exception:
                refused = True
            if "after" in step:
                observation = {**implementation.observe(), "refused": refused}
                if words := difference(step["after"], observation, vector["tolerance"]):
                    return f"after step {number}, {kind}:{words}"
    except NotOffered as error:
        return f"not offered: {error}"
    return ""


def difference(expected: Any, observation: Any, tolerance: float) -> str:
    """Return the first difference in words. What an observation leaves out is not
    compared, except the update. The state is compared exactly.
    """
    if isinstance(expected, dict) and isinstance(observation, Mapping):
        for name in expected:
            if name in observation or name == "update":
                limit = 0.0 if name == "state" else tolerance
                if words := difference(expected[name], observation[name], limit):
                    return f" {name}{words}"
        return ""
    same = expected == observation
    if isinstance(expected, list) and isinstance(observation, list):
        pairs = zip(expected, observation, strict=False)
        same = len(expected) == len(observation)
        same = same and not any(difference(*pair, tolerance) for pair in pairs)
    elif isinstance(expected, float) and isinstance(observation, float):
        both_nan = math.isnan(expected) and math.isnan(observation)
        same = both_nan or math.isclose(expected, observation, rel_tol=tolerance)
    return "" if same else f" is {observation}, expected {expected}"
