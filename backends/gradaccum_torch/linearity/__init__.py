"""A check that a loss is linear in its scale, grad(s x loss) = s x grad(loss), which loss scaling relies on."""

from gradaccum_torch.linearity.check import verify_loss_scaling

__all__ = ["verify_loss_scaling"]
