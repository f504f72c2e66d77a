"""A torch without a private name trains as before, more slowly, and says what it lacks; three names have no fallback."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("torch", reason="needs PyTorch")

NAMES = [
    "torch:_foreach_norm",
    "torch:_foreach_div_",
    "torch:_foreach_mul_",
    "torch:_foreach_copy_",
    "torch:_C._storage_Use_Count",
    "torch.optim.optimizer:_global_optimizer_pre_hooks",
    "torch.optim.optimizer:_global_optimizer_post_hooks",
    "torch.optim:Optimizer._optimizer_step_pre_hooks",
    "torch.utils._python_dispatch:_disable_current_modes",
]


def run(name: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "conformance_tests.framework_tests.torch_renamed", name]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)


@pytest.mark.parametrize("name", NAMES)
def test_torch_without(name: str) -> None:
    done = run(name)
    assert done.stdout == "trained\n", done.stderr


def test_name_without_fallback() -> None:
    done = run("torch.nn:Module._buffers")
    assert "ImportError: gradaccum_torch needs torch.nn.Module._buffers, a private name that torch" in done.stderr
