"""``python -m gradaccum_conformance.vectors.make`` records from the reference what
comes after each event of the vectors, and writes their files anew.

``windows.json`` and ``resuming.json`` are their own scripts: to add a vector, copy one,
give it another name and other events, whose numbers may be plain, and run this program.
``transitions.json`` has each event in each state that its options and events reach.
"""

from __future__ import annotations

import json
import re
from functools import partial
from typing import Any

import numpy as np

from gradaccum import GradAccumError
from gradaccum.kit import UntilWeight, terms_of
from gradaccum_conformance.reference.accumulation import ReferenceAccumulation
from gradaccum_conformance.reference.harness import NumpySession, harness
from gradaccum_conformance.vectors.run import FOLDER, KINDS, decode
from gradaccum_conformance.vectors.session import SessionImplementation, wrap_options
from gradaccum_conformance.walking import state_of, walk

Page = dict[str, Any]
"""A file: ``options`` and ``events`` by name, and ``vectors``."""
WALK_TOLERANCE = 2.0**-21
"""Eight units in the last place, for the order in which one divides and clips."""


class Recorder:
    """The reference, and the vectors' words for what it does."""

    def __init__(self, page: Page, options: str, dtype: str) -> None:
        self.options = page["options"]
        self.implementation = SessionImplementation(
            harness, self.options[options], dtype
        )

    def play(self, event: dict[str, Any]) -> dict[str, Any]:
        """Play one event, and return what stands below ``after``."""
        arguments = dict(event)
        kind = arguments.pop("kind")
        saved = {"saved": self.terms()} if kind == "resume" else {}
        refused = False
        try:
            if kind == "resume":
                options = self.options[arguments["options"]]
                self.implementation = self.implementation.resume(options)
            else:
                getattr(self.implementation, kind)(**arguments)
        except GradAccumError:
            refused = True
        return {"refused": refused, **saved, **self.observe()}

    def terms(self) -> dict[str, Any]:
        """Return the options that an open window is saved with."""
        accumulation = self.accumulation
        terms = terms_of(accumulation.options, accumulation.optimizer_step)._asdict()
        if isinstance(terms["steps"], UntilWeight):
            terms["steps"] = {"until_weight": terms["steps"].weight}
        return terms

    def observe(self) -> dict[str, Any]:
        observation = self.implementation.observe()
        decision = observation["decision"]
        if decision is not None:
            applied = decision["apply"]
            decision["divisor"] = self.accumulation.divisor if applied else None
        return observation

    @property
    def accumulation(self) -> ReferenceAccumulation:
        session = self.implementation.session
        assert isinstance(session, NumpySession)
        return session.accumulation


class Walk(Recorder):
    """A walk over the reference's states, which keeps a vector of each event in each.

    It is a `gradaccum_conformance.walking.Walker`.
    """

    def __init__(self, page: Page, name: str) -> None:
        super().__init__(page, name, "float32")
        self.name = name
        self.events = page["events"]
        self.vectors: list[dict[str, Any]] = []

    def do(self, event: str, history: tuple[str, ...]) -> None:
        before = self.observe()
        after = self.play(self.events[event])
        if after["decision"] is not None:
            del after["decision"]["loss"]  # No event of a walk has one.
        vector = {
            "topic": self.name,
            "name": f"{self.name}: {' '.join((*history, event))}",
            "options": self.name,
            "dtype": "float32",
            "tolerance": WALK_TOLERANCE,
            "steps": [
                *({"event": name} for name in history),
                {"event": event, "after": after},
            ],
            "before": {name: before[name] for name in ("state", "sum")},
        }
        self.vectors.append(vector)

    def snapshot(self) -> Any:
        return self.implementation.session.snapshot()

    def restore(self, snapshots: Any) -> None:
        self.implementation.session.restore(snapshots)
        self.implementation.begin_event()


def walk_vectors(page: Page) -> list[dict[str, Any]]:
    """Return a vector for each event in each state that can be reached."""
    vectors = []
    for name, options in page["options"].items():
        recorder = Walk(page, name)
        here = partial(state_of, recorder.implementation.session, wrap_options(options))
        walk(recorder, page["events"], here)
        vectors += recorder.vectors
    return vectors


def file_text(kind: str) -> str:
    """Return the text of a file: JSON with one vector in a line."""
    text = (FOLDER / f"{kind}.json").read_text("utf-8")
    page = decode(json.loads(text))
    vectors = page.pop("vectors")
    if kind == "transitions":
        vectors = walk_vectors(page)
    else:
        for vector in vectors:
            recorder = Recorder(page, vector["options"], vector["dtype"])
            for step in vector["steps"]:
                step["after"] = recorder.play(step["event"])
    lines = ",\n".join(f"  {to_json(vector)}" for vector in vectors)
    entries = [f' "{name}": {to_json(value)}' for name, value in page.items()]
    return "{\n" + ",\n".join([*entries, f' "vectors": [\n{lines}\n ]']) + "\n}\n"


def file_texts() -> dict[str, str]:
    """Return the text of each file by its kind."""
    with np.errstate(over="ignore", invalid="ignore"):
        return {kind: file_text(kind) for kind in KINDS}


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
        (FOLDER / f"{kind}.json").write_text(text, "utf-8")
        vectors = json.loads(text)["vectors"]
        print(f"{kind}: {len(vectors)} vectors")


if __name__ == "__main__":
    main()
