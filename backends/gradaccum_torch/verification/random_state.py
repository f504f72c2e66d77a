"""The random state that a loss may draw from: torch's on each device in use, Python's, and NumPy's where it is imported."""

from __future__ import annotations

import random
import sys
from typing import Any, NamedTuple

import torch


class RandomState(NamedTuple):
    """A copy of it."""

    cpu: torch.Tensor
    cuda: list[torch.Tensor]
    python: Any
    numpy: Any

    @staticmethod
    def now() -> RandomState:
        """The state at this moment; a device that was never used is not woken."""
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
        numpy = sys.modules.get("numpy")
        return RandomState(torch.get_rng_state(), cuda, random.getstate(), None if numpy is None else numpy.random.get_state())

    def put_back(self) -> None:
        """Go on from here."""
        torch.set_rng_state(self.cpu)
        if self.cuda:
            torch.cuda.set_rng_state_all(self.cuda)
        random.setstate(self.python)
        if self.numpy is not None:
            sys.modules["numpy"].random.set_state(self.numpy)


def begin(state: RandomState, seed: int) -> None:
    """Set the random state: `state` itself for seed 0, for another seed one that has nothing to do with it."""
    state.put_back()
    if seed:
        torch.manual_seed(0x5EED0 + seed)
    begin_host(state, seed)


def begin_host(state: RandomState, seed: int) -> None:
    """The same for Python's and NumPy's alone: what they draw is no tensor with rows of items, and is given whole to each micro-batch."""
    random.setstate(state.python)
    if seed:
        random.seed(0x5EED0 + seed)
    if state.numpy is not None:
        sys.modules["numpy"].random.set_state(state.numpy)
        if seed:
            sys.modules["numpy"].random.seed(0x5EED0 + seed)
