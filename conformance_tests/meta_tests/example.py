"""Runs the suite on the example backend as a third party would: by entry points, in a
process of its own.
"""

from __future__ import annotations

import os
from pathlib import Path

from conformance_tests.framework_tests.preloaded import Preloaded

EXAMPLE = Path(__file__).parent / "example_backend"
ENTRY_POINTS = """
[gradaccum.backends]
plain = plain_backend:backend
[gradaccum.types]
plain = plain_backend:backend
[gradaccum.harnesses]
plain = {harness}
"""


def install(site: Path, harness: str = "plain_harness:harness") -> None:
    """Write what an installer would: a distribution's metadata with its entry
    points.
    """
    metadata = site / "plain-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: plain\nVersion: 1.0\n", "utf-8"
    )
    (metadata / "entry_points.txt").write_text(
        ENTRY_POINTS.format(harness=harness), "utf-8"
    )


def python_path(*folders: Path) -> str:
    """PYTHONPATH with `folders` before what is on it already."""
    return os.pathsep.join(
        [*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])]
    )


def run_suite(
    light: Preloaded, site: Path, *options: str, **environment: str
) -> tuple[int, str]:
    """``python -m gradaccum_conformance --backend plain`` with the example on the path,
    in a process that has imported pytest already.
    """
    variables = {"PYTHONPATH": python_path(*_folders(site)), **environment}
    program = site / "program.py"
    text = f"""
import os, sys
from gradaccum_conformance.__main__ import main
os.environ.update({variables!r})
sys.path[:0] = {list(map(str, _folders(site)))!r}
sys.argv[1:] = {_arguments(options)!r}
sys.exit(main())
"""
    program.write_text(text, "utf-8")
    return light.run(program)


def _arguments(options: tuple[str, ...]) -> list[str]:
    gaps = (
        []
        if "--xfails-file" in options
        else ["--xfails-file", str(EXAMPLE / "xfails.txt")]
    )
    return ["--backend", "plain", "-q", "-p", "no:cacheprovider", *options, *gaps]


def _folders(site: Path) -> tuple[Path, ...]:
    return site, EXAMPLE, Path(__file__).parent
