"""Every Python block of the torch recipes runs as a program of its own; each asserts its own result."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs PyTorch")

import gradaccum_torch
from conformance_tests.framework_tests.recipes import Recipe, cases, recipes_of, run_recipe

RECIPES = recipes_of(gradaccum_torch)


@pytest.mark.parametrize("recipe", cases(RECIPES))
def test_recipe(recipe: Recipe, tmp_path: Path) -> None:
    assert "assert " in recipe.code
    run_recipe(recipe, tmp_path)


def test_wrong_recipe_fails(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="not the large batch's"):
        run_recipe(Recipe("wrong", 'assert 1 == 2, "not the large batch\'s"'), tmp_path)
