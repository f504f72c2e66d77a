"""`verify` checks whether accumulation is right for a user's loss."""

from gradaccum.verification.examination import examine
from gradaccum.verification.frameworks import VerifyingBackend, verify
from gradaccum.verification.report import Cause, VerificationReport
from gradaccum.verification.subject import (
    Conditions,
    HostRandom,
    Subject,
    places_of,
)

__all__ = [
    "Cause",
    "Conditions",
    "HostRandom",
    "Subject",
    "VerificationReport",
    "VerifyingBackend",
    "examine",
    "places_of",
    "verify",
]
