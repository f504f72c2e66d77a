"""The conformance suite's harness: models from neutral specs, sessions over them, and
access to their state.
"""

from gradaccum_harnesses.mindspore.large_batch import harness

__all__ = ["harness"]
