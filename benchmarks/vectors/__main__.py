"""``python -m benchmarks.vectors [IMPLEMENTATION ...]``: how many vectors of the
specification each implementation passes.

Plays those whose package is installed in this environment; the others keep their
recorded scores. ``--record`` writes ``results.json``, and the table on the scoreboard's
page, which is made of it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from datetime import date
from functools import partial
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer
from rich.console import Console

from gradaccum import BackendNotFoundError
from gradaccum_conformance.loading import load_harness
from gradaccum_conformance.vectors.run import KINDS, Start, play, read
from gradaccum_conformance.vectors.session import SessionImplementation

RESULTS = Path(__file__).parent / "results.json"
PAGE = Path(__file__).parents[1] / "SCOREBOARD.md"
START = "<!-- table: vectors -->"
END = "<!-- end of vectors -->"
Result = dict[str, Any]


class Contestant(NamedTuple):
    """An implementation, and the package whose version stands beside it."""

    package: str
    start: Callable[[], Start]


def session(backend: str) -> Start:
    return partial(SessionImplementation, load_harness(backend))


def adapter(module: str, name: str) -> Start:
    start: Start = getattr(import_module(f"benchmarks.vectors.{module}"), name)
    return start


CONTESTANTS = {
    "gradaccum, torch": Contestant("gradaccum", partial(session, "torch")),
    "gradaccum, JAX": Contestant("gradaccum", partial(session, "jax")),
    "gradaccum, MindSpore": Contestant("gradaccum", partial(session, "mindspore")),
    "optax.MultiSteps": Contestant(
        "optax", partial(adapter, "optax_multisteps", "MultiSteps")
    ),
    "Keras's accumulation": Contestant(
        "keras", partial(adapter, "keras_optimizer", "KerasOptimizer")
    ),
}


def measured(contestant: Contestant) -> Result:
    """Play every vector; the result has counts by topic, and what is not offered.

    Raises:
        ImportError: the package is not installed.
    """
    start = contestant.start()
    topics: dict[str, Counter[str]] = {}
    not_offered: Counter[str] = Counter()
    differences = {}
    with np.errstate(over="ignore", invalid="ignore"):
        for kind in KINDS:
            for vector in read(kind):
                words = play(start, vector)
                outcome = words.partition(": ")[0] if words else "passes"
                if outcome == "not offered":
                    not_offered[words.partition(": ")[2]] += 1
                elif words:
                    outcome = "differs"
                    differences[vector["name"]] = words
                topics.setdefault(vector["topic"], Counter())[outcome] += 1
    return {
        "version": version(contestant.package),
        "day": date.today().isoformat(),
        "topics": topics,
        "not offered": not_offered,
        "differences": differences,
    }


def table(results: dict[str, Result]) -> str:
    """The counts by topic in Markdown: passes of vectors, and what differs."""
    columns = [name for name in CONTESTANTS if name in results]
    titles = [f"{name} {results[name]['version']}" for name in columns]
    lines = [
        f"|topic|vectors|{'|'.join(titles)}|",
        "|---" * (len(columns) + 2) + "|",
    ]
    for topic, counts in results[columns[0]]["topics"].items():
        cells = [cell(results[name]["topics"][topic]) for name in columns]
        lines.append(f"|{topic}|{sum(counts.values())}|{'|'.join(cells)}|")
    sums = [total(results[name]) for name in columns]
    cells = [cell(counts) for counts in sums]
    lines.append(f"|all|{sum(sums[0].values())}|{'|'.join(cells)}|")
    days = sorted({results[name]["day"] for name in columns})
    lines += ["", f"Measured {' to '.join(dict.fromkeys((days[0], days[-1])))}.", ""]
    for name in columns:
        if reasons := results[name]["not offered"]:
            words = ", ".join(f"{reason} ({n})" for reason, n in reasons.items())
            lines.append(f"- Not offered by {name}: {words}.")
    return "\n".join(lines)


def total(result: Result) -> Counter[str]:
    counts: Counter[str] = Counter()
    for each in result["topics"].values():
        counts.update(each)
    return counts


def cell(counts: dict[str, int]) -> str:
    """The counts in words, such as "4 pass, 1 differs"."""
    verbs = {
        "passes": ("passes", "pass"),
        "differs": ("differs", "differ"),
        "not offered": ("is not offered", "are not offered"),
    }
    words = []
    for outcome, (one, several) in verbs.items():
        if number := counts.get(outcome, 0):
            words.append(f"{number} {one if number == 1 else several}")
    return ", ".join(words)


def write_page(results: dict[str, Result]) -> None:
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(START)
    PAGE.write_text(
        f"{before}{START}\n{table(results)}\n{END}{rest.partition(END)[2]}",
        encoding="utf-8",
    )


def main(
    implementation: Annotated[
        list[str] | None,
        typer.Argument(help='Such as "optax.MultiSteps". Default: all.'),
    ] = None,
    record: Annotated[
        bool, typer.Option("--record", help="Write results.json and the page.")
    ] = False,
) -> None:
    """Play the specification's vectors."""
    console = Console()
    if unknown := set(implementation or ()) - CONTESTANTS.keys():
        raise typer.BadParameter(
            f"expected some of {', '.join(CONTESTANTS)}; got {', '.join(sorted(unknown))}"
        )
    results = json.loads(RESULTS.read_text("utf-8")) if RESULTS.exists() else {}
    for name in implementation or CONTESTANTS:
        try:
            results[name] = measured(CONTESTANTS[name])
        except (BackendNotFoundError, ModuleNotFoundError) as error:
            console.print(f"{name}: not played, {error}")
            continue
        console.print(
            f"{name} {results[name]['version']}: {cell(total(results[name]))}"
        )
        for vector, words in results[name]["differences"].items():
            console.print(f"  {vector}: {words}", markup=False)
    if record:
        RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        write_page(results)


if __name__ == "__main__":
    typer.run(main)
