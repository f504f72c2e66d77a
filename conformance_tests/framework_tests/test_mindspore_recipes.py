"""Every Python block of the MindSpore recipes runs as a program of its own; each
asserts its own result.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

import gradaccum_mindspore

from .mindspore_common import HOOKS
from .preloaded import Preloaded
from .recipes import Recipe, cases, recipes_of, run_preloaded

RECIPES = recipes_of(gradaccum_mindspore)
pytestmark = [pytest.mark.xdist_group("mindspore recipes"), pytest.mark.slow]


@pytest.fixture(scope="module")
def framework() -> Iterator[Preloaded]:
    with Preloaded("gradaccum_mindspore", GLOG_v="4") as imported:
        yield imported


CASES = [
    pytest.param(
        *case.values,
        id=case.id,
        marks=[*case.marks, *[HOOKS] * ("recompute(" in case.values[0].code)],
    )
    for case in cases(RECIPES)
]


@pytest.mark.parametrize("recipe", CASES)
def test_recipe(recipe: Recipe, tmp_path: Path, framework: Preloaded):
    assert "np.testing.assert_allclose" in recipe.code
    run_preloaded(recipe, tmp_path, framework)
