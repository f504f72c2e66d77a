"""The command line: the backends it runs, those it names as missing, and its exit
code.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import gradaccum
from gradaccum import __main__ as command_line
from gradaccum import versions
from gradaccum_conformance import cli, selection
from gradaccum_conformance.report import command as report_command
from gradaccum_conformance.runner import Ended, Job

SUITE_RECORDS = (
    {"kind": "collected", "backend": "b", "tests": 1},
    {
        "kind": "test",
        "backend": "b",
        "property": "weights",
        "test": "t",
        "outcome": "passed",
        "reason": "",
        "errors": [],
        "seconds": 0.1,
    },
    {"kind": "finished", "exit_status": 0},
)


@pytest.fixture(autouse=True)
def known_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three backends are known, jax is not installed."""
    monkeypatch.setattr(
        selection, "registered_backends", lambda: ("jax", "numpy", "torch")
    )
    monkeypatch.setattr(selection, "available_backends", lambda: ("numpy", "torch"))


@pytest.fixture
def without_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(name="typer")

    monkeypatch.setattr(command_line, "import_module", missing)


def invoke(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(
        cli.app, arguments, env={"COLUMNS": "200", "NO_COLOR": "1"}
    )
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def run_as(
    monkeypatch: pytest.MonkeyPatch,
    module: Any,
    records: Sequence[dict[str, Any]],
    exit_code: int = 0,
) -> list[Job]:
    """Let every job end at once with these records. Returns a list that fills with the
    jobs.
    """
    ran: list[Job] = []

    def run(jobs: Sequence[Job], console: Any, *, total: str, each: str) -> list[Ended]:
        ran.extend(jobs)
        return [
            Ended(job.backend, exit_code, tuple(records), "last words") for job in jobs
        ]

    monkeypatch.setattr(module, "run_with_progress", run)
    return ran


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--version", f"gradaccum {gradaccum.__version__}"),
        ("--help", "gradaccum[conformance]"),
        ("", "gradaccum[conformance]"),
    ],
)
def test_version_and_help_need_no_package(
    without_packages: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: str,
    words: str,
) -> None:
    monkeypatch.setattr(sys, "argv", ["gradaccum", *arguments.split()])
    command_line.main()
    assert words in capsys.readouterr().out


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (
            "demo",
            (r"demo needs 'typer'.*gradaccum\[conformance\]'$"),
        ),
        ("dmeo", r"no command 'dmeo'\. Usage: gradaccum(.|\n)*conformance "),
    ],
)
def test_without_packages_a_command_says_what_it_needs(
    without_packages: None, monkeypatch: pytest.MonkeyPatch, command: str, words: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["gradaccum", command])
    with pytest.raises(SystemExit, match=words):
        command_line.main()


def test_versions_names_packages_and_backends() -> None:
    """It runs without the packages of this command line, and imports no framework."""
    exit_code, output = invoke("versions")
    assert exit_code == 0
    lines = output.splitlines()
    assert lines[0] == f"gradaccum {gradaccum.__version__}"
    assert lines[1].startswith(f"Python {platform.python_version()} ")
    assert f"numpy {version('numpy')}" in lines
    assert {"backend numpy", "backend torch"} <= set(lines)


def test_versions_of_a_missing_framework(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nobody has all frameworks: it is no failure."""

    def installed(package: str) -> str:
        if package == "jax":
            raise PackageNotFoundError(package)
        return "1.0"

    monkeypatch.setattr(versions, "version", installed)
    monkeypatch.setattr(versions, "available_backends", lambda: ("torch",))
    monkeypatch.setattr(sys, "argv", ["gradaccum", "versions"])
    command_line.main()
    lines = capsys.readouterr().out.splitlines()
    assert {"jax not installed", "optax 1.0", "backend torch"} <= set(lines)
    assert "backend jax, whose framework is not installed" in lines


def test_versions_imports_no_framework() -> None:
    program = (
        "import sys; from gradaccum.versions import report; report();"
        " print(sorted({'numpy', 'torch', 'jax', 'mindspore'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(
    ("name", "option"), [("demo", "--out"), ("conformance", "--report")]
)
def test_folder_that_cannot_be_written(name: str, option: str, tmp_path: Path) -> None:
    """It is one line, before anything runs."""
    (tmp_path / "file").touch()
    exit_code, output = invoke(name, option, str(tmp_path / "file" / "folder"))
    assert exit_code == 2
    assert output.startswith(f"gradaccum: cannot write to {tmp_path}")
    assert output.endswith(f"Name another folder: {option} FOLDER\n")
    assert output.count("\n") == 1


@pytest.mark.parametrize("name", ["demo", "conformance"])
def test_unknown_backend_is_wrong_argument(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    exit_code, output = invoke(name, "--backend", "tensorflow")
    assert exit_code == 2
    assert "jax, numpy, torch" in output
    assert "tensorflow" in output
    assert not list(tmp_path.iterdir())


def test_conformance_runs_every_installed_backend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It names the others, each with the command that installs it."""
    ran = run_as(monkeypatch, report_command, SUITE_RECORDS)
    exit_code, output = invoke("conformance", "--report", str(tmp_path))
    assert exit_code == 0
    assert [job.backend for job in ran] == ["numpy", "torch"]
    assert "jax is not installed. Run: pip install 'gradaccum[jax]'" in output
    assert "weights" in output
    assert "conformance: passed" in (tmp_path / "report.html").read_text(
        encoding="utf-8"
    )
    assert (
        json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))["passed"]
        is True
    )


def test_conformance_runs_suite_as_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = run_as(monkeypatch, report_command, SUITE_RECORDS)
    invoke("conformance", "--backend", "torch", "--report", str(tmp_path))
    invoke("conformance", "--backend", "torch", "--report", str(tmp_path), "--deep")
    expected = (
        sys.executable,
        "-m",
        "gradaccum_conformance",
        "--backend",
        "torch",
        "--results",
        str(tmp_path / "raw" / "torch.jsonl"),
    )
    assert [job.command for job in ran] == [expected, (*expected, "--deep")]


def test_conformance_fails_without_requested_backend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = run_as(monkeypatch, report_command, SUITE_RECORDS)
    exit_code, output = invoke(
        "conformance",
        "--backend",
        "jax",
        "--backend",
        "torch",
        "--report",
        str(tmp_path),
    )
    assert exit_code == 1
    assert [job.backend for job in ran] == ["torch"]
    assert "pip install 'gradaccum[jax]'" in output


def test_conformance_fails_after_any_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here a failed test; what else is one is in the tests of the report."""
    run_as(
        monkeypatch,
        report_command,
        (SUITE_RECORDS[0], {**SUITE_RECORDS[1], "outcome": "failed"}, SUITE_RECORDS[2]),
        1,
    )
    assert invoke("conformance", "--report", str(tmp_path))[0] == 1
    assert "conformance: failed" in (tmp_path / "report.html").read_text(
        encoding="utf-8"
    )


def test_terminated_command_ends_its_processes(tmp_path: Path) -> None:
    """A stand-in for a backend's process writes its process id and waits. The test then
    sends SIGTERM to the command.
    """
    results = tmp_path / "b.jsonl"
    child = (
        'import os, time; print(\'{"kind": "pid", "pid": %d}\' % os.getpid(),'
        f" file=open({str(results)!r}, 'a'), flush=True)"
    )
    command = (sys.executable, "-c", f"{child}; time.sleep(600)")
    script = f"""
from pathlib import Path
from gradaccum_conformance import cli, runner
jobs = [runner.Job("b", {command!r}, Path({str(results)!r}))]
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


def test_nothing_to_run_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "available_backends", lambda: ())
    assert selection.select_backends([]).failed


LOOPS = """
from gradaccum.least_squares import SolvedUpdate
from gradaccum.loop_check import read_coefficients

def right():
    return read_coefficients([SolvedUpdate((0.5, 0.5), 0.0, 0.0, 1.0)], (1.0, 1.0))

def wrong():
    return read_coefficients([SolvedUpdate((1.0, 1.0), 0.0, 0.0, 1.0)], (1.0, 1.0))

def nothing():
    return None
"""


@pytest.mark.parametrize(
    ("argument", "status", "text"),
    [
        ("loops:right", 0, "The loop is right"),
        ("loops:wrong", 1, "no mean was taken"),
        ("loops:nothing", 1, "of type NoneType. Return what gradaccum.check_loop"),
        ("loops:absent", 1, "loops has no function 'absent'"),
        ("loops", 1, "write gradaccum check module:function"),
        ("lopos:right", 1, "there is no module 'lopos' here"),
    ],
)
def test_check_prints_the_report(
    tmp_path: Path, argument: str, status: int, text: str
) -> None:
    (tmp_path / "loops.py").write_text(LOOPS, encoding="utf-8")
    ran = subprocess.run(
        [sys.executable, "-m", "gradaccum", "check", argument],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ran.returncode == status
    assert text in ran.stdout + ran.stderr
