"""`verify` checks that accumulation gives correct gradients for a user's loss."""

from gradaccum_torch.verification.check import verify

__all__ = ["verify"]
