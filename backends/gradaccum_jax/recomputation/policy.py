"""What a recomputed function may keep, and what it keeps in the host's memory: JAX's policies, by name or by function.

JAX calls a policy once for each operation and keeps the operation's result if the answer is true. A function is true, so JAX would keep
everything if the user passed a maker of policies in place of the policy that it makes. That is refused here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from gradaccum import ArgumentTypeError, ArgumentValueError
from gradaccum.kit import explain

Policy = Callable[..., Any]
"""Called with an operation, the types of its inputs and its parameters: whether its result is kept, or where it is moved."""

MAKERS = frozenset(
    {
        "offload_dot_with_no_batch_dims",
        "save_and_offload_only_these_names",
        "save_any_names_but_these",
        "save_anything_except_these_names",
        "save_from_both_policies",
        "save_only_these_names",
    }
)
"""The attributes of `jax.checkpoint_policies` that return a policy and are none themselves."""

HOST = "pinned_host"
"""JAX's name of the host's memory that a device reaches."""


def make_policy(policy: object, offload: object) -> Policy | None:
    """One policy of the two options; None keeps nothing.

    Raises:
        ArgumentTypeError, ArgumentValueError: one of the options is not what `recompute` takes, or the device has no such memory.
    """
    kept, moved = _policy_of(policy), _offload_of(offload)
    if moved is None:
        return kept
    _require_host_memory()
    return moved if kept is None else _either(moved, kept)


def _policy_of(policy: object) -> Policy | None:
    """`policy` as a function whose answers are checked."""
    if policy is None:
        return None
    made = _by_name(policy) if isinstance(policy, str) else policy
    if any(made is getattr(jax.checkpoint_policies, name, None) for name in MAKERS):
        raise _maker_error(getattr(made, "__name__", str(made)))
    if not callable(made):
        raise explain(ArgumentTypeError, "policy", expected=_expected(), got=policy, fix='Write policy="dots_saveable".')
    return _checked(made)


def _by_name(name: str) -> Policy:
    if name in MAKERS:
        raise _maker_error(name)
    if name not in _names():
        raise explain(ArgumentValueError, "policy", expected=_expected(), got=name, fix='Write policy="dots_saveable".')
    policy: Policy = getattr(jax.checkpoint_policies, name)
    return policy


def _checked(policy: Policy) -> Policy:
    """`policy`, which may answer with a bool or with one of JAX's own cases. A random key is made again: it costs less than its place."""

    def answer(primitive: Any, *kinds: Any, **params: Any) -> Any:
        if primitive.name.startswith("random_"):
            return False
        said = policy(primitive, *kinds, **params)
        if isinstance(said, bool) or type(said).__module__.startswith("jax"):
            return said
        fix = "A maker of policies is called first: jax.checkpoint_policies.save_only_these_names('name')."
        raise explain(
            ArgumentTypeError, "policy", expected="a policy that returns True or False", found=f"one that returned {said!r}", fix=fix
        )

    return answer


def _offload_of(offload: object) -> Policy | None:
    """The policy that moves what `offload` names to the host."""
    if offload is None:
        return None
    policies: Any = jax.checkpoint_policies
    if offload == "dots":
        return _checked(policies.offload_dot_with_no_batch_dims("device", HOST))
    if isinstance(offload, Sequence) and not isinstance(offload, str) and offload and all(isinstance(name, str) for name in offload):
        names = {"names_which_can_be_saved": [], "names_which_can_be_offloaded": list(offload)}
        return _checked(policies.save_and_offload_only_these_names(**names, offload_src="device", offload_dst=HOST))
    kind = ArgumentValueError if isinstance(offload, (str, Sequence)) else ArgumentTypeError
    fix = 'Write offload=["name"] of a value that the function marks with jax.ad_checkpoint.checkpoint_name(value, "name").'
    raise explain(kind, "offload", expected='"dots" or a sequence of names', got=offload, fix=fix)


def _either(moved: Policy, kept: Policy) -> Policy:
    """Move what `moved` moves; of the rest, keep what `kept` keeps."""

    def answer(primitive: Any, *kinds: Any, **params: Any) -> Any:
        said = moved(primitive, *kinds, **params)
        return said if hasattr(said, "dst") else kept(primitive, *kinds, **params)

    return answer


def _require_host_memory() -> None:
    device = jax.devices()[0]
    kinds = [memory.kind for memory in device.addressable_memories()]
    if HOST not in kinds:
        expected, fix = f"a device that reaches the host's memory ({HOST})", "Leave offload out, and keep less by policy= instead."
        raise explain(ArgumentValueError, "offload", expected=expected, found=f"{device.device_kind} with {kinds}", fix=fix)


def _names() -> list[str]:
    return [name for name in dir(jax.checkpoint_policies) if not name.startswith("_") and name not in MAKERS]


def _expected() -> str:
    return f"a policy or one of {', '.join(map(repr, _names()))}"


def _maker_error(name: str) -> ArgumentValueError:
    fix = f"Call it first and pass what it returns: policy=jax.checkpoint_policies.{name}(...)."
    return explain(ArgumentValueError, "policy", expected="a policy", found=f"{name}, which makes one", fix=fix)
