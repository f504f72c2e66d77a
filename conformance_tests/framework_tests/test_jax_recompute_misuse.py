"""Refusals of `recompute`: at once where possible, otherwise in the call."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import gradaccum
from gradaccum_jax import recompute

POLICIES = jax.checkpoint_policies


@pytest.mark.parametrize(
    ("function", "options", "kind", "message"),
    [
        (3, {}, gradaccum.ArgumentTypeError, "function: expected a function"),
        ([jnp.sin, 3], {}, gradaccum.ArgumentTypeError, "function[1]"),
        ([], {}, gradaccum.ArgumentValueError, "at least one layer"),
        ([jnp.sin] * 3, {"segments": 4}, gradaccum.ArgumentValueError, "segments: expected at most 3"),
        ([jnp.sin] * 3, {"segments": 0}, gradaccum.ArgumentValueError, "segments"),
        ([jnp.sin] * 3, {"segments": 1.5}, gradaccum.ArgumentTypeError, "segments"),
        (jnp.sin, {"segments": 1}, gradaccum.ArgumentValueError, "segments: expected a sequence"),
        (jnp.sin, {"policy": "dots_saveable"}, gradaccum.ArgumentTypeError, "policy=jax.checkpoint_policies.dots_saveable"),
        (jnp.sin, {"policy": 3}, gradaccum.ArgumentTypeError, "policy"),
    ],
)
def test_refused_at_once(function: Any, options: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=re.escape(message)):
        recompute(function, **options)


def test_maker_of_policies() -> None:
    """JAX would take the policy that it makes for true and keep everything."""
    function = recompute(jnp.sin, policy=lambda *names, **params: POLICIES.save_only_these_names(*names))
    with pytest.raises(gradaccum.ArgumentTypeError, match="True or False"):
        jax.grad(function)(1.0)


@pytest.mark.parametrize("name", ["save_only_these_names", "save_any_names_but_these", "save_from_both_policies"])
def test_makers_of_jax(name: str) -> None:
    """Operations without parameters get as far as the check; JAX raises an error of its own for the others."""
    with pytest.raises((gradaccum.ArgumentTypeError, TypeError)):
        jax.grad(recompute(lambda x: jnp.sin(x) * x, policy=getattr(POLICIES, name)))(1.0)


@pytest.mark.parametrize("reads", [True, False])
def test_refs_from_outside(reads: bool) -> None:
    """JAX 0.10 writes twice, and reads at the second run what was written meanwhile."""
    name = next((name for name in ("new_ref", "array_ref") if hasattr(jax, name)), "mutable_array")
    make = getattr(jax if hasattr(jax, name) else jax.experimental, name, None)
    if make is None:
        pytest.skip("JAX 0.5 has no public Ref")
    ref = make(jnp.zeros(()))

    def function(x: Any) -> Any:
        if reads:
            return jnp.sin(x) * ref[...]
        ref[...] = x
        return jnp.sin(x)

    with pytest.raises(gradaccum.UsageError, match="Ref from outside"):
        jax.grad(recompute(function))(1.0)
    assert ref[...] == 0


def test_errors_pass() -> None:
    def function(x: Any) -> Any:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        jax.grad(recompute(function))(1.0)
