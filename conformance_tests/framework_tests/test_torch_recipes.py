"""Every Python block of the torch recipes runs as a program of its own; each asserts
its own result.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import gradaccum_torch

from .preloaded import Preloaded
from .recipes import PORT, Recipe, cases, recipes_of, run_preloaded, run_recipe

RECIPES = recipes_of(gradaccum_torch)
pytestmark = pytest.mark.xdist_group("torch recipes")


@pytest.fixture(scope="module")
def framework() -> Iterator[Preloaded]:
    with Preloaded("gradaccum_torch", "torch._dynamo") as imported:
        yield imported


@pytest.mark.parametrize("recipe", cases(RECIPES))
def test_recipe(recipe: Recipe, tmp_path: Path, framework: Preloaded) -> None:
    assert "assert " in recipe.code
    run_preloaded(recipe, tmp_path, framework)


SRUN = """for rank in 0 1; do
    SLURM_PROCID=$rank SLURM_LOCALID=$rank SLURM_NTASKS=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=$1 python "$2" &
done
wait -n && wait -n
"""


@pytest.mark.deep
def test_recipe_of_a_restart_under_slurm(tmp_path: Path) -> None:
    """SLURM sets its own variables, and none of torchrun's; nobody is killed there."""
    (recipe,) = (each for each in RECIPES if "SLURM" in each.title)
    (tmp_path / "srun").write_text(SRUN, "utf-8")
    run_recipe(recipe._replace(command=f"bash srun {PORT} train.py"), tmp_path)
    assert (tmp_path / "6-1.pt").exists()
