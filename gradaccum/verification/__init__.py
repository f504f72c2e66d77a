"""Is accumulation right for MY loss? `verify` tells, and says why not."""

from gradaccum.verification.dispatch import VerifyingBackend, verify
from gradaccum.verification.report import Cause, MissingPackageError, VerificationReport
from gradaccum.verification.subject import Conditions, Count, Labels, Layer, Precision, Run, Subject

__all__ = [
    "Cause",
    "Conditions",
    "Count",
    "Labels",
    "Layer",
    "MissingPackageError",
    "Precision",
    "Run",
    "Subject",
    "VerificationReport",
    "VerifyingBackend",
    "verify",
]
