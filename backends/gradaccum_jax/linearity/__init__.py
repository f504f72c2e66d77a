"""Whether a loss is linear in its scale: grad(s x loss) = s x grad(loss), as loss scaling assumes. Accumulation needs nothing of it."""

from gradaccum_jax.linearity.check import verify_loss_scaling

__all__ = ["verify_loss_scaling"]
