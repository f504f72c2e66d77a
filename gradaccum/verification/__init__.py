"""`verify`: a check whether accumulation is right for a user's loss."""

from gradaccum.verification.examining import examine
from gradaccum.verification.measuring import ROUNDING_LIMIT, item_axis
from gradaccum.verification.report import (
    Cause,
    VerificationReport,
    VerifyingBackend,
    verify,
)
from gradaccum.verification.subject import (
    Column,
    Conditions,
    HostRandom,
    Precision,
    Run,
    Subject,
    as_loss,
    first_of,
)

__all__ = [
    "ROUNDING_LIMIT",
    "Cause",
    "Column",
    "Conditions",
    "HostRandom",
    "Precision",
    "Run",
    "Subject",
    "VerificationReport",
]
__all__ += ["VerifyingBackend", "as_loss", "examine", "first_of", "item_axis", "verify"]
