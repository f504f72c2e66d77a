"""The packages whose mutants are counted: their files, and the tests that must
notice.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from conformance_tests.programs import ROOT


class Package(NamedTuple):
    """What is mutated, and by what it is held."""

    folder: Path
    """The package, relative to the checkout."""
    parts: tuple[str, ...]
    """Its files and rooms that are mutated, relative to `folder`."""
    tests: tuple[str, ...]
    """Tests below ``conformance_tests``, the quickest first: pytest stops at the first
    failure.
    """
    backend: str
    """The suite runs on this one."""
    imported: tuple[str, ...]
    """Modules that the tests' process has imported already; none of them imports the
    package.
    """
    last_tests: tuple[str, ...] = ()
    """Tests of several processes, of compiled code, or of another framework. They take
    long, and no record says which lines they run, so only a mutant that `tests` let
    live gets them, and all of them.
    """

    def environment(self, folder: Path) -> dict[str, str]:
        """The environment of the tests; what they compile is kept in `folder`."""
        return {
            "GLOG_v": "4",
            "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
            "PYTHONDONTWRITEBYTECODE": "",
            "PYTHONPYCACHEPREFIX": str(folder / "bytecode"),
        }

    def files(self) -> list[Path]:
        found = []
        for part in self.parts:
            place = ROOT / self.folder / part
            found += [place] if place.suffix else sorted(place.rglob("*.py"))
        return found


CORE = Package(
    Path("gradaccum"),
    (
        "transitions.py",
        "state.py",
        "window_loop.py",
        "splitting.py",
        "statistics.py",
        "saving.py",
        "nests.py",
        "options.py",
        "refusals.py",
        "watching.py",
        "verification",
    ),
    ("core_tests", "gradaccum_conformance/suite"),
    "numpy",
    ("pytest", "numpy", "hypothesis.strategies"),
    # Only a framework calls a loss with its model, or cuts an array on a device.
    (
        "framework_tests/test_torch_verification.py",
        "framework_tests/test_torch_large_batch.py",
        "framework_tests/test_torch_auto_size.py",
        "framework_tests/test_jax_verification.py",
        "framework_tests/test_stored_checkpoints.py",
    ),
)

BESIDE = ("coupled", "large_batch", "one_call", "verify", "workers")
"""Of the suite: what is not about the window."""
TOPICS = ("counts", "everyday", "misuse", "masters", "half_precision", "checkpoint")
"""Of the tests that one framework alone has: those of the window, in every adapter."""


def _adapter(name: str, parts: tuple[str, ...], topics: tuple[str, ...]) -> Package:
    """The window of an adapter, and the suite's tests and the adapter's own of it, in
    one process.
    """
    suite = sorted(
        (ROOT / "conformance_tests/gradaccum_conformance/suite").glob("test_*.py")
    )
    about_windows = [
        f"gradaccum_conformance/suite/{file.name}"
        for file in suite
        if not file.name[5:].startswith(BESIDE)
    ]
    own = [f"framework_tests/test_{name}_{topic}.py" for topic in (*TOPICS, *topics)]
    return Package(
        Path("backends") / f"gradaccum_{name}",
        parts,
        (*about_windows, *own),
        name,
        ("pytest", name, "hypothesis.strategies"),
    )


TORCH = _adapter(
    "torch",
    ("window.py", "gradient_sum.py", "gradient_watch.py", "arithmetic.py"),
    (
        "loop",
        "loss_scale",
        "tampering",
        "hostile_autograd",
        "separate_sums",
        "gradients",
        "window_loss",
        "weigh",
        "scheduler",
        "static_memory",
        "interrupted",
        "mirror",
        "workers_resuming",
        "layered",
    ),
)
WORKERS = "gradaccum_conformance/suite/test_workers*.py"
TORCH = TORCH._replace(
    last_tests=(
        WORKERS,
        "framework_tests/test_torch_compile.py",
        "framework_tests/test_torch_workers.py",
    ),
    # The other tests there are about the large batch.
    tests=(
        *TORCH.tests,
        "framework_tests/test_torch_large_batch_misuse.py::test_begun_window_is_refused",
        "framework_tests/test_torch_large_batch_misuse.py"
        "::test_wrapped_parameters_need_their_optimizer",
    ),
    # The first optimizer imports the compiler.
    imported=("pytest", "torch._dynamo", "hypothesis.strategies"),
)
JAX = _adapter(
    "jax",
    ("window.py", "state.py", "gradient_sum.py", "update.py", "extensions.py"),
    ("leaves", "norm", "program", "multisteps", "combinators"),
)
JAX = JAX._replace(
    last_tests=(WORKERS, "framework_tests/test_jax_workers.py"),
    # The other checks of several devices run in a process of their own.
    tests=(*JAX.tests, "framework_tests/test_jax_workers.py::test_one_device"),
)
MINDSPORE = _adapter(
    "mindspore",
    ("window", "state.py", "gradient_sum.py"),
    ("calls", "loss_scale", "sums", "schedule", "training_cell", "interrupted"),
)
MINDSPORE = MINDSPORE._replace(
    last_tests=(WORKERS, "framework_tests/test_mindspore_workers.py"),
    # The other tests there are about other frameworks and MindSpore's optimizers.
    tests=(
        *MINDSPORE.tests,
        "framework_tests/test_stored_checkpoints.py::test_stored_checkpoint_is_resumed[mindspore]",
        "integration_tests/test_mindspore_optimizers.py::test_unmoved_parameters_are_refused",
    ),
)
PACKAGES = {"core": CORE, "torch": TORCH, "jax": JAX, "mindspore": MINDSPORE}
