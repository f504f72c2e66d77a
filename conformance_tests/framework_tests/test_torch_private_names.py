"""A torch without a private name trains as before, more slowly, or refuses by name what
needs it; one name has no fallback.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from conformance_tests.framework_tests.torch_lacking import SCENARIOS, TOGETHER
from conformance_tests.framework_tests.torch_renamed import Hidden
from gradaccum_conformance.deep import deep_but
from gradaccum_torch.private import names as private


def require_promised(names: list[str]) -> None:
    command = [
        sys.executable,
        "-m",
        "conformance_tests.framework_tests.torch_renamed",
        *names,
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=200
    )
    # gloo may have printed before it
    assert done.stdout.endswith("as promised\n"), done.stderr


def test_every_name_has_a_scenario() -> None:
    assert SCENARIOS.keys() == private.LOST.keys()
    assert sorted(name for names in TOGETHER for name in names) == sorted(SCENARIOS)


@pytest.mark.parametrize(
    "names",
    deep_but(TOGETHER[::2], TOGETHER),
    ids=["arithmetic", "compiled", "parallel"],
)
def test_torch_without_many(names: list[str]) -> None:
    require_promised(names)


@pytest.mark.deep
@pytest.mark.parametrize("name", SCENARIOS)
def test_torch_without(name: str) -> None:
    require_promised([name])


def test_division_that_torch_does_not_tell() -> None:
    """Without the attribute of a saved number, and with a graph that is freed."""
    loss = torch.ones(2, requires_grad=True).mean() / 4
    division = private.last_division(loss)
    assert division is not None
    assert division.divisor == 4
    loss.backward()
    assert private.last_division(loss) is None
    silent = SimpleNamespace(name=lambda: "DivBackward0", next_functions=())
    assert private.last_division(SimpleNamespace(grad_fn=silent)) is None
    assert private.last_division(torch.ones(())) is None


def test_name_without_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.spec_from_file_location(
        "gradaccum_torch.again", private.__file__
    )
    assert spec is not None
    assert spec.loader is not None
    monkeypatch.setattr(torch.Tensor, "_version", Hidden(torch._C.TensorBase._version))
    with pytest.raises(
        ImportError,
        match=(
            r"gradaccum_torch needs torch\.Tensor\._version, a private name that torch"
        ),
    ):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
