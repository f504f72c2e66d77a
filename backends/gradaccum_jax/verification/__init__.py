"""`verify`: check that gradient accumulation gives correct results for a given loss."""

from gradaccum_jax.verification.check import verify

__all__ = ["verify"]
