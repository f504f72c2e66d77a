"""Every Python block of the page on MindSpore's neighbours runs as its own program, and
asserts its result.
"""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("mindspore")

import gradaccum_mindspore
from conformance_tests.framework_tests.recipes import Recipe, recipes_of, run_recipe

RECIPES = recipes_of(gradaccum_mindspore, ["INTEGRATIONS.md"])


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.title)
def test_program_of_the_page(recipe: Recipe, tmp_path: Path) -> None:
    assert "\nassert " in recipe.code
    run_recipe(recipe, tmp_path, GLOG_v="4", OMP_NUM_THREADS="1")
