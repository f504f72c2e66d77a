"""Every Python block of the MindSpore recipes runs as a program of its own; each asserts its own result."""

from pathlib import Path

import pytest

pytest.importorskip("mindspore", reason="needs MindSpore")

import gradaccum_mindspore
from conformance_tests.framework_tests.recipes import Recipe, cases, recipes_of, run_recipe

RECIPES = recipes_of(gradaccum_mindspore)


@pytest.mark.parametrize("recipe", cases(RECIPES))
def test_recipe(recipe: Recipe, tmp_path: Path):
    assert "np.testing.assert_allclose" in recipe.code
    run_recipe(recipe, tmp_path, GLOG_v="4")
