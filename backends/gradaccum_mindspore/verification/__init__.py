"""`verify`: check that accumulation gives correct results for a user's loss."""

from gradaccum_mindspore.verification.check import verify

__all__ = ["verify"]
