"""The versions that are supported, measured: one fresh environment for each cell, and a table of what passed there.

``python -m conformance_tests.matrix`` makes the cells that are not done, one at a time, and removes each environment after its cell:
torch's own wheels bring several gigabytes. ``--cell NAME`` takes one. A cell that cannot be made fails the run. Results stay in a folder,
one file each, so that the command resumes; ``--write`` puts the table into the page of versions.
"""

from __future__ import annotations

import json
import platform
import re
import shutil
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
START, END = "<!-- table: versions -->", "<!-- end of table -->"
BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)
FRONT_PAGE = {"torch": "import torch\n", "jax": "optax\n", "mindspore": "import mindspore"}
"""What the first lines of each framework's program on the front page have."""
RECENT_TESTS = ["pytest>=8.3,<9.2", "pytest-xdist>=3.6"]
LIMIT = 3600
"""Seconds of one step."""


@dataclass(frozen=True)
class Cell:
    """An environment, and what is run in it."""

    framework: str
    """``"torch"``, ``"jax"``, ``"mindspore"`` or ``"resolver"``."""
    python: str
    """A version, ``"3.12"``."""
    packages: tuple[str, ...]
    """What pip installs beside gradaccum."""
    whole: bool = False
    """Run the framework's own tests too: at both ends of a range."""

    @property
    def name(self) -> str:
        """Such as ``torch-2.6.0-py3.11``."""
        return "-".join("-".join(re.split("[=<>]+", package)) for package in self.packages) + f"-py{self.python}"


CELLS = (
    Cell("torch", "3.11", ("torch==2.6.0",), whole=True),
    Cell("torch", "3.12", ("torch==2.8.0",)),
    Cell("torch", "3.12", ("torch==2.11.0",)),
    Cell("torch", "3.11", ("torch==2.13.0",)),
    Cell("torch", "3.13", ("torch==2.15.0",), whole=True),
    Cell("jax", "3.11", ("jax==0.5.3", "optax==0.2.4"), whole=True),
    Cell("jax", "3.12", ("jax==0.6.2", "optax==0.2.6")),
    Cell("jax", "3.11", ("jax==0.7.1", "optax==0.2.8")),
    Cell("jax", "3.11", ("jax==0.10.2", "optax==0.2.8")),
    Cell("jax", "3.13", ("jax==0.12.0.1", "optax==0.2.8"), whole=True),
    Cell("mindspore", "3.11", ("mindspore==2.7.0",)),
    Cell("mindspore", "3.11", ("mindspore==2.10.0",), whole=True),
    Cell("mindspore", "3.12", ("mindspore==2.10.0",)),
    Cell("resolver", "3.12", ("levanter", "gradaccum[jax]")),
    Cell("resolver", "3.12", ("torch==2.11.0", "gradaccum[torch]")),
    Cell("resolver", "3.12", ("transformers", "accelerate", "lightning", "gradaccum[torch]")),
)


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
    """The path of ``pythonVERSION``, on the path or among pyenv's.

    Raises:
        FileNotFoundError: this machine has none.
    """
    found = shutil.which(f"python{version}")
    candidates = [found] if found else []
    if pyenv := shutil.which("pyenv"):
        root = subprocess.run([pyenv, "root"], capture_output=True, text=True, check=True).stdout.strip()
        candidates += [str(path) for path in sorted(Path(root, "versions").glob(f"{version}.*/bin/python{version}"))]
    for candidate in candidates:  # pyenv's own command stands on the path, and fails for a version that is not chosen
        if subprocess.run([candidate, "-V"], capture_output=True, check=False).returncode == 0:
            return candidate
    raise FileNotFoundError(f"python{version}: not on this machine. Install it, or name another cell with --cell.")


def measure(cell: Cell, console: Console) -> Result:
    """Make the environment of `cell`, run its steps in it, and remove it."""
    started, result = time.monotonic(), Result(cell.name, day=date.today().isoformat())
    with tempfile.TemporaryDirectory(prefix="gradaccum-") as folder:
        python = Path(folder, "bin", "python")
        subprocess.run([interpreter(cell.python), "-m", "venv", folder], check=True)
        for name, command in _steps(cell, python, Path(folder)).items():
            console.print(f"{cell.name}: {name}")
            passed, line = _run(command, Path(folder))
            result.steps[name] = (passed, line)
            if name == "install" and not passed:
                break
            if name == "import":
                result.python, result.versions = line.split(" ", 1) if passed else ("", "")
    result.seconds = round(time.monotonic() - started)
    return result


def _steps(cell: Cell, python: Path, folder: Path) -> dict[str, list[str]]:
    if cell.framework == "resolver":
        local = [re.sub(r"^gradaccum\[(.*)\]$", rf"{ROOT}[\1]", package) for package in cell.packages]
        return {"install": [str(python), "-m", "pip", "install", "-q", "--dry-run", *local]}
    program = folder / "front_page.py"
    program.write_text(front_page(cell.framework), encoding="utf-8")
    pytest = [str(python), "-m", "pytest", "-q", "-n", "2", "--dist", "loadgroup", "--backend", cell.framework]
    pytest += ["--require-backend", cell.framework]
    shown = "import sys, importlib.metadata as m; print('%d.%d.%d' % sys.version_info[:3], *(f'{n} {m.version(n)}' for n in NAMES))"
    names = {"torch": ["torch", "numpy"], "jax": ["jax", "optax", "numpy"], "mindspore": ["mindspore", "numpy"]}[cell.framework]
    extras = f"-e{ROOT}[{cell.framework},conformance]"
    steps = {
        "install": [str(python), "-m", "pip", "install", "-q", *cell.packages, extras],
        "import": [str(python), "-c", f"import gradaccum_{cell.framework}; NAMES = {names}; {shown}"],
        "front page": [str(python), str(program)],
        "suite": [*pytest, str(ROOT / "conformance_tests/gradaccum_conformance")],
    }
    if cell.whole:
        steps["own tests"] = [*pytest, str(ROOT / "conformance_tests/framework_tests")]
    return steps


def front_page(framework: str) -> str:
    """The program of `framework` on the front page."""
    programs = BLOCK.findall((ROOT / "README.md").read_text(encoding="utf-8"))
    return next(program for program in programs if FRONT_PAGE[framework] in program)


def _run(command: list[str], folder: Path) -> tuple[bool, str]:
    """Whether it passed, and the last line that it printed."""
    try:
        ran = subprocess.run(
            command, cwd=ROOT if "pytest" in command else folder, capture_output=True, text=True, check=False, timeout=LIMIT
        )
    except subprocess.TimeoutExpired:
        return False, f"not done after {LIMIT} s"
    lines = (ran.stdout if ran.returncode == 0 else ran.stdout + ran.stderr).strip().splitlines()
    return ran.returncode == 0, lines[-1].strip(" =") if lines else ""


def table(results: list[Result]) -> str:
    """The results as a table in Markdown, with the date of each and the machine that it was made on."""
    rows = ["| cell | Python and versions | import | front page | suite | own tests | day |", "|---|---|---|---|---|---|---|"]
    for result in results:
        cells = [_told(result, step) for step in ("import", "front page", "suite", "own tests")]
        installs = f"{result.python} {result.versions}".strip() or _told(result, "install")
        rows.append(f"| {result.name} | {installs} | {' | '.join(cells)} | {result.day} |")
    return "\n".join([*rows, "", f"Made on {platform.machine()}, {platform.system()}, on CPUs only."])


def _told(result: Result, step: str) -> str:
    if step not in result.steps:
        return ""
    passed, line = result.steps[step]
    counts = ", ".join(re.findall(r"\d+ (?:passed|failed|skipped|xfailed|errors?)", line))
    return counts or ("yes" if passed else f"**no**: {line}")


def main(
    cell: Annotated[list[str], typer.Option(help="The name of a cell; repeat the option for several. Default: every cell.")] = [],  # noqa: B006
    out: Annotated[Path, typer.Option(help="Folder for the results; cells that have one there are skipped.")] = Path("versions-results"),
    write: Annotated[bool, typer.Option("--write", help="Put the table into the page of versions.")] = False,
) -> None:
    """Measure the supported versions, each in an environment of its own."""
    console, out = Console(), out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    if unknown := set(cell) - {known.name for known in CELLS}:
        raise typer.BadParameter(f"expected one of {', '.join(known.name for known in CELLS)}; got {', '.join(sorted(unknown))}")
    results = []
    for known in CELLS:
        file = out / f"{known.name}.json"
        if (not cell or known.name in cell) and not file.exists():
            file.write_text(json.dumps(asdict(measure(known, console)), indent=1), encoding="utf-8")
        if file.exists():
            results.append(Result(**json.loads(file.read_text(encoding="utf-8"))))
    made = table(results)
    console.print(made, markup=False)
    if write:
        before, _, rest = PAGE.read_text(encoding="utf-8").partition(START)
        PAGE.write_text(f"{before}{START}\n{made}\n{END}{rest.partition(END)[2]}", encoding="utf-8")
    raise typer.Exit(0 if all(result.passed for result in results) else 1)


if __name__ == "__main__":
    sys.exit(typer.run(main))
