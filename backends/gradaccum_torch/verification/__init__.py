"""Is accumulation right for a loss? `verify` tells, and says why not."""

from gradaccum_torch.verification.check import verify

__all__ = ["verify"]
