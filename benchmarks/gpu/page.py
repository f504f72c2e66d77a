"""The page ``benchmarks/GPU.md``, from the results of one run."""

from __future__ import annotations

from pathlib import Path

from benchmarks.gpu.records import Record, Run
from benchmarks.gpu.stages import STAGES
from benchmarks.gpu.table import COLUMNS, by_stage, cells, counted

PAGE = Path(__file__).parents[1] / "GPU.md"
RESULTS = Path(__file__).parent / "results.jsonl"
"""The run that the page shows."""
HEAD = """\
# On a GPU

```bash
python -m benchmarks.gpu                       # on an NVIDIA card, 9 minutes at most
python -m benchmarks.gpu --device cpu --small  # the same code on a CPU, 3 minutes
python -m benchmarks.gpu --page FILE           # this page, from a file of results
```

Run it from the root of a clone, with torch 2.6 or newer; gradaccum itself does not have
to be installed. JAX, optax, Accelerate, Lightning and transformers are included if they
are installed. Each check immediately appends its result to
`benchmark-results/gpu.jsonl`, so an interrupted run keeps the results of all finished
checks.

"""
NOTHING = """\
Nothing has been run on a GPU yet. A run has these stages:

"""
ON_CPU = """\
This run was made on a CPU, with `--device cpu`. It shows that the script runs, but says
nothing about a GPU.

"""


def page_of(run: Run | None) -> str:
    """Return the page's text; without a run it says that there was none."""
    if run is None:
        titles = [f"{number}. {stage.title}" for number, stage in enumerate(STAGES, 1)]
        return HEAD + NOTHING + "\n".join(titles) + "\n"
    parts = [HEAD]
    if not run.is_on_gpu:
        parts.append(ON_CPU)
    about = "; ".join(f"{name} {value}" for name, value in run.machine.items())
    parts.append(f"Measured on: {about}.\n\nResults: {counted(run)}.\n")
    for title, records in by_stage(run):
        parts.append(f"\n## {title}\n\n{_table(records)}\n")
    return "".join(parts)


def _table(records: list[Record]) -> str:
    lines = [_line(COLUMNS), "|---" * len(COLUMNS) + "|"]
    lines += [_line(cells(record)) for record in records]
    return "\n".join(lines)


def _line(texts: tuple[str, ...]) -> str:
    return f"| {' | '.join(text.replace('|', '/') for text in texts)} |"
