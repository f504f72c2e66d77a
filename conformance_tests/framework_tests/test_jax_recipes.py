"""Every Python block of the JAX recipes runs as its own program and asserts its result."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("optax", reason="needs optax")

import gradaccum_jax
from conformance_tests.framework_tests.recipes import Recipe, recipes_of, run_recipe


@pytest.mark.parametrize("recipe", recipes_of(gradaccum_jax), ids=lambda recipe: recipe.title)
def test_recipe(recipe: Recipe, tmp_path: Path) -> None:
    if "flax" in recipe.code:
        pytest.importorskip("flax", reason="flax is not installed")
    assert "assert" in recipe.code
    run_recipe(recipe, tmp_path, XLA_FLAGS="--xla_force_host_platform_device_count=4")
