"""Every Python block of the page on JAX's neighbours runs as its own program, on four
devices, and asserts its result.
"""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("optax", reason="needs optax")

import gradaccum_jax
from conformance_tests.framework_tests.recipes import Recipe, recipes_of, run_recipe

RECIPES = recipes_of(gradaccum_jax, ["INTEGRATIONS.md"])


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.title)
def test_program_of_the_page(recipe: Recipe, tmp_path: Path) -> None:
    if "flax" in recipe.code:
        pytest.importorskip("flax", reason="flax is not installed")
    assert "assert" in recipe.code
    run_recipe(recipe, tmp_path, XLA_FLAGS="--xla_force_host_platform_device_count=4")
