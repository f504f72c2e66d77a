"""``python -m benchmarks.run_question NAME --results FILE [--quick]``: one question in
a process of its own, as JSON lines.
"""

from __future__ import annotations

import argparse
import gc
import json
from pathlib import Path
from typing import Any

from benchmarks.case import Case, Curve, Distances, load_question
from benchmarks.rounds import Plan, measure

PLAN = Plan(rounds=40, least=7, seconds=15.0, turn=0.005)
QUICK = Plan(rounds=9, least=5, seconds=3.0, turn=0.002)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name")
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    plan = QUICK if arguments.quick else PLAN
    arguments.results.parent.mkdir(parents=True, exist_ok=True)
    with arguments.results.open("w", encoding="utf-8") as file:
        for case in load_question(arguments.name).cases(arguments.quick):
            record = _timed(case, plan) if isinstance(case, Case) else _untimed(case)
            print(
                json.dumps({"kind": "case", "question": arguments.name} | record),
                file=file,
                flush=True,
            )
            del case
            gc.collect()


def _timed(case: Case, plan: Plan) -> dict[str, Any]:
    rows = [
        timing._asdict()
        for timing in measure(case.contestants, case.baseline, plan, case.clock)
    ]
    for row in rows:
        name = row["contestant"]
        row["counts"] = dict(case.counts.get(name, {}))
        seconds = row["median_ms"] / 1e3
        row["counts"] |= {
            unit: work / seconds for unit, work in case.rates.get(name, {}).items()
        }
    return {"case": case.name, "baseline": case.baseline, "x": case.x, "rows": rows}


def _untimed(case: Curve | Distances) -> dict[str, Any]:
    return (
        _drawn(case)
        if isinstance(case, Curve)
        else {"case": case.name, "loop": case._asdict()}
    )


def _drawn(curve: Curve) -> dict[str, Any]:
    return {
        "case": curve.name,
        "curve": curve._asdict()
        | {"xs": list(curve.xs), "ys": list(curve.ys), "counts": dict(curve.counts)},
    }


if __name__ == "__main__":
    main()
