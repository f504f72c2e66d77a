"""Parameters that are split over processes (FSDP2, tensor parallel): one norm for all, each element counted once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")
pytest.importorskip("torch.distributed.fsdp", reason="needs a torch with distributed support")


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="this torch was built without gloo")
def test_two_processes_train_as_one(tmp_path: Path) -> None:
    script = Path(__file__).with_name("torch_sharding.py")
    commands = [[sys.executable, str(script), str(rank), str(tmp_path / "store")] for rank in range(2)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for command in commands]
    try:
        said = [process.communicate(timeout=300)[0] for process in running]
    finally:
        for process in running:
            process.kill()
    assert [process.returncode for process in running] == [0, 0], "\n".join(said)
