"""The mutants that no test can notice, each with the reason."""

from __future__ import annotations

from .running import Mutant

DISTANCE = "a distance does not depend on which of the two stands first"

EQUIVALENT: dict[tuple[str, str], str] = {
    ("gradaccum/transitions.py", "excess > 1 -> (excess >= 1)"): "an excess of 1 divides by 1",
    (
        "gradaccum/verification/experiments.py",
        "bench.apart_by(bench.floor(TRAINING), again, bench.large(TRAINING).gradients)"
        " -> bench.apart_by(bench.floor(TRAINING), bench.large(TRAINING).gradients, again)",
    ): DISTANCE,
    (
        "gradaccum/verification/experiments.py",
        "bench.apart(pairs[0], gradients, conditions) -> bench.apart(gradients, pairs[0], conditions)",
    ): DISTANCE,
    (
        "gradaccum/verification/measuring.py",
        "self.apart(self.accumulated(p.parts, conditions, way), large, conditions)"
        " -> self.apart(large, self.accumulated(p.parts, conditions, way), conditions)",
    ): DISTANCE,
    (
        "gradaccum/verification/experiments.py",
        "((a, b), (c, d)) -> ((c, d), (a, b))",
    ): "a sum of two does not depend on their order, and a loss with a state was found before",
}
"""By the file and the change."""


def why_equivalent(mutant: Mutant) -> str:
    """Return the reason why the mutant does what the package does, or an empty text."""
    return EQUIVALENT.get((str(mutant.file), str(mutant.mutation)), "")
