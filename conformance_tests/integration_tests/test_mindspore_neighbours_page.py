"""Every Python block of the page on MindSpore's neighbours runs as its own program, and asserts its result."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("mindspore", reason="needs MindSpore")

import gradaccum_mindspore
from conformance_tests.framework_tests.recipes import Recipe, _recipes_in, run_recipe

assert gradaccum_mindspore.__file__ is not None
PAGE = (Path(gradaccum_mindspore.__file__).parent / "NEIGHBOURS.md").read_text(encoding="utf-8")
RECIPES = _recipes_in(PAGE)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.title)
def test_program_of_the_page(recipe: Recipe, tmp_path: Path) -> None:
    assert "\nassert " in recipe.code
    run_recipe(recipe, tmp_path, GLOG_v="4", OMP_NUM_THREADS="1")
