"""`verify` checks whether accumulation is right for a user's loss."""

from gradaccum.verification.batch import Batch
from gradaccum.verification.examination import examine
from gradaccum.verification.report import (
    Cause,
    VerificationReport,
    VerifyingBackend,
    verify,
)
from gradaccum.verification.subject import (
    Conditions,
    HostRandom,
    Precision,
    Run,
    Subject,
    as_loss,
)

__all__ = [
    "Batch",
    "Cause",
    "Conditions",
    "HostRandom",
    "Precision",
    "Run",
    "Subject",
    "VerificationReport",
    "VerifyingBackend",
]
__all__ += ["as_loss", "examine", "verify"]
