"""``gradaccum doctor``: each known bad combination is named with its fix, and nothing
that a framework does stops the doctor.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from gradaccum import __version__
from gradaccum.doctor import (
    Environment,
    Probe,
    Requirement,
    findings_of,
    report,
    requirements_of,
    satisfies,
)

from .example import python_path

ROOT = Path(__file__).parents[2]
ASKED = (
    Requirement("torch", ">=2.13", "torch"),
    Requirement("jax", ">=0.7.1", "jax"),
    Requirement("mindspore", "<2.11,>=2.7", "mindspore"),
    Requirement("numpy", "<2", "mindspore"),
    Requirement("pytest", "<9.2,>=8.3", "conformance"),
    Requirement("pytest", "<9.2,>=8.3", "numpy"),
)
WORKS = Probe("torch", "works", devices=("cpu",))
HEALTHY = Environment(
    running="0.1.0",
    versions={"gradaccum": "0.1.0", "torch": "2.13.0+cpu", "numpy": "2.3.1"},
    requirements={
        "gradaccum": ASKED,
        "jax": (Requirement("jaxlib", "<=0.7.1,>=0.7.1", ""),),
    },
    probes=(WORKS,),
)


def having(**versions: str) -> Environment:
    """The healthy environment with these packages too; an underscore stands for a
    hyphen.
    """
    return HEALTHY._replace(
        versions={
            **HEALTHY.versions,
            **{name.replace("_", "-"): found for name, found in versions.items()},
        }
    )


def test_healthy_environment_has_no_finding() -> None:
    assert findings_of(HEALTHY) == ()
    assert (
        findings_of(
            having(
                mindspore="2.10.0",
                numpy="1.26.4",
                jax="0.7.1",
                jaxlib="0.7.1",
                pytest="9.1.2",
                pytest_xdist="3.8.0",
            )
        )
        == ()
    )


GPU = Probe("jax", "works", devices=("cuda:0 (NVIDIA H200)",))
BAD: dict[str, tuple[Environment, tuple[str, ...]]] = {
    "numpy 2 with MindSpore": (
        having(mindspore="2.10.0"),
        ("numpy", "2.3.1", "np.float32(2)", "pip install 'numpy<2'"),
    ),
    "another MindSpore": (
        having(mindspore="2.6.0", numpy="1.26.4"),
        ("mindspore", "2.6.0", "pip install 'mindspore<2.11,>=2.7'"),
    ),
    "old torch": (
        having(torch="2.12.1"),
        ("torch", "2.12.1", "hooks", "pip install 'torch>=2.13'"),
    ),
    "torch before its release": (having(torch="2.13.0rc1"), ("torch", "2.13.0rc1")),
    "pytest 9.2 with xdist": (
        having(pytest="9.2.0", pytest_xdist="3.8.0"),
        ("pytest", "9.2.0", "groups", "pip install 'pytest<9.2"),
    ),
    "another jaxlib": (
        having(jax="0.7.1", jaxlib="0.8.0"),
        ("jaxlib", "0.8.0", "jax 0.7.1 asks", "pip install 'jaxlib<=0.7.1"),
    ),
    "stale metadata": (
        HEALTHY._replace(running="0.2.0"),
        ("0.2.0", "0.1.0", "pip install"),
    ),
    "import that raises": (
        HEALTHY._replace(probes=(WORKS, Probe("jax", "fails", "ImportError: no"))),
        ("jax", "ImportError: no"),
    ),
    "import that crashes": (
        HEALTHY._replace(probes=(WORKS, Probe("jax", "crashes", "exit code -11"))),
        ("jax", "exit code -11"),
    ),
    "import that hangs": (
        HEALTHY._replace(probes=(WORKS, Probe("jax", "hangs", "stage"))),
        ("jax", "in time", "--limit"),
    ),
    "no backend": (
        HEALTHY._replace(probes=(Probe("jax", "missing", "optax"),)),
        ("none works", "gradaccum[torch]"),
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_combination_is_named(name: str) -> None:
    """Once, as a problem, with the fix."""
    environment, words = BAD[name]
    (finding,) = findings_of(environment)
    assert finding.kind == "problem"
    text = report(environment, (finding,))
    assert all(word in text for word in words), text


def test_bounds_bind_only_their_users() -> None:
    """Here numpy 2 without MindSpore, pytest 9.2 without pytest-xdist."""
    assert findings_of(having(pytest="9.2.0")) == ()
    assert findings_of(having(numpy="2.4.0")) == ()


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        (HEALTHY._replace(probes=(WORKS, GPU)), "cpu only, although jax sees cuda:0"),
        (
            HEALTHY._replace(
                probes=(
                    WORKS._replace(lacking=(("torch:Tensor._gone", "It is slower."),)),
                )
            ),
            "lacks torch.Tensor._gone",
        ),
        (
            HEALTHY._replace(versions={"torch": "2.13.0"}),
            "is on the path but it is not installed",
        ),
    ],
)
def test_worth_a_note(environment: Environment, words: str) -> None:
    (finding,) = findings_of(environment)
    assert finding.kind == "note"
    assert words in finding.what


@pytest.mark.parametrize(
    ("installed", "bounds", "fits"),
    [
        ("2.13.0+cpu", ">=2.13", True),
        ("2.9.1", ">=2.13", False),
        ("1.26.4", ">=1.26,<2", True),
        ("2.0.0", "<2", False),
        ("2.0.0rc1", "<2", True),
        ("2.0", "==2.0.0", True),
        ("1.4.9", "~=1.4.2", True),
        ("3.8.0", "!=3.8", False),
        ("3.8", "nonsense", True),
        ("3.8", "", True),
    ],
)
def test_version_bounds(installed: str, bounds: str, fits: bool) -> None:
    assert satisfies(installed, bounds) is fits


def write_package(
    site: Path, name: str, version: str, *requires: str, entry_points: str = ""
) -> None:
    """What an installer would write."""
    folder = site / f"{name}-{version}.dist-info"
    folder.mkdir()
    lines = [
        "Metadata-Version: 2.1",
        f"Name: {name}",
        f"Version: {version}",
        *(f"Requires-Dist: {line}" for line in requires),
    ]
    (folder / "METADATA").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (folder / "entry_points.txt").write_text(entry_points, encoding="utf-8")


def test_requirements_come_from_metadata(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = (
        "a_b>=1,<2",
        "c (>=3)",
        "d[x]>=4 ; extra == 'e'",
        'f; python_version < "3"',
        "g",
    )
    write_package(tmp_path, "asker", "1.0", *lines)
    monkeypatch.syspath_prepend(tmp_path)
    found = [("a-b", ">=1,<2", ""), ("c", ">=3", ""), ("d", ">=4", "e"), ("g", "", "")]
    assert [tuple(one) for one in requirements_of("asker")] == found


CHILD = (
    "import subprocess, sys; child = subprocess.Popen([sys.executable, '-c', 'import"
    " time; time.sleep(600)'])"
)
BACKENDS = {
    "good": (
        "print('noise')\nclass backend:\n    name = 'good'\n    devices ="
        " staticmethod(lambda: ['cpu', 'toy:0'])"
    ),
    "raising": "raise RuntimeError('built for another numpy')",
    "crashing": (
        "import os, sys; print('a library is missing', file=sys.stderr, flush=True);"
        " os._exit(7)"
    ),
    "hanging": (
        f"{CHILD}\nopen('PID', 'w').write(str(child.pid))\nimport time; time.sleep(600)"
    ),
    "waiting": (
        "import time\nclass backend:\n    devices = staticmethod(lambda:"
        " time.sleep(600))"
    ),
    "leaving": (
        f"{CHILD}\nopen('PID', 'w').write(str(child.pid))\nclass backend:\n    name ="
        " 'leaving'"
    ),
    "absent": "import no_such_framework",
}


def install_backends(site: Path, *names: str) -> None:
    entries = "\n".join(f"{name} = toy_{name}:backend" for name in names)
    write_package(
        site, "toys", "1.0", entry_points=f"[gradaccum.backends]\n{entries}\n"
    )
    for name in names:
        code = BACKENDS[name].replace("PID", str(site / f"{name}.pid"))
        (site / f"toy_{name}.py").write_text(code, encoding="utf-8")


def doctor(
    *arguments: str, path: str, options: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *options, "-m", "gradaccum", "doctor", *arguments]
    environment = {**os.environ, "PYTHONPATH": path}
    return subprocess.run(
        command,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


@pytest.fixture(scope="module")
def toys(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Path, dict[str, Any], float]:
    """One run of the doctor on all toy backends: their folder, what each came to, and
    the seconds that it took.
    """
    site = tmp_path_factory.mktemp("site")
    install_backends(site, *BACKENDS)
    started = time.monotonic()
    done = doctor(
        "--json",
        "--limit",
        "6",
        *(f"--backend={name}" for name in BACKENDS),
        path=python_path(site),
    )
    seconds = time.monotonic() - started
    assert done.returncode == 1, done.stderr
    assert "noise" not in done.stdout
    return (
        site,
        {one["backend"]: one for one in json.loads(done.stdout)["probes"]},
        seconds,
    )


@pytest.mark.parametrize(
    ("name", "outcome", "words"),
    [
        ("good", "works", ""),
        ("leaving", "works", ""),
        ("raising", "fails", "RuntimeError: built for another numpy"),
        ("absent", "fails", "no_such_framework"),
        ("crashing", "crashes", "exit code 7. Its last words: a library is missing"),
        ("hanging", "hangs", "It said nothing"),
        ("waiting", "hangs", ""),
    ],
)
def test_backend_is_probed(
    toys: tuple[Path, dict[str, Any], float], name: str, outcome: str, words: str
) -> None:
    found = toys[1][name]
    assert found["outcome"] == outcome
    assert words in found["detail"]
    assert found["devices"] == (["cpu", "toy:0"] if name == "good" else [])


def test_doctor_never_hangs(toys: tuple[Path, dict[str, Any], float]) -> None:
    """All backends share the time, and no process of theirs is left."""
    site, _, seconds = toys
    assert seconds < 20
    for name in ("hanging", "leaving"):
        assert not runs(int((site / f"{name}.pid").read_text(encoding="utf-8")))


def runs(pid: int) -> bool:
    """Whether the process runs. One that has ended, and whose parent has yet to read
    its exit code, does not.
    """
    try:
        return (
            Path(f"/proc/{pid}/stat")
            .read_text(encoding="utf-8")
            .rpartition(")")[2]
            .split()[0]
            != "Z"
        )
    except FileNotFoundError:
        return False


def test_doctor_runs_on_bare_python() -> None:
    """Neither rich nor any framework nor the metadata of gradaccum is there."""
    done = doctor(path=str(ROOT), options=("-S",))
    assert done.returncode == 1, done.stderr
    assert f"gradaccum {__version__}" in done.stdout
    assert (
        "NOTE  gradaccum: its code is on the path but it is not installed"
        in done.stdout
    )
    assert "PROBLEM  backends: none works here" in done.stdout
    assert not done.stderr


def test_installed_numpy_is_judged(tmp_path: Path) -> None:
    """By the metadata of this very package, whose bounds stand nowhere else."""
    write_package(tmp_path, "numpy", "2.3.0")
    write_package(tmp_path, "mindspore", "2.10.0")
    done = doctor("--backend", "numpy", path=python_path(tmp_path))
    assert done.returncode == 1, done.stdout
    assert (
        "PROBLEM  numpy: version 2.3.0 is installed; gradaccum[mindspore] asks for"
        " numpy<2" in done.stdout
    )


def test_missing_framework_is_no_problem(tmp_path: Path) -> None:
    install_backends(tmp_path, "good")
    types = (
        "[gradaccum.backends]\nabsent ="
        " toy_absent:backend\n[gradaccum.types]\nno_such_framework ="
        " toy_absent:backend\n"
    )
    write_package(tmp_path, "other", "1.0", entry_points=types)
    done = doctor(
        "--backend", "good", "--backend", "absent", path=python_path(tmp_path)
    )
    assert "absent: not installed (it needs no_such_framework)" in done.stdout
    assert "absent" not in done.stdout.partition("PROBLEM")[2]


@pytest.mark.parametrize(
    "arguments",
    [
        ("--backend", "tensorflow"),
        ("--limit", "0"),
        ("--limit", "nan"),
        ("--limit", "soon"),
        ("--deep",),
    ],
)
def test_wrong_argument(arguments: tuple[str, ...]) -> None:
    done = doctor(*arguments, path=python_path(ROOT))
    assert done.returncode == 2
    assert arguments[-1] in done.stderr
    assert "Traceback" not in done.stderr


def test_doctor_imports_no_framework() -> None:
    """Into its own process, which a broken one would end."""
    code = """
import sys
from gradaccum import doctor
doctor.main(["--backend", "numpy"])
print(sorted({"torch", "jax", "mindspore", "numpy", "rich"} & set(sys.modules)))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip().endswith("[]")
