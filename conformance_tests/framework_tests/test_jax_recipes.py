"""Every Python block of the JAX recipes runs as its own program and asserts its
result.
"""

from __future__ import annotations

from pathlib import Path

import jax
import pytest

import gradaccum_jax

from .recipes import Recipe, cases, recipes_of, run_recipe

RECIPES = [
    recipe
    for recipe in recipes_of(gradaccum_jax)
    if "JAX 0.10" not in recipe.title or jax.__version_info__ >= (0, 10)
]


@pytest.mark.parametrize("recipe", cases(RECIPES))
def test_recipe(recipe: Recipe, tmp_path: Path) -> None:
    for library in ("flax", "orbax.checkpoint"):
        if library in recipe.code:
            pytest.importorskip(library)
    assert "assert" in recipe.code
    run_recipe(recipe, tmp_path, XLA_FLAGS="--xla_force_host_platform_device_count=4")
