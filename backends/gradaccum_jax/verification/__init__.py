"""`verify`: whether accumulation is right for a loss, found by experiment on one batch. Accumulation needs nothing of it."""

from gradaccum_jax.verification.check import verifies, verify

__all__ = ["verifies", "verify"]
