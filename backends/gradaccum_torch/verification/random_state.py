"""The random state of torch that a loss may draw from, on each device in use."""

from __future__ import annotations

from typing import NamedTuple

import torch


class RandomState(NamedTuple):
    """A copy of it."""

    cpu: torch.Tensor
    cuda: list[torch.Tensor]

    @staticmethod
    def now() -> RandomState:
        """The state at this moment; a device that was never used is not woken."""
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
        return RandomState(torch.get_rng_state(), cuda)

    def put_back(self) -> None:
        """Go on from here."""
        torch.set_rng_state(self.cpu)
        if self.cuda:
            torch.cuda.set_rng_state_all(self.cuda)
