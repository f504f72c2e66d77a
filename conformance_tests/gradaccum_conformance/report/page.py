"""The report as one web page that needs no other file."""

from __future__ import annotations

from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from gradaccum_conformance.report.results import GAP, SKIPPED, BackendResults
from gradaccum_conformance.report.run import Run, versions
from gradaccum_conformance.report.table import title_of
from gradaccum_conformance.selection import install_command

TEMPLATE = "page.html"


def render_page(run: Run) -> str:
    """The page as HTML. Everything that comes from a test is escaped."""
    loader = PackageLoader("gradaccum_conformance.report", "templates")
    environment = Environment(
        loader=loader,
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        title_of=title_of,
        install_command=install_command,
        versions=versions,
        skips=_skips,
    )
    return str(environment.get_template(TEMPLATE).render(run=run, gap=GAP))


def write_page(path: Path, run: Run) -> None:
    """Write the page."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(render_page(run), "utf-8")


def _skips(results: BackendResults) -> dict[str, int]:
    """How many tests were skipped for each reason."""
    reasons = [test.reason or "no reason given" for test in results.having(SKIPPED)]
    return {reason: reasons.count(reason) for reason in dict.fromkeys(reasons)}
