"""Is accumulation right for MY loss? `verify` tells, and says why not."""

from gradaccum.verification.dispatch import VerifyingBackend, verify
from gradaccum.verification.examining import examine
from gradaccum.verification.loss_function import HostRandom, as_loss
from gradaccum.verification.measuring import ROUNDING_LIMIT
from gradaccum.verification.partitions import item_axis
from gradaccum.verification.report import Cause, MissingPackageError, VerificationReport
from gradaccum.verification.subject import Column, Conditions, Layer, Precision, Run, Subject

__all__ = [
    "ROUNDING_LIMIT",
    "Cause",
    "Column",
    "Conditions",
    "HostRandom",
    "Layer",
    "MissingPackageError",
    "Precision",
    "Run",
    "Subject",
    "VerificationReport",
    "VerifyingBackend",
    "as_loss",
    "examine",
    "item_axis",
    "verify",
]
