"""`verify`: checks whether accumulation is right for a user's loss."""

from gradaccum_torch.verification.check import verify

__all__ = ["verify"]
