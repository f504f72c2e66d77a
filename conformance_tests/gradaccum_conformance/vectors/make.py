"""``python -m gradaccum_conformance.vectors.make`` writes the vectors anew from the
reference, the same that the suite compares each backend with.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

import numpy as np

from gradaccum import GradAccumError
from gradaccum.kit import UntilWeight, terms_of
from gradaccum_conformance.reference.accumulation import ReferenceAccumulation
from gradaccum_conformance.reference.harness import NumpySession, harness
from gradaccum_conformance.vectors.run import FOLDER
from gradaccum_conformance.vectors.scripts import (
    OPTIONS,
    RESUMING,
    WALK_EVENTS,
    WINDOWS,
    Event,
    Script,
)
from gradaccum_conformance.vectors.session import SessionImplementation, wrap_options
from gradaccum_conformance.walking import state_of, walk

TOLERANCES = {"float32": 2.0**-21, "float64": 2.0**-50, "float16": 2.0**-21}
"""Eight units in the last place, for the order in which one divides and clips. No
number of float16's vector is rounded.
"""
WALKS = [name for name in OPTIONS if name.startswith("walk: ")]


class Recorder:
    """The reference, and the vectors' words for what it does."""

    def __init__(self, options: str, dtype: str = "float32") -> None:
        self.options = options
        self.dtype = dtype
        self.implementation = SessionImplementation(harness, OPTIONS[options], dtype)

    def play(self, event: Event) -> dict[str, Any]:
        """Play one event, and return what stands below ``after``."""
        arguments = dict(event)
        kind = arguments.pop("kind")
        saved = {"saved": self.terms()} if kind == "resume" else {}
        refused = False
        try:
            if kind == "resume":
                self.implementation = self.implementation.resume(
                    OPTIONS[arguments["options"]]
                )
            else:
                getattr(self.implementation, kind)(**arguments)
        except GradAccumError:
            refused = True
        return {"refused": refused, **saved, **self.observe()}

    def terms(self) -> dict[str, Any]:
        """Return the options that an open window is saved with."""
        accumulation = reference_in(self.implementation)
        terms = terms_of(accumulation.options, accumulation.optimizer_step)._asdict()
        if isinstance(terms["steps"], UntilWeight):
            terms["steps"] = {"until_weight": terms["steps"].weight}
        return terms

    def observe(self) -> dict[str, Any]:
        observation = self.implementation.observe()
        decision = observation["decision"]
        if decision is not None:
            divisor = reference_in(self.implementation).divisor
            decision["divisor"] = divisor if decision["apply"] else None
        return observation

    def vector(self, topic: str, name: str, steps: list[Any]) -> dict[str, Any]:
        return {
            "topic": topic,
            "name": name,
            "options": self.options,
            "dtype": self.dtype,
            "tolerance": TOLERANCES[self.dtype],
            "steps": steps,
        }


def script_vector(script: Script) -> dict[str, Any]:
    recorder = Recorder(script.options, script.dtype)
    steps = [{"event": event, "after": recorder.play(event)} for event in script.events]
    refused = tuple(n for n, step in enumerate(steps) if step["after"]["refused"])
    assert refused == script.refused, f"{script.name}: refused are {refused}"
    return recorder.vector(script.topic, f"{script.topic}: {script.name}", steps)


def reference_in(implementation: SessionImplementation) -> ReferenceAccumulation:
    assert isinstance(implementation.session, NumpySession)
    return implementation.session.accumulation


class Walk(Recorder):
    """A walk over the reference's states, which keeps a vector of each event in each.

    It is a `gradaccum_conformance.walking.Walker`.
    """

    def __init__(self, options: str) -> None:
        super().__init__(options)
        self.vectors: list[dict[str, Any]] = []

    def do(self, event: str, history: tuple[str, ...]) -> None:
        before = self.observe()
        after = self.play(WALK_EVENTS[event])
        if after["decision"] is not None:
            del after["decision"]["loss"]  # No event of a walk has one.
        steps = [
            *({"event": name} for name in history),
            {"event": event, "after": after},
        ]
        name = f"{self.options}: {' '.join((*history, event))}"
        vector = self.vector(self.options, name, steps)
        vector["before"] = {name: before[name] for name in ("state", "sum")}
        self.vectors.append(vector)

    def snapshot(self) -> Any:
        return self.implementation.session.snapshot()

    def restore(self, snapshots: Any) -> None:
        self.implementation.session.restore(snapshots)
        self.implementation.begin_event()


def walk_vectors(options: str) -> list[dict[str, Any]]:
    """Return a vector for each event in each state that can be reached."""
    recorder = Walk(options)
    wrap_arguments = wrap_options(OPTIONS[options])
    walk(
        recorder,
        WALK_EVENTS,
        lambda: state_of(recorder.implementation.session, wrap_arguments),
    )
    return recorder.vectors


def file_texts() -> dict[str, str]:
    """Return the text of each file by its kind."""
    with np.errstate(over="ignore", invalid="ignore"):
        transitions = [vector for options in WALKS for vector in walk_vectors(options)]
        return {
            "transitions": file_text(transitions, WALK_EVENTS),
            "windows": file_text(map(script_vector, WINDOWS), {}),
            "resuming": file_text(map(script_vector, RESUMING), {}),
        }


def file_text(vectors: Iterable[dict[str, Any]], events: dict[str, Event]) -> str:
    """Return JSON with one vector in a line."""
    vector_list = list(vectors)
    names = {vector["options"] for vector in vector_list}
    names |= {
        step["event"]["options"]
        for vector in vector_list
        for step in vector["steps"]
        if "options" in step["event"]
    }
    options = {name: value for name, value in OPTIONS.items() if name in names}
    head = {"$schema": "schema.json", "options": options, "events": events}
    lines = ",\n".join(f"  {to_json(vector)}" for vector in vector_list)
    entries = [f' "{name}": {to_json(value)}' for name, value in head.items()]
    return "{\n" + ",\n".join([*entries, f' "vectors": [\n{lines}\n ]']) + "\n}\n"


def to_json(value: Any) -> str:
    return json.dumps(with_hexadecimal_floats(value))


def with_hexadecimal_floats(value: Any) -> Any:
    """Return `value` with each float in C's hexadecimal notation, which loses no bit."""
    if isinstance(value, float):
        return re.sub(r"\.?0+p", "p", value.hex())
    if isinstance(value, dict):
        return {name: with_hexadecimal_floats(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [with_hexadecimal_floats(each) for each in value]
    return value


def main() -> None:
    """Write every file."""
    for kind, text in file_texts().items():
        (FOLDER / f"{kind}.json").write_text(text, encoding="utf-8")
        vectors = json.loads(text)["vectors"]
        print(f"{kind}: {len(vectors)} vectors")


if __name__ == "__main__":
    main()
