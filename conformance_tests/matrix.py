"""The versions that are supported, measured: one fresh environment for each cell, and a
table of what passed there.

``python -m conformance_tests.matrix`` makes the cells that are not done, one at a time,
and removes each environment after its cell: torch's own wheels bring several gigabytes.
``--cell NAME`` takes one. A cell that cannot be made fails the run. Results stay in a
folder, one file each, so that the command resumes; ``--write`` puts the table into the
page of versions.

CI takes the newest release of a framework on the newest Python,
``--cell torch-newest --suite-only``; its full run also its own tests and the floors.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "gradaccum" / "VERSIONS.md"
START = "<!-- table: versions -->"
END = "<!-- end of table -->"
BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)
FRONT_PAGE = {
    "torch": "import torch\n",
    "jax": "optax\n",
    "mindspore": "import mindspore",
}
"""What the first lines of each framework's program on the front page have."""
RECORD = "conformance_tests.record"
LIMIT = 3600
"""Seconds of one step."""


@dataclass(frozen=True)
class Cell:
    """An environment, and what is run in it."""

    framework: str
    """``"torch"``, ``"jax"``, ``"mindspore"`` or ``"resolver"``."""
    packages: str
    """What pip installs beside gradaccum, from the newest release of a package without
    a version; separated by spaces.
    """
    python: str = ""
    """A version, ``"3.12"``; empty: the newest that this machine has and the framework
    has wheels for.
    """
    extras: str = "conformance"
    """What of gradaccum's own extras is installed beside the framework's."""

    @property
    def name(self) -> str:
        """Such as ``torch-2.6.0-py3.11``, or ``torch-newest``."""
        named = "-".join(
            re.sub(r"\[.*\]|[=<>]+", "-", package).strip("-")
            for package in self.packages.split()
        )
        return f"{named}-py{self.python}" if self.python else f"{named}-newest"


CELLS = (
    Cell("torch", "torch==2.6.0", "3.11"),
    Cell("torch", "torch==2.8.0", "3.12"),
    Cell("torch", "torch==2.11.0", "3.12"),
    Cell("torch", "torch==2.13.0", "3.11"),
    Cell("torch", "torch==2.14.1", "3.13"),
    Cell("torch", "torch==2.15.0", "3.13"),
    Cell("jax", "jax==0.5.3 optax==0.2.4", "3.11"),
    Cell("jax", "jax==0.6.2 optax==0.2.6", "3.12"),
    Cell("jax", "jax==0.7.1 optax==0.2.8", "3.11"),
    Cell("jax", "jax==0.10.2 optax==0.2.8", "3.11", extras="conformance,ecosystem"),
    Cell("jax", "jax==0.12.0.1 optax==0.2.8", "3.13", extras="conformance,ecosystem"),
    Cell("mindspore", "mindspore==2.7.0", "3.11"),
    Cell("mindspore", "mindspore==2.9.0", "3.12"),
    Cell("mindspore", "mindspore==2.10.0", "3.11"),
    Cell("mindspore", "mindspore==2.10.0", "3.12"),
    Cell("resolver", "levanter>=1.2.dev0 gradaccum[jax]", "3.12"),
    Cell("resolver", "verl torch==2.11.0 gradaccum[torch]", "3.12"),
    Cell("resolver", "transformers accelerate lightning gradaccum[torch]", "3.12"),
    Cell("resolver", "axolotl gradaccum[torch]", "3.12"),
    Cell("resolver", "flax gradaccum[jax]", "3.12"),
)
"""What the table shows: both ends of each range, and between them what other packages
pin.
"""
NEWEST = (Cell("torch", "torch"), Cell("jax", "jax", extras="conformance,ecosystem"))
PYTHONS = ("3.14", "3.13", "3.12", "3.11")


@dataclass
class Result:
    """What a cell gave. Each step has its last line, and whether it passed."""

    name: str
    python: str = ""
    versions: str = ""
    day: str = ""
    seconds: float = 0.0
    steps: dict[str, tuple[bool, str]] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """True if every step did."""
        return bool(self.steps) and all(passed for passed, _ in self.steps.values())


def interpreter(version: str) -> str:
    """The path of ``pythonVERSION``, on the path or beside this Python; of the newest
    one of `PYTHONS` if `version` is empty.

    Raises:
        FileNotFoundError: this machine has none.
    """
    for wanted in (version,) if version else PYTHONS:
        # Installers such as pyenv and uv put one Python beside another.
        pattern = f"*{wanted}*/bin/python{wanted}"
        beside = sorted(Path(sys.base_prefix).parent.glob(pattern))
        for candidate in (shutil.which(f"python{wanted}"), *map(str, beside)):
            # The command of pyenv stands on the path, and fails for a version that is
            # not chosen.
            if candidate and run([candidate, "-V"], ROOT)[0]:
                return candidate
    raise FileNotFoundError(f"python{version or PYTHONS}: not on this machine")


def python_in(environment: Path, version: str) -> Path:
    """The Python of `environment`, which is made if it is not there."""
    python = environment / "bin" / "python"
    if not python.exists():
        command = [interpreter(version), "-m", "venv", str(environment)]
        subprocess.run(command, check=True)
    return python


def measure(
    cell: Cell,
    environment: Path,
    console: Console,
    *,
    installs_only: bool,
    suite_only: bool = False,
) -> Result:
    """Run the steps of `cell` in `environment`, which is made if it is not there; with
    `suite_only` without the framework's own tests.
    """
    started = time.monotonic()
    result = Result(cell.name, cell.python, day=date.today().isoformat())
    python = python_in(environment, cell.python)
    with tempfile.TemporaryDirectory() as folder:
        steps = _steps(cell, python, Path(folder))
        if suite_only:
            del steps["own tests"]
        for name, command in steps.items():
            console.print(f"{cell.name}: {name}")
            passed, output = run(command, Path(folder))
            line = output[-1].strip(" =") if output else ""
            shown = "\n".join(output[-1 if passed else -300 :])
            console.print(shown, markup=False, highlight=False)
            if name == "import" and passed:
                result.python, result.versions = line.split(" ", 1)
            if name == "resolver" and passed:
                result.versions = _named(cell, output)
                line = f"{len(output)} packages fit"
            result.steps[name] = (passed, line)
            if name == "install" and (installs_only or not passed):
                break
    result.seconds = round(time.monotonic() - started)
    return result


def _steps(cell: Cell, python: Path, folder: Path) -> dict[str, list[str]]:
    module = [str(python), "-m"]
    pip = [*module, "pip", "install", "-q"]
    if cell.framework == "resolver":
        # uv reads metadata, where pip would load each candidate's wheel.
        place = rf"\1 @ {ROOT.as_uri()}"
        packages = cell.packages.replace(" ", "\n")
        file = folder / "packages.txt"
        file.write_text(re.sub(r"(gradaccum\[.*\])", place, packages))
        uv = [str(python.with_name("uv")), "pip", "compile", "-q", "--no-header"]
        options = ["--no-annotate", "--python-version", cell.python, str(file)]
        return {"install": [*pip, "uv"], "resolver": [*uv, *options]}
    framework = cell.framework
    program = folder / "front_page.py"
    program.write_text(front_page(framework), "utf-8")
    names = [framework, "numpy"]
    if framework == "jax":
        names.append("optax")
    versions = (
        f"import gradaccum_{framework}, importlib.metadata as m, sys;"
        " print('%d.%d.%d' % sys.version_info[:3],"
        f" *(f'{{n}} {{m.version(n)}}' for n in {names}))"
    )
    backend = ["--backend", framework]
    pytest = [*module, "pytest", "-q", "-n", "2", "--dist", "loadgroup", *backend]
    pytest += ["--require-backend", framework]
    return {
        "install": [
            *pip,
            *cell.packages.split(),
            f"-e{ROOT}[{framework},{cell.extras}]",
        ],
        "import": [str(python), "-c", versions],
        "front page": [str(python), str(program)],
        "bits": [*module, RECORD, "--part", "bits", *backend],
        "suite": [*pytest, str(ROOT / "conformance_tests/gradaccum_conformance")],
        "own tests": [
            *pytest,
            "-m",
            "",
            str(ROOT / "conformance_tests/framework_tests"),
        ],
    }


def _named(cell: Cell, resolved: list[str]) -> str:
    """What a resolver took of frameworks and of the packages that `cell` asks for."""
    names = {re.split(r"[\[=<>]", package)[0] for package in cell.packages.split()}
    names = {"torch", "jax", "optax", *names} - {"gradaccum"}
    lines = [line for line in resolved if line.split("==")[0] in names]
    return " ".join(lines).replace("==", " ")


def front_page(framework: str) -> str:
    """The program of `framework` on the front page."""
    programs = BLOCK.findall((ROOT / "README.md").read_text("utf-8"))
    return next(program for program in programs if FRONT_PAGE[framework] in program)


def run(command: list[str], folder: Path) -> tuple[bool, list[str]]:
    """True if it passed, and the lines that it printed."""
    place = ROOT if {"pytest", RECORD} & {*command} else folder
    with subprocess.Popen(
        command,
        cwd=place,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            out, errors = process.communicate(timeout=LIMIT)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return False, [f"not done after {LIMIT} s"]
    passed = process.returncode == 0
    return passed, (out if passed else out + errors).strip().splitlines()


def table(results: list[Result]) -> str:
    """The results as a table in Markdown, with the date of each and the machine that it
    was made on.
    """
    steps = ("import", "front page", "bits", "suite", "own tests", "resolver")
    rows = [
        f"| cell | Python and versions | {' | '.join(steps)} | day |",
        "|---" * (len(steps) + 3) + "|",
    ]
    for result in results:
        versions = _words(result, "install")
        if result.versions:
            versions = f"{result.python} {result.versions}"
        cells = [_words(result, step) for step in steps]
        rows.append(
            f"| {result.name} | {versions} | {' | '.join(cells)} | {result.day} |"
        )
    machine = f"Made on {platform.machine()}, {platform.system()}, on CPUs only."
    return "\n".join([*rows, "", machine])


def _words(result: Result, step: str) -> str:
    if step not in result.steps:
        return ""
    passed, line = result.steps[step]
    outcome = r"\d+ (?:passed|failed|skipped|xfailed|errors?|packages fit)"
    counts = ", ".join(re.findall(rf"{outcome}|^not held|^the same", line))
    if counts:
        return counts
    return "yes" if passed else f"**no**: {line}"


def _read(file: Path) -> Result:
    return Result(**json.loads(file.read_text("utf-8")))


def main(
    cell: Annotated[
        list[str],
        typer.Option(
            help=(
                "The name of a cell; repeat the option for several. Default: those of"
                " the table."
            )
        ),
    ] = [],  # noqa: B006
    out: Annotated[
        Path,
        typer.Option(
            help="Folder for the results; cells that have one there are skipped."
        ),
    ] = Path("versions-results"),
    environments: Annotated[
        Path | None,
        typer.Option(help="Folder of environments, by cell, to use and to keep."),
    ] = None,
    install_only: Annotated[
        bool,
        typer.Option("--install-only", help="Make the environments, and nothing else."),
    ] = False,
    suite_only: Annotated[
        bool, typer.Option("--suite-only", help="Leave out the framework's own tests.")
    ] = False,
    write: Annotated[
        bool, typer.Option("--write", help="Put the table into the page of versions.")
    ] = False,
) -> None:
    """Measure the supported versions, each in an environment of its own."""
    known = {each.name: each for each in (*CELLS, *NEWEST)}
    if unknown := set(cell) - known.keys():
        raise typer.BadParameter(f"expected some of {list(known)}; got {unknown}")
    out = out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    results = []
    for each in [known[name] for name in cell] or CELLS:
        file = out / f"{each.name}.json"
        if file.exists():
            results.append(_read(file))
            continue
        with tempfile.TemporaryDirectory(prefix="gradaccum-") as folder:
            result = measure(
                each,
                (environments or Path(folder)) / each.name,
                Console(),
                installs_only=install_only,
                suite_only=suite_only,
            )
        results.append(result)
        if not install_only:
            file.write_text(json.dumps(asdict(result), indent=1), "utf-8")
    if write:
        files = [out / f"{each.name}.json" for each in CELLS]
        rows = table([_read(file) for file in files if file.exists()])
        before, _, rest = PAGE.read_text("utf-8").partition(START)
        page = f"{before}{START}\n{rows}\n{END}{rest.partition(END)[2]}"
        PAGE.write_text(page, "utf-8")
    raise typer.Exit(0 if all(result.passed for result in results) else 1)


if __name__ == "__main__":
    sys.exit(typer.run(main))
