"""The table of scores on the scoreboard's page is the recorded one, and of the vectors
that there are.
"""

from __future__ import annotations

import json

from benchmarks.vectors.__main__ import CONTESTANTS, PAGE, RESULTS, table, total
from gradaccum_conformance.vectors.run import KINDS, read

SCORES = json.loads(RESULTS.read_text(encoding="utf-8"))


def test_scores_are_of_these_vectors() -> None:
    number = sum(len(read(kind)) for kind in KINDS)
    assert {sum(total(score).values()) for score in SCORES.values()} == {number}


def test_page_shows_the_scores() -> None:
    assert SCORES.keys() == CONTESTANTS.keys()
    assert table(SCORES) in PAGE.read_text(encoding="utf-8")
    passes = {name for name, score in SCORES.items() if set(total(score)) == {"passes"}}
    assert passes == {name for name in CONTESTANTS if name.startswith("gradaccum")}
