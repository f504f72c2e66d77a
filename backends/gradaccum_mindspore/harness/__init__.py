"""What the conformance suite drives: models from neutral specs, sessions over them, and the second door through which it looks."""

from gradaccum_mindspore.harness.large_batch import harness

__all__ = ["harness"]
