"""The conformance suite's harness: models from neutral specs, sessions over them, and
access to their results.
"""

from gradaccum_harnesses.jax.large_batch import harness

__all__ = ["harness"]
