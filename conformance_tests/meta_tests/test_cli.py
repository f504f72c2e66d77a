"""The command line: the backends it runs, those it names as missing, and its exit
code.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import gradaccum
from conformance_tests.programs import run_python
from gradaccum import __main__ as command_line
from gradaccum import versions
from gradaccum_conformance import cli, selection
from gradaccum_conformance.report import command as report_command
from gradaccum_conformance.runner import Ended, Job

from .test_report import ended, record

Run = Callable[..., list[Job]]


@pytest.fixture(autouse=True)
def known_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three backends are known, jax is not installed."""
    monkeypatch.setattr(
        selection, "registered_backends", lambda: ("jax", "numpy", "torch")
    )
    monkeypatch.setattr(selection, "available_backends", lambda: ("numpy", "torch"))


def invoke(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(
        cli.app, arguments, env={"COLUMNS": "200", "NO_COLOR": "1"}
    )
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


@pytest.fixture
def suite_ends_with(monkeypatch: pytest.MonkeyPatch) -> Run:
    """A function that lets every job end at once with this outcome of its one test; it
    returns a list that fills with the jobs.
    """

    def plan(outcome: str, exit_code: int) -> list[Job]:
        jobs_so_far: list[Job] = []
        process = ended(record(outcome), exit_code=exit_code)

        def run(jobs: Sequence[Job], *_: Any, **__: Any) -> list[Ended]:
            jobs_so_far.extend(jobs)
            return [process._replace(backend=job.backend) for job in jobs]

        monkeypatch.setattr(report_command, "run_with_progress", run)
        return jobs_so_far

    return plan


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--version", f"gradaccum {gradaccum.__version__}"),
        ("--help", "gradaccum[conformance]"),
        ("", "gradaccum[conformance]"),
        ("demo", "demo needs 'typer'"),
        ("dmeo", "no command 'dmeo'. Usage: gradaccum"),
    ],
)
def test_without_packages(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: str,
    words: str,
) -> None:
    def missing(name):
        raise ModuleNotFoundError(name="typer")

    monkeypatch.setattr(command_line, "import_module", missing)
    monkeypatch.setattr(sys, "argv", ["gradaccum", *arguments.split()])
    message = ""
    try:
        command_line.main()
    except SystemExit as error:
        message = str(error)
    assert words in message + capsys.readouterr().out


def test_versions_names_packages_and_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing framework is no failure."""

    def version(package):
        if package == "jax":
            raise PackageNotFoundError(package)
        return "1.0"

    monkeypatch.setattr(versions, "version", version)
    monkeypatch.setattr(versions, "available_backends", lambda: ("torch",))
    exit_code, output = invoke("versions")
    assert exit_code == 0
    lines = output.splitlines()
    assert lines[0] == f"gradaccum {gradaccum.__version__}"
    assert lines[1].startswith(f"Python {platform.python_version()} ")
    assert {"jax not installed", "optax 1.0", "backend torch"} <= set(lines)
    assert "backend jax, whose framework is not installed" in lines


@pytest.mark.parametrize("name", ["demo", "conformance"])
def test_unknown_backend_is_wrong_argument(name: str) -> None:
    exit_code, output = invoke(name, "--backend", "tensorflow")
    assert exit_code == 2
    assert "jax, numpy, torch" in output
    assert "tensorflow" in output


def test_conformance_runs_every_installed_backend(
    tmp_path: Path, suite_ends_with: Run
) -> None:
    """It names the missing ones, each with the command that installs it."""
    jobs = suite_ends_with("passed", 0)
    exit_code, output = invoke("conformance", "--report", str(tmp_path))
    assert exit_code == 0
    assert [job.backend for job in jobs] == ["numpy", "torch"]
    assert "jax is not installed. Run: pip install 'gradaccum[jax]'" in output
    page = (tmp_path / "report.html").read_text("utf-8")
    assert "conformance: passed" in page
    report = json.loads((tmp_path / "report.json").read_text("utf-8"))
    assert report["passed"] is True


@pytest.mark.parametrize(("name", "outcome"), [("jax", "passed"), ("torch", "failed")])
def test_conformance_fails(
    tmp_path: Path, suite_ends_with: Run, name: str, outcome: str
) -> None:
    """Without a backend that was asked for, and after any failure."""
    suite_ends_with(outcome, outcome == "failed")
    arguments = ("--backend", name, "--backend", "numpy", "--report", str(tmp_path))
    assert invoke("conformance", *arguments)[0] == 1
    page = (tmp_path / "report.html").read_text("utf-8")
    assert "conformance: failed" in page


def test_terminated_command_ends_its_processes(tmp_path: Path) -> None:
    """A stand-in for a backend's process writes its process id and waits. The test then
    sends SIGTERM to the command.
    """
    results = tmp_path / "b.jsonl"
    child = (
        'import os, time; print(\'{"kind": "pid", "pid": %d}\' % os.getpid(),'
        f" file=open({str(results)!r}, 'a'), flush=True); time.sleep(600)"
    )
    script = f"""
from pathlib import Path
from gradaccum_conformance import cli, runner
jobs = [runner.Job("b", {(sys.executable, "-c", child)!r}, Path({str(results)!r}))]
cli.app = lambda: runner.run_jobs(jobs, lambda backend, record: print(record["pid"], flush=True))
cli.main()
"""
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout
        pid = int(process.stdout.readline())
        process.terminate()
        assert process.wait(timeout=60) == 143
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


LOOPS = """
from gradaccum.least_squares import WeightedSum
from gradaccum.loop_check import LoopReport

def right():
    return LoopReport([WeightedSum((0.5, 0.5), 0.0, 0.0, 1.0)], (1.0, 1.0))

def wrong():
    return LoopReport([WeightedSum((1.0, 1.0), 0.0, 0.0, 1.0)], (1.0, 1.0))

def nothing():
    return None
"""


@pytest.mark.parametrize(
    ("argument", "status", "text"),
    [
        ("loops:right", 0, "The loop is right"),
        ("loops:wrong", 1, "no mean was taken"),
        (
            "loops:nothing",
            1,
            "of type NoneType. Return the report of gradaccum.check_loop",
        ),
        ("loops:absent", 1, "loops:absent cannot be imported"),
    ],
)
def test_check_prints_the_report(
    tmp_path: Path, argument: str, status: int, text: str
) -> None:
    (tmp_path / "loops.py").write_text(LOOPS, "utf-8")
    command = ("-m", "gradaccum", "check", argument)
    done = run_python(*command, cwd=tmp_path, timeout=60)
    assert done.returncode == status
    assert text in done.stdout + done.stderr
