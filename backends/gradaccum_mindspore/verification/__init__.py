"""`verify`: a check whether accumulation is right for a user's loss;
`verify_loss_scaling` is its experiment with the loss scale.
"""

from gradaccum_mindspore.verification.check import verify
from gradaccum_mindspore.verification.custom_backward import verify_loss_scaling

__all__ = ["verify", "verify_loss_scaling"]
