"""What the user has said about the micro-batch under way, between two calls of ``step``."""

from __future__ import annotations

from typing import NamedTuple

from gradaccum_torch.knowledge import Told
from gradaccum_torch.misuse import multiplied_error, not_scaled_error, other_weight_error
from gradaccum_torch.sentinel import Sentinels


class MicroBatch(NamedTuple):
    """Notes about a micro-batch. Without any its weight is 1."""

    weight: float = 1.0
    noted: bool = False
    """A loss was given to ``opt.backward`` or ``opt.scale``, with this weight."""
    scaled_by_user: bool = False
    """``opt.scale`` was called, so a plain ``backward()`` is expected."""
    losses: tuple[Told, ...] = ()
    """Its losses as they were told, not scaled; empty if nobody told them."""

    def all_losses(self, sentinels: Sentinels) -> tuple[Told, ...]:
        """Its losses; empty if some were not told: there was a plain ``backward()`` beside ``opt.backward``."""
        some = self.noted and not self.scaled_by_user and sentinels.arrivals.outside
        return () if some else self.losses

    def require_same(self, weight: float) -> None:
        """All losses of one micro-batch have one weight.

        Raises:
            UsageError: an earlier one had another.
        """
        if self.noted and self.weight != weight:
            raise other_weight_error(weight, self.weight)

    def require_scaled(self, sentinels: Sentinels, factor: float, scale_in_use: bool) -> None:
        """Every gradient of the micro-batch was multiplied by `factor`, weight times loss scale.

        Raises:
            UsageError: there was a plain ``backward()`` where `factor` is needed, or one of another wrapped optimizer, with its own factor.
        """
        # Where the user has replaced .grad since, as netD.zero_grad() of a GAN does, what was multiplied is gone.
        if sentinels.watching and sentinels.arrivals.multiplied and not sentinels.arrivals.disturbed:
            raise multiplied_error()
        forgotten = scale_in_use and not self.noted and not self.scaled_by_user
        mixed = sentinels.arrivals.outside and self.noted and not self.scaled_by_user and (factor != 1 or self.weight == 0)
        if forgotten or mixed:
            raise not_scaled_error(sentinels.arrived)


NOTHING_SAID = MicroBatch()
