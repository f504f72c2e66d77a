"""The conformance report on the suite's recorded results: in the terminal, as a web
page and as JSON.
"""

from gradaccum_conformance.measuring import Measurement
from gradaccum_conformance.report.results import (
    BackendResults,
    Cell,
    Result,
    results_of,
)
from gradaccum_conformance.report.run import Run

__all__ = ["BackendResults", "Cell", "Measurement", "Result", "Run", "results_of"]
