"""What a recomputed part keeps all the same, and random numbers beside it.

torch runs an operation again, or hands out what it kept of it. What is kept draws nothing the second time, so that each later draw would
have another's numbers, silently. So after the first draw that is kept, all further draws are kept as well. An operation that draws in
place cannot be kept, and is refused there.
"""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from gradaccum_torch.recomputation.checks import drawing_in_place_error
from gradaccum_torch.torch_private import without_dispatch_modes, writes

Policy = Sequence[Any] | Callable[..., CheckpointPolicy | bool]
"""A list of operations to keep, or a function ``(context, operation, *args, **kwargs)`` that says what to do with each."""

_KEPT = (True, CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)


def selective_contexts(policy: Policy) -> tuple[AbstractContextManager[object], AbstractContextManager[object]]:
    """The contexts of torch in which `policy` holds: of the forward pass, and of its replay."""
    if torch.compiler.is_compiling():
        first, again = create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]
        return first, again
    aligned = _Aligned(policy)
    first, again = create_selective_checkpoint_contexts(aligned)  # type: ignore[no-untyped-call]
    return first, _Replay(aligned, again)


class _Aligned:
    """`policy` for one forward pass, such that its replay draws each random number at the place of the first pass."""

    def __init__(self, policy: Policy) -> None:
        self._decide = policy if callable(policy) else functools.partial(_listed, frozenset(policy))
        self._states: dict[torch.device, Tensor] = {_CPU: torch.get_rng_state()}
        self._keeping = False
        self._decisions: defaultdict[Any, list[CheckpointPolicy | bool]] = defaultdict(list)
        self.replayed: Counter[Any] = Counter()
        """How often the replay under way has run each operation."""

    def __call__(self, context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy | bool:
        decisions = self._decisions[operation]
        if context.is_recompute:  # Old versions of torch ask again, and hand out only what is kept by the same answers.
            self.replayed[operation] += 1
            return decisions[self.replayed[operation] - 1]
        decisions.append(self._decision(context, operation, *args, **kwargs))
        return decisions[-1]

    def _decision(self, context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy | bool:
        decision = self._decide(context, operation, *args, **kwargs)
        if torch.Tag.nondeterministic_seeded not in operation.tags or not self._drew(context):
            return decision
        self._keeping = self._keeping or decision in _KEPT
        if not self._keeping:
            return decision
        if writes(operation):
            raise drawing_in_place_error(operation)
        return CheckpointPolicy.MUST_SAVE

    def _drew(self, context: Any) -> bool:
        """True if a generator has moved since the last operation that may draw; attention without dropout, say, draws nothing.

        Before torch 2.8 the policy is asked before the operation has run. There every operation that may draw counts as one that drew.
        """
        if not hasattr(context, "op_output"):
            return True
        out = context.op_output
        first = out[0] if isinstance(out, tuple) else out
        device = first.device if isinstance(first, Tensor) else _CPU
        with without_dispatch_modes():
            before, after = self._states.get(device), _rng_state(device)
            self._states[device] = after
            return before is None or not torch.equal(before, after)


class _Replay:
    """The context `again` of torch, in which `aligned` answers from its first decision on."""

    def __init__(self, aligned: _Aligned, again: AbstractContextManager[object]) -> None:
        self._aligned, self._again = aligned, again

    def __enter__(self) -> None:
        self._aligned.replayed.clear()
        self._again.__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        return self._again.__exit__(*error)


_CPU = torch.device("cpu")


def _rng_state(device: torch.device) -> Tensor:
    """The state of the device's generator, uint8, on the CPU."""
    if device.type == "cpu":
        return torch.get_rng_state()
    state: Tensor = torch.get_device_module(device).get_rng_state(device)
    return state


def _listed(kept: frozenset[Any], context: object, operation: Any, *args: object, **kwargs: object) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in kept else CheckpointPolicy.PREFER_RECOMPUTE
