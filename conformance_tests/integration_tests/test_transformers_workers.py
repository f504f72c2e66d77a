"""The Trainer of transformers on two processes, with losses over unequally many tokens, beside its own accumulation."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs PyTorch")
pytest.importorskip("transformers", reason="needs transformers")
pytest.importorskip("accelerate", reason="needs accelerate")

from conformance_tests.framework_tests.recipes import Recipe, run_recipe

PROGRAM = """
from conformance_tests.integration_tests import torchvision_ops  # before transformers looks for it
import tempfile
import torch
from conformance_tests.integration_tests.regression import distance
from conformance_tests.integration_tests.test_transformers_tokens import Tokens, gpt2
from conformance_tests.integration_tests.transformers_runs import bare, trained, wrapped

torch.optim.AdamW = torch.optim.SGD
options = {"ddp_backend": "gloo", "logging_steps": 100, "max_grad_norm": 0.0, "ddp_find_unused_parameters": False}
mine = trained(wrapped(tempfile.mkdtemp(), gpt2(), Tokens(), {"steps": 2, "clip_norm": None}, **options))
own = trained(bare(tempfile.mkdtemp(), gpt2(), Tokens(), gradient_accumulation_steps=2, **options))
assert mine.args.world_size == 2
assert mine.optimizer.optimizer.result.optimizer_step == own.state.global_step == 6, "windows of 2, 2 and 1, twice"
assert distance(mine.model, own.model) < 1e-6 < 1e-3 < distance(mine.model, gpt2())
"""


def test_two_processes_equal_own_accumulation(tmp_path: Path) -> None:
    command = "python -m torch.distributed.run --standalone --nproc-per-node 2 train.py"
    run_recipe(Recipe("two processes", PROGRAM, command), tmp_path, OMP_NUM_THREADS="1")
